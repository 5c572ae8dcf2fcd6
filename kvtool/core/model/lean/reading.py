"""What a decoder layer computes, as few functions of tensors, read off its modules.

A family is not known by name: a layer fits if its modules are of kinds that are known here. What a norm does with its
weight is tried; one that is no plain root mean square norm, and an MLP of experts, are called as the modules they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from kvtool.core.model.stepping.family import ATTENTION_PARTS, DROPOUT_PARTS, LAYER_PARTS, check_parts, plain_shape
from kvtool.core.model.stepping.kept import Unfit

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder

Map = Callable[[torch.Tensor], torch.Tensor]

_CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Root mean square norm of each head: its weight `[head_dim]`, in the model's dtype."""

    weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer.

    Attributes
    ----------
    project : rows `[rows, hidden]`, normed, to queries, keys and values `[rows, heads · head_dim]` each.
    flat_norms : of all heads' queries and keys together (OLMo 2).
    head_norms : of each head's (Qwen3).
    before, after : norms in front of attention and MLP, and behind them.
    residual : what the outputs of attention and MLP are multiplied by.
    """

    project: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    out: Map
    mlp: Map
    before: tuple[Map | None, Map | None]
    after: tuple[Map | None, Map | None]
    flat_norms: tuple[Map, Map] | None
    head_norms: tuple[HeadNorm, HeadNorm] | None
    scale: float
    residual: float

    def heads(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, `[rows, heads · head_dim]` each, before norms of heads and rotation."""
        queries, keys, values = self.project(_by(self.before[0], hidden))
        if self.flat_norms is not None:
            queries, keys = self.flat_norms[0](queries), self.flat_norms[1](keys)
        return queries, keys, values

    def behind(self, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """From what attention gives, `[rows, heads · head_dim]`, to the next layer's `[rows, hidden]`."""
        hidden = torch.add(hidden, _by(self.after[0], self.out(mixed)), alpha=self.residual)
        output = _by(self.after[1], self.mlp(_by(self.before[1], hidden)))
        return torch.add(hidden, output, alpha=self.residual)


def _by(norm: Map | None, rows: torch.Tensor) -> torch.Tensor:
    return rows if norm is None else norm(rows)


def read_layer(decoder: Decoder, layer: Any) -> Layer:
    """Read one layer off its modules.

    Raises
    ------
    Unfit : one of them is not known.
    """
    check_parts(layer, LAYER_PARTS | DROPOUT_PARTS)
    attention = layer.self_attn
    check_parts(attention, ATTENTION_PARTS)
    flat, by_head = _head_norms(decoder, attention)
    before, after = _norms(layer)
    return Layer(
        project=_projection(decoder, attention),
        out=_linear(attention.o_proj),
        mlp=_mlp(layer.mlp),
        before=before,
        after=after,
        flat_norms=flat,
        head_norms=by_head,
        scale=float(attention.scaling),
        residual=float(getattr(layer, "residual_multiplier", 1.0)),
    )


def read_norm(module: Any) -> Map:
    """A norm as one operation where it is a plain one; else the module itself."""
    plain = _plain(module)
    if plain is None:
        by_module: Map = module
        return by_module
    weight, epsilon = plain
    return lambda rows: F.rms_norm(rows, weight.shape, weight, epsilon)


def _plain(module: Any) -> tuple[torch.Tensor, float] | None:
    """Weight and epsilon of a root mean square norm that multiplies by its weight; None: it does something else."""
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or epsilon is None or getattr(module, "bias", None) is not None or weight.ndim != 1:
        return None
    return (weight.detach(), float(epsilon)) if _multiplies(type(module), module, float(epsilon)) else None


_found: dict[tuple[type, torch.dtype], bool] = {}


def _multiplies(kind: type, module: Any, epsilon: float) -> bool:
    """Whether norms of a class are plain: the first one is tried, the others are of the same code."""
    weight = module.weight
    if (kind, weight.dtype) not in _found:
        with torch.inference_mode():
            probe = torch.linspace(-2, 3, weight.numel(), dtype=torch.float32).to(weight.device, weight.dtype)
            factor = torch.linspace(0.5, 2, weight.numel(), dtype=torch.float32).to(weight.device, weight.dtype)
            # With a weight that tells: the module's own may be all ones.
            given = torch.func.functional_call(module, {"weight": factor}, (probe,)).float()
            wanted = F.rms_norm(probe, probe.shape, factor, epsilon).float()
            off = float((given - wanted).abs().max() / wanted.abs().max())
            _found[kind, weight.dtype] = off <= _CLOSE[weight.dtype]
    return _found[kind, weight.dtype]


def _norms(layer: Any) -> tuple[tuple[Map | None, Map | None], tuple[Map | None, Map | None]]:
    """The norms before and behind attention and MLP: most families have the first kind, OLMo 2 the second."""
    behind, first = getattr(layer, "post_feedforward_layernorm", None), getattr(layer, "input_layernorm", None)
    if first is not None and behind is None:
        return (read_norm(first), read_norm(layer.post_attention_layernorm)), (None, None)
    if first is None and behind is not None:
        return (None, None), (read_norm(layer.post_attention_layernorm), read_norm(behind))
    raise Unfit(f"{type(layer).__name__} has norms in other places")


def _head_norms(decoder: Decoder, attention: Any) -> tuple[tuple[Map, Map] | None, tuple[HeadNorm, HeadNorm] | None]:
    """Norms of queries and keys: over all heads together, or head by head."""
    modules = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    if modules == (None, None):
        return None, None
    plain = [_plain(module) for module in modules]
    if plain[0] is None or plain[1] is None:
        raise Unfit(f"{type(modules[0]).__name__} is no plain norm")
    if all(weight.numel() == plain_shape(decoder).key_dim for weight, _ in (plain[0], plain[1])):
        return None, (HeadNorm(*plain[0]), HeadNorm(*plain[1]))
    return (read_norm(modules[0]), read_norm(modules[1])), None


def _projection(
    decoder: Decoder, attention: Any
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    shape = plain_shape(decoder)
    sizes = [count * shape.key_dim for count in (decoder.config.num_attention_heads, shape.heads, shape.heads)]
    if hasattr(attention, "qkv_proj"):
        whole = _linear(attention.qkv_proj)

        def cut(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            queries, keys, values = whole(rows).split(sizes, -1)
            return queries, keys, values

        return cut
    query, key, value = (_linear(module) for module in (attention.q_proj, attention.k_proj, attention.v_proj))
    return lambda rows: (query(rows), key(rows), value(rows))


def _linear(module: Any) -> Map:
    if type(module) is not torch.nn.Linear:
        raise Unfit(f"{type(module).__name__} is no plain linear layer")
    across = module.weight.detach().t()  # turned once: at each call it would cost a fifth of what a product does
    if module.bias is None:
        return lambda rows: torch.mm(rows, across)
    bias = module.bias.detach()
    return lambda rows: torch.addmm(bias, rows, across)


def _mlp(module: Any) -> Map:
    """A gated MLP as its products; what is none (experts) as the module itself, which wants `[1, rows, hidden]`."""
    activation = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    names = {name for name, _ in module.named_children()} - {"act_fn", "activation_fn"}
    if activation is None or names not in ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}):
        return partial(_by_module, module)
    down = _linear(module.down_proj)
    if "gate_up_proj" in names:
        both = _linear(module.gate_up_proj)

        def cut(rows: torch.Tensor) -> torch.Tensor:
            gate, up = both(rows).chunk(2, -1)
            return down(activation(gate).mul_(up))

        return cut
    gate, up = _linear(module.gate_proj), _linear(module.up_proj)
    return lambda rows: down(activation(gate(rows)).mul_(up(rows)))


def _by_module(module: Any, rows: torch.Tensor) -> torch.Tensor:
    given = module(rows[None])
    out: torch.Tensor = given[0] if isinstance(given, tuple) else given
    return out.view(rows.shape)
