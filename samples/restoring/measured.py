"""All that is measured of one question: name by name, the KL before each token of the answer."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.selectors.union import Union
from kvtool.core.model.prompt_cache import PromptCache
from restoring.case import Case
from restoring.gradients import MIDDLE, shares
from restoring.rows import Given, attended, best, classes, copied_tokens, worths
from restoring.shifts import PARTS, Lacking

BANDS = 6  # of layers

Found = tuple[str, list[float]]


def measured(case: Case, ratio: float, gold: Collection[str]) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """KL by name, and facts: shares of the KL by gradients, which tokens are copied, how many rows there are."""
    reused, fused = case.fused(Reuse()).cache, case.fused(Union(ratio=ratio))
    attention = attended(case, case.mixed(case.full), case.context, [*case.plan.segments[-1].ids, *case.script[:-1]])
    named = classes(case, gold, fused.recomputed, attention.sum(0), ratio)
    first, left = shares(case, reused, MIDDLE), shares(case, fused.cache)
    facts: dict[str, Any] = {
        "copied": copied_tokens(case),
        "tokens": case.context,
        "shares of reuse": shares_by(case, first, named),
        "shares": shares_by(case, left, named),
    }
    named |= {f"largest shares {share:.0%}": best(case.plan, by_row(case, left), share) for share in (0.05, 0.15)}
    found = {"reuse": case.kl(case.mixed(reused)), "union": case.kl(case.mixed(fused.cache))}
    found |= dict(_restored(case, fused.cache, named))
    worth = worths(case, reused, attention, by_row(case, first), named)
    found |= dict(_chosen(case, reused, ratio, fused.recomputed, worth))
    found |= dict(_shifts(case, fused.cache, reused, fused.recomputed))
    return found, facts


def _restored(case: Case, cache: PromptCache, named: dict[str, torch.Tensor]) -> Iterator[Found]:
    """What is left when some of the context is right."""
    yield "sides|keys", case.kl(case.mixed(cache, sides=(0,)))
    yield "sides|values", case.kl(case.mixed(cache, sides=(1,)))
    layers = len(case.decoder.layers)
    for band in range(BANDS):
        some = range(band * layers // BANDS, (band + 1) * layers // BANDS)
        yield f"layers|{some.start}-{some.stop - 1}", case.kl(case.mixed(cache, layers=some))
    for name, rows in named.items():
        yield f"rows|{name}", case.kl(case.mixed(cache, rows=rows))
    yield from _readers(case, cache)


def _readers(case: Case, cache: PromptCache) -> Iterator[Found]:
    """The question's rows right and what the answer sees of the chunks not; and the other way round.

    The first token is none of either's: it is 0 here.
    """
    hybrid = case.mixed(cache)
    question = slice(case.context, case.plan.length)
    for target, exact in zip(hybrid.buffers, case.full.buffers, strict=True):
        target.keys[:, :, question] = exact.keys[:, :, question]
        target.values[:, :, question] = exact.values[:, :, question]
    yield "readers|question's rows", [0.0, *case.kl_without_asking(hybrid)]
    hybrid = case.mixed(cache, rows=torch.ones(case.plan.length, dtype=torch.bool))
    yield "readers|chunks under the answer", [0.0, *case.kl_without_asking(hybrid)]


def _chosen(
    case: Case, reused: PromptCache, ratio: float, own: torch.Tensor, worths: dict[str, torch.Tensor]
) -> Iterator[Found]:
    """As many rows chosen by oracles: put right over what is reused, and recomputed and shifted as the product does."""
    yield "right|the product's", case.kl(case.mixed(reused, own))
    for name, worth in worths.items():
        rows = best(case.plan, worth, ratio)
        yield f"right|{name}", case.kl(case.mixed(reused, rows))
        yield f"recomputed|{name}", case.kl(case.mixed(case.fused(Given(rows)).cache))


def _shifts(case: Case, cache: PromptCache, reused: PromptCache, recomputed: torch.Tensor) -> Iterator[Found]:
    """The recomputed rows are computed anew over the rows that oracles shift."""
    still = case.plan.hit_rows() & ~recomputed
    yield "shift|none", case.kl(case.mixed(reused), recomputed)
    lacking = Lacking(case, reused, still)
    for name, part in PARTS.items():
        yield f"shift|{name}", case.kl(lacking.moved(cache, part), recomputed)
    yield "shift|exact keys", case.kl(case.mixed(cache, still, sides=(0,)), recomputed)
    yield "shift|exact values", case.kl(case.mixed(cache, still, sides=(1,)), recomputed)


def by_row(case: Case, parts: torch.Tensor) -> torch.Tensor:
    """Sum shares over layers and sides, `[length]`."""
    rows = torch.zeros(case.plan.length)
    rows[: case.context] = parts.sum((0, 1))
    return rows


def shares_by(case: Case, parts: torch.Tensor, named: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Sum shares of the KL `[layers, 2, context]` by layer and side, by rows, and tell in how few rows they are."""
    ranked = by_row(case, parts)[case.plan.hit_rows()].sort(descending=True).values
    by_name = {}
    for name, mask in named.items():
        some = mask[: case.context]
        by_name[name] = [*parts[:, :, some].sum((0, 2)).tolist(), int(some.sum())]
    return {
        "total": float(parts.sum()),
        "layers": parts.sum(2).tolist(),
        "rows": by_name,
        "top": {share: float(ranked[: max(1, round(share * len(ranked)))].sum()) for share in (0.01, 0.05, 0.15)},
    }
