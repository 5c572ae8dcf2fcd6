"""What each codec level is, known without importing torch. A new codec is a file here and a line below."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvtool.core.codec.nested import NESTED
from kvtool.core.errors import UsageError

RAW = "raw"
MAX_LOSS = 0.01  # nats a token of the answer: what `auto` may lose


@dataclass(frozen=True, slots=True)
class Level:
    """What a level is, as far as anybody but its codec has to know.

    Attributes
    ----------
    name : as records, command lines and catalogues carry it.
    codec : `module:class` in this package. The class is called with the level's name, and fulfils `Codec` (base.py).
    lossless : what is decoded is what was encoded, bit for bit. A lossy level's records state their error.
    verbatim : records hold the model's own numbers and nothing else, so that their length follows from the shape.
    nested : records begin with the header of payload.py. They name the profile that they were made with, if any, and
        the record of the next coarser nested level that they refine, if any.
    """

    name: str
    codec: str = ""
    lossless: bool = False
    verbatim: bool = False
    nested: bool = False

    @property
    def of_prefix(self) -> str:
        """The level at which the prompt's beginning is stored where chunks are at this one: it is never lossy."""
        return self.name if self.lossless else RAW


DEFAULT_LOSSY = "2"  # what `compress` makes unless it is told

# The finest first; of those that lose nothing the largest first.
_LEVELS = (
    Level(RAW, "raw:Raw", lossless=True, verbatim=True),
    Level("lossless", "lossless:Lossless", lossless=True),
    *(Level(name, "cachegen:CacheGen", nested=True) for name in NESTED),
)
LEVELS: Mapping[str, Level] = {level.name: level for level in _LEVELS}


def level_of(name: str) -> Level:
    """The level of this name. One that is not known (another version's) has no codec, and is not taken for lossless."""
    return LEVELS.get(name) or Level(name)


def known(names: Iterable[str | None]) -> list[str]:
    """The known levels among these, the finest first."""
    among = {*names}
    return [name for name in LEVELS if name in among]


def exact(names: Iterable[str | None] = LEVELS) -> list[str]:
    """The known levels among these that lose nothing, the largest first."""
    return [name for name in known(names) if LEVELS[name].lossless]


def lossy(names: Iterable[str | None] = LEVELS) -> list[str]:
    """The known levels among these that lose something, the finest first."""
    return [name for name in known(names) if not LEVELS[name].lossless]


def nested(names: Iterable[str | None] = LEVELS) -> list[str]:
    """The levels among these whose records may refine one another, the finest first."""
    return [name for name in known(names) if LEVELS[name].nested]


def check_level(name: str) -> str:
    """The level's name, if there is a codec for it.

    Raises
    ------
    UsageError : there is none.
    """
    if name not in LEVELS:
        raise UsageError(f"there is no level {name!r}", f"known: {', '.join(LEVELS)}")
    return name
