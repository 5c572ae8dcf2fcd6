"""The targets of all modules in this folder: what is fed with bytes, and the sound bytes that changes begin with.

A module has ``TARGETS``, functions of bytes by name, and ``SEEDS``, which make the sound bytes of each. A target
returns where the bytes are read or politely refused, and raises for a bug.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable, Iterator
from pathlib import Path

Target = Callable[[bytes], None]
Seeds = Callable[[], list[bytes]]

_FOLDER = Path(__file__).parent
_OTHERS = {"__main__", "child", "registry", "harness"} | {  # the driver; and lives, which are no functions of bytes
    *("lives", "engines", "runs", "checks", "reference", "corpus", "children")
}


def modules() -> list[str]:
    """Names of the modules that have targets."""
    names = [found.name for found in pkgutil.iter_modules([str(_FOLDER)])]
    return [f"tests.fuzzing.{name}" for name in names if name not in _OTHERS and not name.startswith("test_")]


def targets() -> dict[str, str]:
    """The module of each target, by the target's name."""
    found: dict[str, str] = {}
    for name in modules():
        module = importlib.import_module(name)
        assert module.TARGETS.keys() == module.SEEDS.keys(), name
        assert not module.TARGETS.keys() & found.keys(), name
        found |= dict.fromkeys(module.TARGETS, name)
    return found


def loaded(target: str, module: str) -> tuple[Target, list[bytes]]:
    """A target and its seeds."""
    found = importlib.import_module(module)
    return found.TARGETS[target], found.SEEDS[target]()


def mutations(seeds: list[bytes], count: int, dice: random.Random) -> Iterator[bytes]:
    """Seeds with one to four changes: bits, bytes, numbers at their bounds, parts that are cut, doubled or swapped."""
    for _ in range(count):
        data = bytearray(dice.choice(seeds))
        for _ in range(dice.randint(1, 4)):
            _change(data, seeds, dice)
        yield bytes(data)


def _change(data: bytearray, seeds: list[bytes], dice: random.Random) -> None:
    at, other = dice.randint(0, len(data)), dice.choice(seeds)
    stop = min(len(data), at + dice.choice([1, 2, 4, 8, 64, 1024]))
    edges = [0, 1, 0x7F, 0xFF, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
    kind = dice.randrange(6)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << dice.randrange(8)
    elif kind == 1:
        width = dice.choice([1, 2, 4, 8])
        data[at : at + width] = (dice.choice(edges) % 256**width).to_bytes(width, "little")
    elif kind == 2:
        del data[at:stop]
    elif kind == 3:
        data[at:at] = data[at:stop]
    elif kind == 4:
        from_there = dice.randint(0, len(other))
        data[at:stop] = other[from_there : from_there + stop - at]
    else:
        data[at:at] = dice.choice([b"[" * 2000, b"\0", b"\xff", b"-1", b"1e999", b'"', b"{}", b"null", b"9" * 5000])
