"""Plan a prompt: segments at absolute positions, each with the KV that is stored of it; and estimate what a fusion mode
reads and computes for it, and its time on this machine. `session/speeds.py` measures the speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

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
    """Place the segments of a prompt one after the other. A cached segment is exact if the ids before it are the
    lead-in it was prefilled after, which stored rows know by digest, and its level loses nothing."""
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
