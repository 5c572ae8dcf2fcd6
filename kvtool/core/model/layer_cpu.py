"""Fused decoder layer on a CPU, for few rows: the model's own products and attention, with machine code in between.

For a question's 32 rows, torch's work between the products costs a third of the products' time: some thirty calls a
layer, each of a few microseconds. This module makes four.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtool.core.kernels import COMPUTED
from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.kernels.layer.cpu import LayerKernels, Rounding, layer_kernels
from kvtool.core.kernels.linear.modules import PackedLinear
from kvtool.core.model.attention import IMPLEMENTATION, QueryRows
from kvtool.core.model.kinds import angles_of
from kvtool.core.model.modules import Swapped, cache_name, own_class, swap, swapped_by
from kvtool.core.model.spec import LayerSpec, ModelSpec, NormSpec, Projection, UnsupportedArchitecture, check_trial
from kvtool.core.model.stack import DecoderStack
from kvtool.core.native.isa import isa_here

_TRIED = 3  # rows that both ways compute of a layer before the fused one is taken
_installing = threading.Lock()


@dataclass(frozen=True, slots=True, eq=False)
class FusedDecoderLayer:
    """Computes a layer's rows by its spec; a part that the spec does not know is called as the module that it is."""

    spec: LayerSpec
    kernels: LayerKernels
    params: AttentionParams
    _inside: tuple[torch.nn.Module, ...]  # what is never called; products are asked at each call
    _normed: tuple[Any, ...]
    _weighed: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, spec: LayerSpec, kernels: LayerKernels) -> FusedDecoderLayer:
        norms = [norm.module for norm in spec.norms if norm.is_rms]
        called = [norm.module for norm in spec.norms if not norm.is_rms]
        called += [spec.module.mlp] if spec.mlp is None else []
        called_parts = {spec.module, *(part for module in called for part in module.modules())}
        parts = (part for part in spec.module.modules() if not isinstance(part, torch.nn.Linear))
        inside = tuple(part for part in parts if part not in called_parts)
        params = AttentionParams(spec.scale, spec.kind.window)
        return cls(spec, kernels, params, inside, tuple(norms), _weighed(norms))

    def serves(self, hidden: torch.Tensor, cache: Any, tables: Any, rows: Any, more: dict[str, Any]) -> bool:
        """Return True for rows of a prompt over its cache, if no hook listens to what is inside the layer."""
        return (
            isinstance(rows, QueryRows)
            and not rows.exact_forward
            and cache is not None
            and tables is not None
            and not more
            and torch.is_inference_mode_enabled()
            and hidden.dtype == self.kernels.dtype
            and tables[0].dtype == self.kernels.angles
            and len(hidden) == len(tables[0]) == 1
            and self.spec.module.self_attn.config._attn_implementation == IMPLEMENTATION
            and not any(map(_is_touched, self._inside))
            and self._weighed == _weighed(self._normed)
        )

    def compute(
        self, hidden: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], cache: Any, rows: QueryRows
    ) -> torch.Tensor:
        spec = self.spec
        (before, between), (after, last) = spec.before, spec.after
        attended = self._normed_by(after, self._attended(self._normed_by(before, hidden), tables, cache, rows))
        hidden, normed = self._added(hidden, attended, between)
        return self._added(hidden, self._normed_by(last, self._mlp(normed)), None)[0]

    def _normed_by(self, norm: NormSpec | None, rows: torch.Tensor) -> torch.Tensor:
        if norm is None:
            return rows
        if not norm.is_rms:
            out: torch.Tensor = norm.module(rows)
            return out
        return self.kernels.norm(rows, norm.weight, norm.epsilon)[1]

    def _added(
        self, hidden: torch.Tensor, more: torch.Tensor, norm: NormSpec | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.spec.residual != 1:
            more = more * self.spec.residual
        if norm is not None and norm.is_rms:
            return self.kernels.norm(hidden, norm.weight, norm.epsilon, more=more)
        total = hidden + more
        return total, self._normed_by(norm, total)

    def _mlp(self, rows: torch.Tensor) -> torch.Tensor:
        mlp = self.spec.mlp
        if mlp is None:
            given = self.spec.module.mlp(rows)
            out: torch.Tensor = given[0] if isinstance(given, tuple) else given
            return out.view(rows.shape).contiguous()
        gate, up = (side.contiguous() for side in _products((mlp.gate, mlp.up), rows))
        return _product(mlp.down.module, self.kernels.gate(gate, up))

    def _attended(
        self, normed: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], cache: Any, rows: QueryRows
    ) -> torch.Tensor:
        spec, layer = self.spec, self.spec.module.self_attn.layer_idx
        heads = normed.shape[1], -1, spec.kind.shape.key_dim
        queries, keys, values = _products((spec.query, spec.key, spec.value), normed)
        queries, keys = queries.contiguous(), keys.contiguous()
        if spec.head_norms is not None:
            queries, keys = (
                self.kernels.norm(side, norm.weight, norm.epsilon)[1]
                for side, norm in zip((queries, keys), spec.head_norms, strict=True)
            )
        queries, keys, values = (side.view(heads) for side in (queries, keys, values))
        if spec.rotary:
            self.kernels.apply_rope(queries, keys, *(side[0].contiguous() for side in tables))
        side_by_side = (side.transpose(0, 1)[None] for side in (keys, values))
        keys, values = cache.update(*side_by_side, layer)
        out = rows.attend(layer, queries.transpose(0, 1)[None], keys, values, self.params)
        return _product(spec.out.module, out.transpose(1, 2).reshape(1, len(queries), -1))


class _FusedModule(Swapped):
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        rows: Any = None,
        **more: Any,
    ) -> torch.Tensor:
        fused: FusedDecoderLayer = self._swapped_by
        name = cache_name(self)
        cache = more.pop(name, None)
        if fused.serves(hidden_states, cache, position_embeddings, rows, more):
            assert position_embeddings is not None
            return fused.compute(hidden_states.contiguous(), position_embeddings, cache, rows)
        out: torch.Tensor = super().forward(
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **{name: cache},
            **({} if rows is None else {"rows": rows}),
            **more,
        )
        return out


def _products(parts: Sequence[Projection], rows: torch.Tensor) -> Sequence[torch.Tensor]:
    if parts[0].module is parts[-1].module:
        return torch.split(_product(parts[0].module, rows), [part.rows for part in parts], -1)
    return [_product(part.module, rows) for part in parts]


def _product(linear: Any, rows: torch.Tensor) -> torch.Tensor:
    by_rows = isinstance(linear, PackedLinear) and not _is_touched(linear)
    out: torch.Tensor = linear.rows_product(rows) if by_rows else linear(rows)
    return out


def in_team(layer: torch.nn.Module, count: int, rows: Any) -> bool:
    """Return True if all of a layer's products of so many rows are machine code of our own, which a pool computes."""
    fused = swapped_by(layer)
    if not isinstance(fused, FusedDecoderLayer) or fused.spec.mlp is None:
        return False
    if not isinstance(rows, QueryRows) or rows.exact_forward:
        return False
    linears = {projection.module for projection in fused.spec.projections}
    return all(_is_in_team(linear, count, fused.kernels.dtype) for linear in linears)


def _is_in_team(linear: Any, count: int, dtype: torch.dtype) -> bool:
    return isinstance(linear, PackedLinear) and "forward" not in vars(linear) and linear.in_team(count, dtype)


def _weighed(norms: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Return where the weights of norms are, and how often they were written: copies of them are computed with."""
    weights = [norm.weight for norm in norms]
    return tuple((weight.data_ptr(), -1 if weight.is_inference() else weight._version) for weight in weights)


def _is_touched(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def install_fused_layers(stack: DecoderStack, spec: ModelSpec) -> None:
    with _installing:
        try:
            kernels = _kernels_for(stack, spec)
            layers = [FusedDecoderLayer.of(layer, kernels) for layer in spec.layers]
            tried = set()
            for number, layer in enumerate(layers):
                module = layer.spec.module
                kind = own_class(module), own_class(module.self_attn), own_class(module.mlp), layer.spec.rotary
                if kind not in tried:
                    tried.add(kind)
                    _try(stack, number, layer)
        except (AttributeError, ValueError, RuntimeError, TypeError) as error:
            raise UnsupportedArchitecture(str(error)) from error
        for layer in layers:
            swap(layer.spec.module, _FusedModule, layer)


def _kernels_for(stack: DecoderStack, spec: ModelSpec) -> LayerKernels:
    isa = isa_here()
    if isa is None:
        raise UnsupportedArchitecture("there is no machine code for this CPU")
    if stack.device != "cpu" or stack.dtype not in COMPUTED:
        raise UnsupportedArchitecture(f"{stack.dtype} on {stack.device}")
    spec.check_halves()
    first = {norm.rounds_first for layer in spec.layers for norm in layer.norms if norm.is_rms} or {True}
    if len(first) > 1:
        raise UnsupportedArchitecture("norms that round at different places")
    rounding = Rounding(norm_first=first.pop(), rope_in_float32=spec.rope_in_float32)
    return layer_kernels(isa, stack.dtype, spec.activation, rounding)


@torch.inference_mode()
def _try(stack: DecoderStack, number: int, layer: FusedDecoderLayer) -> None:
    module = layer.spec.module
    rows = QueryRows.of(torch.arange(_TRIED), stack.device)
    draw = torch.Generator().manual_seed(0)
    size = int(stack.config.hidden_size)
    hidden = torch.randn((1, _TRIED, size), generator=draw, dtype=torch.float32).to(stack.dtype)
    name = stack.kinds[number].rotation or stack.rotary.names[0]
    tables = angles_of(stack.base.rotary_emb, name, hidden, rows.places)
    own, ours = (stack.new_cache(_TRIED) for _ in range(2))
    for cache in (own, ours):
        cache.set_length(_TRIED)
        cache.rows = rows
    expected = own_class(module).forward(
        module,
        hidden.clone(),
        position_ids=rows.places[None],
        position_embeddings=tables,
        rows=rows,
        **{cache_name(module): own},
    )
    found = layer.compute(hidden.clone(), tables, ours, rows)
    kept, wanted = ours.buffers[number], own.buffers[number]
    for one, other in ((found, expected), (kept.keys, wanted.keys), (kept.values, wanted.values)):
        check_trial(one, other, stack.dtype, layers=1)
