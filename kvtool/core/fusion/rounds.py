"""More chunks behind those that are fused already: the rows that stand are neither read nor computed again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtool.core.common.timeline import Timeline
from kvtool.core.fusion.condense import condensed, in_full
from kvtool.core.fusion.engine import Fused, FuseTiming, TokenCounts, fuse_into
from kvtool.core.fusion.plan import Candidate, Plan, plan_further
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.source import KVSource, RecordMissing
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache


def fuse_further(
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
    plan = plan_further(before.plan, chunks)
    return fuse_behind(decoder, before.cache, plan, selector, source, timeline=timeline, patience=patience)


def fuse_behind(
    decoder: Decoder,
    cache: PromptCache,
    plan: Plan,
    selector: Selector,
    source: KVSource,
    reserve: int = 0,
    timeline: Timeline | None = None,
    patience: float | None = None,
) -> Fused:
    """Fuse what a plan has behind the rows that stand in `cache`; see `fuse_further` and `fuse`.

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
        there = condensed(plan, selector, decoder.stored_layers)
        try:
            return fuse_into(cache, decoder, there, selector, source, timeline, patience)
        except RecordMissing as missing:
            plan = plan.without_all(in_full(plan, there, missing.unusable), missing.stored)
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
        reach=before.reach + now.reach,
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
    copy.turned_to = cache.turned_to and cache.turned_to[:length]
    copy.set_length(length)
    return copy
