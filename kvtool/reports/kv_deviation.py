"""KV deviation of reused rows from full prefill's, and its effect on attention (CacheBlend's insights).

‖Δ‖ / ‖full‖ is 0 where full is 0.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvtool.core.fusion.selectors.base import share_of
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.reports.reused_prompt import Queries, ReusedPrompt

METRICS = ("v_sse", "k_sse", "kv_sse", "k_l1")  # as `blend` knows them
_ROUNDING = 1e-6  # relative: what another order of a sum makes of the same numbers in float32
SHARES = (0.01, 0.02, 0.05, 0.10, 0.15, 0.25, 0.50)
RATIOS = (0.0, 0.05, 0.10, 0.15, 0.25, 0.50)
CHOICES = ("hkvd", "random", "first")
QUANTILES = (0.5, 0.9, 0.99, 1.0)
_SEED = 0


@dataclass(frozen=True, slots=True)
class Deviation:
    by_metric: Mapping[str, torch.Tensor]  # float32 `[layers, hits]` for each of METRICS
    size: torch.Tensor  # sum of squares of full prefill's keys and of its values over these rows, float32 `[2, layers]`

    @property
    def worth(self) -> torch.Tensor:
        """Return the score of a token: its squared V deviation, each layer by its own mean. float32 `[hits]`."""
        v = self.by_metric["v_sse"]
        return (v / v.mean(1, keepdim=True).clamp_min(1e-30)).mean(0)


def deviation(prompt: ReusedPrompt, reused: PromptCache, full: PromptCache) -> Deviation:
    by_metric: dict[str, list[torch.Tensor]] = {name: [] for name in METRICS}
    sizes = []
    at = prompt.hits.to(full.buffers[0].keys.device)
    for layers in zip(reused.buffers, full.buffers, strict=True):
        stored, exact = (
            [side[0].index_select(1, at).float() for side in (layer.keys, layer.values)] for layer in layers
        )
        k_wrong, v_wrong = (side - right for side, right in zip(stored, exact, strict=True))
        k_sse, v_sse = (wrong.square().sum((0, 2)) for wrong in (k_wrong, v_wrong))
        rows = {"v_sse": v_sse, "k_sse": k_sse, "kv_sse": k_sse + v_sse, "k_l1": k_wrong.abs().sum((0, 2))}
        for name, values in rows.items():
            by_metric[name].append(values.cpu())
        sizes.append(torch.stack([side.square().sum() for side in exact]).cpu())
    return Deviation({name: torch.stack(rows) for name, rows in by_metric.items()}, torch.stack(sizes, 1))


def top_share(values: torch.Tensor, share: float) -> float:
    total = float(values.sum())
    return float(values.topk(share_of(share, len(values))).values.sum()) / total if total else 0.0


def spearman(values: torch.Tensor, others: torch.Tensor) -> float:
    """Compute the rank correlation; equal values share the mean of their ranks. It is 0 if one side is all equal."""
    ranks = torch.stack([_ranks(values), _ranks(others)])
    centred = ranks - ranks.mean(1, keepdim=True)
    norms = centred.norm(dim=1)
    return float(centred[0] @ centred[1] / norms.prod()) if bool((norms > 0).all()) else 0.0


def _ranks(values: torch.Tensor) -> torch.Tensor:
    _, which, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    middle: torch.Tensor = (last - counts + last - 1).double() / 2
    return middle[which]


# ---- attention ---------------------------------------------------------------------------------------------------


def attention_deviation(cache: PromptCache, asked: Queries, full: PromptCache, asked_full: Queries) -> list[float]:
    """Measure by layer how far a question's attention over a cache is from that over the full one: the L2 norm of the
    difference over that of the full one, over heads, rows of the question and keys (CacheBlend, section 4.1)."""
    both = zip(asked.attention(cache), asked_full.attention(full), strict=True)
    return [float((wrong - exact).norm() / exact.norm()) for wrong, exact in both]


def chosen_rows(prompt: ReusedPrompt, choice: str, ratio: float, worth: torch.Tensor) -> torch.Tensor:
    """Choose `ratio` of the reused rows, the most deviating, random or first of every chunk: bool `[length]`."""
    chosen = torch.zeros(prompt.plan.length, dtype=torch.bool)
    count = share_of(ratio, len(prompt.hits))
    if choice == "hkvd":
        chosen[prompt.hits[worth.topk(count).indices]] = True
    elif choice == "random":
        chosen[random.Random(_SEED).sample(prompt.hits.tolist(), count)] = True
    else:  # as many of each chunk as it has, until the budget is spent
        depth = torch.cat([torch.arange(len(chunk.ids)) for chunk in prompt.plan.chunks if chunk.status == "hit"])
        chosen[prompt.hits[depth.argsort(stable=True)[:count]]] = True
    return chosen


def _relative(difference: float, size: float) -> float:
    return difference / size if size else 0.0


# ---- a report ----------------------------------------------------------------------------------------------------


def deviation_report(prompt: ReusedPrompt) -> dict[str, Any]:
    full = prompt.full()  # and one other cache at a time
    asked = prompt.queries(full)

    def attention(cache: PromptCache) -> list[float]:
        return attention_deviation(cache, prompt.queries(cache), full, asked)

    reused = prompt.recomputing(torch.zeros(prompt.plan.length, dtype=torch.bool))
    reuse, untouched, rows = deviation(prompt, reused, full), attention(reused), []
    del reused
    for choice in CHOICES:
        for ratio in RATIOS:
            chosen = chosen_rows(prompt, choice, ratio, reuse.worth)
            by_layer = attention(prompt.recomputing(chosen)) if ratio else untouched
            row: dict[str, Any] = {"choice": choice, "ratio": ratio, "tokens_recomputed": int(chosen.sum())}
            rows.append(row | {"deviation": sum(by_layer) / len(by_layer), "by_layer": by_layer})
    return {
        "tokens": {"prompt": prompt.plan.length, "reused": len(prompt.hits)},
        "layers": [_layer(reuse, number) for number in range(reuse.size.shape[1])],
        "attention": rows,
        "token_deviation": reuse.worth.tolist(),
    }


def _layer(whole: Deviation, number: int) -> dict[str, Any]:
    sse = {name: rows[number] for name, rows in whole.by_metric.items()}
    v, layers = sse["v_sse"], len(whole.by_metric["v_sse"])
    k_size, v_size = whole.size[:, number].tolist()
    relative = _relative(float(v.sum()), v_size) ** 0.5
    ranked = number + 1 < layers and relative > _ROUNDING
    after = spearman(v, whole.by_metric["v_sse"][number + 1]) if ranked else None
    return {
        "layer": number,
        **{name: float(rows.mean()) for name, rows in sse.items()},
        "v_relative": relative,
        "k_relative": _relative(float(sse["k_sse"].sum()), k_size) ** 0.5,
        "quantiles": {str(q): float(v.sqrt().quantile(q)) for q in QUANTILES},
        "top_share": {str(share): top_share(v, share) for share in SHARES},
        "spearman_next": after,
    }
