"""From a layer's products to its heads: norms of heads, rotation, and the writing of keys and values into the cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kvtool.core.kernels.heads_triton import HeadNorm
from kvtool.core.kernels.machine import has_triton
from kvtool.core.kernels.rope import CosSin, RopeTables
from kvtool.core.model.spec import ModelSpec, Projection

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.model.prompt_cache import BufferLayer

HeadNorms = tuple[HeadNorm, HeadNorm]


class Heads:
    """Places the heads of a model's layers: by one kernel where there is Triton, else by a dozen operations.

    Rotation is computed in float32 and rounded once, as that of stored keys is (`Rotary`).

    Parameters
    ----------
    spec : of a model that rotates its heads in halves.
    norms : of queries' and keys' heads, by layer; None: there are none.
    """

    def __init__(self, decoder: Decoder, spec: ModelSpec[Projection], norms: Sequence[HeadNorms | None]) -> None:
        self._norms = norms
        self._head_dim = spec.head_dim
        self._name, self._rotates = decoder.rotary.names[0], [layer.rotary > 0 for layer in spec.layers]
        self._device = decoder.device

    @cached_property
    def by_kernel(self) -> bool:
        """Whether there is Triton."""
        return self._device.startswith("cuda") and has_triton()

    def place(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: RopeTables,
        at: torch.Tensor,
        buffer: BufferLayer,
    ) -> torch.Tensor:
        """Write keys and values to a layer's buffers.

        Parameters
        ----------
        queries, keys, values : `[rows, heads · head_dim]`, rows of adjacent numbers.
        table : of the rows' positions; `at`: where they stand in the buffers, int64 `[rows]`.

        Returns
        -------
        The queries, `[1, heads, rows, head_dim]`.
        """
        rotated = table.by_name[self._name] if self._rotates[layer] else None
        if self.by_kernel:
            from kvtool.core.kernels.heads_triton import place

            return place(queries, keys, values, self._norms[layer], rotated, at, buffer.keys, buffer.values)
        query, key, value = (
            side.view(1, len(at), -1, self._head_dim).transpose(1, 2) for side in (queries, keys, values)
        )
        query, key = self._turned(layer, query, key, rotated)
        buffer.scatter(at, key, value)
        return query

    def _turned(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, table: CosSin | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norms = self._norms[layer]
        if norms is not None:
            query, key = (
                F.rms_norm(side, norm.weight.shape, norm.weight, norm.epsilon)
                for side, norm in zip((query, key), norms, strict=True)
            )
        return (query, key) if table is None else (in_halves(query, table), in_halves(key, table))


def in_halves(heads: torch.Tensor, table: CosSin) -> torch.Tensor:
    """Rotate `[1, heads, rows, head_dim]` in float32: number i and its partner half a rotation further on."""
    width = table.cos.shape[-1]
    wide = heads[..., :width].float()
    low, high = wide.chunk(2, -1)
    turned = wide * table.cos[:, None] + torch.cat([-high, low], -1) * table.sin[:, None]
    return torch.cat([turned.to(heads.dtype), heads[..., width:]], -1)
