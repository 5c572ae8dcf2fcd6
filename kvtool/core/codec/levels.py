"""What each codec level is, known without importing torch. A new codec is a file here and a line below, or a plugin."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvtool.core.codec.nested import NESTED
from kvtool.core.common.plugins import Plugin, PluginError, found
from kvtool.core.errors import UsageError

RAW = "raw"
MAX_LOSS = 0.01  # nats a token of the answer: what `auto` may lose


@dataclass(frozen=True, slots=True)
class Level:
    """What a level is, as far as anybody but its codec has to know.

    Attributes
    ----------
    name : as records, command lines and catalogues carry it.
    codec : `module:class`, a module of this package with a dot before it. The class is called with the level's name,
        and fulfils `Codec` (base.py).
    lossless : what is decoded is what was encoded, bit for bit. A lossy level's records state their error.
    verbatim : records hold the model's own numbers and nothing else, so that their length follows from the shape.
    nested : records may name the record of the next coarser nested level, which they refine.
    profiled : records name the profile that they were made with (payload.py); those of an earlier kvtool may name none.
    baseline : there to be compared with; `auto` does not take it.
    share : percent of a chunk's rows that are stored; 100: all of them.
    inner : the level at which these rows are stored, where they are not all.
    bits : a number of K or V of the whole chunk takes about so many: what lossy levels are ordered by.
    """

    name: str
    codec: str = ""
    lossless: bool = False
    verbatim: bool = False
    nested: bool = False
    profiled: bool = False
    baseline: bool = False
    share: int = 100
    inner: str = ""
    bits: float = 0.0

    @property
    def of_prefix(self) -> str:
        """The level at which the prompt's beginning is stored where chunks are at this one: it is never lossy."""
        return self.name if self.lossless else RAW


DEFAULT_LOSSY = "2"  # what `compress` makes unless it is told

SHARES = (75, 50, 25)  # percent of the rows that `compress --keep` may leave
_BITS = (3.6, 2.2, 1.1, 0.5)  # of NESTED, measured (samples/results/codec.md)
_PAPERS_BITS = (5.4, 4.5, 3.6, 2.8)  # of the paper's scheme; the first two measured

_WHOLE = (
    Level(RAW, ".raw:Raw", lossless=True, verbatim=True, bits=16.0),
    Level("lossless", ".lossless:Lossless", lossless=True, bits=11.0),
    *(
        Level(name, ".transform_codec:TransformCodec", nested=True, profiled=True, bits=bits)
        for name, bits in zip(NESTED, _BITS, strict=True)
    ),
)


def _kept(level: Level, share: int) -> Level:
    """The level at which a share of the rows is stored as `level` stores all of them; each record stands alone."""
    return Level(
        f"keep{share}-{level.name}",
        ".row_subset:Kept",
        profiled=level.profiled,
        share=share,
        inner=level.name,
        bits=level.bits * share / 100,
    )


_BASELINES = tuple(
    Level(f"cachegen-{name}", ".cachegen:CacheGen", baseline=True, bits=bits)
    for name, bits in zip(NESTED, _PAPERS_BITS, strict=True)
)
_OWN = (*_WHOLE, *_BASELINES, *(_kept(level, share) for level in _WHOLE for share in SHARES))
_PLUGINS = found("codecs", own=("auto", "none", *(level.name for level in _OWN)))


def _plugged() -> Iterator[Level]:
    """The levels of plugins. One that cannot be used is left out: its records stay, and are not read."""
    for plugin in _PLUGINS.values():
        try:
            yield _level_of_plugin(plugin)
        except PluginError as error:
            plugin.leave_out(error)


def _level_of_plugin(plugin: Plugin) -> Level:
    """What a plugin says of its level: a dictionary of `codec`, `lossless` and `bits`. Raises PluginError."""
    facts = plugin.load()
    try:
        codec, lossless, bits = str(facts["codec"]), bool(facts["lossless"]), float(facts["bits"])
    except (KeyError, TypeError, ValueError) as error:
        raise plugin.broken("it does not tell codec, lossless and bits of its level") from error
    if not re.fullmatch(r"\w[\w.]*:\w+", codec) or not 0 < bits <= 64:
        raise plugin.broken("its codec is no `module:class`, or its bits are not between 0 and 64")
    return Level(plugin.name, codec, lossless=lossless, bits=bits)


# The finest first: of those that lose nothing the largest, then by size.
_LEVELS = sorted(
    (*_OWN, *_plugged()),
    key=lambda level: (not level.lossless, -level.bits),
)
LEVELS: Mapping[str, Level] = {level.name: level for level in _LEVELS}
_SHORT = ("raw|lossless|1..4|keepNN-…|cachegen-1..4", *(level.name for level in _LEVELS if level.name in _PLUGINS))
NAMES = "|".join(_SHORT)  # of all
WHOLE: Mapping[str, Level] = {level.name: level for level in _LEVELS if level.share == 100}  # with all rows


def level_of(name: str) -> Level:
    """The level of this name. One that is not known (another version's) has no codec, and is not taken for lossless."""
    return LEVELS.get(name) or Level(name)


def plugin_of(name: str) -> Plugin | None:
    """The plugin that a level comes from; None: it is kvtool's own."""
    return _PLUGINS.get(name)


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


def profiled(names: Iterable[str | None] = LEVELS) -> list[str]:
    """The levels among these whose records name a profile, the finest first."""
    return [name for name in known(names) if LEVELS[name].profiled]


def whole(names: Iterable[str | None] = LEVELS) -> list[str]:
    """The levels among these at which every row is stored, the finest first."""
    return [name for name in known(names) if LEVELS[name].share == 100]


def keeping(level: str, share: int) -> str:
    """The name of the level at which `share` percent of the rows are stored as `level` stores all of them."""
    return level if share == 100 else f"keep{share}-{level}"


def check_level(name: str) -> str:
    """The level's name, if there is a codec for it.

    Raises
    ------
    UsageError : there is none.
    """
    if name not in LEVELS:
        raise UsageError(f"there is no level {name!r}", f"known: {NAMES.replace('|', ', ')}")
    return name


def shown_loss(loss: float | None, allowed: float) -> str:
    """Word a loss and its limit. None: it was not measured."""
    if loss is None:
        return f"loss not measured, {allowed:g} nats a token are allowed"
    return f"loss {loss:.4f} of at most {allowed:g} nats a token"


def enough_loss(loss: float) -> str:
    """The `--max-loss` that allows a loss: in thousandths, rounded up."""
    return f"{math.ceil(1000 * loss) / 1000:g}"
