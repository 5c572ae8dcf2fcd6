"""Lay out a prompt as segments with absolute positions, and say what of it is cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from kvtool.core.cache.identity import ids_digest
from kvtool.core.codec.levels import known, level_of
from kvtool.core.common.types import Ids

Status = Literal["hit", "exact", "miss", "fresh", "standing"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A segment as it is wanted: its token ids, and where its KV is kept.

    Attributes
    ----------
    lead_in : digest of the token ids behind which the stored rows were prefilled.
    level : codec level to read, or None when nothing is stored there; `reason` then says why.
    kept : which of its tokens have a row there, ascending; None: all.
    stored : there is a record of it all the same: at another level than the one asked for, or too slow to wait for.
    sensitivity : one little-endian float16 a token (records/encode.py), or empty where none was kept.
    relevance : to the question, the more the higher: what is asked for first when records are read.
    """

    ids: Ids
    chunk_id: bytes = b""
    lead_in: bytes = b""
    level: str | None = None
    reason: str = ""
    stored: bool = False
    sensitivity: bytes = b""
    relevance: float = 0.0
    kept: Ids | None = None

    @property
    def rows(self) -> Sequence[int]:
        """Which of its tokens are stored."""
        return range(len(self.ids)) if self.kept is None else self.kept


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of the prompt. `status`: `hit` (cached), `exact` (cached, and what full prefill gives), `miss`
    (should be cached, is computed in place), `fresh` (never cached: the question) or `standing` (its fused rows are in
    the prompt cache from an earlier round, and are neither read nor computed again).

    A token has a *place*, the row of the prompt's buffers that its key and value stand in, and a *position*, by which
    the key is rotated. They differ where rows before it, or of its own segment, are not there (fusion/engine.py).

    Attributes
    ----------
    ids : of the tokens that have a place.
    start : place of the first.
    first : position of the source's first token; None: `start`.
    kept : which of the source's tokens have a place, ascending; None: all.
    """

    ids: Ids
    start: int
    status: Status
    source: Candidate
    reason: str = ""
    first: int | None = None
    kept: Ids | None = None

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)

    @property
    def position(self) -> int:
        """Of the source's first token."""
        return self.start if self.first is None else self.first

    @property
    def positions(self) -> Sequence[int]:
        """Of each token that has a place."""
        first = self.position
        return range(first, first + len(self.ids)) if self.kept is None else [first + token for token in self.kept]

    @property
    def cached(self) -> bool:
        return self.status in ("hit", "exact")


@dataclass(frozen=True, slots=True)
class Plan:
    """Prompt = prefix + chunks + question.

    Attributes
    ----------
    segments : in prompt order; the first is the prefix, the last the question. In the plan of a later round
        (`extend_plan`) the first is all that stands.
    """

    segments: tuple[Segment, ...]

    @property
    def ids(self) -> list[int]:
        """Of the tokens that have a place."""
        return [token for segment in self.segments for token in segment.ids]

    @property
    def text_ids(self) -> list[int]:
        """Of all tokens of the prompt's text."""
        return [token for segment in self.segments for token in segment.source.ids]

    @property
    def length(self) -> int:
        """How many tokens have a place."""
        return self.segments[-1].stop

    @property
    def dropped(self) -> int:
        """How many tokens have none: what lies between the place and the position of all that follows the chunks."""
        return self.segments[-1].position - self.segments[-1].start

    @property
    def positions(self) -> torch.Tensor:
        """int64 `[length]`: the position of each place."""
        return torch.tensor([position for segment in self.segments for position in segment.positions])

    @property
    def position_ids(self) -> list[int] | None:
        """The position of each place, where some differ from it; None: none does."""
        return self.positions.tolist() if self.dropped else None

    @property
    def chunks(self) -> tuple[Segment, ...]:
        return self.segments[1:-1]

    @property
    def cached(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.cached]

    @property
    def cached_chunks(self) -> list[Segment]:
        return [segment for segment in self.chunks if segment.cached]

    @property
    def context_tokens(self) -> int:
        """Cached tokens of chunks: what a ratio is a share of."""
        return sum(len(segment.ids) for segment in self.cached_chunks)

    @property
    def levels(self) -> list[str]:
        """The levels at which its chunks are read, finest first."""
        return known(segment.source.level for segment in self.cached_chunks)

    def mask(self, *statuses: Status) -> torch.Tensor:
        """Bool `[length]`: positions of the segments with one of these statuses."""
        mask = torch.zeros(self.length, dtype=torch.bool)
        for segment in self.segments:
            if segment.status in statuses:
                mask[segment.start : segment.stop] = True
        return mask

    def hit_rows(self) -> torch.Tensor:
        """Bool `[length]`: rows of chunks whose stored KV is not what full prefill gives."""
        rows = self.mask("hit")
        rows[: self.segments[0].stop] = False
        return rows

    def sensitivity(self) -> torch.Tensor:
        """float32 `[length]`: what was kept of each cached token, the mean of these where nothing was."""
        values = torch.full((self.length,), torch.nan, dtype=torch.float32)
        for segment in self.cached:
            if segment.source.sensitivity:
                kept = torch.frombuffer(bytearray(segment.source.sensitivity), dtype=torch.float16)
                some = kept if segment.kept is None else kept[list(segment.kept)]
                values[segment.start : segment.stop] = some.float()
        return values.nan_to_num(values.nanmean().nan_to_num(1.0).item())

    def without(self, segment: Segment, reason: str, stored: bool = False) -> Plan:
        """The plan with `segment`'s record given up: a hole, and nothing behind it is exact any more by luck."""
        source = replace(segment.source, stored=True) if stored else segment.source
        hole = replace(segment, status="miss", reason=reason, source=source)
        return Plan(tuple(hole if s is segment else s for s in self.segments))

    def without_all(self, unusable: Sequence[tuple[Segment, str]], stored: bool = False) -> Plan:
        """The plan with the records of several segments given up, each for its reason."""
        plan = self
        for segment, reason in unusable:
            plan = plan.without(segment, reason, stored)
        return plan


def build_plan(prefix: Candidate, chunks: Sequence[Candidate], question: Sequence[int]) -> Plan:
    """Lay out a prompt.

    A cached segment is exact when the ids before it in the prompt are the lead-in it was prefilled behind, and its
    level loses nothing: its rows are then what full prefill gives. Stored rows know their lead-in by digest.
    """
    segments: list[Segment] = []
    before: list[int] = []
    for candidate in (prefix, *chunks):
        segments.append(_place(candidate, before))
        before.extend(candidate.ids)
    segments.append(Segment(tuple(question), len(before), "fresh", Candidate(tuple(question))))
    return Plan(tuple(segments))


def extend_plan(before: Plan, chunks: Sequence[Candidate]) -> Plan:
    """The plan of a further round: what stands before the question stays, `chunks` and the question come behind it."""
    *stand, question = before.segments
    return plan_after(standing(stand), chunks, question.ids)


def plan_after(stands: Candidate, chunks: Sequence[Candidate], question: Sequence[int]) -> Plan:
    """The plan of what comes behind rows that are in the prompt cache already."""
    laid_out = build_plan(stands, chunks, question)
    return Plan((replace(laid_out.segments[0], status="standing"), *laid_out.segments[1:]))


def standing(segments: Sequence[Segment], behind: Sequence[int] = ()) -> Candidate:
    """Fused segments, and tokens that were appended to their cache, as the one that a further plan stands behind."""
    ids = [token for segment in segments for token in segment.source.ids]
    there = [position for segment in segments for position in segment.positions]
    grown = range(len(ids), len(ids) + len(behind))
    return Candidate((*ids, *behind), kept=(*there, *grown) if len(there) < len(ids) else None)


def _place(candidate: Candidate, before: list[int]) -> Segment:
    status: Status = "hit"
    if candidate.level is None:
        status = "miss"
    elif candidate.lead_in == ids_digest(before) and level_of(candidate.level).lossless:
        status = "exact"
    return Segment(candidate.ids, len(before), status, candidate, candidate.reason)
