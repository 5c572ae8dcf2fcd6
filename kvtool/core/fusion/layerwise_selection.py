"""Layer-wise selection of recomputed rows by their deviation, or by the question's attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from kvtool.core.codec.base import LayerKV
from kvtool.core.common.timeline import Timeline, add_span
from kvtool.core.fusion.cost import MOST_ASKING
from kvtool.core.fusion.loader import Loader
from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors.base import Pooling, Selector
from kvtool.core.fusion.shift import Shift
from kvtool.core.kernels.attention.eager import mean_weights
from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.modules import CACHES, ForwardEnded, LayerProbe, of_rows, tables_of_rows
from kvtool.core.model.preemption import pass_hooks
from kvtool.core.model.prompt_cache import PromptCache

if TYPE_CHECKING:
    from kvtool.core.model.captured import StaticRows
    from kvtool.core.model.decoder import Decoder

_BLOCK = 64  # rows whose weights exist at a time: memory grows with the prompt's length, not with its square

# Of tokens, their rows, how many of these are asked, layers, pooling, and whether the pass ends with the layers.
HeldAttention = Callable[[list[int], QueryRows, int, range, Pooling, bool], torch.Tensor | None]


class LayerwiseSelection:
    """The rows of one pass: waits for each layer's records, and drops rows before the layers that a selector names. A
    pre-hook on the decoder layers exchanges the rows, so the model's forward stays untouched. To rank rows it runs the
    layer up to its cache write. `rows`: of the current layer; `computed`: number of rows, by layer."""

    def __init__(
        self,
        decoder: Decoder,
        plan: Plan,
        selector: Selector,
        cache: PromptCache,
        loader: Loader,
        rows: QueryRows,
        cached: torch.Tensor,
        shift: Shift,
        timeline: Timeline | None = None,
    ) -> None:
        self.targets = selector.narrowing(plan, decoder.stored_layers)
        self.rows = rows
        self.computed: list[int] = []
        self.select_s = self.shift_s = 0.0
        self._decoder, self._selector, self._cache, self._loader = decoder, selector, cache, loader
        self._cached, self._shift = cached, shift
        self._shifting(shift.follow, rows)
        self._timeline = timeline
        self._since = time.perf_counter()
        self._kept: torch.Tensor | None = None  # indices into the first layer's rows; None: all

    def on_update(self, layer: int, rows: int) -> None:
        self._note_span(f"compute to layer {layer}", rows)
        self._loader.wait(layer)
        self.computed.append(rows)
        self._shifting(self._shift.before, layer)
        self._since = time.perf_counter()

    def on_updated(self, layer: int) -> None:
        self._shifting(self._shift.after, layer)

    def _shifting(self, step: Callable[..., None], *given: Any) -> None:
        started = time.perf_counter()
        step(*given)
        self.shift_s += time.perf_counter() - started

    def skip(self, layers: int) -> None:
        self.computed = [len(self.rows)] * layers

    def end(self) -> None:
        self._note_span("compute to logits", self.computed[-1])

    def _note_span(self, name: str, rows: int) -> None:
        add_span(self._timeline, name, self._since, rows=rows)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        first = min(self.targets, default=len(self._decoder.layers))
        layers = list(enumerate(self._decoder.layers))[first:]
        with pass_hooks((module, self._hook(layer)) for layer, module in layers):
            yield

    def _hook(self, layer: int) -> Any:
        def narrow(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            hidden, more = args[0], args[1:] if self._kept is None else of_rows(args[1:], self._kept)
            kwargs = self._with_rows(kwargs)
            if layer in self.targets:
                keep = self._choose(module, layer, hidden, kwargs)
                hidden, more = hidden[:, keep], of_rows(more, keep)
                kwargs = self._with_rows(kwargs, keep)
            return (hidden, *more), kwargs

        return narrow

    def _choose(self, module: Any, layer: int, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """Choose the current rows to keep: all that are not cached, and the highest scores; ascending indices."""
        self._loader.wait(layer)
        started = time.perf_counter()
        keys, values = _kv_of(module, hidden, kwargs)
        buffer = self._cache.buffers[layer]
        # Only the scores need the device, which is waited for once.
        order = torch.tensor(self.rows.order)
        reused = self._cached[order]
        among = reused.nonzero()[:, 0]
        again = among.to(hidden.device, non_blocking=True)
        where = self.rows.places[again]
        new = keys[:, :, again], values[:, :, again]
        old = buffer.keys[:, :, where], buffer.values[:, :, where]
        worth = self._selector.worth(new, old)
        top = worth.topk(min(self.targets[layer], len(among))).indices.cpu()
        keep = ~reused
        keep[among[top]] = True
        dropped = (~keep)[among].nonzero()[:, 0].to(hidden.device, non_blocking=True)
        buffer.scatter(where[dropped], *(side[:, :, dropped] for side in new))
        chosen = keep.nonzero()[:, 0]
        indices = chosen.to(hidden.device, non_blocking=True)
        self._kept = indices if self._kept is None else self._kept[indices]
        self.rows = QueryRows.of(order[chosen], self._decoder.device, self.rows.position_ids)
        self._cache.rows = self.rows
        self.select_s += add_span(self._timeline, "select", started, layer=layer)
        refreshed = torch.zeros_like(self._cached)
        refreshed[order[~keep]] = True
        self._shifting(self._shift.follow, self.rows, refreshed)
        return indices

    def _with_rows(self, kwargs: dict[str, Any], keep: torch.Tensor | None = None) -> dict[str, Any]:
        """Cut a layer's arguments to the current rows: to `keep` of their rows, else from those of the first layer."""
        keep = self._kept if keep is None else keep
        if keep is None:
            return kwargs
        changed = {"position_embeddings": tables_of_rows(kwargs["position_embeddings"], keep), "rows": self.rows}
        if kwargs.get("position_ids") is not None:
            changed["position_ids"] = kwargs["position_ids"][..., keep]
        return kwargs | changed


def _kv_of(module: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> LayerKV:
    """Run a layer up to its cache write; return its rotated keys and values `[1, kv_heads, rows, head_dim]`."""
    probe = LayerProbe(until="cache")
    probe.run(module.forward, hidden, **(kwargs | {name: probe.cache for name in CACHES if name in kwargs}))
    assert probe.kv is not None, "the layer did not write to its cache"
    return probe.kv


class QuestionWatch:
    """Sum of the attention of a pass's last `count` rows. `ends`: the pass ends with the last of `layers`. `counted`:
    float32 `[count]`, 1 for those of them that count, 0 for others before them; None: all count."""

    def __init__(
        self,
        rows: QueryRows | StaticRows,
        count: int,
        layers: range,
        length: int,
        pooling: Pooling,
        ends: bool,
        counted: torch.Tensor | None = None,
    ) -> None:
        self._rows, self._count, self._counted = rows, count, counted
        self._layers, self._pooling, self._ends = layers, pooling, ends
        self._total = torch.zeros(length, device=rows.places.device, dtype=torch.float32)

    @property
    def mean(self) -> torch.Tensor:
        return self._total / len(self._layers)

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, scoring: AttentionParams) -> None:
        if layer not in self._layers:
            return
        count = 1 if self._pooling == "last" else self._count
        seen, last = self._rows.seen(scoring.window)[slice(len(self._rows) - count, None)], self._total
        squares = torch.zeros_like(self._total)
        for first in range(0, count, _BLOCK):
            some = slice(first, min(first + _BLOCK, count))
            part = query[0, :, query.shape[2] - count :][:, some]
            weights = mean_weights(part, key[0, :, : len(self._total)], seen[some], scoring)
            shares = weights if self._counted is None else weights * self._counted[some, None]
            squares += shares.square().sum(0)
            last = weights[-1]
        pooled = squares.sqrt_()
        self._total += pooled.mul_(last).sqrt_() if self._pooling == "both" else pooled
        if self._ends and layer == self._layers[-1]:
            raise ForwardEnded


def question_attention(
    decoder: Decoder,
    plan: Plan,
    cache: PromptCache,
    loader: Loader,
    layers: range,
    pooling: Pooling = "rows",
    held: HeldAttention | None = None,
) -> torch.Tensor:
    """Measure the question's attention to the whole prompt, over reused rows at their true positions: float32
    `[plan.length]`, the mean over `layers`. Of a question longer than `MOST_ASKING` tokens only the end is computed;
    places after it are 0. `pooling` of rows: L2 norm (`rows`, InfoFlow KV), the `last` row, which predicts the answer's
    first token, or the geometric mean of `both`. `held`: computes the same of a prompt that has to load nothing."""
    length, plan = plan.length, plan.with_question_end(MOST_ASKING)
    rows = QueryRows.of(plan.mask("miss", "fresh").nonzero()[:, 0], decoder.device, plan.position_ids)
    ends = not bool(plan.mask("miss").any())
    count, ids = len(plan.segments[-1].ids), plan.ids
    tokens = [ids[place] for place in rows.order]
    mean = None if held is None else held(tokens, rows, count, layers, pooling, ends)
    if mean is None:
        watch = QuestionWatch(rows, count, layers, plan.length, pooling, ends)
        cache.before_update = lambda layer, count: loader.wait(layer)
        with suppress(ForwardEnded):
            at = plan.positions[rows.order].to(decoder.device) if plan.dropped else None
            decoder.fill_cache(tokens, replace(rows, watch=watch), cache, at)
        cache.before_update = None
        mean = watch.mean
    return pad(mean.cpu()[: plan.length], (0, length - plan.length))
