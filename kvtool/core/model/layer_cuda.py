"""Fused forward pass on a GPU: a decoder layer in few operations, since each operation costs its launch.

A model's own forward takes 60 to 70 operations a layer. Launching one takes 5 to 20 µs, more than the work of a
question's 32 rows. Here a layer is its products and a handful of others: a root mean square norm is one operation.
Norms of heads, rotation and the writing into the prompt cache are one together (`heads_triton`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.kernels.heads_triton import HeadNorm, place
from kvtool.core.kernels.rope import RopeTables, rotate_halves_torch
from kvtool.core.kernels.triton_jit import has_triton
from kvtool.core.model.attention import PlacedRows, QueryRows
from kvtool.core.model.prompt_cache import BufferLayer, PromptCache
from kvtool.core.model.spec import (
    TOLERANCE,
    LayerSpec,
    ModelSpec,
    NormSpec,
    Projection,
    UnsupportedArchitecture,
    check_trial,
)
from kvtool.core.model.stack import DecoderStack

_TRIED = 8  # tokens
Map = Callable[[torch.Tensor], torch.Tensor]
HeadNorms = tuple[HeadNorm, HeadNorm]
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values, `[rows, heads · head_dim]` each, before norms of heads and rotation."""
Prefill = Callable[[Sequence[int]], tuple[torch.Tensor, PromptCache]]


class FusedForward:
    def __init__(self, stack: DecoderStack, spec: ModelSpec) -> None:
        self._stack, self._spec = stack, spec
        spec.check_halves()
        if not stack.rotary.is_single:
            raise UnsupportedArchitecture("layers rotate by RoPEs of their own")
        self._layers = [FusedCudaLayer.of(layer) for layer in spec.layers]
        self._norm = _norm(spec.norm)
        self._by_kernel = stack.device.startswith("cuda") and has_triton()

    @classmethod
    def tried(cls, stack: DecoderStack, spec: ModelSpec, prefill: Prefill) -> FusedForward:
        """Make one, and compare a short prefill with that by the model's own forward."""
        if stack.dtype not in TOLERANCE:
            raise UnsupportedArchitecture(f"{stack.dtype} on {stack.device}")
        try:
            made = cls(stack, spec)
            made._try(prefill)
        except (AttributeError, TypeError, ValueError) as error:  # a module that is not what it seems
            raise UnsupportedArchitecture(str(error)) from error
        return made

    def _try(self, prefill: Prefill) -> None:
        stack = self._stack
        ids = [number * (int(stack.config.vocab_size) // _TRIED) for number in range(_TRIED)]
        exact, _ = prefill(ids)
        cache = stack.new_cache(_TRIED)
        cache.set_length(_TRIED)
        rows = QueryRows.of(torch.arange(_TRIED), stack.device)
        found = self.compute(torch.tensor(ids).to(stack.device), rows, cache)[-1]
        check_trial(found, exact, stack.dtype, len(stack.layers))

    @torch.inference_mode()
    def compute(
        self,
        ids: torch.Tensor,
        rows: PlacedRows,
        cache: PromptCache,
        keep: int = 1,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden = self.hidden(ids, rows, cache, keep, position_ids)
        logits: torch.Tensor = self._stack.model.get_output_embeddings()(self._norm(hidden))
        return logits.float() if self._spec.logits == 1 else logits.float() * self._spec.logits

    def hidden(
        self, ids: torch.Tensor, rows: PlacedRows, cache: PromptCache, keep: int, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        hidden: torch.Tensor = self._stack.base.embed_tokens(ids)
        if self._spec.embedding != 1:
            hidden = hidden * self._spec.embedding
        table = self._stack.rotary.table(rows.places if position_ids is None else position_ids)
        last = len(self._layers) - 1
        for number, layer in enumerate(self._layers):
            heads = layer.heads(hidden)
            if cache.before_update is not None:
                cache.before_update(number, len(ids))
            queries = self._placed(layer, heads, table, rows.places, cache.buffers[number])
            if cache.after_update is not None:
                cache.after_update(number)
            if number == last and keep < len(ids):  # no later layer needs the others
                queries, hidden, rows = queries[:, :, -keep:], hidden[-keep:], rows.last(keep)
            mixed = rows.attend(number, queries, *cache.buffers[number].view(), layer.params)
            hidden = layer.after_attention(mixed.transpose(1, 2).reshape(len(hidden), -1), hidden)
        return hidden

    def _placed(
        self, layer: FusedCudaLayer, heads: Heads, table: RopeTables, at: torch.Tensor, buffer: BufferLayer
    ) -> torch.Tensor:
        """Norm and rotate heads, and write keys and values to a layer's buffers; return queries `[1, heads, rows,
        head_dim]`. Rotation is in float32, rounded once, as of stored keys. `at`: places in the buffers, int64
        `[rows]`."""
        angles = table.by_name[self._stack.rotary.names[0]] if layer.rotates else None
        if self._by_kernel:
            return place(*heads, layer.head_norms, angles, at, buffer.keys, buffer.values)
        query, key, value = (side.view(1, len(at), -1, self._spec.head_dim).transpose(1, 2) for side in heads)
        if layer.head_norms is not None:
            query, key = (
                F.rms_norm(side, norm.weight.shape, norm.weight, norm.epsilon)
                for side, norm in zip((query, key), layer.head_norms, strict=True)
            )
        if angles is not None:
            query, key = (rotate_halves_torch(side, angles) for side in (query, key))
        buffer.scatter(at, key, value)
        return query


@dataclass(frozen=True, slots=True)
class FusedCudaLayer:
    """A decoder layer as functions of tensors; norms of other kinds, and an MLP of experts, are called as modules."""

    project: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]  # of normed rows, to `[rows, heads · head_dim]` each
    out: Map
    mlp: Map
    before: tuple[Map, Map]  # norms of attention and MLP; of a place without a norm the identity
    after: tuple[Map, Map]
    flat_norms: tuple[Map, Map] | None  # of all heads' queries and keys together (OLMo 2)
    head_norms: HeadNorms | None  # of each head's (Qwen3)
    rotates: bool
    params: AttentionParams
    residual: float  # what the outputs of attention and MLP are multiplied by

    @classmethod
    def of(cls, spec: LayerSpec) -> FusedCudaLayer:
        if any(spec.before) and any(spec.after):
            raise UnsupportedArchitecture("norms before and after attention, which was not tried on a GPU")
        flat, by_head = _head_norms(spec)
        return cls(
            project=_products((spec.query, spec.key, spec.value)),
            out=_linear(spec.out.module),
            mlp=_mlp(spec),
            before=(_norm(spec.before[0]), _norm(spec.before[1])),
            after=(_norm(spec.after[0]), _norm(spec.after[1])),
            flat_norms=flat,
            head_norms=by_head,
            rotates=spec.rotary > 0,
            params=AttentionParams(spec.scale, spec.kind.window),
            residual=spec.residual,
        )

    def heads(self, hidden: torch.Tensor) -> Heads:
        queries, keys, values = self.project(self.before[0](hidden))
        if self.flat_norms is not None:
            queries, keys = self.flat_norms[0](queries), self.flat_norms[1](keys)
        return queries, keys, values

    def after_attention(self, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.add(hidden, self.after[0](self.out(mixed)), alpha=self.residual)
        output = self.after[1](self.mlp(self.before[1](hidden)))
        return torch.add(hidden, output, alpha=self.residual)


def _norm(norm: NormSpec | None) -> Map:
    if norm is None:
        return lambda rows: rows
    if not norm.is_rms or norm.adds_one:
        by_module: Map = norm.module
        return by_module
    weight, epsilon = norm.module.weight.detach(), norm.epsilon
    return lambda rows: F.rms_norm(rows, weight.shape, weight, epsilon)


def _head_norms(spec: LayerSpec) -> tuple[tuple[Map, Map] | None, HeadNorms | None]:
    if spec.head_norms is None:
        return None, None
    query, key = spec.head_norms
    if query.adds_one or key.adds_one:
        raise UnsupportedArchitecture(f"{type(query.module).__name__} adds one to its weight")
    if not spec.normed_by_head:
        return (_norm(query), _norm(key)), None
    first, second = (HeadNorm(norm.module.weight.detach(), norm.epsilon) for norm in (query, key))
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
