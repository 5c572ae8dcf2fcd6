"""Codec levels and the first bytes of their records; needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import xxhash

from kvtool.core.errors import DamagedError, UsageError

Payload = bytes | bytearray | memoryview

RAW = "raw"
NESTED = ("1", "2", "3", "4")  # finest first; each has steps three times as wide as the one before
NO_PROFILE = bytes(16)  # named by a record that was made without a profile
MAKER = slice(64, 80)  # of a payload: the digest of its profile
_BASE, _CHECK = 7, slice(40, 44)  # of a payload (record.py)
MAX_LOSS = 0.01  # nats a token of the answer: what `auto` may lose


@dataclass(frozen=True, slots=True)
class Level:
    name: str
    codec: str = ""  # `.module:class` of this package; called with the name, it makes a `Codec` (base.py)
    lossless: bool = False  # decoding gives back the encoded bits. A lossy level's records state their error
    verbatim: bool = False  # records hold the model's own numbers only: their length follows from the shape
    nested: bool = False  # records may name the record of the next coarser nested level, which they refine
    profiled: bool = False  # records name the profile that they were made with, if any (record.py)
    baseline: bool = False  # a level to compare others with; `auto` does not take it
    share: int = 100  # percent of a chunk's rows that are stored
    inner: str = ""  # the level at which these rows are stored, where they are not all
    bits: float = 0.0  # approximate size of a number of K or V of the whole chunk, by which lossy levels are ordered

    @property
    def of_prefix(self) -> str:
        """The level of the prompt's beginning where chunks are at this one: it is never lossy."""
        return self.name if self.lossless else RAW


DEFAULT_LOSSY = "2"  # what `compress` makes by default

SHARES = (75, 50, 25)  # percent of the rows that `compress --keep` may leave
_BITS = (3.6, 2.2, 1.1, 0.5)  # of NESTED, measured (samples/results/codec.md)
_PAPERS_BITS = (5.4, 4.5, 3.6, 2.8)  # of the paper's scheme; the first two measured

_WHOLE = (
    Level(RAW, ".lossless:Raw", lossless=True, verbatim=True, bits=16.0),
    Level("lossless", ".lossless:Lossless", lossless=True, bits=11.0),
    *(
        Level(name, ".transform:TransformCodec", nested=True, profiled=True, bits=bits)
        for name, bits in zip(NESTED, _BITS, strict=True)
    ),
)
_SUBSETS = tuple(
    Level(
        f"keep{share}-{level.name}",
        ".row_subset:RowSubset",
        profiled=level.profiled,
        share=share,
        inner=level.name,
        bits=level.bits * share / 100,
    )
    for level in _WHOLE
    for share in SHARES
)
_BASELINES = tuple(
    Level(f"cachegen-{name}", ".cachegen:CacheGen", baseline=True, bits=bits)
    for name, bits in zip(NESTED, _PAPERS_BITS, strict=True)
)
# The finest first: of those that lose nothing the largest, then by size.
_LEVELS = sorted((*_WHOLE, *_BASELINES, *_SUBSETS), key=lambda level: (not level.lossless, -level.bits))
LEVELS: Mapping[str, Level] = {level.name: level for level in _LEVELS}
NAMES = "raw|lossless|1..4|keepNN-…|cachegen-1..4"  # of all
WHOLE: Mapping[str, Level] = {level.name: level for level in _LEVELS if level.share == 100}  # with all rows


def level_of(name: str) -> Level:
    """An unknown level (another version's) has no codec, and counts as lossy."""
    return LEVELS.get(name) or Level(name)


def known(names: Iterable[str | None]) -> list[str]:
    among = {*names}
    return [name for name in LEVELS if name in among]


def exact(names: Iterable[str | None] = LEVELS) -> list[str]:
    return [name for name in known(names) if LEVELS[name].lossless]


def lossy(names: Iterable[str | None] = LEVELS) -> list[str]:
    return [name for name in known(names) if not LEVELS[name].lossless]


def nested(names: Iterable[str | None] = LEVELS) -> list[str]:
    return [name for name in known(names) if LEVELS[name].nested]


def profiled(names: Iterable[str | None] = LEVELS) -> list[str]:
    return [name for name in known(names) if LEVELS[name].profiled]


def whole(names: Iterable[str | None] = LEVELS) -> list[str]:
    return [name for name in known(names) if LEVELS[name].share == 100]


def keeping(level: str, share: int) -> str:
    return level if share == 100 else f"keep{share}-{level}"


def check_level(name: str) -> str:
    if name not in LEVELS:
        raise UsageError(f"there is no level {name!r}", f"known: {NAMES.replace('|', ', ')}")
    return name


def shown_loss(loss: float | None, allowed: float) -> str:
    if loss is None:
        return f"loss not measured, {allowed:g} nats a token are allowed"
    return f"loss {loss:.4f} of at most {allowed:g} nats a token"


def enough_loss(loss: float) -> str:
    return f"{math.ceil(1000 * loss) / 1000:g}"


def coarser(level: str) -> str | None:
    at = NESTED.index(level) + 1 if level in NESTED else len(NESTED)
    return NESTED[at] if at < len(NESTED) else None


def base_level(level: str, payload: Payload) -> str | None:
    """The level that a record refines; None: it refines none. Raises DamagedError."""
    if level not in NESTED:
        return None
    base = coarser(level)
    number = payload[_BASE] if len(payload) > _CHECK.stop else None
    if number == 0:
        return None
    if base is None or number != NESTED.index(base) + 1:
        raise DamagedError("a compressed record of no known level")
    return base


def stated_check(payload: Payload) -> int:
    """Read the `check_of` the very record that is refined."""
    return int.from_bytes(payload[_CHECK], "little")


def check_of(parts: Iterable[Payload]) -> int:
    """Hash a record's payload, given as parts, to 32 bits, not all 0, which distinguish it within its level."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest() & 0xFFFFFFFF or 1
