"""Reuse the longest stored prefix of a prompt for a model that keeps states, exactly, and compute what follows.

A state is made of every token before it, so nothing but the very same beginning can be reused. What is kept of an
answered prompt is a chain of stretches, one a segment: keys and values of the layers that have some, as they stand in
the prompt (they never move), and at some ends the states. Reuse goes as far as stretches are there without a gap, back
to the last end with a state.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvtool.core.cache.stretches import Place, StretchInfo
from kvtool.core.common.timeline import Timeline, add_span
from kvtool.core.fusion.engine import Fused, FuseTiming, TokenCounts
from kvtool.core.fusion.plan import Plan, Segment
from kvtool.core.fusion.read_set import ReadSet
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.shift import Shifted
from kvtool.core.fusion.state_checkpoint import (
    KEYS,
    VALUES,
    CheckpointLoader,
    NewCheckpoint,
    Parts,
    ReadPart,
    StoredPrefix,
    kept_size,
)
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import BufferLayer
from kvtool.core.model.states import StateCache, StateLayer, States

DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class PrefixFused:
    """An answered prompt.

    Attributes
    ----------
    fused : as every mode gives it; reused segments are `exact` in its plan.
    new : the stretches that are worth keeping. `used`: ids of those that were reused.
    """

    fused: Fused
    new: tuple[NewCheckpoint, ...]
    used: tuple[bytes, ...]


def checkpoint_ends(segments: int) -> frozenset[int]:
    """At the ends of which of a prompt's segments (from 0) the state is kept.

    At the first, which is the prompt's own beginning; at the last; and 1, 2, 4, 8, … before that. A state may be larger
    than the keys and values of a segment many times, so not each is kept; where a prompt differs from an answered one
    from some segment on, at most twice the segments from there to the end are computed.
    """
    last = segments - 1
    back = [0, *(2**power for power in range(segments.bit_length()))]
    return frozenset({0, *(last - steps for steps in back)} & {*range(segments)})


def fuse_prefix(
    decoder: Decoder,
    plan: Plan,
    selector: Selector,
    found: StoredPrefix,
    read: ReadPart,
    reserve: int = 0,
    timeline: Timeline | None = None,
) -> PrefixFused:
    """Compute what follows the longest stored beginning of a prompt.

    A part that turns out damaged gives its stretch up: the beginning is shorter then.

    Parameters
    ----------
    plan : all its segments to be computed. Its chunks' ids are what a stretch is told to be made of.
    found : what is stored of it. The stretches behind what is reused are new.
    """
    while True:
        cache = decoder.new_cache(plan.length + reserve)
        assert isinstance(cache, StateCache)
        loading = CheckpointLoader(decoder, cache, read)
        started = time.perf_counter()
        damaged = loading.take(plan, found)
        if damaged is None:
            break
        found = found.without(damaged)
        plan = _with_reason(plan, damaged, DAMAGED)
    read_ms = add_span(timeline, "read states", started) * 1e3
    started = time.perf_counter()
    plan = _as_reused(plan, found.usable)
    logits, new = _compute(decoder, plan, cache, found)
    cache.mark()
    took = add_span(timeline, "compute", started) * 1e3
    fused = _fused(decoder, plan, selector, cache, logits, loading.bytes_read, (read_ms, took))
    return PrefixFused(fused, tuple(new), found.ids[: found.usable])


def extend_prefix(
    decoder: Decoder,
    cache: StateCache,
    plan: Plan,
    selector: Selector,
    reserve: int = 0,
    timeline: Timeline | None = None,
) -> PrefixFused:
    """Compute what a plan has behind the tokens that the states of `cache` are behind; nothing of it is worth storing.

    Parameters
    ----------
    cache : stays marked where it is.
    plan : its first segment stands.
    """
    started, stands = time.perf_counter(), plan.segments[0].stop
    cache.reserve(plan.length + reserve)
    logits = pass_of(decoder, plan.ids[stands:], stands, cache)
    took = add_span(timeline, "compute", started) * 1e3
    return PrefixFused(_fused(decoder, plan, selector, cache, logits, 0, (0.0, took)), (), ())


def _compute(
    decoder: Decoder, plan: Plan, cache: StateCache, found: StoredPrefix
) -> tuple[torch.Tensor, list[NewCheckpoint]]:
    """Compute all segments that are not reused; the state is looked at where it is kept.

    Returns
    -------
    The last token's logits, float32 `[vocabulary]`, and the stretches that were computed.
    """
    context = plan.segments[:-1]
    ends = checkpoint_ends(len(context)) if found.ids else frozenset()
    states: dict[int, dict[int, States]] = {}
    ids: list[int] = []
    start = context[found.usable - 1].stop if found.usable else 0
    logits = torch.empty(0, dtype=torch.float32)
    for number, segment in enumerate(plan.segments[found.usable :], found.usable):
        ids.extend(segment.ids)
        if ids and (number in ends or segment is plan.segments[-1]):
            logits = pass_of(decoder, ids, start, cache)
            start, ids = start + len(ids), []
        if number in ends:
            states[number] = _copied(cache)
    wanted = [number for number in range(found.usable, len(found.ids)) if not found.has(number, number in states)]
    return logits, [_new(decoder, plan, found, number, cache, states.get(number, {})) for number in wanted]


def pass_of(decoder: Decoder, ids: Sequence[int], start: int, cache: StateCache) -> torch.Tensor:
    """Compute rows from place `start` on behind the states as they are; logits of the last, float32 `[vocabulary]`."""
    stop = start + len(ids)
    cache.set_length(stop)
    return decoder.compute(ids, QueryRows.of(torch.arange(start, stop), decoder.device), cache)[-1]


def _copied(cache: StateCache) -> dict[int, States]:
    return {
        number: {name: tensor.to("cpu", copy=True) for name, tensor in layer.states().items()}
        for number, layer in enumerate(cache.buffers)
        if isinstance(layer, StateLayer)
    }


def _new(
    decoder: Decoder, plan: Plan, found: StoredPrefix, number: int, cache: StateCache, states: dict[int, States]
) -> NewCheckpoint:
    segment = plan.segments[number]
    parts: Parts = dict(_rows(cache, segment))
    for layer, held in states.items():
        parts["state", layer] = {f"{what} {at}": one for (what, at), one in held.items()}
    chunks = [one.source.chunk_id for one in plan.segments[1 : number + 1] if one.source.chunk_id]
    info = StretchInfo(
        start=segment.start,
        tokens=len(segment.ids),
        rows=tuple(sorted(layer for side, layer in parts if side == "rows")),
        states=tuple(sorted(states)),
        chunks=tuple(dict.fromkeys(chunks)),
        own=bool(plan.segments[0].source.chunk_id or not plan.segments[0].ids),
        size=kept_size(parts, decoder.kv_dtype),
        arithmetic=decoder.loaded.arithmetic,
    )
    return NewCheckpoint(found.ids[number], number, info, {place: parts[place] for place in info.places})


def _rows(cache: StateCache, segment: Segment) -> Iterator[tuple[Place, dict[str, torch.Tensor]]]:
    for number, layer in enumerate(cache.buffers):
        if isinstance(layer, BufferLayer):
            sides = {name: getattr(layer, name)[:, :, segment.start : segment.stop] for name in (KEYS, VALUES)}
            yield ("rows", number), sides


# ---- as other modes tell of themselves ---------------------------------------------------------------------------


def _with_reason(plan: Plan, number: int, reason: str) -> Plan:
    segments = [replace(one, reason=reason) if at == number else one for at, one in enumerate(plan.segments)]
    return Plan(tuple(segments))


def _as_reused(plan: Plan, usable: int) -> Plan:
    """The plan with its first segments reused, and all others but the question computed."""
    context = [
        replace(one, status="exact", reason="") if at < usable else replace(one, status="miss", reason=one.reason)
        for at, one in enumerate(plan.segments[:-1])
    ]
    return Plan((*context, plan.segments[-1]))


def _fused(
    decoder: Decoder,
    plan: Plan,
    selector: Selector,
    cache: StateCache,
    logits: torch.Tensor,
    bytes_read: int,
    took: tuple[float, float],
) -> Fused:
    reused = int(plan.mask("exact").sum())
    none = torch.zeros(plan.length, dtype=torch.bool)
    standing = int(plan.mask("standing").sum())
    fresh = plan.length - reused - standing
    return Fused(
        logits=logits,
        cache=cache,
        plan=plan,
        tokens=TokenCounts(plan.length, reused, 0, fresh, (fresh,) * len(decoder.layers), standing),
        timing=FuseTiming(took[0], 0.0, 0.0, 0.0, 0.0, 0.0, took[1], 0.0),
        bytes_read=bytes_read,
        read_set=ReadSet.whole(plan, len(decoder.layers)),
        recomputed=none,
        reasons=selector.reasons(plan, none),
        shifted=Shifted(none, ()),
    )
