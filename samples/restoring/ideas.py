"""Other ways to spend the same number of recomputed rows, tried in the lab over a reused cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch

from kvtool.core.fusion.layerwise_selection import question_attention
from kvtool.core.fusion.loader import Loader
from kvtool.core.fusion.selectors.base import share_of
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.selectors.union import Union
from kvtool.core.fusion.shift import Shift
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.prompt_cache import PromptCache
from restoring.case import Case
from restoring.rows import attended

SPREADS = (0.5, 1.0)  # of the budget, over chunks by their length
EARLY = 1 / 3  # of the budget, in the first of two rounds
Found = tuple[str, list[float]]


class _There:
    """A loader whose layers are all there."""

    def wait(self, layer: int) -> None:
        """Nothing to wait for."""


@dataclass(frozen=True, slots=True)
class Lab:
    """A question over its reused cache, whose own rows are computed where they are asked for."""

    case: Case
    reused: PromptCache
    spare: PromptCache

    @classmethod
    def of(cls, case: Case) -> Lab:
        spare = case.decoder.new_cache(case.plan.length + len(case.script))
        return cls(case, case.fused(Reuse()).cache, spare)

    def copied(self, base: PromptCache) -> PromptCache:
        """Copy a cache's rows up to the answer into the spare one."""
        for target, source in zip(self.spare.buffers, base.buffers, strict=True):
            for there, here in ((target.keys, source.keys), (target.values, source.values)):
                there[:, :, : self.case.plan.length] = here[:, :, : self.case.plan.length]
        self.spare.set_length(self.case.plan.length)
        return self.spare

    def worth(self, cache: PromptCache) -> torch.Tensor:
        """What `union` ranks rows by over a cache, `[length]`."""
        plan, selector = self.case.plan, Union()
        layers = range(len(self.case.decoder.layers) // 2, len(self.case.decoder.layers))
        cache.set_length(plan.length)
        ready = cast(Loader, _There())
        return selector.weighed(plan, question_attention(self.case.decoder, plan, cache, ready, layers, "both"))

    def recompute(self, cache: PromptCache, rows: torch.Tensor, shifts: bool = True) -> None:
        """Compute rows (bool `[length]`) over a cache, and shift those that stay."""
        decoder, ids = self.case.decoder, self.case.plan.ids
        places = QueryRows.of(rows.nonzero()[:, 0], decoder.device)
        shift = Shift(decoder, self.case.plan, cache, wanted=shifts)
        shift.follow(places)
        cache.before_update = lambda layer, count: shift.before(layer)
        cache.after_update = shift.after
        try:
            decoder.walk([ids[row] for row in places.order], places, cache)
        finally:
            cache.before_update = cache.after_update = None


def tried(case: Case, ratio: float) -> Iterator[Found]:
    """The KL of the product's own choice, and of the ideas, by name; each recomputes as many rows."""
    lab = Lab.of(case)
    worth = lab.worth(lab.copied(lab.reused))
    budget = share_of(ratio, case.plan.context_tokens)
    yield "product", _once(lab, spread(case, worth, budget, 0.0))
    for share in SPREADS:
        yield f"spread {share:.0%}", _once(lab, spread(case, worth, budget, share))
    early = spread(case, worth, round(EARLY * budget), 0.0)
    for name, shifts in (("ranked again", False), ("ranked and shifted again", True)):
        cache = lab.copied(lab.reused)
        lab.recompute(cache, early)
        again = lab.worth(cache).masked_fill(early, -1.0)
        lab.recompute(cache, spread(case, again, budget - int(early.sum()), 0.0), shifts)
        yield name, case.kl(cache)
    yield "after the first token", _while_answering(lab, worth, budget)


def spread(case: Case, worth: torch.Tensor, budget: int, share: float) -> torch.Tensor:
    """The rows of the highest worth, bool `[length]`; a share of the budget is chosen chunk by chunk first."""
    hits, rows = case.plan.hit_rows(), case.plan.mask()
    for segment in case.plan.cached_chunks:
        own = worth[segment.start : segment.stop]
        count = int(share * budget * len(own) / case.plan.context_tokens)
        rows[segment.start + own.topk(count).indices] = True
    rows &= hits
    left = worth.masked_fill(rows | ~hits, -torch.inf)
    rows[left.topk(budget - int(rows.sum())).indices] = True
    return rows


def _once(lab: Lab, rows: torch.Tensor) -> list[float]:
    cache = lab.copied(lab.reused)
    lab.recompute(cache, rows)
    return lab.case.kl(cache)


def _while_answering(lab: Lab, worth: torch.Tensor, budget: int) -> list[float]:
    """Two thirds of the rows before the first token, which is then asked what it looks at for the last third.

    The question's rows stay as they were when the first token was given.
    """
    case, cache = lab.case, lab.copied(lab.reused)
    before = spread(case, worth, round((1 - EARLY) * budget), 0.0)
    lab.recompute(cache, before)
    first = case.kl(cache)[0]
    if len(case.script) < 2:
        return [first]
    looked = attended(case, cache, case.plan.length, case.script[:1]).sum(0) * case.plan.sensitivity()
    lab.recompute(cache, spread(case, looked.masked_fill(before, -1.0), budget - int(before.sum()), 0.0), shifts=False)
    return [first, *case.kl_without_asking(cache)]
