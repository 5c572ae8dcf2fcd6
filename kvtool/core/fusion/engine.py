"""The one engine behind every fusion mode: rows of all segments in one pass over a cache that loads meanwhile."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from kvtool.core.common.timeline import Timeline, add_span
from kvtool.core.fusion.condense import condensed, in_full
from kvtool.core.fusion.loader import Loader
from kvtool.core.fusion.narrowing import Narrowing
from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.question import question_attention
from kvtool.core.fusion.reach import Reach
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.shift import Shift, Shifted
from kvtool.core.fusion.source import KVSource, RecordMissing
from kvtool.core.model.attention import Rows
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
    reach : what was read of which layer. Through a window some rows of a layer are never seen: what the cache holds
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
    reach: Reach
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
        there = condensed(plan, selector, decoder.stored_layers)
        cache = decoder.new_cache(there.length + reserve)
        try:
            return fuse_into(cache, decoder, there, selector, source, timeline, patience)
        except RecordMissing as missing:
            plan = plan.without_all(in_full(plan, there, missing.unusable), missing.stored)


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
    plan : a condensed one.

    Raises
    ------
    RecordMissing : a record is missing, damaged or slow; what the cache holds behind standing segments is then
        undefined, and of a slow one (`stored`) a thread may write there still.
    """
    cache.set_length(plan.length)
    cache.turned_to = plan.turned_to
    cached = plan.mask("hit", "exact")
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.callback(cache.unhook)  # also where it fails: others go on from the rows that stand
        reach = Reach.of(plan, selector, decoder.windows, decoder.device)
        reach.clear(cache)
        loader = stack.enter_context(Loader(decoder, reach.read, cache, source, timeline, patience=patience))
        first = _first_rows(decoder, plan, selector, cache, loader, timeline)
        shift = Shift(decoder, plan, cache, wanted=selector.shift, loader=loader)
        narrowing = Narrowing(decoder, plan, selector, cache, loader, first.rows, cached, shift, timeline)
        cache.before_update, cache.after_update = narrowing.on_update, narrowing.on_updated
        if narrowing.targets:
            stack.enter_context(narrowing.hooked())
        logits = _computed(decoder, plan, first.rows, cache)
        narrowing.end()
    if logits.is_cuda:  # who asked waits for them now in any case; the times are of what was done, not of asking for it
        torch.cuda.current_stream(logits.device).synchronize()
    total = time.perf_counter() - started
    recomputed = torch.zeros(plan.length, dtype=torch.bool)
    recomputed[narrowing.rows.order] = True
    recomputed &= cached
    return Fused(
        logits=logits,
        cache=cache,
        plan=plan,
        tokens=_count(plan, cached, recomputed, [count + first.done for count in narrowing.computed]),
        timing=_timing(loader, narrowing.select_s + first.asking_s, narrowing.shift_s, total),
        bytes_read=loader.stats.bytes_read,
        reach=reach,
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

    rows: Rows
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


def _rows(decoder: Decoder, plan: Plan, mask: torch.Tensor) -> Rows:
    return Rows.of(mask.nonzero()[:, 0], decoder.device, plan.turned_to)


def _computed(decoder: Decoder, plan: Plan, rows: Rows, cache: PromptCache) -> torch.Tensor:
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
