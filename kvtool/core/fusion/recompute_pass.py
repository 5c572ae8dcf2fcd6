"""What happens between the layers of the pass that recomputes rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kvtool.core.common.timeline import Timeline, add_span
from kvtool.core.fusion.loader import Loader
from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.shift import Shift
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.passes import OnLayer
from kvtool.core.model.prompt_cache import PromptCache

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder


class RecomputePass(OnLayer):
    """Waits for each layer's records, drops rows at the layers that a selector names (`blend`), and shifts reused rows.
    `rows`: of the current layer; `computed`: number of rows, by layer."""

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
        self.narrows = selector.narrowing(plan, decoder.stored_layers)
        self.rows = rows
        self.computed: list[int] = []
        self.select_s = self.shift_s = 0.0
        self._decoder, self._selector, self._cache, self._loader = decoder, selector, cache, loader
        self._cached, self._shift = cached, shift
        self._shifting(shift.follow, rows)
        self._timeline = timeline
        self._since = time.perf_counter()

    def before_write(self, layer: int, rows: int) -> None:
        self._note_span(f"compute to layer {layer}", rows)
        self._loader.wait(layer, self._decoder.pause)
        self.computed.append(rows)
        self._shifting(self._shift.before, layer)
        self._since = time.perf_counter()

    def written(self, layer: int) -> None:
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

    def choose(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, QueryRows]:
        """Keep all rows that are not cached, and those with the highest scores."""
        self._loader.wait(layer, self._decoder.pause)
        started = time.perf_counter()
        buffer = self._cache.buffers[layer]
        # Only the scores need the device, which is waited for once.
        order = torch.tensor(self.rows.order)
        reused = self._cached[order]
        among = reused.nonzero()[:, 0]
        again = among.to(keys.device, non_blocking=True)
        where = self.rows.places[again]
        new = keys[:, :, again], values[:, :, again]
        old = buffer.keys[:, :, where], buffer.values[:, :, where]
        worth = self._selector.worth(new, old)
        top = worth.topk(min(self.narrows[layer], len(among))).indices.cpu()
        keep = ~reused
        keep[among[top]] = True
        dropped = (~keep)[among].nonzero()[:, 0].to(keys.device, non_blocking=True)
        buffer.scatter(where[dropped], *(side[:, :, dropped] for side in new))
        chosen = keep.nonzero()[:, 0]
        self.rows = QueryRows.of(order[chosen], self._decoder.device, self.rows.position_ids)
        self.select_s += add_span(self._timeline, "select", started, layer=layer)
        refreshed = torch.zeros_like(self._cached)
        refreshed[order[~keep]] = True
        self._shifting(self._shift.follow, self.rows, refreshed)
        return chosen.to(keys.device, non_blocking=True), self.rows
