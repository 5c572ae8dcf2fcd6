"""Decoder layer on a GPU in few operations, since each costs its launch.

A model's own forward takes 60 to 70 operations a layer. Launching one takes 5 to 20 µs, more than the work of a
question's 32 rows. Here a layer is its products and a handful of others: a root mean square norm is one operation.
Norms of heads, rotation and the writing into the prompt cache are one together (`heads_triton`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.kernels.placing_triton import HeadNorm, place_heads
from kvtool.core.kernels.rope import CosSin, rotate_halves_torch
from kvtool.core.model.forward import Ends, Forward, Heads, Map
from kvtool.core.model.prompt_cache import BufferLayer
from kvtool.core.model.spec import LayerSpec, ModelSpec, NormSpec, Projection, UnsupportedArchitecture
from kvtool.core.native.jit import has_triton

if TYPE_CHECKING:
    from kvtool.core.model.stack import DecoderStack


@dataclass(frozen=True, slots=True)
class CudaLayer:
    """A layer as functions of tensors; norms of other kinds, and an MLP of experts, are called as modules."""

    products: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]  # of normed rows, to queries, keys and values
    out: Map
    mlp: Map
    before: tuple[Map, Map]  # norms of attention and MLP; of a place without a norm the identity
    after: tuple[Map, Map]
    flat_norms: tuple[Map, Map] | None  # of all heads' queries and keys together (OLMo 2)
    head_norms: tuple[HeadNorm, HeadNorm] | None  # of each head's (Qwen3)
    head_dim: int
    params: AttentionParams
    residual: float  # what the outputs of attention and MLP are multiplied by
    by_kernel: bool

    @classmethod
    def of(cls, spec: LayerSpec, by_kernel: bool) -> CudaLayer:
        flat, by_head = _head_norms(spec)
        return cls(
            products=_products((spec.query, spec.key, spec.value)),
            out=_linear(spec.out.module),
            mlp=_mlp(spec),
            before=(norm_of(spec.before[0]), norm_of(spec.before[1])),
            after=(norm_of(spec.after[0]), norm_of(spec.after[1])),
            flat_norms=flat,
            head_norms=by_head,
            head_dim=spec.kind.shape.key_dim,
            params=spec.params,
            residual=spec.residual,
            by_kernel=by_kernel,
        )

    def project(self, hidden: torch.Tensor, positions: torch.Tensor, exact: bool) -> Heads:
        queries, keys, values = self.products(self.before[0](hidden))
        if self.flat_norms is not None:
            queries, keys = self.flat_norms[0](queries), self.flat_norms[1](keys)
        return Heads(queries, keys, values)

    def rotate(self, heads: Heads, angles: CosSin | None) -> Heads:
        """Rotation is in float32, rounded once, as of stored keys."""
        queries, keys, values = (side.view(1, len(side), -1, self.head_dim).transpose(1, 2) for side in heads)
        if self.head_norms is not None:
            first, second = self.head_norms
            queries, keys = first.normed(queries), second.normed(keys)
        if angles is not None:
            queries, keys = (rotate_halves_torch(side, angles) for side in (queries, keys))
        return Heads(queries, keys, values)

    def write(self, heads: Heads, angles: CosSin | None, places: torch.Tensor, buffer: BufferLayer) -> torch.Tensor:
        if self.by_kernel:
            return place_heads(*heads, self.head_norms, angles, places, buffer.keys, buffer.values)
        queries, keys, values = self.rotate(heads, angles)
        buffer.scatter(places, keys, values)
        return queries

    def finish(self, attended: torch.Tensor, hidden: torch.Tensor, exact: bool) -> torch.Tensor:
        hidden = torch.add(hidden, self.after[0](self.out(attended)), alpha=self.residual)
        output = self.after[1](self.mlp(self.before[1](hidden)))
        return torch.add(hidden, output, alpha=self.residual)


def norm_of(norm: NormSpec | None) -> Map:
    if norm is None:
        return lambda rows: rows
    if not norm.is_rms or norm.adds_one:
        by_module: Map = norm.module
        return by_module
    weight, epsilon = norm.module.weight.detach(), norm.epsilon
    return lambda rows: F.rms_norm(rows, weight.shape, weight, epsilon)


def _head_norms(spec: LayerSpec) -> tuple[tuple[Map, Map] | None, tuple[HeadNorm, HeadNorm] | None]:
    if spec.head_norms is None:
        return None, None
    query, key = spec.head_norms
    if not spec.normed_by_head:
        return (norm_of(query), norm_of(key)), None
    first, second = (
        HeadNorm(norm.weight if norm.adds_one else norm.module.weight.detach(), norm.epsilon) for norm in (query, key)
    )
    return None, (first, second)


def _products(parts: Sequence[Projection]) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    if parts[0].module is parts[-1].module:
        whole, sizes = _linear(parts[0].module), [part.rows for part in parts]
        return lambda rows: whole(rows).split(sizes, -1)
    each = [_linear(part.module) for part in parts]
    return lambda rows: tuple(product(rows) for product in each)


def _linear(module: Any) -> Map:
    if type(module) is not torch.nn.Linear:
        raise UnsupportedArchitecture(f"{type(module).__name__} is no plain linear layer")
    across = module.weight.detach().t()  # transposed once: at each call it would cost a fifth of what a product does
    if module.bias is None:
        return lambda rows: torch.mm(rows, across)
    bias = module.bias.detach()
    return lambda rows: torch.addmm(bias, rows, across)


def _mlp(spec: LayerSpec) -> Map:
    mlp = spec.mlp
    if mlp is None:
        return partial(_by_module, spec.module.mlp)
    activation, both, down = mlp.function, _products((mlp.gate, mlp.up)), _linear(mlp.down.module)

    def gated(rows: torch.Tensor) -> torch.Tensor:
        gate, up = both(rows)
        return down(activation(gate).mul_(up))

    return gated


def _by_module(module: Any, rows: torch.Tensor) -> torch.Tensor:
    given = module(rows[None])
    out: torch.Tensor = given[0] if isinstance(given, tuple) else given
    return out.view(rows.shape)


def cuda_forward(stack: DecoderStack, spec: ModelSpec) -> Forward:
    by_kernel = stack.device.startswith("cuda") and has_triton()
    layers = [CudaLayer.of(layer, by_kernel) for layer in spec.layers]
    ends = Ends(*spec.ends(stack.base.embed_tokens, norm_of(spec.norm)))
    return Forward(stack.rotary, stack.pause, layers, ends)
