"""What a model's modules compute for one token, read off the modules: norms, matrices, multipliers.

A family is not known by name. A model fits if every module of its layers is one that is known here, and what cannot be
seen from outside is tried: what a norm does with its weight, which function an MLP's gate is, how heads are rotated.
Its first step is compared with the model's own in any case (`native`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from kvtool.core.kernels.linear.qtensor import QuantizedTensor
from kvtool.core.model.stepping.kept import KeptWeights, Unfit

if TYPE_CHECKING:
    from kvtool.core.kernels.rope import Table
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.model.kv_shape import KVShape

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
LAYER_PARTS |= {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
DROPOUT_PARTS = {"resid_attn_dropout", "resid_mlp_dropout"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"}
MLP_PARTS = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"}
_BASE = {"embed_tokens", "layers", "norm", "rotary_emb"}
_CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class Linear:
    """Rows `first` … of a matrix, and a bias float32 `[rows]`."""

    matrix: QuantizedTensor
    first: int
    rows: int
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square normalisation: its weight, float32, and what is added to the mean."""

    weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer.

    Attributes
    ----------
    before : norms in front of attention and MLP; `after`: behind them. None where there is none.
    head_norms : of queries and keys; as long as a head, or as all heads.
    rotary : how many numbers of a head are rotated; 0: none.
    scale : of the scores.
    residual : what the outputs of attention and MLP are multiplied by.
    """

    before: tuple[Norm | None, Norm | None]
    after: tuple[Norm | None, Norm | None]
    query: Linear
    key: Linear
    value: Linear
    out: Linear
    head_norms: tuple[Norm, Norm] | None
    rotary: int
    scale: float
    gate: Linear
    up: Linear
    down: Linear
    residual: float

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All its products."""
        return (self.query, self.key, self.value, self.out, self.gate, self.up, self.down)


@dataclass(frozen=True, slots=True)
class Family:
    """A whole model.

    Attributes
    ----------
    embedding : what a token's embedding is multiplied by; `logits`: what the logits are.
    activation : "silu" or "gelu_tanh".
    """

    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: str
    embedding: float
    logits: float


def plain_shape(decoder: Decoder) -> KVShape:
    """The one shape of all layers' keys and values. Raises Unfit: they have several, or keys are no values' width."""
    if decoder.plain_shape is None:
        raise Unfit("layers keep keys and values of different shapes")
    return decoder.plain_shape


def family_of(decoder: Decoder) -> Family:
    """Read a model.

    Raises
    ------
    Unfit : it computes something that is not known here.
    """
    base, config, shape = decoder.base, decoder.config, plain_shape(decoder)
    if decoder.device != "cpu" or decoder.dtype not in _CLOSE:
        raise Unfit(f"{decoder.dtype} on {decoder.device}")
    check_parts(base, _BASE)
    check_unshaped(decoder)
    rotaries = rotaries_of(decoder)
    kept = KeptWeights(decoder)
    layers = tuple(_layer(decoder, kept, layer, rotary) for layer, rotary in zip(decoder.layers, rotaries, strict=True))
    activations = {activation_of(layer.mlp) for layer in decoder.layers}
    if len(activations) != 1:
        raise Unfit("different activations")
    return Family(
        layers=layers,
        norm=norm_of(base.norm),
        head=_linear(kept, decoder.model.get_output_embeddings()),
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=shape.heads,
        head_dim=shape.key_dim,
        activation=activations.pop(),
        embedding=float(getattr(base, "embedding_multiplier", 1.0)),
        logits=1.0 / float(getattr(config, "logits_scaling", 1.0)),
    )


def _layer(decoder: Decoder, kept: KeptWeights, layer: Any, rotary: int) -> Layer:
    check_parts(layer, LAYER_PARTS | DROPOUT_PARTS)
    shape = plain_shape(decoder)
    attention, mlp, width = layer.self_attn, layer.mlp, shape.key_dim
    check_parts(attention, ATTENTION_PARTS)
    check_parts(mlp, MLP_PARTS)
    sizes = [count * width for count in (decoder.config.num_attention_heads, shape.heads, shape.heads)]
    query, key, value = _parts(kept, attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"), sizes)
    inner = decoder.config.intermediate_size
    gate, up = _parts(kept, mlp, "gate_up_proj", ("gate_proj", "up_proj"), [inner, inner])
    before, after = norms_of(layer)
    return Layer(
        before=before,
        after=after,
        query=query,
        key=key,
        value=value,
        out=_linear(kept, attention.o_proj),
        head_norms=head_norms_of(attention),
        rotary=rotary,
        scale=float(attention.scaling),
        gate=gate,
        up=up,
        down=_linear(kept, mlp.down_proj),
        residual=float(getattr(layer, "residual_multiplier", 1.0)),
    )


def check_unshaped(decoder: Decoder) -> None:
    """Take layers only whose scores are plain ones, over however many keys, and whose keys have one shape."""
    if any(kind.softcap is not None or kind.sinks for kind in decoder.kinds):
        raise Unfit("capped scores or sinks")
    if decoder.plain_shape is None or not decoder.rotary.names:
        raise Unfit("layers of different kinds")


def check_parts(module: Any, names: set[str]) -> None:
    strange = sorted({name for name, _ in module.named_children()} - names)
    if strange:
        raise Unfit(f"{type(module).__name__} has {strange[0]}")


def norms_of(layer: Any) -> tuple[tuple[Norm | None, Norm | None], tuple[Norm | None, Norm | None]]:
    """The norms before and behind attention and MLP: most families have the first, OLMo 2 the second, Gemma 3 both."""
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    first, second, before_mlp, behind = (getattr(layer, name, None) for name in names)
    if second is not None and first is not None and before_mlp is not None and behind is not None:
        return (norm_of(first), norm_of(before_mlp)), (norm_of(second), norm_of(behind))
    if second is not None and first is not None and before_mlp is behind is None:
        return (norm_of(first), norm_of(second)), (None, None)
    if second is not None and behind is not None and first is before_mlp is None:
        return (None, None), (norm_of(second), norm_of(behind))
    raise Unfit(f"{type(layer).__name__} has norms in other places")


def head_norms_of(attention: Any) -> tuple[Norm, Norm] | None:
    query, key = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return None if query is None or key is None else (norm_of(query), norm_of(key))


def norm_of(module: Any) -> Norm:
    """A norm, with the weight that it multiplies by: some add one to what they keep."""
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or epsilon is None or getattr(module, "bias", None) is not None:
        raise Unfit(f"{type(module).__name__} is no root mean square norm")
    probe = torch.linspace(-2, 3, weight.numel(), dtype=weight.dtype)
    given = module(probe).float()
    wide = probe.float()
    plain = wide * torch.rsqrt(wide.square().mean() + epsilon)
    for factor in (weight.detach().float(), 1.0 + weight.detach().float()):
        if torch.allclose(given, plain * factor, rtol=_CLOSE[weight.dtype], atol=_CLOSE[weight.dtype]):
            return Norm(factor.contiguous(), float(epsilon))
    raise Unfit(f"{type(module).__name__} is no root mean square norm")


def activation_of(mlp: Any) -> str:
    """Which function the gate goes through, by what it gives."""
    function = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    probe = torch.linspace(-6, 6, 49, dtype=torch.float32)
    known: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": F.silu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    for name, expected in known.items():
        if callable(function) and torch.allclose(function(probe), expected(probe), rtol=1e-5, atol=1e-6):
            return name
    raise Unfit(f"{type(mlp).__name__} has another activation")


def _parts(kept: KeptWeights, module: Any, fused: str, names: tuple[str, ...], sizes: list[int]) -> list[Linear]:
    """Several products of one input: matrices of their own, or rows of one matrix."""
    if hasattr(module, fused):
        whole = _linear(kept, getattr(module, fused))
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        if sum(sizes) != whole.rows or whole.bias is not None:
            raise Unfit(f"{fused} is cut otherwise")
        return [Linear(whole.matrix, start, size, None) for start, size in zip(starts, sizes, strict=True)]
    found = [_linear(kept, getattr(module, name)) for name in names]
    if [linear.rows for linear in found] != sizes:
        raise Unfit(f"{names[0]} and its like have other sizes")
    return found


def _linear(kept: KeptWeights, module: Any) -> Linear:
    matrix = kept.matrix(module)
    bias = getattr(module, "bias", None)
    return Linear(matrix, 0, matrix.rows, None if bias is None else bias.detach().float().contiguous())


def rotaries_of(decoder: Decoder) -> list[int]:
    """How many numbers of a head each layer rotates, if it does so in halves as is usual."""
    table = decoder.rotary.table(torch.tensor([37]))
    return [_rotary_of(decoder, table, layer) for layer in range(len(decoder.layers))]


def _rotary_of(decoder: Decoder, table: Table, layer: int) -> int:
    angles = decoder.rotary.angles(table, layer)
    if angles is None:
        return 0
    width, half = angles.cos.shape[-1], angles.cos.shape[-1] // 2
    probe = torch.linspace(-1, 1, plain_shape(decoder).key_dim, dtype=torch.float32)[None, None, None]
    turned = torch.cat([-probe[..., half:width], probe[..., :half]], -1)
    halves = torch.cat([probe[..., :width] * angles.cos + turned * angles.sin, probe[..., width:]], -1)
    if not torch.allclose(decoder.rotary.rotate(probe, table, layer), halves, atol=1e-6):
        raise Unfit("heads are not rotated in halves")
    return width
