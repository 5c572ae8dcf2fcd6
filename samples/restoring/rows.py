"""Which rows of a prompt are which: gold passages', attended, copied, recomputed; and what each is worth."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors.base import Selector, share_of
from kvtool.core.kernels.attention.eager import mean_weights
from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.prompt_cache import PromptCache
from restoring.case import BOTH, Case, sides_of

FIRST = 16  # tokens of a chunk


@dataclass(frozen=True, slots=True)
class Given(Selector):
    """Recomputes the rows that it was given, bool `[length]`, and shifts the others as the product does."""

    name: ClassVar[str] = "given"
    given: torch.Tensor
    shift: bool = True

    def rows(self, plan: Plan, attention: torch.Tensor | None = None) -> torch.Tensor:
        return self.given


def classes(
    case: Case, gold: Collection[str], recomputed: torch.Tensor, attention: torch.Tensor, share: float
) -> dict[str, torch.Tensor]:
    """Rows of the context by name, bool `[length]`. `attention`: `[length]`, what question and answer look at."""
    hits = case.plan.hit_rows()
    chunks = case.plan.chunks
    marked, first = case.plan.mask(), case.plan.mask()
    for segment, hit in zip(chunks, case.asked.hits, strict=True):
        first[segment.start : min(segment.start + FIRST, segment.stop)] = True
        if hit.passage.source.rsplit("/", 1)[-1] in gold:
            marked[segment.start : segment.stop] = True
    named = {
        "first 16 of each chunk": first,
        "recomputed": recomputed,
        "reused": ~recomputed,
        "most attended": best(case.plan, attention, share),
        "random": best(case.plan, torch.rand(case.plan.length, generator=_draw()), share),
        "copied by the answer": copied(case),
    }
    if gold:
        named |= {"gold passages": marked, "other passages": ~marked}
    return {name: rows & hits for name, rows in named.items()}


def copied(case: Case) -> torch.Tensor:
    """Rows at which two or more tokens of the answer stand in the context one after the other, bool `[length]`."""
    rows, ids = case.plan.mask(), case.plan.ids
    pairs = set(zip(case.script, case.script[1:], strict=False))
    for row, pair in enumerate(itertools.pairwise(ids)):
        if pair in pairs:
            rows[row : row + 2] = True
    return rows


def copied_tokens(case: Case) -> list[bool]:
    """Of each token of the script: whether it follows in the context on the one before it, too."""
    ids = case.plan.ids[: case.context]
    pairs = set(itertools.pairwise(ids))
    return [False, *(pair in pairs for pair in zip(case.script, case.script[1:], strict=False))]


def best(plan: Plan, worth: torch.Tensor, share: float) -> torch.Tensor:
    """The `share` of the reused rows that is worth most, bool `[length]`."""
    places = plan.hit_rows().nonzero()[:, 0]
    count = min(share_of(share, plan.context_tokens), len(places))
    rows = plan.mask()
    rows[places[worth[places].topk(count).indices]] = True
    return rows


def attended(case: Case, cache: PromptCache, start: int, ids: Sequence[int]) -> torch.Tensor:
    """What rows of some tokens look at over a cache, the mean over heads, the sum over rows, `[layers, length]`.

    Parameters
    ----------
    start : place of the first of them.
    """
    rows = QueryRows.of(torch.arange(start, start + len(ids)), "cpu")
    found: list[torch.Tensor] = []

    def watch(layer: int, query: torch.Tensor, key: torch.Tensor, scoring: AttentionParams) -> None:
        found.append(mean_weights(query[0], key[0], rows.seen(scoring.window), scoring).sum(0)[: case.plan.length])

    cache.set_length(start + len(ids))
    case.decoder.walk(ids, replace(rows, watch=watch), cache)
    return torch.stack(found)


def changes(case: Case, cache: PromptCache) -> torch.Tensor:
    """Squared distance of each row from full prefill's, `[layers, length]`, each side by its mean in the layer."""
    hits = case.plan.hit_rows()
    total = torch.zeros(len(case.decoder.layers), case.plan.length)
    for layer in range(len(total)):
        for side in BOTH:
            pair = (sides_of(one, layer)[side][0, :, : case.plan.length].float() for one in (cache, case.full))
            distance = torch.stack([*pair]).diff(dim=0)[0].square().sum((0, 2))
            total[layer] += distance / distance[hits].mean().clamp_min(1e-12)
    return total


def worths(
    case: Case, reused: PromptCache, attention: torch.Tensor, gradient: torch.Tensor, named: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What oracles rank rows by, `[length]` each.

    Parameters
    ----------
    attention : over the full cache, `[layers, length]`.
    gradient : each row's share of the KL of `reused`, `[length]`.
    """
    change = changes(case, reused)
    change[0] = 0.0  # of the first layer keys and values are right but for rounding
    both = (attention * change.sqrt()).sum(0)
    found = {
        "true change": change.sum(0),
        "true attention x change": both,
        "true gradient": gradient,
    }
    if "gold passages" in named:
        found["gold passages first"] = both + both.max() * named["gold passages"]
    return found


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)
