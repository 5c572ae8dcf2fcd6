"""The targets of the modules in this folder: what is fed with bytes, and the sound bytes that changes begin with.

A module has ``TARGETS``: by name a function of bytes, and what makes its sound bytes. A target returns where the bytes
are read or politely refused, and raises for a bug.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtool.core.errors import KvtoolError

Target = Callable[[bytes], None]

refused = functools.partial(contextlib.suppress, KvtoolError)  # an error that says what is wrong is no finding
_MODULES = [f"tests.fuzzing.{name}" for name in ("documents", "models", "shared", "stores")]


def targets() -> dict[str, str]:
    """The module of each target, by the target's name."""
    return {name: module for module in _MODULES for name in importlib.import_module(module).TARGETS}


def loaded(target: str, module: str) -> tuple[Target, list[bytes]]:
    function, seeds = importlib.import_module(module).TARGETS[target]
    return function, seeds()


@functools.cache
def scratch(name: str) -> Path:
    """Make a folder that is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"kvtool-fuzz-{name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


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
