"""A pass through a model: the rows that it computes, and what is done between its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch

from kvtool.core.kernels.attention.params import KV, AttentionParams
from kvtool.core.model.attention import AttentionRows, PlacedRows, QueryRows
from kvtool.core.model.prompt_cache import PromptCache


class OnLayer:
    """Called at each layer of a pass in turn; as it is, it does nothing.

    `narrows`: the layers at which `choose` is called, and how many reused rows they keep. Keys and values are `[1,
    kv_heads, rows, head_dim]`, keys rotated.
    """

    narrows: Mapping[int, int] = {}

    def choose(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, QueryRows]:
        """Choose the rows that this layer and later ones compute. Returns their indices among the rows so far, int64 on
        the device, ascending."""
        raise NotImplementedError

    def before_write(self, layer: int, rows: int) -> None:
        """Called before so many rows of a layer are written to the cache."""

    def written(self, layer: int) -> None:
        """Called as soon as they are written."""

    def collect(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Called, in a pass without a cache, with what a layer would write to one; returns True to end the pass."""
        return False

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> bool:
        """Called with what attention is about to take, of the cache too; returns True to end the pass."""
        return False


NOTHING = OnLayer()


@dataclass(slots=True, eq=False)
class Pass:
    """`ids`, `positions`: int64 `[rows]` on the device. Without a cache, rows attend to those of the pass only.
    `exact`: by products whose sums do not depend on the number of rows, so that stored numbers do not depend on their
    batch."""

    ids: torch.Tensor
    rows: AttentionRows
    positions: torch.Tensor
    cache: PromptCache | None
    on_layer: OnLayer = NOTHING
    exact: bool = False

    @property
    def placed(self) -> PlacedRows:
        """The rows of a pass with a cache."""
        return cast("PlacedRows", self.rows)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KV:
        """Write a layer's rows to the cache; return the keys and values to attend to."""
        self.on_layer.before_write(layer, keys.shape[2])
        if self.cache is None:
            return keys, values
        buffer = self.cache.buffers[layer]
        buffer.scatter(self.placed.places, keys, values)
        self.on_layer.written(layer)
        return buffer.view()
