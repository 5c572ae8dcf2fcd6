"""Rows that are not stored take no place in a prompt: what stands closes up, and keeps its positions.

So neither memory nor attention is spent on them, no query can see an empty place, and who sees whom is said by the
order of places as ever. Only what rotates by position has to ask a plan for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvtool.core.cache.link import RecordReader
from kvtool.core.common.types import Ids
from kvtool.core.fusion.plan import Candidate, Plan, Segment
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.records.reading import Unusable, kept_rows


def with_rows(store: RecordReader, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Segments that are wanted at some levels, with what these say of the rows that are stored.

    It stands in the records: of a level that leaves rows out the first layer's are read. Where one cannot be, its chunk
    is a hole.
    """
    made = list(candidates)
    for level in {one.level for one in candidates if one.level is not None}:
        numbers = [number for number, one in enumerate(made) if one.level == level]
        found = kept_rows(store, [made[number].chunk_id for number in numbers], level)
        for number, rows in zip(numbers, found, strict=True):
            made[number] = _with(made[number], rows)
    return made


def _with(candidate: Candidate, rows: Ids | Unusable | None) -> Candidate:
    if isinstance(rows, Unusable):
        return replace(candidate, level=None, kept=None, reason=rows.reason)
    return replace(candidate, kept=rows) if rows != candidate.kept else candidate


def condensed(plan: Plan, selector: Selector, layers: int) -> Plan:
    """The plan as a mode computes it, from one in which every token has a place.

    A chunk that is computed whole is there whole, whatever is stored of it: recomputing everything is full prefill. Of
    any other only the rows that are stored are there. Where they are all stored the plan is given back as it is.
    """
    if all(segment.source.kept is None for segment in plan.segments):
        return plan
    whole = _computed_throughout(plan, selector, layers)
    segments: list[Segment] = []
    place = position = 0
    for segment in plan.segments:
        made = _placed(segment, place, position, bool(whole[segment.start : segment.stop].all()))
        segments.append(made)
        place, position = made.stop, position + len(segment.source.ids)
    return Plan(tuple(segments))


def _placed(segment: Segment, place: int, position: int, whole: bool) -> Segment:
    source = segment.source
    if source.kept is None or not (segment.cached or segment.status == "standing") or (segment.cached and whole):
        return replace(segment, ids=source.ids, start=place, first=position, kept=None)
    ids = tuple(source.ids[token] for token in source.kept)
    return replace(segment, ids=ids, start=place, first=position, kept=source.kept)


def _computed_throughout(plan: Plan, selector: Selector, layers: int) -> torch.Tensor:
    """Bool `[plan.length]`: cached rows that a mode computes at every layer, whatever it finds on its way."""
    cached = plan.mask("hit", "exact")
    if not selector.uses_cache:
        return cached
    if selector.asked(plan, layers):  # the question's attention will choose among what is there
        return torch.zeros_like(cached)
    rows = selector.rows(plan) & cached
    stay = min(selector.narrowing(plan, layers).values(), default=plan.length)
    return rows if stay >= int(rows.sum()) else torch.zeros_like(cached)


def in_full(plan: Plan, condensed: Plan, unusable: Sequence[tuple[Segment, str]]) -> list[tuple[Segment, str]]:
    """Segments of a condensed plan as they are in the one that it was made of."""
    own = {id(small): large for small, large in zip(condensed.segments, plan.segments, strict=True)}
    return [(own[id(segment)], reason) for segment, reason in unusable]
