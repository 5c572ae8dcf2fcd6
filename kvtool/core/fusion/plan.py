"""Plan a prompt: segments at absolute positions, each with the KV that is stored of it; and estimate what a fusion mode
reads and computes for it, and its time on this machine. `session/speeds.py` measures the speeds."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from kvtool.core.cache.identity import ids_digest
from kvtool.core.codec.levels import known, level_of
from kvtool.core.common.types import Ids
from kvtool.core.records.read import Unusable, read_stored_rows

if TYPE_CHECKING:
    from kvtool.core.cache.chunks import ChunkReader


Status = Literal["hit", "exact", "miss", "fresh", "resident"]


class Part(NamedTuple):
    """Tokens `first` … `stop` of a chunk of so many."""

    first: int
    stop: int
    of: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A segment to place: its token ids, and where its KV is stored. `lead_in`: digest of the ids that its rows were
    prefilled after. `level`: None if nothing is stored, for which `reason` gives why. `stored_rows`: tokens with a
    stored row, ascending; None: all. `stored`: a record exists although `level` is None. `sensitivity`: one
    little-endian float16 a token, or empty. `part`: of a longer stored chunk, whose rows are read whole."""

    ids: Ids
    chunk_id: bytes = b""
    lead_in: bytes = b""
    level: str | None = None
    reason: str = ""
    stored: bool = False
    sensitivity: bytes = b""
    relevance: float = 0.0
    stored_rows: Ids | None = None
    part: Part | None = None

    @property
    def rows(self) -> Sequence[int]:
        return range(len(self.ids)) if self.stored_rows is None else self.stored_rows


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of the prompt. `status`: `hit` (cached), `exact` (cached, and equal to full prefill), `miss` (a hole,
    computed in place), `fresh` (never cached: the question) or `resident` (fused in an earlier round). A token has a
    *place*, its row in the prompt's buffers, and a *position*, by which its key is rotated; they differ where rows are
    not stored. `start`: place of the first of `ids`. `first`: position of the source's first token; None: `start`.
    `placed_rows`: tokens of the source that have a place; None: all."""

    ids: Ids
    start: int
    status: Status
    source: Candidate
    reason: str = ""
    first: int | None = None
    placed_rows: Ids | None = None

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)

    @property
    def position(self) -> int:
        return self.start if self.first is None else self.first

    @property
    def positions(self) -> Sequence[int]:
        if self.placed_rows is None:
            return range(self.position, self.position + len(self.ids))
        return [self.position + token for token in self.placed_rows]

    @property
    def cached(self) -> bool:
        return self.status in ("hit", "exact")


@dataclass(frozen=True, slots=True)
class Plan:
    """Prompt = prefix + chunks + question; in a later round (`extend_plan`) the first segment is all resident rows."""

    segments: tuple[Segment, ...]

    @property
    def ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.ids]

    @property
    def text_ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.source.ids]

    @property
    def length(self) -> int:
        return self.segments[-1].stop

    @property
    def dropped(self) -> int:
        """Number of tokens without a place: the last segment's position less its place."""
        return self.segments[-1].position - self.segments[-1].start

    @property
    def positions(self) -> torch.Tensor:
        return torch.tensor([position for segment in self.segments for position in segment.positions])

    @property
    def position_ids(self) -> list[int] | None:
        """Position of each place; None if every token is at its place."""
        return self.positions.tolist() if self.dropped else None

    @property
    def chunks(self) -> tuple[Segment, ...]:
        return self.segments[1:-1]

    @property
    def passages(self) -> tuple[Segment, ...]:
        """Chunks that a store knows; any others are a client's own text between them."""
        return tuple(segment for segment in self.chunks if segment.source.chunk_id)

    @property
    def cached(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.cached]

    @property
    def cached_chunks(self) -> list[Segment]:
        return [segment for segment in self.chunks if segment.cached]

    @property
    def context_tokens(self) -> int:
        return sum(len(segment.ids) for segment in self.cached_chunks)

    @property
    def levels(self) -> list[str]:
        return known(segment.source.level for segment in self.cached_chunks)

    def mask(self, *statuses: Status) -> torch.Tensor:
        mask = torch.zeros(self.length, dtype=torch.bool)
        for segment in self.segments:
            if segment.status in statuses:
                mask[segment.start : segment.stop] = True
        return mask

    def hit_rows(self) -> torch.Tensor:
        """Mark the rows of chunks whose stored KV differs from full prefill, bool `[length]`."""
        rows = self.mask("hit")
        rows[: self.segments[0].stop] = False
        return rows

    def sensitivity(self) -> torch.Tensor:
        """Each token's stored sensitivity, float32 `[length]`; their mean where none is stored."""
        values = torch.full((self.length,), torch.nan, dtype=torch.float32)
        for segment in self.cached:
            if segment.source.sensitivity:
                sensitivity = torch.frombuffer(bytearray(segment.source.sensitivity), dtype=torch.float16)
                rows = sensitivity if segment.placed_rows is None else sensitivity[list(segment.placed_rows)]
                values[segment.start : segment.stop] = rows.float()
        return values.nan_to_num(values.nanmean().nan_to_num(1.0).item())

    def with_question_end(self, most: int) -> Plan:
        *before, question = self.segments
        ids = question.ids[-most:]
        return Plan((*before, replace(question, ids=ids, source=replace(question.source, ids=ids))))

    def without(self, segment: Segment, reason: str, stored: bool = False) -> Plan:
        source = replace(segment.source, stored=True) if stored else segment.source
        hole = replace(segment, status="miss", reason=reason, source=source)
        return Plan(tuple(hole if s is segment else s for s in self.segments))


def with_stored_rows(store: ChunkReader, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Add to candidates which of their rows are stored at their level; an unreadable one becomes a hole. Only of a
    level that drops rows is a record read, that of the first layer."""
    with_rows = list(candidates)
    for level in {candidate.level for candidate in candidates if candidate.level is not None}:
        numbers = [number for number, candidate in enumerate(candidates) if candidate.level == level]
        stored = read_stored_rows(store, [candidates[number].chunk_id for number in numbers], level)
        for number, rows in zip(numbers, stored, strict=True):
            if isinstance(rows, Unusable):
                with_rows[number] = replace(candidates[number], level=None, stored_rows=None, reason=rows.reason)
            else:
                with_rows[number] = replace(candidates[number], stored_rows=rows)
    return with_rows


def build_plan(prefix: Candidate, chunks: Sequence[Candidate], question: Sequence[int]) -> Plan:
    """Place the segments of a prompt one after the other. A cached segment is exact if its level is lossless
    and the ids before it are those that it was prefilled after (compared by digest, `Candidate.lead_in`)."""
    segments: list[Segment] = []
    before: list[int] = []
    for candidate in (prefix, *chunks):
        level, part = candidate.level, candidate.part
        status: Status = "miss" if level is None else "hit"
        if level is not None and candidate.lead_in == ids_digest(before) and level_of(level).lossless:
            status = "exact" if part is None or part.first == 0 else "hit"
        segments.append(Segment(candidate.ids, len(before), status, candidate, candidate.reason))
        before.extend(candidate.ids)
    segments.append(Segment(tuple(question), len(before), "fresh", Candidate(tuple(question))))
    return Plan(tuple(segments))


def extend_plan(resident: Candidate, chunks: Sequence[Candidate], question: Sequence[int]) -> Plan:
    laid_out = build_plan(resident, chunks, question)
    return Plan((replace(laid_out.segments[0], status="resident"), *laid_out.segments[1:]))


def as_resident(segments: Sequence[Segment], appended: Sequence[int] = ()) -> Candidate:
    """Join fused segments, and tokens that were appended to their cache, into one that a further plan begins with."""
    ids = [token for segment in segments for token in segment.source.ids]
    there = [position for segment in segments for position in segment.positions]
    grown = range(len(ids), len(ids) + len(appended))
    return Candidate((*ids, *appended), stored_rows=(*there, *grown) if len(there) < len(ids) else None)


MEMORY = "memory"  # among the levels: KV that is held decoded, which only has to be placed and rotated
# Kinds of cached segments (fusion/plan.py); `leading` are exact ones with nothing else before them.
Kind = Literal["leading", "exact", "hit"]
CACHED: tuple[Kind, ...] = ("leading", "exact", "hit")
MOST_ASKING = 256  # tokens of a question whose attention ranks the passages' rows: its last ones
_COMPUTED = ("fresh", "hole")  # computed by every mode: the question and the holes


@dataclass(frozen=True, slots=True)
class PassSpeed:
    """Seconds of one pass: `fixed` (weights read, calls made), plus `row` for each row and `key` for each seen key."""

    fixed: float
    row: float
    key: float

    def seconds(self, rows: float, keys: float) -> float:
        return self.fixed + self.row * rows + self.key * keys


@dataclass(frozen=True, slots=True)
class LoadSpeed:
    """Seconds of reading, decoding, uploading and rotating all layers: `fixed`, plus `token` for each token. `busy`:
    number of cores that are busy meanwhile. `bytes_per_second`: raw-equivalent KV; only shown to users."""

    fixed: float
    token: float
    busy: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Load:
    seconds: float
    core_seconds: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of a machine, device, model and dtype; `loads` by codec level and `MEMORY`. `cores`: of this process;
    `threads`: of a pass. `own_memory`: True for a GPU, whose loading takes no core from the compute."""

    passes: PassSpeed
    loads: Mapping[str, LoadSpeed]
    layers: int
    cores: int = 1
    threads: int = 1
    own_memory: bool = False

    def load(self, tokens: Mapping[str, float]) -> Load:
        seconds = {level: self.loads[level].fixed + self.loads[level].token * n for level, n in tokens.items() if n}
        busy = sum(self.loads[level].busy * took for level, took in seconds.items())
        return Load(sum(seconds.values()), busy)

    def overlapped(self, load: Load, compute: float) -> float:
        """Estimate a pass whose layers are loaded while earlier ones compute (CacheBlend, section 5). The first layer
        loads before it computes, the last one computes after it is loaded. On the CPU both share the cores: the time is
        at least the core-seconds of both, divided by the cores."""
        overlapped = max(load.seconds + compute / self.layers, load.seconds / self.layers + compute)
        if self.own_memory:
            return overlapped
        return max(overlapped, (load.core_seconds + compute * self.threads) / max(self.cores, self.threads))

    def to_json(self) -> dict[str, Any]:
        return {"pass": asdict(self.passes), "loads": {level: asdict(speed) for level, speed in self.loads.items()}}


def read_numbers(kind: type[PassSpeed] | type[LoadSpeed], row: Any) -> Any:
    """Read a speed from its JSON. Raises ValueError, TypeError or KeyError for anything else."""
    values = {name: float(row[name]) for name in kind.__slots__}
    if not all(math.isfinite(value) and value >= 0 for value in values.values()):
        raise ValueError("a speed is a finite number")
    return kind(**values)


def fit_pass(samples: Sequence[tuple[float, float, float]]) -> PassSpeed:
    coefficients = fit([(1.0, rows, keys) for rows, keys, _ in samples], [seconds for *_, seconds in samples])
    return PassSpeed(*coefficients)


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Fit coefficients by non-negative least squares of the relative error; one for each column. All sets of non-zero
    columns are tried, since there are at most three."""
    target = np.asarray(seconds, dtype=float)
    matrix = np.asarray(rows, dtype=float) / target[:, None]
    count = matrix.shape[1]
    best, error = np.zeros(count), math.inf
    for used in (used for size in range(count) for used in itertools.combinations(range(count), size + 1)):
        part = matrix[:, used]
        scale = np.abs(part).max(0)
        solution = np.linalg.lstsq(part / scale, np.ones(len(target)), rcond=None)[0] / scale
        residual = float(np.square(part @ solution - 1).sum())
        if (solution >= 0).all() and residual < error - 1e-9:
            best, error = np.zeros(count), residual
            best[list(used)] = solution
    return [float(coefficient) for coefficient in best]


@dataclass(frozen=True, slots=True)
class Span:
    """A segment of the prompt. `level`: of its records; None if it is not stored. `in_memory`: so that nothing is
    read. `dropped`: tokens whose rows are not stored: they are not read, and no ratio is a share of them."""

    tokens: int
    status: str
    level: str | None = None
    in_memory: bool = False
    dropped: int = 0

    @classmethod
    def of(cls, segment: Segment, in_memory: bool = False) -> Span:
        if not segment.cached:
            return cls(len(segment.ids), segment.status, in_memory=in_memory)
        source = segment.source
        gone = len(source.ids) - len(source.rows)
        return cls(len(source.ids), segment.status, source.level, in_memory, gone)


@dataclass(frozen=True, slots=True)
class Cost:
    """The work of a mode in addition to the question and the holes: it `reads` and `computes` (whole) kinds of cached
    segments. `overlapped`: further rows of hits that are computed while loading, the mean over the layers. `after`:
    rows of hits that a second pass computes, after the question's own pass has seen all that is loaded."""

    reads: tuple[Kind, ...] = CACHED
    computes: tuple[Kind, ...] = ()
    overlapped: float = 0.0
    after: int = 0


class PromptRows:
    """Rows of a planned prompt, counted by kind; segments at a level that could not be measured are holes. `context`:
    cached tokens of chunks, which a ratio is a share of. `hit_chunks`: tokens of each hit. `holes`: True if a segment
    that should be stored is not."""

    def __init__(self, spans: Sequence[Span], speeds: Speeds) -> None:
        self._speeds = speeds
        self._rows, self._keys = Counter[str](), Counter[str]()
        self._stored: defaultdict[str, Counter[str]] = defaultdict(Counter)  # tokens by kind, by level
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
            self._rows[kind] += span.tokens
            self._keys[kind] += _keys_seen(start, span.tokens)
            there = span.tokens - span.dropped
            if cached and span.level is not None:
                self._stored[kind][span.level] += 0 if span.in_memory else there
                self.context += there if number else 0
            if number and status == "hit":
                self.hit_chunks.append(there)
            start += span.tokens
        self.length, self.hits = start, self._rows["hit"]

    def load(self, *kinds: str) -> Load:
        return self._speeds.load(sum((self._stored[kind] for kind in kinds), Counter[str]()))

    def seconds(self, cost: Cost) -> float:
        """Estimate the seconds from the planned prompt to the first token. The question's own pass skips the LM head
        and sums up its attention; it counts as much as any other pass."""
        after = self._pass(("fresh",), min(cost.after, self.hits)) if cost.after else 0.0
        first = self._pass((*_COMPUTED, *cost.computes), min(cost.overlapped, self.hits), asks=bool(after))
        return self._speeds.overlapped(self.load(*cost.reads), first) + after

    def _pass(self, kinds: Sequence[str], hits: float = 0.0, asks: bool = False) -> float:
        """Estimate a pass over all rows of these kinds and some hits. `asks`: of the question, only rows that rank."""
        rows, keys = (sum(counts[kind] for kind in kinds) for counts in (self._rows, self._keys))
        if asks and (cut := self._rows["fresh"] - MOST_ASKING) > 0:
            rows, keys = rows - cut, keys - _keys_seen(self.length - cut, cut)
        share = hits / self.hits if hits else 0.0
        return self._speeds.passes.seconds(rows + hits, keys + share * self._keys["hit"])


def _keys_seen(start: int, tokens: int) -> int:
    return tokens * start + tokens * (tokens + 1) // 2
