"""Fuse cached segments into one prompt cache. A selector, which is a fusion mode, chooses the rows to recompute: a mode
that ranks rows by the question's attention runs the question first, over the cache as it is loaded. Then one pass
computes the chosen rows and the fresh ones. Further chunks can extend a fused prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace

import torch

from kvtool.core.common.timeline import Timeline, add_span
from kvtool.core.fusion.graph_pass import GraphPass
from kvtool.core.fusion.loader import Loader, open_loader
from kvtool.core.fusion.plan import Candidate, Plan, Segment, as_resident, extend_plan
from kvtool.core.fusion.question_pass import question_attention
from kvtool.core.fusion.recompute_pass import RecomputePass
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.shift import Shift, Shifted
from kvtool.core.fusion.source import KVSource, RecordMissing
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Rows of a prompt: `prompt` = `resident` (fused in an earlier round) + `reused` + `recomputed` (by the last layer)
    + `fresh` (question and holes). `rows`: computed at each layer, of all kinds together. `dropped`: tokens of the text
    that count among none of these, since their rows are not stored."""

    prompt: int
    reused: int
    recomputed: int
    fresh: int
    rows: tuple[int, ...]
    resident: int = 0
    dropped: int = 0

    def to_json(self) -> dict[str, int]:
        counts = {"prompt": self.prompt, "resident": self.resident, "reused": self.reused}
        return counts | {"recomputed": self.recomputed, "fresh": self.fresh, "dropped": self.dropped}


@dataclass(frozen=True, slots=True)
class FuseTiming:
    """Milliseconds. The loader's threads spend `read`, `decode`, `upload` and `rotate` while `recompute` runs. `select`
    includes the question's own pass if a mode ranks by its attention; `shift` is, on a GPU, spent on launching it;
    `wait` is how long the compute waited for the loader."""

    read: float
    decode: float
    upload: float
    rotate: float
    select: float
    shift: float
    recompute: float
    wait: float


@dataclass(frozen=True, slots=True)
class Fused:
    """A prompt's fused cache and the logits of its last token, float32 `[vocabulary]`. In its plan, segments with
    unusable records are holes, and rows that are not stored have no place. `recomputed`: cached rows that the last
    layer computed, bool `[length]`; `reasons`: the same by reason, one a row. `shifted`: which reused rows were
    shifted, and how far."""

    logits: torch.Tensor
    cache: PromptCache
    plan: Plan
    tokens: TokenCounts
    timing: FuseTiming
    bytes_read: int
    recomputed: torch.Tensor
    reasons: dict[str, torch.Tensor]
    shifted: Shifted


def fuse(
    decoder: Decoder,
    plan: Plan,
    selector: Selector,
    source: KVSource,
    reserve: int = 0,
    timeline: Timeline | None = None,
    patience: float | None = None,
    cache: PromptCache | None = None,
) -> Fused:
    """Fuse the cached segments of a plan and compute the rest. A missing, damaged or slow record becomes a hole: the
    pass starts again with that segment computed in place. `reserve`: tokens that will be generated. `patience`: seconds
    that the compute waits for one record; None: no limit. `cache`: holds the plan's first, resident segment; after a
    slow record the result has another cache."""
    while True:
        there = compact_plan(plan, selector, decoder.stored_layers)
        if cache is not None:
            cache.reserve(plan.length + reserve)
        into = decoder.new_cache(there.length + reserve) if cache is None else cache
        try:
            return fuse_into(into, decoder, there, selector, source, timeline, patience)
        except RecordMissing as missing:
            original = {id(compact): segment for compact, segment in zip(there.segments, plan.segments, strict=True)}
            for compact, reason in missing.unusable:
                plan = plan.without(original[id(compact)], reason, missing.stored)
            if cache is not None and missing.stored:  # the thread that reads it may still write into these buffers
                cache = copied(decoder, cache, there.segments[0].stop)


def fuse_into(
    cache: PromptCache,
    decoder: Decoder,
    plan: Plan,
    selector: Selector,
    source: KVSource,
    timeline: Timeline | None = None,
    patience: float | None = None,
) -> Fused:
    """Run one pass of `fuse`, of a plan by `compact_plan`. Raises RecordMissing; the cache is then undefined after its
    resident rows; if a record was slow (`stored`), a thread may still write there."""
    cache.set_length(plan.length)
    cache.position_ids = plan.position_ids
    cached = plan.mask("hit", "exact")
    started = time.perf_counter()
    with ExitStack() as stack:
        # A segment with more rows in the plan than in the store is computed at every layer.
        segments = [
            segment for segment in selector.reads(plan, decoder.stored_layers) if segment.kept == segment.source.kept
        ]
        loader = stack.enter_context(open_loader(decoder, segments, cache, source, timeline, patience=patience))
        graph_pass = GraphPass.of(decoder, plan, cache, loader)
        rows, done, asking_s = _first_rows(decoder, plan, selector, cache, loader, graph_pass, timeline)
        shift = Shift(decoder, plan, cache, loader, selector.shift)
        recompute = RecomputePass(decoder, plan, selector, cache, loader, rows, cached, shift, timeline)
        logits = _computed(decoder, plan, cache, rows, recompute, graph_pass, shift)
        recompute.end()
    if logits.is_cuda:  # the caller reads them next in any case; so times are those of the work, not of its launch
        torch.cuda.current_stream(logits.device).synchronize()
    total = time.perf_counter() - started
    recomputed = torch.zeros(plan.length, dtype=torch.bool)
    recomputed[recompute.rows.order] = True
    recomputed &= cached
    return Fused(
        logits=logits,
        cache=cache,
        plan=plan,
        tokens=_count(plan, cached, recomputed, [count + done for count in recompute.computed]),
        timing=_timing(loader, recompute.select_s + asking_s, recompute.shift_s, total),
        bytes_read=loader.stats.bytes_read,
        recomputed=recomputed,
        reasons=selector.reasons(plan, recomputed),
        shifted=shift.done,
    )


def _first_rows(
    decoder: Decoder,
    plan: Plan,
    selector: Selector,
    cache: PromptCache,
    loader: Loader,
    graph_pass: GraphPass | None,
    timeline: Timeline | None,
) -> tuple[QueryRows, int, float]:
    """Choose the first layer's rows, by the question's attention if the selector ranks by that. Returns also the number
    of rows that the question's own pass has computed before, the holes; and its seconds."""
    started, cached = time.perf_counter(), plan.mask("hit", "exact")
    layers = selector.ranking_layers(plan, decoder.stored_layers)
    if not layers:
        chosen = selector.rows(plan) & cached if selector.uses_cache else cached
        return _rows(decoder, plan, chosen | plan.mask("miss", "fresh")), 0, 0.0
    by_graph = None if graph_pass is None else graph_pass.attention
    attention = question_attention(decoder, plan, cache, loader, layers, selector.pooling, by_graph)
    chosen = selector.rows(plan, attention) & cached
    asking = add_span(timeline, "question attention", started) - loader.waited_s
    return _rows(decoder, plan, chosen | plan.mask("fresh")), int(plan.mask("miss").sum()), asking


def _rows(decoder: Decoder, plan: Plan, mask: torch.Tensor) -> QueryRows:
    return QueryRows.of(mask.nonzero()[:, 0], decoder.device, plan.position_ids)


def _computed(
    decoder: Decoder,
    plan: Plan,
    cache: PromptCache,
    rows: QueryRows,
    recompute: RecomputePass,
    graph_pass: GraphPass | None,
    shift: Shift,
) -> torch.Tensor:
    """Compute rows, by a graph if nothing is to be loaded; return the logits of the prompt's last token."""
    ids = plan.ids
    tokens = [ids[row] for row in rows.order]
    logits = None if graph_pass is None or recompute.narrows else graph_pass.logits(tokens, rows, shift)
    if logits is not None:
        recompute.skip(decoder.stored_layers)
        return logits
    at = plan.positions[rows.order].to(decoder.device) if plan.dropped else None
    return decoder.compute(tokens, rows, cache, position_ids=at, on_layer=recompute)[-1]


def _count(plan: Plan, cached: torch.Tensor, recomputed: torch.Tensor, computed: list[int]) -> TokenCounts:
    again, cached_rows = int(recomputed.sum()), int(cached.sum())
    fresh = int(plan.mask("miss", "fresh").sum())
    resident = plan.length - cached_rows - fresh
    return TokenCounts(plan.length, cached_rows - again, again, fresh, tuple(computed), resident, plan.dropped)


def _timing(loader: Loader, select: float, shift: float, total: float) -> FuseTiming:
    upload, rotate = loader.placing_s()
    seconds = {
        "read": loader.stats.read_s,
        "decode": loader.stats.decode_s,
        "upload": upload,
        "rotate": rotate,
        "select": select,
        "shift": shift,
        "recompute": total - select - shift - loader.waited_s,
        "wait": loader.waited_s,
    }
    return FuseTiming(**{name: value * 1e3 for name, value in seconds.items()})


# ---- rows that are not stored ------------------------------------------------------------------------------------
#
# Rows that are not stored take no place in a prompt: the others close up and keep their positions. So they cost neither
# memory nor attention, and the order of places still says which row sees which. Only rotation needs positions.


def compact_plan(plan: Plan, selector: Selector, layers: int) -> Plan:
    """Make the plan that a mode computes, from one in which every token has a place: a chunk that is computed whole
    keeps all tokens (recomputing everything is full prefill), any other those that have stored rows."""
    if all(segment.source.kept is None for segment in plan.segments):
        return plan
    whole = _computed_throughout(plan, selector, layers)
    segments: list[Segment] = []
    start = position = 0
    for segment in plan.segments:
        compact = _placed(segment, start, position, bool(whole[segment.start : segment.stop].all()))
        segments.append(compact)
        start, position = compact.stop, position + len(segment.source.ids)
    return Plan(tuple(segments))


def _placed(segment: Segment, start: int, position: int, whole: bool) -> Segment:
    source = segment.source
    if source.kept is None or not (segment.cached or segment.status == "resident") or (segment.cached and whole):
        return replace(segment, ids=source.ids, start=start, first=position, kept=None)
    ids = tuple(source.ids[token] for token in source.kept)
    return replace(segment, ids=ids, start=start, first=position, kept=source.kept)


def _computed_throughout(plan: Plan, selector: Selector, layers: int) -> torch.Tensor:
    """Find the cached rows that a mode is certain to compute at every layer, bool `[plan.length]`."""
    cached = plan.mask("hit", "exact")
    if not selector.uses_cache:
        return cached
    if selector.ranking_layers(plan, layers):  # the question's attention will choose among the stored rows
        return torch.zeros_like(cached)
    rows = selector.rows(plan) & cached
    stay = min(selector.narrowing(plan, layers).values(), default=plan.length)
    return rows if stay >= int(rows.sum()) else torch.zeros_like(cached)


# ---- further rounds: chunks after resident rows, which are neither read nor computed again --------------------------


def extend_fused(
    decoder: Decoder,
    before: Fused,
    chunks: Sequence[Candidate],
    selector: Selector,
    source: KVSource,
    timeline: Timeline | None = None,
    patience: float | None = None,
) -> Fused:
    """Fuse `chunks` into the prompt cache of `before`, one round or several that `joined` has added up, after its own,
    and compute the question again after them. A row sees only earlier rows, so resident rows never change. The result
    counts and times the new rows, and a ratio is a share of the new chunks."""
    *fused, question = before.plan.segments
    plan = extend_plan(as_resident(fused), chunks, question.ids)
    return fuse(decoder, plan, selector, source, timeline=timeline, patience=patience, cache=before.cache)


def joined(before: Fused, now: Fused) -> Fused:
    """Add a round to those before it, as if they were one pass: the whole prompt's plan, with counts and times summed.
    `tokens.rows` counts every computed question, `tokens.fresh` the last one only."""
    start = before.plan.segments[-1].start
    plan = Plan((*before.plan.segments[:-1], *now.plan.segments[1:]))
    fresh = before.tokens.fresh - len(before.plan.segments[-1].ids) + now.tokens.fresh
    names = {**before.reasons, **now.reasons}
    none = plan.mask()
    return Fused(
        logits=now.logits,
        cache=now.cache,
        plan=plan,
        tokens=TokenCounts(
            prompt=plan.length,
            reused=before.tokens.reused + now.tokens.reused,
            recomputed=before.tokens.recomputed + now.tokens.recomputed,
            fresh=fresh,
            rows=tuple(a + b for a, b in zip(before.tokens.rows, now.tokens.rows, strict=True)),
            dropped=plan.dropped,
        ),
        timing=FuseTiming(*map(sum, zip(astuple(before.timing), astuple(now.timing), strict=True))),
        bytes_read=before.bytes_read + now.bytes_read,
        recomputed=_spliced(before.recomputed, now.recomputed, start),
        shifted=before.shifted + now.shifted,
        reasons={name: _spliced(before.reasons.get(name, none), now.reasons.get(name, none), start) for name in names},
    )


def _spliced(before: torch.Tensor, now: torch.Tensor, start: int) -> torch.Tensor:
    return torch.cat([before[:start], now[start:]])


def copied(decoder: Decoder, cache: PromptCache, length: int) -> PromptCache:
    copy = decoder.new_cache(cache.buffers[0].keys.shape[2])
    for new, old in zip(copy.buffers, cache.buffers, strict=True):
        new.keys[:, :, :length] = old.keys[:, :, :length]
        new.values[:, :, :length] = old.values[:, :, :length]
    copy.position_ids = cache.position_ids and cache.position_ids[:length]
    copy.set_length(length)
    return copy
