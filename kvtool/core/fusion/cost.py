"""Estimate what a fusion mode reads and computes for a prompt, and how long that takes at this machine's speeds.

Reading and computing are the controller's two measured quantities; here is how they overlap. `session/speeds.py`
measures them and keeps them next to the store. Nothing here needs torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from kvtool.core.fusion.plan import Segment

MEMORY = "memory"  # among the levels: KV that is held decoded, which is only put into its place and rotated
# A cached segment is exact or a hit (fusion/plan.py); `leading` are the exact ones with nothing else before them.
Kind = Literal["leading", "exact", "hit"]
CACHED: tuple[Kind, ...] = ("leading", "exact", "hit")
_COMPUTED = ("fresh", "hole")  # what every mode computes: the question, and what is not stored


# ---- measured speeds ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PassSpeed:
    """Seconds of one pass: `fixed` (weights read, calls made) + `row` a row + `key` a key that a row sees."""

    fixed: float
    row: float
    key: float

    def seconds(self, rows: float, keys: float) -> float:
        """The time of a pass over so many rows, which see so many keys in all."""
        return self.fixed + self.row * rows + self.key * keys


@dataclass(frozen=True, slots=True)
class LoadSpeed:
    """Seconds of reading, decoding, uploading and rotating all layers: `fixed` + `token` a token.

    Attributes
    ----------
    busy : cores that are kept busy meanwhile.
    bytes_per_second : raw-equivalent KV bytes a second; what is shown, not what is computed with.
    """

    fixed: float
    token: float
    busy: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Load:
    """What loading takes: seconds alone on the machine, and core-seconds."""

    seconds: float
    core_seconds: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of one machine, device, model and dtype.

    Attributes
    ----------
    loads : speeds of loading, by codec level and `MEMORY`.
    cores : how many this process may use. `threads` : how many of these a pass uses.
    own_memory : the device computes by itself (a GPU), so that loading takes no core from it.
    """

    passes: PassSpeed
    loads: Mapping[str, LoadSpeed]
    layers: int
    cores: int = 1
    threads: int = 1
    own_memory: bool = False

    def load(self, tokens: Mapping[str, float]) -> Load:
        """What loading so many tokens of each level takes; every level must have been measured."""
        seconds = {level: self.loads[level].fixed + self.loads[level].token * n for level, n in tokens.items() if n}
        busy = sum(self.loads[level].busy * took for level, took in seconds.items())
        return Load(sum(seconds.values()), busy)

    def beside(self, load: Load, compute: float) -> float:
        """Seconds of a pass whose layers are loaded while the ones before compute (CacheBlend, section 5).

        Neither can be faster than alone: the last layer computes after it is loaded, the first loads before it
        computes. On the CPU both also want the same cores: the core-seconds of both over the cores there are.
        """
        alone = max(load.seconds + compute / self.layers, load.seconds / self.layers + compute)
        if self.own_memory:
            return alone
        return max(alone, (load.core_seconds + compute * self.threads) / max(self.cores, self.threads))

    def to_json(self) -> dict[str, Any]:
        """What was measured."""
        return {"pass": asdict(self.passes), "loads": {level: asdict(one) for level, one in self.loads.items()}}


def read_numbers(kind: type[PassSpeed] | type[LoadSpeed], row: Any) -> Any:
    """A speed from its JSON.

    Raises
    ------
    ValueError, TypeError, KeyError : it is not one.
    """
    values = {name: float(row[name]) for name in kind.__slots__}
    if not all(math.isfinite(value) and value >= 0 for value in values.values()):
        raise ValueError("a speed is a finite number")
    return kind(**values)


def fit_pass(samples: Sequence[tuple[float, float, float]]) -> PassSpeed:
    """Speed from samples of (rows, keys, seconds)."""
    coefficients = fit([(1.0, rows, keys) for rows, keys, _ in samples], [seconds for *_, seconds in samples])
    return PassSpeed(*coefficients)


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Non-negative least squares of the relative error: coefficients by column.

    With three columns the best set of those that are not zero is found by trying all.
    """
    target = np.asarray(seconds, dtype=float)
    matrix = np.asarray(rows, dtype=float) / target[:, None]
    count = matrix.shape[1]
    best, error = [0.0] * count, math.inf
    for size in range(1, count + 1):
        for used in itertools.combinations(range(count), size):
            part = matrix[:, used]
            scale = np.abs(part).max(0)
            solution = np.linalg.lstsq(part / scale, np.ones(len(target)), rcond=None)[0] / scale
            residual = float(np.square(part @ solution - 1).sum())
            if (solution >= 0).all() and residual < error - 1e-9:
                best = [0.0] * count
                for column, value in zip(used, solution.tolist(), strict=True):
                    best[column] = value
                error = residual
    return best


# ---- what a prompt costs ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """A segment of the prompt.

    Attributes
    ----------
    status : see fusion/plan.py.
    level : at which it is read; None: it is not stored.
    held : it is in memory already, so that nothing is to be read.
    dropped : tokens whose rows are not stored: they are neither read nor part of what a ratio is a share of.
    shares : by mode, the share of the layers that read it, where some look through a window; all of a mode not named.
    """

    tokens: int
    status: str
    level: str | None = None
    held: bool = False
    dropped: int = 0
    shares: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, segment: Segment, held: bool = False, shares: Mapping[str, float] | None = None) -> Span:
        """The span of a plan's segment."""
        if not segment.cached:
            return cls(len(segment.ids), segment.status, held=held)
        source = segment.source
        gone = len(source.ids) - len(source.rows)
        return cls(len(source.ids), segment.status, source.level, held, gone, shares or {})


@dataclass(frozen=True, slots=True)
class Cost:
    """What a mode reads, and what it computes beside the question and the holes.

    Attributes
    ----------
    reads : cached segments of these kinds are loaded.
    computes : cached segments of these kinds are computed whole, by the pass that runs beside loading.
    beside : rows of hits that this pass computes of the others, the mean over the layers.
    behind : rows of hits that a pass of their own computes, behind the question's, which has to see all that is loaded.
    """

    reads: tuple[Kind, ...] = CACHED
    computes: tuple[Kind, ...] = ()
    beside: float = 0.0
    behind: int = 0


class PromptRows:
    """The rows of a laid-out prompt, counted by what is known of them.

    Parameters
    ----------
    spans : in prompt order, the prompt's beginning first, the question last.
    speeds : what was measured. A level that could not be is one whose records cannot be read: these are holes.

    Attributes
    ----------
    length : tokens of the prompt.
    context : cached tokens of chunks, which a ratio is a share of.
    hit_chunks : tokens of each cached chunk whose rows are not what full prefill gives.
    holes : a segment that should be stored is not.
    layers : how many the model has.
    """

    def __init__(self, spans: Sequence[Span], speeds: Speeds) -> None:
        self._speeds = speeds
        self._rows: dict[str, int] = {}
        self._keys: dict[str, int] = {}
        self._stored: dict[str, dict[str, int]] = {}  # tokens by kind, by level
        self._spared: dict[tuple[str, str, str], float] = {}  # of them what is not read, by mode, kind and level
        self.layers = speeds.layers
        self.context = 0
        self.hit_chunks: list[int] = []
        self.holes = any(span.status == "miss" and span.tokens for span in spans)
        start, leading = 0, True
        for number, span in enumerate(spans):
            cached = span.status in ("hit", "exact") and span.level in speeds.loads
            status = span.status if cached or span.status == "fresh" else "hole"
            leading = leading and status == "exact"
            kind = "leading" if leading else status
            self._rows[kind] = self._rows.get(kind, 0) + span.tokens
            self._keys[kind] = self._keys.get(kind, 0) + _keys_seen(start, span.tokens)
            there = span.tokens - span.dropped
            if cached and span.level is not None:
                levels = self._stored.setdefault(kind, {})
                read = 0 if span.held else there
                levels[span.level] = levels.get(span.level, 0) + read
                for mode, share in span.shares.items():
                    key = mode, kind, span.level
                    self._spared[key] = self._spared.get(key, 0.0) + (1.0 - share) * read
                self.context += there if number else 0
            if number and status == "hit":
                self.hit_chunks.append(there)
            start += span.tokens
        self.length = start

    @property
    def hits(self) -> int:
        """Cached tokens that are not what full prefill gives: those worth recomputing."""
        return self._rows.get("hit", 0)

    def load(self, *kinds: str, mode: str = "") -> Load:
        """What reading the cached segments of these kinds takes; a mode may leave out what no row of it sees."""
        tokens: dict[str, float] = {}
        for kind in kinds:
            for level, count in self._stored.get(kind, {}).items():
                tokens[level] = tokens.get(level, 0) + count - self._spared.get((mode, kind, level), 0.0)
        return self._speeds.load(tokens)

    def seconds(self, cost: Cost, mode: str = "") -> float:
        """Expected seconds from the laid-out prompt to the first token.

        The question's pass skips the LM head and sums its attention up instead: it is taken as dear as any other.
        """
        first = self._pass((*_COMPUTED, *cost.computes), min(cost.beside, self.hits))
        seconds = self._speeds.beside(self.load(*cost.reads, mode=mode), first)
        return seconds + self._pass(("fresh",), min(cost.behind, self.hits)) if cost.behind else seconds

    def _pass(self, kinds: Sequence[str], hits: float = 0.0) -> float:
        """Seconds of a pass over all rows of these kinds, and so many of the hits."""
        rows, keys = (sum(counts.get(kind, 0) for kind in kinds) for counts in (self._rows, self._keys))
        share = hits / self.hits if hits else 0.0
        return self._speeds.passes.seconds(rows + hits, keys + share * self._keys.get("hit", 0))


def _keys_seen(start: int, tokens: int) -> int:
    """Keys that the rows start … start + tokens - 1 see."""
    return tokens * start + tokens * (tokens + 1) // 2
