"""How far reused keys and values are from full prefill's, and what that does to attention (CacheBlend's insights)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtool.core.fusion.selectors.ranking import share_of
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.model.weights import attention_weights
from kvtool.lab.measure.caches import Queries, Subject

METRICS = ("v_sse", "k_sse", "kv_sse", "k_l1")  # as `blend` knows them
SHARES = (0.01, 0.02, 0.05, 0.10, 0.15, 0.25, 0.50)
RATIOS = (0.0, 0.05, 0.10, 0.15, 0.25, 0.50)
CHOICES = ("hkvd", "random", "first")
QUANTILES = (0.5, 0.9, 0.99, 1.0)
_SEED = 0


@dataclass(frozen=True, slots=True)
class Deviation:
    """Of one prompt, over the rows that are reused.

    Attributes
    ----------
    by_metric : float32 `[layers, hits]` for each of METRICS.
    size : sum of squares of full prefill's keys and of its values over these rows, float32 `[2, layers]`.
    """

    by_metric: Mapping[str, torch.Tensor]
    size: torch.Tensor

    @property
    def worth(self) -> torch.Tensor:
        """What ranks a token over all layers: its squared V deviation, each layer by its own mean. float32 `[hits]`."""
        v = self.by_metric["v_sse"]
        return (v / v.mean(1, keepdim=True).clamp_min(1e-30)).mean(0)


def deviation(subject: Subject, reused: PromptCache, full: PromptCache) -> Deviation:
    """Compare two caches of one prompt, layer by layer."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in METRICS}
    sizes = []
    at = subject.hits.to(full.buffers[0].keys.device)
    for mine, right in zip(reused.buffers, full.buffers, strict=True):
        exact = [side[0].index_select(1, at).float() for side in (right.keys, right.values)]
        wrong = [
            side[0].index_select(1, at).float() - own for side, own in zip((mine.keys, mine.values), exact, strict=True)
        ]
        k_sse, v_sse = (side.square().sum((0, 2)) for side in wrong)
        rows = {"v_sse": v_sse, "k_sse": k_sse, "kv_sse": k_sse + v_sse, "k_l1": wrong[0].abs().sum((0, 2))}
        for name, values in rows.items():
            found[name].append(values.cpu())
        sizes.append(torch.stack([side.square().sum() for side in exact]).cpu())
    return Deviation({name: torch.stack(rows) for name, rows in found.items()}, torch.stack(sizes, 1))


def top_share(values: torch.Tensor, share: float) -> float:
    """What part of the sum the highest `share` of the values holds; 0 where the sum is 0."""
    total = float(values.sum())
    return float(values.topk(share_of(share, len(values))).values.sum()) / total if total else 0.0


def spearman(one: torch.Tensor, other: torch.Tensor) -> float:
    """Rank correlation; equal values share the mean of their ranks. 0 where all values of one are equal."""
    ranks = torch.stack([_ranks(one), _ranks(other)])
    centred = ranks - ranks.mean(1, keepdim=True)
    norms = centred.norm(dim=1)
    return float(centred[0] @ centred[1] / norms.prod()) if bool((norms > 0).all()) else 0.0


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """float64, from 0."""
    _, which, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    middle: torch.Tensor = (last - counts + last - 1).double() / 2
    return middle[which]


# ---- attention ---------------------------------------------------------------------------------------------------


def attention_deviation(mine: PromptCache, asked: Queries, full: PromptCache, asked_full: Queries) -> list[float]:
    """By layer: the L2 norm, over heads, rows of the question and keys, of the difference of two attention matrices,
    over that of the full one (CacheBlend, section 4.1)."""
    found = []
    for number, ((query, scaling), (right, scaling_right)) in enumerate(
        zip(asked.layers, asked_full.layers, strict=True)
    ):
        keys, keys_right = mine.buffers[number].view()[0][0], full.buffers[number].view()[0][0]
        exact = attention_weights(right, keys_right, asked_full.positions, scaling_right)
        wrong = attention_weights(query, keys, asked.positions, scaling) - exact
        found.append(float(wrong.norm() / exact.norm()))
    return found


def chosen_rows(subject: Subject, choice: str, ratio: float, worth: torch.Tensor) -> torch.Tensor:
    """Bool `[length]`: `ratio` of the reused rows, by highest deviation, at random, or the first of every chunk."""
    chosen = torch.zeros(subject.plan.length, dtype=torch.bool)
    count = share_of(ratio, len(subject.hits))
    if choice == "hkvd":
        chosen[subject.hits[worth.topk(count).indices]] = True
    elif choice == "random":
        chosen[random.Random(_SEED).sample(subject.hits.tolist(), count)] = True
    else:  # as many of each chunk as it has, until the budget is spent
        depth = torch.cat([torch.arange(len(one.ids)) for one in subject.plan.chunks if one.status == "hit"])
        chosen[subject.hits[depth.argsort(stable=True)[:count]]] = True
    return chosen


# ---- a report ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Right:
    """Full prefill's cache and the question's queries over it. Beside it one other cache is held at a time."""

    subject: Subject
    cache: PromptCache
    asked: Queries

    @classmethod
    def of(cls, subject: Subject) -> Right:
        cache = subject.full()
        return cls(subject, cache, subject.queries(cache))

    def compare(self, recomputed: torch.Tensor) -> tuple[Deviation, list[float]]:
        """The deviation of a cache with these rows recomputed (bool `[length]`), and that of its attention by layer."""
        mine = self.subject.recomputing(recomputed)
        return deviation(self.subject, mine, self.cache), self._attention(mine)

    def attention(self, recomputed: torch.Tensor) -> list[float]:
        """By layer, of a cache with these rows recomputed."""
        return self._attention(self.subject.recomputing(recomputed))

    def _attention(self, mine: PromptCache) -> list[float]:
        return attention_deviation(mine, self.subject.queries(mine), self.cache, self.asked)


def deviation_report(
    subject: Subject, ratios: Sequence[float] = RATIOS, choices: Sequence[str] = CHOICES
) -> dict[str, Any]:
    """Everything that `inspect deviation` tells of one prompt, as JSON values.

    Returns
    -------
    `tokens{prompt, reused}`, `layers[{layer, v_sse, k_sse, kv_sse, k_l1, v_relative, k_relative, quantiles, top_share,
    spearman_next}]`: means over rows of each metric, ‖ΔV‖ / ‖V‖ over all rows, quantiles of ‖ΔV‖ over rows, the share
    of the squared V deviation in the top rows, the rank correlation with the layer after it;
    `attention[{choice, ratio, rows, deviation, by_layer}]`; `token_deviation` by row: `Deviation.worth`.
    """
    right = Right.of(subject)
    none = torch.zeros(subject.plan.length, dtype=torch.bool)
    found, reused = right.compare(none)
    worth, rows = found.worth, []
    for choice in choices:
        for ratio in ratios:
            chosen = chosen_rows(subject, choice, ratio, worth)
            by_layer = right.attention(chosen) if ratio else reused
            mean = sum(by_layer) / len(by_layer)
            rows.append(
                {"choice": choice, "ratio": ratio, "rows": int(chosen.sum()), "deviation": mean, "by_layer": by_layer}
            )
    return {
        "tokens": {"prompt": subject.plan.length, "reused": len(subject.hits)},
        "layers": [_layer(found, number) for number in range(found.size.shape[1])],
        "attention": rows,
        "token_deviation": worth.tolist(),
    }


def _layer(found: Deviation, number: int) -> dict[str, Any]:
    sse = {name: rows[number] for name, rows in found.by_metric.items()}
    v, layers = sse["v_sse"], len(found.by_metric["v_sse"])
    k_size, v_size = found.size[:, number].tolist()
    after = spearman(v, found.by_metric["v_sse"][number + 1]) if number + 1 < layers and v.any() else None
    return {
        "layer": number,
        **{name: float(rows.mean()) for name, rows in sse.items()},
        "v_relative": (float(v.sum()) / v_size) ** 0.5 if v_size else 0.0,
        "k_relative": (float(sse["k_sse"].sum()) / k_size) ** 0.5 if k_size else 0.0,
        "quantiles": {str(q): float(v.sqrt().quantile(q)) for q in QUANTILES},
        "top_share": {str(share): top_share(v, share) for share in SHARES},
        "spearman_next": after,
    }
