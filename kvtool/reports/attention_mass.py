"""Attention sparsity: how few keys get most of the attention, and where (EPIC's premise: the heavy positions stay)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors.base import share_of
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.selectors.union import Union
from kvtool.core.kernels.attention.eager import attention_weights
from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.reports.reused_prompt import ReusedPrompt, watch_rows

CLASSES = ("sink", "instruction", "chunk starts", "own chunk", "other chunks", "question")
START_TOKENS = 4  # of every chunk
MASS = 0.9
HEAVY = 0.05  # share of the context that counts as heavy
_STEP = 256  # keys; every other shape of a product costs oneDNN new code, which it keeps
_BLOCK_BYTES = 2**21  # of the weights of rows that exist at a time: they stay in the CPU's cache


@dataclass(frozen=True, slots=True)
class Classes:
    fixed: torch.Tensor  # int64 `[length]`, an index into CLASSES; a chunk's keys after its start are `own chunk`
    chunk: torch.Tensor  # int64 `[length]`, the chunk's number, -1 outside of chunks

    @classmethod
    def of(cls, plan: Plan) -> Classes:
        fixed = torch.full((plan.length,), CLASSES.index("question"))
        chunk = torch.full((plan.length,), -1)
        fixed[: plan.segments[0].stop] = CLASSES.index("instruction")
        for number, segment in enumerate(plan.chunks):
            fixed[segment.start : segment.stop] = CLASSES.index("own chunk")
            fixed[segment.start : min(segment.start + START_TOKENS, segment.stop)] = CLASSES.index("chunk starts")
            chunk[segment.start : segment.stop] = number
        fixed[0] = CLASSES.index("sink")
        return cls(fixed, chunk)

    def mass(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        fixed = self.fixed[: weights.shape[2]]
        one_hot = torch.nn.functional.one_hot(fixed, len(CLASSES)).to(weights.dtype)
        mass = (weights @ one_hot).sum(1).double()
        own, other = CLASSES.index("own chunk"), CLASSES.index("other chunks")
        inside = fixed == own
        same = (self.chunk[rows][:, None] == self.chunk[: len(fixed)]) & inside
        kept = (weights * same).sum((1, 2)).double()
        mass[:, other] += mass[:, own] - kept
        mass[:, own] = kept
        return mass


def keys_needed(weights: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Compute the share of visible keys that holds `MASS` of a row's attention: float64 `[heads, rows]`."""
    rising = torch.from_numpy(np.sort(weights.numpy(), axis=-1))  # twenty times as fast as torch's sort
    falling = rising.flip(-1).cumsum(-1)
    enough = MASS * falling[..., -1:] - 1e-6
    return ((falling < enough).sum(-1) + 1).clamp_max(visible).double() / visible


class Tally:
    def __init__(self, classes: Classes, rows: torch.Tensor) -> None:
        self._classes, self._rows = classes, rows
        self.mass: list[torch.Tensor] = []  # of each layer: `[heads, classes]`, the mean over rows
        self.needed: list[torch.Tensor] = []  # of each layer: `[heads]`, the mean over rows

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, scoring: AttentionParams) -> None:
        query = query[0, :, query.shape[2] - len(self._rows) :]
        mass = torch.zeros(query.shape[0], len(CLASSES), dtype=torch.float64)
        needed = torch.zeros(query.shape[0], dtype=torch.float64)
        step = max(1, _BLOCK_BYTES // (4 * query.shape[0] * key.shape[2]))
        for first in range(0, len(self._rows), step):
            rows = self._rows[first : first + step]
            stop = min(-(-(int(rows[-1]) + 1) // _STEP) * _STEP, key.shape[2])
            seen = QueryRows.of(rows, key.device).seen(scoring.window)
            weights = attention_weights(query[:, first : first + step], key[0, :, :stop], seen, scoring)
            weights = weights.cpu()
            mass += self._classes.mass(weights, rows)
            needed += keys_needed(weights, rows + 1).sum(1)
        self.mass.append(mass / len(self._rows))
        self.needed.append(needed / len(self._rows))

    def to_json(self) -> dict[str, Any]:
        mass, needed = torch.stack(self.mass), torch.stack(self.needed)
        layers = [
            {"layer": layer, **_facts(mass[layer].mean(0), needed[layer].mean())}
            | {"heads": [_facts(*head) for head in zip(mass[layer], needed[layer], strict=True)]}
            for layer in range(len(mass))
        ]
        return _facts(mass.mean((0, 1)), needed.mean()) | {"layers": layers}


def _facts(mass: torch.Tensor, needed: torch.Tensor) -> dict[str, Any]:
    return {"mass": _named(mass), "keys_for_mass": float(needed)}


def _named(mass: torch.Tensor) -> dict[str, float]:
    return dict(zip(CLASSES, mass.tolist(), strict=True))


# ---- static sparsity ---------------------------------------------------------------------------------------------


def heavy_positions(
    prompt: ReusedPrompt, cache: PromptCache, ids: Sequence[int], context: torch.Tensor
) -> torch.Tensor:
    """Find the share `HEAVY` of the context with most of a question's attention, as bool `[layers, length]`. The
    question `ids` takes the place of the prompt's own in the cache, which has to have room for it."""
    start, layers = prompt.plan.segments[-1].start, list[torch.Tensor]()
    rows = QueryRows.of(torch.arange(start, start + len(ids)), prompt.decoder.device)

    def note(layer: int, query: torch.Tensor, key: torch.Tensor, scoring: AttentionParams) -> None:
        worth = attention_weights(query[0], key[0], rows.seen(scoring.window), scoring).mean((0, 1)).cpu()
        heavy = torch.zeros(prompt.plan.length, dtype=torch.bool)
        heavy[context[worth[context].topk(share_of(HEAVY, len(context))).indices]] = True
        layers.append(heavy)

    cache.set_length(start + len(ids))
    watch_rows(prompt.decoder, ids, start, cache, note)
    return torch.stack(layers)


def overlap(chosen: torch.Tensor, other: torch.Tensor) -> list[float]:
    """Return by layer the share of chosen positions (bool `[layers, length]`) that another choice has, too."""
    shares: list[float] = ((chosen & other).sum(1).double() / chosen.sum(1).clamp_min(1)).tolist()
    return shares


# ---- a report ----------------------------------------------------------------------------------------------------


def sparsity_report(prompt: ReusedPrompt, others: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
    plan, decoder = prompt.plan, prompt.decoder
    classes, cache = Classes.of(plan), decoder.new_cache(plan.length + max(map(len, others), default=0))
    cache.set_length(plan.length)
    first, last = plan.chunks[0].start, plan.segments[-1].start
    chunks, question = Tally(classes, torch.arange(first, last)), torch.arange(last, plan.length)

    def rows_of_chunks(layer: int, query: torch.Tensor, key: torch.Tensor, scoring: AttentionParams) -> None:
        chunks(layer, query[:, :, :last], key, scoring)

    watch_rows(decoder, plan.ids, 0, cache, rows_of_chunks)
    tallies = {}
    for name, selector in {"full": None, "reuse": Reuse(), "epic": Epic(), "union": Union()}.items():
        tallies[name] = Tally(classes, question)
        prompt.watch_question(cache if selector is None else prompt.fused(selector).cache, tallies[name])
    return {
        "classes": list(CLASSES),
        "start_tokens": START_TOKENS,
        "tokens": {"chunks": last - first, "question": len(question), "prompt": plan.length},
        "class_share": _named(classes.fixed.bincount(minlength=len(CLASSES)).double() / plan.length),
        "mass_threshold": MASS,
        "chunk_attention": {"full": chunks.to_json()},
        "question_attention": {name: tally.to_json() for name, tally in tallies.items()},
        "stability": _stability(prompt, cache, others) if others else None,
    }


def _stability(prompt: ReusedPrompt, cache: PromptCache, others: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Compute how many of the heaviest positions two questions share, as means over pairs: `by_layer`, `mean`; `chance`
    is what two random choices would share, `starts`: the part of all heavy positions among first tokens of chunks."""
    plan = prompt.plan
    context = torch.cat([torch.arange(segment.start, segment.stop) for segment in plan.chunks])
    heavy = [heavy_positions(prompt, cache, ids, context) for ids in (plan.segments[-1].ids, *others)]
    pairs = [overlap(heavy[a], heavy[b]) for a in range(len(heavy)) for b in range(a)]
    by_layer = [sum(values) / len(pairs) for values in zip(*pairs, strict=True)]
    starts = Classes.of(plan).fixed == CLASSES.index("chunk starts")
    total = sum(int(positions.sum()) for positions in heavy)
    return {
        "questions": len(heavy),
        "share": HEAVY,
        "by_layer": by_layer,
        "mean_share": sum(by_layer) / len(by_layer),
        "chance_share": share_of(HEAVY, len(context)) / len(context),
        "start_share": sum(int((positions & starts).sum()) for positions in heavy) / total,
        "start_chance": float(starts.sum()) / len(context),
    }
