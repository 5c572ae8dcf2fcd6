"""Fuse cached segments into one prompt cache. A selector, which is a fusion mode, chooses the rows to recompute: a mode
that ranks rows by the question's attention runs the question first, over the cache as it is loaded. Then one pass
computes the chosen rows and the fresh ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from kvtool.core.common.types import Timeline, add_span
from kvtool.core.fusion.loader import Loader
from kvtool.core.fusion.plan import MOST_ASKING, Plan, Segment
from kvtool.core.fusion.selectors.base import Pooling, QuestionWatch, Selector
from kvtool.core.fusion.shift import Shift, Shifted
from kvtool.core.fusion.source import KVSource, RecordMissing
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.forward import OnLayer, QueryRows
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
        compact = compact_plan(plan, selector, decoder.stored_layers)
        if cache is not None:
            cache.reserve(plan.length + reserve)
        prompt_cache = decoder.new_cache(compact.length + reserve) if cache is None else cache
        try:
            return fuse_into(prompt_cache, decoder, compact, selector, source, timeline, patience)
        except RecordMissing as missing:
            original = dict(zip(map(id, compact.segments), plan.segments, strict=True))
            for segment, reason in missing.unusable:
                plan = plan.without(original[id(segment)], reason, missing.stored)
            if cache is not None and missing.stored:  # the thread that reads it may still write into these buffers
                cache = copied(decoder, cache, compact.segments[0].stop)


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
    # Not loaded: segments to which `compact_plan` gave all their rows, since each layer computes them.
    segments = selector.reads(plan, decoder.stored_layers)
    loaded = [segment for segment in segments if segment.placed_rows == segment.source.stored_rows]
    with Loader(decoder, loaded, cache, source, timeline, patience=patience) as loader:
        rows, holes, asking_s = _first_rows(decoder, plan, selector, cache, loader, timeline)
        shift = Shift(decoder, plan, cache, loader, selector.shift)
        recompute = RecomputePass(decoder, plan, selector, cache, loader, rows, cached, shift, timeline)
        ids = plan.ids
        tokens = [ids[row] for row in rows.order]
        logits = decoder.compute(tokens, rows, cache, on_layer=recompute)[-1]
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
        tokens=_count(plan, cached, recomputed, [count + holes for count in recompute.computed]),
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
    timeline: Timeline | None,
) -> tuple[QueryRows, int, float]:
    """Choose the first layer's rows, by the question's attention if the selector ranks by that. Returns also the number
    of rows that the question's own pass has computed before, the holes; and its seconds."""
    started, cached = time.perf_counter(), plan.mask("hit", "exact")
    layers = selector.ranking_layers(plan, decoder.stored_layers)
    if not layers:
        chosen = (selector.rows(plan) & cached) if selector.uses_cache else cached
        return _rows(decoder, plan, chosen | plan.mask("miss", "fresh")), 0, 0.0
    attention = question_attention(decoder, plan, cache, loader, layers, selector.pooling)
    chosen = selector.rows(plan, attention) & cached
    asking = add_span(timeline, "question attention", started) - loader.waited_s
    return _rows(decoder, plan, chosen | plan.mask("fresh")), int(plan.mask("miss").sum()), asking


def _rows(decoder: Decoder, plan: Plan, mask: torch.Tensor) -> QueryRows:
    return QueryRows.of(mask.nonzero()[:, 0], decoder.device, plan.position_ids)


def question_attention(
    decoder: Decoder,
    plan: Plan,
    cache: PromptCache,
    loader: Loader,
    layers: range,
    pooling: Pooling = "rows",
) -> torch.Tensor:
    """Measure the question's attention to the whole prompt, over reused rows at their true positions: float32
    `[plan.length]`, the mean over `layers`. Of a question longer than `MOST_ASKING` tokens only the end is computed;
    places after it are 0. `pooling` of rows: L2 norm (`rows`, InfoFlow KV), the `last` row, which predicts the answer's
    first token, or the geometric mean of `both`."""
    length, plan = plan.length, plan.with_question_end(MOST_ASKING)
    rows = QueryRows.of(plan.mask("miss", "fresh").nonzero()[:, 0], decoder.device, plan.position_ids)
    ends = not bool(plan.mask("miss").any())
    count, ids = len(plan.segments[-1].ids), plan.ids
    tokens = [ids[row] for row in rows.order]
    wait = partial(loader.wait, meanwhile=decoder.pause)
    watch = QuestionWatch(rows, count, layers, plan.length, pooling, ends, wait)
    decoder.fill_cache(tokens, rows, cache, watch)
    return pad(watch.mean.cpu(), (0, length - plan.length))


class RecomputePass(OnLayer):
    """Waits for each layer's records, drops rows at the layers that a selector names (`blend`), and shifts reused rows.
    `rows`: of the current layer; `computed`: number of rows, by layer."""

    def __init__(
        self,
        decoder: Decoder,
        plan: Plan,
        selector: Selector,
        cache: PromptCache,
        loader: Loader,
        rows: QueryRows,
        cached: torch.Tensor,
        shift: Shift,
        timeline: Timeline | None = None,
    ) -> None:
        self.narrows = selector.narrowing(plan, decoder.stored_layers)
        self.rows = rows
        self.computed: list[int] = []
        self.select_s = self.shift_s = 0.0
        self._decoder, self._selector, self._cache, self._loader = decoder, selector, cache, loader
        self._cached, self._shift = cached, shift
        self._shifting(shift.follow, rows)
        self._timeline = timeline
        self._since = time.perf_counter()

    def before_write(self, layer: int, rows: int) -> None:
        self._note_span(f"compute to layer {layer}", rows)
        self._loader.wait(layer, self._decoder.pause)
        self.computed.append(rows)
        self._shifting(self._shift.before, layer)
        self._since = time.perf_counter()

    def written(self, layer: int) -> None:
        self._shifting(self._shift.after, layer)

    def _shifting(self, step: Callable[..., None], *given: Any) -> None:
        started = time.perf_counter()
        step(*given)
        self.shift_s += time.perf_counter() - started

    def end(self) -> None:
        self._note_span("compute to logits", self.computed[-1])

    def _note_span(self, name: str, rows: int) -> None:
        add_span(self._timeline, name, self._since, rows=rows)

    def choose(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, QueryRows]:
        """Keep all rows that are not cached, and those with the highest scores."""
        self._loader.wait(layer, self._decoder.pause)
        started = time.perf_counter()
        buffer = self._cache.buffers[layer]
        # Only the scores need the device, which is waited for once.
        order = torch.tensor(self.rows.order)
        reused = self._cached[order]
        among = reused.nonzero()[:, 0]
        again = among.to(keys.device, non_blocking=True)
        where = self.rows.places[again]
        new = keys[:, :, again], values[:, :, again]
        old = buffer.keys[:, :, where], buffer.values[:, :, where]
        worth = self._selector.worth(new, old)
        top = worth.topk(min(self.narrows[layer], len(among))).indices.cpu()
        keep = ~reused
        keep[among[top]] = True
        dropped = (~keep)[among].nonzero()[:, 0].to(keys.device, non_blocking=True)
        buffer.scatter(where[dropped], *(side[:, :, dropped] for side in new))
        chosen = keep.nonzero()[:, 0]
        self.rows = QueryRows.of(order[chosen], self._decoder.device, self.rows.position_ids)
        self.select_s += add_span(self._timeline, "select", started, layer=layer)
        refreshed = torch.zeros_like(self._cached)
        refreshed[order[~keep]] = True
        self._shifting(self._shift.follow, self.rows, refreshed)
        return chosen.to(keys.device, non_blocking=True), self.rows


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
    if all(segment.source.stored_rows is None for segment in plan.segments):
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
    if source.stored_rows is None or not (segment.cached or segment.status == "resident") or (segment.cached and whole):
        return replace(segment, ids=source.ids, start=start, first=position, placed_rows=None)
    ids = tuple(source.ids[token] for token in source.stored_rows)
    return replace(segment, ids=ids, start=start, first=position, placed_rows=source.stored_rows)


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


def copied(decoder: Decoder, cache: PromptCache, length: int) -> PromptCache:
    copy = decoder.new_cache(cache.buffers[0].keys.shape[2])
    for new, old in zip(copy.buffers, cache.buffers, strict=True):
        new.keys[:, :, :length] = old.keys[:, :, :length]
        new.values[:, :, :length] = old.values[:, :, :length]
    copy.position_ids = cache.position_ids and cache.position_ids[:length]
    copy.set_length(length)
    return copy
