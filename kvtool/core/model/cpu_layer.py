"""Decoder layer on a CPU: products of packed or plain weights, and machine code between them.

For a question's 32 rows, torch's work between the products costs a third of the products' time: some thirty calls a
layer, each of a few microseconds. This layer makes four.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvtool.core.kernels import COMPUTED
from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.kernels.layer_cpu import LayerKernels, Rounding, layer_kernels
from kvtool.core.kernels.linear.modules import PackedLinear
from kvtool.core.kernels.rope import CosSin
from kvtool.core.model.forward import Ends, Forward, Heads
from kvtool.core.model.prompt_cache import BufferLayer
from kvtool.core.model.spec import LayerSpec, ModelSpec, NormSpec, Projection, UnsupportedArchitecture
from kvtool.core.native.isa import isa_here
from kvtool.core.native.threads import use_pool

if TYPE_CHECKING:
    from kvtool.core.model.stack import DecoderStack


@dataclass(frozen=True, slots=True, eq=False)
class CpuLayer:
    """A layer by its spec; norms of other kinds, and an MLP of experts, are called as modules."""

    spec: LayerSpec
    kernels: LayerKernels
    params: AttentionParams

    def project(self, hidden: torch.Tensor, positions: torch.Tensor, exact: bool) -> Heads:
        spec, normed = self.spec, normed_by(self.kernels, self.spec.before[0], hidden)
        queries, keys, values = _products((spec.query, spec.key, spec.value), normed, exact)
        queries, keys = queries.contiguous(), keys.contiguous()
        if spec.head_norms is not None:
            first, second = spec.head_norms
            queries, keys = normed_by(self.kernels, first, queries), normed_by(self.kernels, second, keys)
        return Heads(queries, keys, values)

    def rotate(self, heads: Heads, angles: CosSin | None) -> Heads:
        shape = len(heads.queries), -1, self.spec.kind.shape.key_dim
        queries, keys, values = (side.view(shape) for side in heads)
        if angles is not None:
            cos, sin = (side[0].to(self.kernels.angles).contiguous() for side in (angles.cos, angles.sin))
            self.kernels.apply_rope(queries, keys, cos, sin)
        return Heads(*(side.transpose(0, 1)[None] for side in (queries, keys, values)))

    def write(self, heads: Heads, angles: CosSin | None, places: torch.Tensor, buffer: BufferLayer) -> torch.Tensor:
        queries, keys, values = self.rotate(heads, angles)
        buffer.scatter(places, keys, values)
        return queries

    def finish(self, attended: torch.Tensor, hidden: torch.Tensor, exact: bool) -> torch.Tensor:
        (_, between), (after, last) = self.spec.before, self.spec.after
        attended = normed_by(self.kernels, after, _product(self.spec.out.module, attended, exact))
        hidden, normed = self._added(hidden, attended, between)
        return self._added(hidden, normed_by(self.kernels, last, self._mlp(normed, exact)), None)[0]

    def _added(
        self, hidden: torch.Tensor, more: torch.Tensor, norm: NormSpec | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.spec.residual != 1:
            more = more * self.spec.residual
        if norm is not None and norm.is_rms:
            return self.kernels.norm(hidden, norm.weight, norm.epsilon, more=more)
        total = hidden + more
        return total, normed_by(self.kernels, norm, total)

    def _mlp(self, rows: torch.Tensor, exact: bool) -> torch.Tensor:
        mlp = self.spec.mlp
        if mlp is None:
            given = self.spec.module.mlp(rows[None])
            out: torch.Tensor = given[0] if isinstance(given, tuple) else given
            return out.view(rows.shape).contiguous()
        gate, up = (side.contiguous() for side in _products((mlp.gate, mlp.up), rows, exact))
        return _product(mlp.down.module, self.kernels.gate(gate, up), exact)


def normed_by(kernels: LayerKernels, norm: NormSpec | None, rows: torch.Tensor) -> torch.Tensor:
    if norm is None:
        return rows
    if not norm.is_rms:
        out: torch.Tensor = norm.module(rows)
        return out
    return kernels.norm(rows, norm.weight, norm.epsilon)[1]


def _products(parts: Sequence[Projection], rows: torch.Tensor, exact: bool) -> Sequence[torch.Tensor]:
    if parts[0].module is parts[-1].module:
        return torch.split(_product(parts[0].module, rows, exact), [part.rows for part in parts], -1)
    return [_product(part.module, rows, exact) for part in parts]


def _product(linear: Any, rows: torch.Tensor, exact: bool) -> torch.Tensor:
    ours = isinstance(linear, PackedLinear) and not exact
    out: torch.Tensor = linear.rows_product(rows) if ours else linear(rows)
    return out


def cpu_forward(stack: DecoderStack, spec: ModelSpec) -> Forward:
    isa = isa_here()
    if isa is None:
        raise UnsupportedArchitecture("there is no machine code for this CPU")
    if stack.dtype not in COMPUTED:
        raise UnsupportedArchitecture(f"{stack.dtype} on {stack.device}")
    norms = (spec.norm, *(norm for layer in spec.layers for norm in layer.norms))
    first = {norm.rounds_first for norm in norms if norm.is_rms} or {True}
    if len(first) > 1:
        raise UnsupportedArchitecture("norms that round at different places")
    rounding = Rounding(norm_first=first.pop(), rope_in_float32=spec.rope_in_float32)
    kernels = layer_kernels(isa, stack.dtype, spec.activation, rounding)
    layers = [CpuLayer(layer, kernels, layer.params) for layer in spec.layers]
    threads = partial(_pool, spec.layers[0], stack.dtype)
    ends = spec.ends(stack.base.embed_tokens, partial(normed_by, kernels, spec.norm))
    return Forward(stack.rotary, stack.pause, layers, Ends(*ends, threads))


def _pool(layer: LayerSpec, dtype: torch.dtype, rows: int, exact: bool) -> AbstractContextManager[object]:
    """Take a pool where all products are machine code of our own. Torch's threads wait spinning after its products: a
    pool's would only take turns with those."""
    return use_pool(torch.get_num_threads() if not exact and _in_team(layer, dtype, rows) else 1)


def _in_team(layer: LayerSpec, dtype: torch.dtype, rows: int) -> bool:
    products = [projection.module for projection in layer.projections]
    packed = layer.mlp is not None and all(isinstance(product, PackedLinear) for product in products)
    return packed and all(product.in_team(rows, dtype) for product in products)
