"""Measures of a prompt with reused KV: distance of its KV and attention from full prefill's, and attention by class.

CacheBlend's insights: few tokens deviate, and the same ones in neighbouring layers. EPIC's premise: chunks' starts are
heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from kvtool.core.codec.levels import level_of
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors.base import Selector, share_of
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.selectors.union import Union
from kvtool.core.fusion.source import KVSource
from kvtool.core.kernels.attention.eager import attention_weights
from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.forward import OnLayer, QueryRows
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.query.prompt import lay_out
from kvtool.core.query.reply import NO_KV
from kvtool.core.query.retrieve import find_chunks

if TYPE_CHECKING:
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.query.prompt import PromptLayout
    from kvtool.core.query.reply import Request
    from kvtool.core.session.session import Session

Watch = Callable[[int, torch.Tensor, torch.Tensor, AttentionParams], None]
"""Called with a layer's number, queries, keys and parameters of attention."""
_ROUNDING = 1e-6  # relative: what another order of a sum makes of the same numbers in float32
SHARES = (0.01, 0.02, 0.05, 0.10, 0.15, 0.25, 0.50)
RATIOS = (0.0, 0.05, 0.10, 0.15, 0.25, 0.50)
CLASSES = ("sink", "instruction", "chunk starts", "own chunk", "other chunks", "question")
START_TOKENS = 4  # of every chunk
MASS = 0.9
_STEP = 256  # keys; every other shape of a product costs oneDNN new code, which it keeps
_BLOCK_BYTES = 2**21  # of the weights of rows that exist at a time: they stay in the CPU's cache


@dataclass(frozen=True, slots=True)
class Chosen(Selector):
    name: ClassVar[str] = "chosen"
    rows_chosen: torch.Tensor

    def rows(self, plan: Plan, attention: torch.Tensor | None = None) -> torch.Tensor:
        return self.rows_chosen


@dataclass(frozen=True, slots=True)
class ReusedPrompt:
    """A prompt whose records are all there, some of them not what full prefill gives."""

    decoder: Decoder
    plan: Plan
    source: KVSource
    hits: torch.Tensor  # positions, ascending, of rows that are reused and not exact: int64 `[hits]`

    @classmethod
    def of(cls, decoder: Decoder, plan: Plan, source: KVSource) -> ReusedPrompt:
        """Check a prompt. Raises UsageError if nothing of it is reused, or rows of it are not stored."""
        if any(segment.source.stored_rows is not None for segment in plan.segments):
            raise UsageError(
                "some rows of this prompt are not stored, so that they cannot be compared", "name a level of all rows"
            )
        hits = plan.hit_rows().nonzero()[:, 0]
        if not len(hits):
            reasons = {segment.reason for segment in plan.segments}
            hint = "`kvtool ingest` computes its KV" if NO_KV in reasons else "take more chunks (--top-k, --documents)"
            raise UsageError("nothing of this prompt is reused from another place", hint)
        return cls(decoder, plan, source, hits)

    def full(self) -> PromptCache:
        return self.decoder.prefill(self.plan.ids)[1]

    def fused(self, selector: Selector) -> Fused:
        return fuse(self.decoder, self.plan, selector, self.source)

    def recomputing(self, rows: torch.Tensor) -> PromptCache:
        return self.fused(Chosen(rows)).cache

    def watch_question(self, cache: PromptCache, watch: Watch) -> None:
        question = self.plan.segments[-1]
        watch_rows(self.decoder, question.ids, question.start, cache, watch)

    def queries(self, cache: PromptCache) -> Queries:
        """Return the question's queries, whose keys and values are then in the cache."""
        layers: list[tuple[torch.Tensor, AttentionParams]] = []
        self.watch_question(cache, lambda layer, query, key, scoring: layers.append((query[0].clone(), scoring)))
        sources = [layer if kind.source is None else kind.source for layer, kind in enumerate(self.decoder.kinds)]
        rows = torch.arange(self.plan.segments[-1].start, self.plan.length)
        return Queries(QueryRows.of(rows, self.decoder.device), layers, sources)


@dataclass(frozen=True, slots=True)
class Queries:
    rows: QueryRows
    layers: list[tuple[torch.Tensor, AttentionParams]]
    sources: list[int]

    def attention(self, cache: PromptCache) -> Iterator[torch.Tensor]:
        for (query, scoring), source in zip(self.layers, self.sources, strict=True):
            keys = cache.buffers[source].view()[0][0]
            yield attention_weights(query, keys, self.rows.seen(scoring.window), scoring)


def watch_rows(decoder: Decoder, ids: Sequence[int], start: int, cache: PromptCache, watch: Watch) -> None:
    """Compute a prompt's rows from `start` into their places in the cache, and show each layer's queries and keys."""
    rows = QueryRows.of(torch.arange(start, start + len(ids)), decoder.device)
    decoder.fill_cache(ids, rows, cache, on_layer=_Watching(watch))


@dataclass(frozen=True, slots=True)
class _Watching(OnLayer):
    watch: Watch

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> bool:
        self.watch(layer, query, keys, params)
        return False


def lay_out_exactly(session: Session, request: Request, options: QueryOptions) -> tuple[PromptLayout, ReusedPrompt]:
    """Build a prompt whose chunks are read exactly, so that no codec's loss is counted as reuse's.

    If a level is asked for, they are read at that level. A chunk that is not stored is a hole, as it is to a question.
    Raises KvtoolError if a chunk is stored at lossy levels only.
    """
    find_chunks(session.finder, request, options)  # what cannot be found is reported before the model is loaded
    decoder, exactly = session.decoder, options.level == "auto"
    asked = lay_out(session, request, options, exactly=exactly, answered=False)
    for chunk in (segment.source for segment in asked.plan.chunks if exactly):
        if chunk.level is not None and not level_of(chunk.level).lossless:
            raise KvtoolError(
                f"chunk {chunk.chunk_id.hex()[:12]} is not stored exactly",
                f"name its level: --level {chunk.level}, or ingest its document into a new store",
            )
    return asked, ReusedPrompt.of(decoder, asked.plan, session.source)


# ---- deviation (CacheBlend) ----


@dataclass(frozen=True, slots=True)
class Deviation:
    """Squared deviations of the reused rows, float32 `[layers, hits]`."""

    keys: torch.Tensor
    values: torch.Tensor
    size: torch.Tensor  # sum of squares of full prefill's keys and of its values over these rows, float32 `[2, layers]`

    @property
    def worth(self) -> torch.Tensor:
        """Return the score of a token: its squared V deviation, each layer by its own mean. float32 `[hits]`."""
        return (self.values / self.values.mean(1, keepdim=True).clamp_min(1e-30)).mean(0)


def deviation(prompt: ReusedPrompt, reused: PromptCache, full: PromptCache) -> Deviation:
    wrong, sizes = [], []
    at = prompt.hits.to(full.buffers[0].keys.device)
    for layers in zip(reused.buffers, full.buffers, strict=True):
        stored, exact = (
            [side[0].index_select(1, at).float() for side in (layer.keys, layer.values)] for layer in layers
        )
        pairs = zip(stored, exact, strict=True)
        wrong.append(torch.stack([(side - right).square().sum((0, 2)) for side, right in pairs]).cpu())
        sizes.append(torch.stack([side.square().sum() for side in exact]).cpu())
    keys, values = torch.stack(wrong, 1)
    return Deviation(keys, values, torch.stack(sizes, 1))


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


def attention_deviation(cache: PromptCache, asked: Queries, full: PromptCache, asked_full: Queries) -> list[float]:
    """Measure by layer how far a question's attention over a cache is from that over the full one: the L2 norm of the
    difference over that of the full one, over heads, rows of the question and keys (CacheBlend, section 4.1)."""
    both = zip(asked.attention(cache), asked_full.attention(full), strict=True)
    return [float((wrong - exact).norm() / exact.norm()) for wrong, exact in both]


def most_deviating(prompt: ReusedPrompt, ratio: float, worth: torch.Tensor) -> torch.Tensor:
    """Choose `ratio` of the reused rows, those that deviate most: bool `[length]`."""
    chosen = torch.zeros(prompt.plan.length, dtype=torch.bool)
    chosen[prompt.hits[worth.topk(share_of(ratio, len(prompt.hits))).indices]] = True
    return chosen


def deviation_report(prompt: ReusedPrompt) -> dict[str, Any]:
    full = prompt.full()  # and one other cache at a time
    asked = prompt.queries(full)

    def attention(cache: PromptCache) -> list[float]:
        return attention_deviation(cache, prompt.queries(cache), full, asked)

    reused = prompt.recomputing(torch.zeros(prompt.plan.length, dtype=torch.bool))
    reuse, untouched, rows = deviation(prompt, reused, full), attention(reused), []
    del reused
    for ratio in RATIOS:
        chosen = most_deviating(prompt, ratio, reuse.worth)
        by_layer = attention(prompt.recomputing(chosen)) if ratio else untouched
        row: dict[str, Any] = {"ratio": ratio, "tokens_recomputed": int(chosen.sum())}
        rows.append(row | {"deviation": sum(by_layer) / len(by_layer), "by_layer": by_layer})
    return {
        "tokens": {"prompt": prompt.plan.length, "reused": len(prompt.hits)},
        "layers": [_layer(reuse, number) for number in range(reuse.size.shape[1])],
        "attention": rows,
        "token_deviation": reuse.worth.tolist(),
    }


def _layer(whole: Deviation, number: int) -> dict[str, Any]:
    sides = (whole.values[number], whole.keys[number])
    sizes = whole.size[:, number].tolist()[::-1]
    v, k = ((float(side.sum()) / size if size else 0.0) ** 0.5 for side, size in zip(sides, sizes, strict=True))
    ranked = number + 1 < len(whole.values) and v > _ROUNDING
    return {
        "layer": number,
        **{"v_sse": float(sides[0].mean()), "k_sse": float(sides[1].mean()), "v_relative": v, "k_relative": k},
        "top_share": {str(share): top_share(sides[0], share) for share in SHARES},
        "spearman_next": spearman(*whole.values[number : number + 2]) if ranked else None,
    }


# ---- attention by class of key (EPIC) ----


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


def sparsity_report(prompt: ReusedPrompt) -> dict[str, Any]:
    plan, decoder = prompt.plan, prompt.decoder
    classes, cache = Classes.of(plan), decoder.new_cache(plan.length)
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
    }
