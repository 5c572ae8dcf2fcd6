"""Fuse cached segments into one prompt cache: rows of all segments in one pass while the cache is loaded.

Every fusion mode is a selector that this engine asks. A prompt that is fused can be extended by further chunks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from kvtool.core.common.timeline import Timeline, add_span
from kvtool.core.fusion.layerwise_selection import LayerwiseSelection, question_attention
from kvtool.core.fusion.loader import Loader
from kvtool.core.fusion.plan import Candidate, Plan, Segment, extend_plan
from kvtool.core.fusion.read_set import ReadSet
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.shift import Shift, Shifted
from kvtool.core.fusion.source import KVSource, RecordMissing
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """prompt = reused + recomputed + fresh, and in a further round + standing. `recomputed`: cached rows computed at
    the last layer; `fresh`: question and holes. `rows` is what was computed at each layer, all kinds together.
    `dropped`: tokens of the text that are in none of these, since their rows were not stored."""

    prompt: int
    reused: int
    recomputed: int
    fresh: int
    rows: tuple[int, ...]
    standing: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class FuseTiming:
    """Milliseconds. `read`, `decode`, `upload` and `rotate` run beside `recompute` in the loader's thread.

    `wait` is how long the compute stood still for them; `select` holds the question's own pass where there is one;
    `shift` is what moving reused rows took of the compute (on a GPU: what asking for it took).
    """

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
    """A prompt's fused cache and the logits of its last token.

    Attributes
    ----------
    logits : float32 `[vocabulary]`.
    plan : what was computed; segments whose records turned out unusable are misses in it, and rows that are not there
        have no place.
    read_set : what was read of which layer. Through a window some rows of a layer are never seen: what the cache holds
        there is undefined.
    recomputed : bool `[length]`, the cached rows computed at the last layer.
    reasons : why: names of reasons, each with its rows (bool `[length]`); no row has two.
    shifted : which reused rows were moved, and how far.
    """

    logits: torch.Tensor
    cache: PromptCache
    plan: Plan
    tokens: TokenCounts
    timing: FuseTiming
    bytes_read: int
    read_set: ReadSet
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
) -> Fused:
    """Fuse the cached segments of a plan and compute the rest.

    A record that turns out missing, damaged or slow while layers are already running becomes a hole: the pass starts
    again with that segment computed in place, and the plan in the result says why.

    Parameters
    ----------
    reserve : room for tokens that will be generated.
    timeline : collects what ran when.
    patience : seconds that reading one record may take while the compute waits for it; None: as long as it takes.
    """
    while True:
        there = compact_plan(plan, selector, decoder.stored_layers)
        cache = decoder.new_cache(there.length + reserve)
        try:
            return fuse_into(cache, decoder, there, selector, source, timeline, patience)
        except RecordMissing as missing:
            plan = plan.without_all(in_original(plan, there, missing.unusable), missing.stored)


def fuse_into(
    cache: PromptCache,
    decoder: Decoder,
    plan: Plan,
    selector: Selector,
    source: KVSource,
    timeline: Timeline | None = None,
    patience: float | None = None,
) -> Fused:
    """One pass of `fuse` over a given cache, in which the rows of standing segments are in place.

    Parameters
    ----------
    plan : as `compact_plan` gives it.

    Raises
    ------
    RecordMissing : a record is missing, damaged or slow; what the cache holds behind standing segments is then
        undefined, and of a slow one (`stored`) a thread may write there still.
    """
    cache.set_length(plan.length)
    cache.position_ids = plan.position_ids
    cached = plan.mask("hit", "exact")
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.callback(cache.unhook)  # also where it fails: others go on from the rows that stand
        read_set = ReadSet.of(plan, selector, decoder.windows, decoder.device)
        read_set.clear(cache)
        loader = stack.enter_context(Loader(decoder, read_set.read, cache, source, timeline, patience=patience))
        first = _first_rows(decoder, plan, selector, cache, loader, timeline)
        shift = Shift(decoder, plan, cache, wanted=selector.shift, loader=loader)
        selection = LayerwiseSelection(decoder, plan, selector, cache, loader, first.rows, cached, shift, timeline)
        cache.before_update, cache.after_update = selection.on_update, selection.on_updated
        if selection.targets:
            stack.enter_context(selection.hooked())
        logits = _computed(decoder, plan, first.rows, cache)
        selection.end()
    if logits.is_cuda:  # who asked waits for them now in any case; the times are of what was done, not of asking for it
        torch.cuda.current_stream(logits.device).synchronize()
    total = time.perf_counter() - started
    recomputed = torch.zeros(plan.length, dtype=torch.bool)
    recomputed[selection.rows.order] = True
    recomputed &= cached
    return Fused(
        logits=logits,
        cache=cache,
        plan=plan,
        tokens=_count(plan, cached, recomputed, [count + first.done for count in selection.computed]),
        timing=_timing(loader, selection.select_s + first.asking_s, selection.shift_s, total),
        bytes_read=loader.stats.bytes_read,
        read_set=read_set,
        recomputed=recomputed,
        reasons=selector.reasons(plan, recomputed),
        shifted=shift.done,
    )


@dataclass(frozen=True, slots=True)
class _First:
    """What the first layer computes.

    Attributes
    ----------
    done : rows that the question's own pass has computed already: the holes, over the cache as it is reused.
    asking_s : seconds that that pass has taken.
    """

    rows: QueryRows
    done: int = 0
    asking_s: float = 0.0


def _first_rows(
    decoder: Decoder, plan: Plan, selector: Selector, cache: PromptCache, loader: Loader, timeline: Timeline | None
) -> _First:
    """Choose the rows, by the question's attention where the selector asks for that."""
    started, cached = time.perf_counter(), plan.mask("hit", "exact")
    asked = selector.asked(plan, decoder.stored_layers)
    if not asked:
        wanted = selector.rows(plan) & cached if selector.uses_cache else cached
        return _First(_rows(decoder, plan, wanted | plan.mask("miss", "fresh")))
    attention = question_attention(decoder, plan, cache, loader, asked, selector.pooling)
    wanted = selector.rows(plan, attention) & cached
    asking = add_span(timeline, "question attention", started) - loader.waited_s
    return _First(_rows(decoder, plan, wanted | plan.mask("fresh")), int(plan.mask("miss").sum()), asking)


def _rows(decoder: Decoder, plan: Plan, mask: torch.Tensor) -> QueryRows:
    return QueryRows.of(mask.nonzero()[:, 0], decoder.device, plan.position_ids)


def _computed(decoder: Decoder, plan: Plan, rows: QueryRows, cache: PromptCache) -> torch.Tensor:
    """Logits of the prompt's last token."""
    ids = plan.ids
    at = plan.positions[rows.order].to(decoder.device) if plan.dropped else None
    return decoder.compute([ids[place] for place in rows.order], rows, cache, position_ids=at)[-1]


def _count(plan: Plan, cached: torch.Tensor, recomputed: torch.Tensor, computed: list[int]) -> TokenCounts:
    again, kept = int(recomputed.sum()), int(cached.sum())
    fresh = int(plan.mask("miss", "fresh").sum())
    standing = plan.length - kept - fresh
    return TokenCounts(plan.length, kept - again, again, fresh, tuple(computed), standing, plan.dropped)


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
# Rows that are not stored take no place in a prompt: what is there closes up, and keeps its positions. So neither
# memory nor attention is spent on them, no query can see an empty place, and who sees whom is said by the order of
# places as ever. Only what rotates by position has to ask a plan for it.


def compact_plan(plan: Plan, selector: Selector, layers: int) -> Plan:
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


def in_original(plan: Plan, compact: Plan, unusable: Sequence[tuple[Segment, str]]) -> list[tuple[Segment, str]]:
    """Return segments of a compact plan as they are in the one that it was made of."""
    own = {id(small): large for small, large in zip(compact.segments, plan.segments, strict=True)}
    return [(own[id(segment)], reason) for segment, reason in unusable]


# ---- more chunks after those that are fused: their rows are neither read nor computed again --------------------------


def extend_fused(
    decoder: Decoder,
    before: Fused,
    chunks: Sequence[Candidate],
    selector: Selector,
    source: KVSource,
    timeline: Timeline | None = None,
    patience: float | None = None,
) -> Fused:
    """Fuse `chunks` into the prompt cache of `before`, behind its own, and compute the question anew behind them.

    A row sees only what stands before it, so nothing that stands would change. The selector sees the new chunks alone:
    a ratio is a share of them.

    Parameters
    ----------
    before : a first round's result, or what `joined` made of several. Its question, and an answer that has grown its
        cache, are overwritten.
    patience : see `fuse`. A record that cannot be used becomes a hole, as there.

    Returns
    -------
    This round: its plan, counts and times are those of the new rows; `joined` adds it to what was before.
    """
    plan = extend_plan(before.plan, chunks)
    return fuse_after(decoder, before.cache, plan, selector, source, timeline=timeline, patience=patience)


def fuse_after(
    decoder: Decoder,
    cache: PromptCache,
    plan: Plan,
    selector: Selector,
    source: KVSource,
    reserve: int = 0,
    timeline: Timeline | None = None,
    patience: float | None = None,
) -> Fused:
    """Fuse what a plan has behind the rows that stand in `cache`; see `extend_fused` and `fuse`.

    Parameters
    ----------
    cache : what stands behind its standing rows is overwritten.
    plan : its first segment stands.

    Returns
    -------
    The plan with all that stands as its first segment; its cache is another where a record was too slow.
    """
    while True:
        cache.reserve(plan.length + reserve)
        there = compact_plan(plan, selector, decoder.stored_layers)
        try:
            return fuse_into(cache, decoder, there, selector, source, timeline, patience)
        except RecordMissing as missing:
            plan = plan.without_all(in_original(plan, there, missing.unusable), missing.stored)
            if missing.stored:  # the thread that reads it still may write into these buffers
                cache = copied(decoder, cache, there.segments[0].stop)


def joined(before: Fused, now: Fused) -> Fused:
    """The rounds before and a further one as if they were one pass: the whole prompt's plan, counts and times summed.

    `tokens.rows` counts every question that was computed, `tokens.fresh` the last one only.
    """
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
        timing=_sum(before.timing, now.timing),
        bytes_read=before.bytes_read + now.bytes_read,
        read_set=before.read_set + now.read_set,
        recomputed=_behind(before.recomputed, now.recomputed, start),
        shifted=before.shifted + now.shifted,
        reasons={name: _behind(before.reasons.get(name, none), now.reasons.get(name, none), start) for name in names},
    )


def _behind(before: torch.Tensor, now: torch.Tensor, start: int) -> torch.Tensor:
    """Rows (bool) of the prompt: up to `start` those of `before`, from there on those of `now`."""
    return torch.cat([before[:start], now[start:]])


def _sum(a: FuseTiming, b: FuseTiming) -> FuseTiming:
    return FuseTiming(**{name: getattr(a, name) + getattr(b, name) for name in FuseTiming.__dataclass_fields__})


def copied(decoder: Decoder, cache: PromptCache, length: int) -> PromptCache:
    """The first `length` rows in buffers of their own, with as much room."""
    copy = decoder.new_cache(cache.buffers[0].keys.shape[2])
    for new, old in zip(copy.buffers, cache.buffers, strict=True):
        new.keys[:, :, :length] = old.keys[:, :, :length]
        new.values[:, :, :length] = old.values[:, :, :length]
    copy.position_ids = cache.position_ids and cache.position_ids[:length]
    copy.set_length(length)
    return copy
