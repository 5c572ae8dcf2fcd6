"""A decoder layer for few rows: the model's own products and attention, and machine code in between.

Of a question's 32 rows, what torch does between the products takes as long as a third of them: some thirty calls a
layer, each of a few microseconds of work. Here it is four.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.kernels.isa import isa_here
from kvtool.core.kernels.linear.modules import PackedLinear
from kvtool.core.kernels.linear.onednn import LaidOut
from kvtool.core.model.attention import IMPLEMENTATION, Rows
from kvtool.core.model.kinds import angles_of
from kvtool.core.model.modules import cache_name
from kvtool.core.model.rowwise.native import Code, code_for
from kvtool.core.model.stepping.family import (
    ATTENTION_PARTS,
    DROPOUT_PARTS,
    LAYER_PARTS,
    MLP_PARTS,
    Norm,
    activation_of,
    check_parts,
    check_unshaped,
    head_norms_of,
    norms_of,
    plain_shape,
    rotaries_of,
)
from kvtool.core.model.stepping.kept import Unfit
from kvtool.core.native.isa import ISAS

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder

_PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_TRIED = 3  # rows that both ways compute of a layer before the quick one is taken
# How far apart they may be: root mean square difference, by that of the layer's result. Measured over all families in
# float32 2e-7; in bfloat16 0, and .006 where norms are rounded at other places (Gemma), which stays as it is.
_CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-3}
_installing = threading.Lock()


@dataclass(frozen=True, slots=True, eq=False)
class QuickLayer:
    """Stands in for one layer's own forward, and calls it for whatever it does not do itself.

    Attributes
    ----------
    norms : before attention and MLP; `after`: behind them, or None. `head_norms`: of queries and keys, or None.
    rotates : whether heads are rotated. `scoring`: of its attention.
    """

    layer: Any
    code: Code
    norms: tuple[Norm, Norm]
    after: tuple[Norm, Norm] | None
    head_norms: tuple[Norm, Norm] | None
    rotates: bool
    scoring: AttentionParams
    _inside: tuple[torch.nn.Module, ...]  # but its products, which are asked at each call
    _normed: tuple[Any, ...]
    _weighed: tuple[tuple[int, int], ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the layer, in this process or by pickle in another, has its own forward: machine code stays."""
        return getattr, (self.layer, "forward")  # which a copy that is being made does not hold yet: it is its class's

    def __call__(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        rows: Any = None,
        **more: Any,
    ) -> torch.Tensor:
        """Compute `[1, rows, hidden]` of the same, as the model's decoder calls its layers."""
        name = cache_name(self.layer)
        cache = more.pop(name, None)
        if self._serves(hidden_states, cache, position_embeddings, rows, more):
            assert position_embeddings is not None
            return self._computed(hidden_states.contiguous(), position_embeddings, cache, rows)
        out: torch.Tensor = type(self.layer).forward(
            self.layer,
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

    def products(self) -> list[torch.nn.Module]:
        """Its seven products."""
        return [getattr(owner, name) for owner, name in _owners(self.layer)]

    def _serves(self, hidden: torch.Tensor, cache: Any, tables: Any, rows: Any, more: dict[str, Any]) -> bool:
        """Whether rows of a prompt are computed over its cache, and nobody listens to what is inside the layer."""
        return (
            isinstance(rows, Rows)
            and not rows.stored
            and cache is not None
            and tables is not None
            and not more
            and torch.is_inference_mode_enabled()
            and hidden.dtype == self.code.dtype
            and len(hidden) == len(tables[0]) == 1
            and self.layer.self_attn.config._attn_implementation == IMPLEMENTATION
            and not any(map(_is_touched, self._inside))
            and self._weighed == _weighed(self._normed)
        )

    def _computed(
        self, hidden: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], cache: Any, rows: Rows
    ) -> torch.Tensor:
        code, (before, between) = self.code, self.norms
        _, normed = code.norm(hidden, before.weight, before.epsilon)
        attended = self._behind(0, self._attended(normed, tables, cache, rows))
        hidden, normed = code.norm(hidden, between.weight, between.epsilon, more=attended)
        mlp = self.layer.mlp
        gated = code.gate(_product(mlp.gate_proj, normed), _product(mlp.up_proj, normed))
        return self._behind(1, _product(mlp.down_proj, gated)).add_(hidden)

    def _behind(self, place: int, rows: torch.Tensor) -> torch.Tensor:
        """What attention or the MLP gives, normed where it is."""
        if self.after is None:
            return rows
        norm = self.after[place]
        return self.code.norm(rows, norm.weight, norm.epsilon)[1]

    def _attended(
        self, normed: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], cache: Any, rows: Rows
    ) -> torch.Tensor:
        attention = self.layer.self_attn
        heads = normed.shape[1], -1, attention.head_dim
        queries, keys, values = (
            _product(product, normed).view(heads) for product in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if self.head_norms is not None:
            own = zip((queries, keys), self.head_norms, strict=True)
            queries, keys = (self.code.norm(side, norm.weight, norm.epsilon)[1] for side, norm in own)
        if self.rotates:
            self.code.turn(queries, keys, *(side[0].contiguous() for side in tables))
        side_by_side = (side.transpose(0, 1)[None] for side in (keys, values))
        keys, values = cache.update(*side_by_side, attention.layer_idx)
        out = rows.attend(attention.layer_idx, queries.transpose(0, 1)[None], keys, values, self.scoring)
        return _product(attention.o_proj, out.transpose(1, 2).reshape(1, len(queries), -1))


def _product(linear: Any, rows: torch.Tensor) -> torch.Tensor:
    """A linear layer's product, in the way that is fast for few rows where its weight is kept for that."""
    laid_out = vars(linear).get("forward")
    out: torch.Tensor
    if linear._forward_hooks or linear._forward_pre_hooks:
        out = linear(rows)
    elif isinstance(laid_out, LaidOut):
        out = laid_out.rows_product(rows)
    elif isinstance(linear, PackedLinear) and laid_out is None:
        out = linear.rows_product(rows)
    else:
        out = linear(rows)
    return out


def in_team(layer: Any, count: int, rows: Any) -> bool:
    """Whether all of a layer's products of so many rows are machine code of our own, which a crew can take part in.

    Parameters
    ----------
    layer : of a decoder.
    """
    quick = vars(layer).get("forward")
    if not isinstance(quick, QuickLayer) or not isinstance(rows, Rows) or rows.stored:
        return False
    return all(_is_in_team(product, count, quick.code.dtype) for product in quick.products())


def _is_in_team(linear: Any, count: int, dtype: torch.dtype) -> bool:
    laid_out = vars(linear).get("forward")
    if isinstance(laid_out, LaidOut):
        return laid_out.in_team(count)
    return isinstance(linear, PackedLinear) and laid_out is None and linear.in_team(count, dtype)


def _weighed(norms: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Where the weights of norms are, and how often they were written: copies of them are computed with."""
    weights = [norm.weight for norm in norms]
    return tuple((weight.data_ptr(), -1 if weight.is_inference() else weight._version) for weight in weights)


def _is_touched(module: torch.nn.Module) -> bool:
    """Whether someone listens to a module, or has given it another forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def quicken(decoder: Decoder) -> bool:
    """Let a model's layers compute few rows the quick way, where they are found to compute nothing else.

    Returns
    -------
    False: they stay as they are.
    """
    with _installing:
        try:
            quick = _quick_layers(decoder)
            fits = _is_alike(decoder, quick[0])
        except (Unfit, AttributeError, ValueError, RuntimeError, TypeError):  # a module that is not what it seems
            return False
        if fits:
            for layer in quick:
                layer.layer.forward = layer
        return fits


def _quick_layers(decoder: Decoder) -> list[QuickLayer]:
    isa = isa_here()
    if isa is None or decoder.device != "cpu" or decoder.dtype not in _CLOSE:
        raise Unfit(f"{decoder.dtype} on {decoder.device}")
    plain_shape(decoder)
    activations = {activation_of(layer.mlp) for layer in decoder.layers}
    check_unshaped(decoder)
    kinds = {(type(layer), type(layer.self_attn), type(layer.mlp)) for layer in decoder.layers}  # only one is tried
    if len(activations) != 1 or len(kinds) != 1:
        raise Unfit("layers of different kinds")
    name = next(name for name, one in ISAS.items() if one is isa)
    code = code_for(name, decoder.dtype, activations.pop())
    each = zip(decoder.layers, rotaries_of(decoder), decoder.kinds, strict=True)
    return [_quick(layer, code, width, kind.window) for layer, width, kind in each]


def _quick(layer: Any, code: Code, rotary: int, window: int | None) -> QuickLayer:
    for module, parts in (
        (layer, LAYER_PARTS | DROPOUT_PARTS),
        (layer.self_attn, ATTENTION_PARTS),
        (layer.mlp, MLP_PARTS),
    ):
        check_parts(module, parts)
    if not all(isinstance(getattr(owner, name, None), torch.nn.Linear) for owner, name in _owners(layer)):
        raise Unfit("its products are laid out otherwise")
    before, after = norms_of(layer)
    head_norms = head_norms_of(layer.self_attn)
    whole = head_norms is not None and head_norms[0].weight.numel() != layer.self_attn.head_dim
    norms, behind = (tuple(norm for norm in side if norm is not None) for side in (before, after))
    if len(norms) != 2 or len(behind) == 1 or whole or getattr(layer, "residual_multiplier", 1.0) != 1.0:
        raise Unfit("its norms or sums stand elsewhere")
    inside = tuple(
        module for module in layer.modules() if module is not layer and not isinstance(module, torch.nn.Linear)
    )
    normed = tuple(module for module in inside if getattr(module, "weight", None) is not None)
    scoring = AttentionParams(float(layer.self_attn.scaling), window)
    return QuickLayer(
        layer,
        code,
        (norms[0], norms[1]),
        (behind[0], behind[1]) if behind else None,
        head_norms,
        rotary > 0,
        scoring,
        inside,
        normed,
        _weighed(normed),
    )


def _owners(layer: Any) -> list[tuple[Any, str]]:
    """What has each of a layer's products, and under which name."""
    return list(zip((layer.self_attn,) * 4 + (layer.mlp,) * 3, _PRODUCTS, strict=True))


@torch.inference_mode()
def _is_alike(decoder: Decoder, quick: QuickLayer) -> bool:
    """Compute a few rows by the model's own first layer and by the quick one."""
    rows = Rows.of(torch.arange(_TRIED), decoder.device)
    draw = torch.Generator().manual_seed(0)
    size = quick.norms[0].weight.numel()
    hidden = torch.randn((1, _TRIED, size), generator=draw, dtype=torch.float32).to(decoder.dtype)
    name = decoder.kinds[0].rotation or decoder.rotary.names[0]
    tables = angles_of(decoder.base.rotary_emb, name, hidden, rows.positions)
    results = []
    for forward in (quick.layer, quick):
        cache = decoder.new_cache(_TRIED)
        cache.set_length(_TRIED)
        cache.rows = rows
        out = forward(
            hidden.clone(),
            position_ids=rows.positions[None],
            position_embeddings=tables,
            rows=rows,
            **{cache_name(quick.layer): cache},
        )
        results.append([side.float() for side in (out, cache.buffers[0].keys, cache.buffers[0].values)])
    return all(_apart(*pair) <= _CLOSE[decoder.dtype] for pair in zip(*results, strict=True))


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).square().mean().sqrt() / one.square().mean().sqrt().clamp_min(1e-12))
