"""Model spec: what each layer of a model computes, read once off its modules, for every fast path alike.

A layer has a spec if every module of it is known here. Before a fast path serves, `check_trial` compares its numbers
with those of the model's own forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from kvtool.core.checkpoint.architecture import ACTIVATIONS
from kvtool.core.checkpoint.dense import RMSNorm
from kvtool.core.errors import ModelError
from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.kernels.rope import RopeTables
from kvtool.core.model.forward import Map
from kvtool.core.model.prompt_cache import LayerKind, angles_of, rotary_of

if TYPE_CHECKING:
    from kvtool.core.model.stack import DecoderStack

# The largest relative error of a fast path after one layer; after n layers √n times as much, as rounding adds up.
# Measured over all families of the tests, after four layers: 5e-6 in float32 and .08 in bfloat16; SmolLM2, after
# thirty: .08. Where something is computed otherwise it is 1 and more.
# Of 8-bit products, whose rows are rounded: .003 after one layer of a 1.5B model.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02, torch.int8: 0.05}
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_LAYER = {"self_attn", "mlp", *_NORMS, "resid_attn_dropout", "resid_mlp_dropout"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm", "sinks"}
_ACTIVATION = ("act_fn", "activation_fn")
_MLP = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", *_ACTIVATION}
_BASE = {"embed_tokens", "layers", "norm", "rotary_emb"}
_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
# Norms of transformers that round the product with the weight only, as Gemma's do; others round before it, too.
_ROUNDING_LAST = {f"{family}RMSNorm" for family in ("FlexOlmo", "Flint", "GptOss", "Helium", "Olmo2", "Olmo3")}
_TRIED_POSITION = 37


class UnsupportedArchitecture(Exception):
    """Raised where a fast path does not compute what a model computes; the text is shown."""


def relative_error(computed: torch.Tensor, expected: torch.Tensor) -> float:
    computed, expected = computed.float(), expected.float()
    spread = (expected - expected.mean()).square().mean().sqrt()
    return float((computed - expected).square().mean().sqrt() / spread.clamp_min(1e-12))


def check_trial(computed: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, layers: int) -> None:
    error = relative_error(computed, expected)
    if not error <= TOLERANCE[dtype] * math.sqrt(layers):
        raise UnsupportedArchitecture(f"the model's own forward differs by {error:.2g} of its spread")


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """Rows `first` … `first + rows` of a linear layer's weight: all of them, or one of several fused products."""

    module: Any
    first: int
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class NormSpec:
    """A norm; of another one than a root mean square norm the weight is empty, and only its module computes it."""

    module: Any
    weight: torch.Tensor  # float32: the factor
    epsilon: float
    adds_one: bool  # its module keeps the factor less one (Gemma)
    rounds_first: bool  # to the model's dtype before it multiplies (Llama), or the product only (Gemma, OLMo 2)

    @property
    def is_rms(self) -> bool:
        return self.weight.numel() > 0


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP:
    """down · (function(gate · x) * (up · x)); `activation`: "silu", "gelu_tanh", or "" for another function."""

    gate: Projection
    up: Projection
    down: Projection
    activation: str
    function: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class LayerSpec:
    module: Any
    kind: LayerKind
    before: tuple[NormSpec | None, NormSpec | None]  # norms before attention and MLP
    after: tuple[NormSpec | None, NormSpec | None]  # norms after them, before the sum
    query: Projection
    key: Projection
    value: Projection
    out: Projection
    head_norms: tuple[NormSpec, NormSpec] | None  # over each head (Qwen3), or over all of them together (OLMo 2)
    rotary: int  # how many numbers of a head are rotated
    by_halves: bool  # number i with the one half of them further on, as is usual
    params: AttentionParams
    residual: float  # what the outputs of attention and MLP are multiplied by
    mlp: GatedMLP | None  # None: something else, which only its module computes (experts)

    @property
    def likeness(self) -> tuple[object, ...]:
        """Equal for layers that compute alike, over other weights."""
        modules = self.module, self.module.self_attn, self.module.mlp
        return *map(type, modules), self.kind, self.rotary, self.params.scale, len([*self.norms])

    @property
    def norms(self) -> Iterator[NormSpec]:
        yield from (norm for norm in (*self.before, *self.after, *(self.head_norms or ())) if norm is not None)

    @property
    def normed_by_head(self) -> bool:
        return self.head_norms is not None and self.head_norms[0].weight.numel() == self.kind.shape.key_dim

    def gated_mlp(self) -> GatedMLP:
        if self.mlp is None:
            module = self.module.mlp
            raise UnsupportedArchitecture(_unknown(module, _MLP) or f"{type(module).__name__} has no gate")
        return self.mlp

    @property
    def projections(self) -> tuple[Projection, ...]:
        mlp = () if self.mlp is None else (self.mlp.gate, self.mlp.up, self.mlp.down)
        return (self.query, self.key, self.value, self.out, *mlp)


@dataclass(frozen=True, slots=True, eq=False)
class ModelSpec:
    """A whole model, all of whose layers have keys and values of one shape."""

    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    head: Projection
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    embedding: float  # what a token's embedding is multiplied by
    logits: float  # what the logits are multiplied by
    cap: float | None  # logits x become cap · tanh(x / cap)
    rope_in_float32: bool  # cos and sin are float32 whatever the model computes in (OLMo 2)
    unknown: str  # a module between embedding and head that is not known here, or ""

    @property
    def projections(self) -> tuple[Projection, ...]:
        return (self.head, *(projection for layer in self.layers for projection in layer.projections))

    @property
    def activation(self) -> str:
        activations = {layer.mlp.activation for layer in self.layers if layer.mlp is not None} or {"silu"}
        if len(activations) != 1 or "" in activations:
            raise UnsupportedArchitecture("an MLP has another activation")
        return activations.pop()

    def ends(self, embed_tokens: Any, norm: Map) -> tuple[Map, Map]:
        """Make what `Ends` has: the embedding of ids, and the logits of rows that `norm` has normed."""

        def embed(ids: torch.Tensor) -> torch.Tensor:
            embedded: torch.Tensor = embed_tokens(ids)
            return embedded if self.embedding == 1 else embedded * self.embedding

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            # Of strided rows `matmul` would copy the whole weight first: .8 s of 1.1 for Qwen2.5's 152k tokens.
            return self.shaped(self.head.module(norm(hidden.contiguous())).float())

        return embed, logits

    def shaped(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale and cap float32 logits."""
        logits = logits if self.logits == 1 else logits * self.logits
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def check_served(self) -> None:
        """Refuse a model that rotates heads otherwise than by halves, which is what all machine code here does, or that
        computes something between embedding and head that is not known."""
        if not all(layer.by_halves for layer in self.layers):
            raise UnsupportedArchitecture("heads are not rotated in halves")
        if self.unknown:
            raise UnsupportedArchitecture(self.unknown)


def read_model_spec(decoder: DecoderStack) -> ModelSpec:
    try:
        return _Reader(decoder).model()
    except (AttributeError, ValueError, RuntimeError, TypeError, ModelError) as error:  # modules that only look known
        raise UnsupportedArchitecture(str(error)) from error


class _Reader:
    def __init__(self, decoder: DecoderStack) -> None:
        self._decoder = decoder
        _check_attention(decoder)
        self._shape = decoder.shapes[0]
        self._heads = int(decoder.config.num_attention_heads)

    def model(self) -> ModelSpec:
        decoder = self._decoder
        base, config, shape = decoder.base, decoder.config, self._shape
        at = torch.tensor([_TRIED_POSITION], device=decoder.device)
        table = decoder.rotary.table(at)
        like = torch.empty(0, dtype=decoder.dtype, device=decoder.device)
        layers = tuple(self._layer(number, layer, table) for number, layer in enumerate(decoder.layers))
        return ModelSpec(
            layers=layers,
            norm=self._norm_of(base.norm),
            head=_whole(decoder.model.get_output_embeddings()),
            hidden=config.hidden_size,
            vocabulary=config.vocab_size,
            heads=self._heads,
            kv_heads=shape.heads,
            head_dim=shape.key_dim,
            embedding=float(getattr(base, "embedding_multiplier", 1.0)),
            logits=1.0 / float(getattr(config, "logits_scaling", 1.0)),
            cap=getattr(config, "final_logit_softcapping", None),
            rope_in_float32=angles_of(rotary_of(base), decoder.rotary.names[0], like, at)[0].dtype == torch.float32,
            unknown=_unknown(base, _BASE),
        )

    def _layer(self, number: int, layer: Any, table: RopeTables) -> LayerSpec:
        if unknown := _unknown(layer, _LAYER) or _unknown(layer.self_attn, _ATTENTION):
            raise UnsupportedArchitecture(unknown)
        attention, width = layer.self_attn, self._shape.key_dim
        sizes = [count * width for count in (self._heads, self._shape.heads, self._shape.heads)]
        query, key, value = _parts(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"), sizes)
        before, after = self._norms(layer)
        rotary, by_halves = self._rope(number, table)
        return LayerSpec(
            module=layer,
            kind=self._decoder.kinds[number],
            before=before,
            after=after,
            query=query,
            key=key,
            value=value,
            out=_whole(attention.o_proj),
            head_norms=self._head_norms(attention),
            rotary=rotary,
            by_halves=by_halves,
            params=self._params(number, attention),
            residual=float(getattr(layer, "residual_multiplier", 1.0)),
            mlp=self._mlp(layer.mlp),
        )

    def _params(self, number: int, attention: Any) -> AttentionParams:
        kind = self._decoder.kinds[number]
        sinks = attention.sinks.detach() if kind.sinks else None
        return AttentionParams(float(attention.scaling), kind.window, kind.softcap, sinks)

    def _norms(
        self, layer: Any
    ) -> tuple[tuple[NormSpec | None, NormSpec | None], tuple[NormSpec | None, NormSpec | None]]:
        first, second, third, last = (self._norm(getattr(layer, name, None)) for name in _NORMS)
        have = tuple(norm is not None for norm in (first, second, third, last))
        if have == (True, True, True, True):
            return (first, third), (second, last)
        if have == (True, True, False, False):
            return (first, second), (None, None)
        if have == (False, True, False, True):
            return (None, None), (second, last)
        if have == (True, False, True, False):
            return (first, third), (None, None)
        raise UnsupportedArchitecture(f"{type(layer).__name__} has norms in other places")

    def _head_norms(self, attention: Any) -> tuple[NormSpec, NormSpec] | None:
        query, key = (self._norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm"))
        if query is None and key is None:
            return None
        if query is None or key is None or not (query.is_rms and key.is_rms):
            raise UnsupportedArchitecture(f"{type(attention).__name__} has a q_norm that is no root mean square norm")
        return query, key

    def _norm(self, module: Any) -> NormSpec | None:
        return None if module is None else self._norm_of(module)

    def _norm_of(self, module: Any) -> NormSpec:
        if isinstance(module, RMSNorm):
            return _norm_spec(module, module.epsilon, module.adds_one, module.rounds_first)
        kind, epsilon = type(module).__name__, getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not (kind.endswith("RMSNorm") and isinstance(epsilon, float)) or getattr(module, "weight", None) is None:
            return NormSpec(module, torch.empty(0, dtype=torch.float32), 0.0, False, False)
        adds_one = "Gemma" in kind
        return _norm_spec(module, epsilon, adds_one, not adds_one and kind not in _ROUNDING_LAST)

    def _mlp(self, module: Any) -> GatedMLP | None:
        config, functions = self._decoder.config, (getattr(module, name, None) for name in _ACTIVATION)
        function = next((function for function in functions if callable(function)), None)
        names = {name for name, _ in module.named_children()} - set(_ACTIVATION)
        gated = names in ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
        if not gated or next(module.named_parameters(recurse=False), None) is not None:
            return None
        inner = module.down_proj.in_features
        gate, up = _parts(module, "gate_up_proj", ("gate_proj", "up_proj"), [inner, inner])
        stated = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "")
        activation = ACTIVATIONS.get(str(stated), "")
        function = _FUNCTIONS.get(activation, function)
        return None if function is None else GatedMLP(gate, up, _whole(module.down_proj), activation, function)

    def _rope(self, number: int, table: RopeTables) -> tuple[int, bool]:
        angles = self._decoder.rotary.angles(table, number)
        return (0, True) if angles is None else (angles.cos.shape[-1], not self._decoder.rotary.in_pairs)


def _norm_spec(module: Any, epsilon: float, adds_one: bool, rounds_first: bool) -> NormSpec:
    factor = module.weight.detach().float() + float(adds_one)
    return NormSpec(module, factor.contiguous(), epsilon, adds_one, rounds_first)


def _unknown(module: Any, names: set[str]) -> str:
    parts = (*module.named_children(), *module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    strange = sorted({name for name, _ in parts} - names)
    return f"{type(module).__name__} has {strange[0]}" if strange else ""


def _check_attention(decoder: DecoderStack) -> None:
    if any(kind.tempered for kind in decoder.kinds):
        raise UnsupportedArchitecture("queries grow with their position")
    if getattr(decoder.config, "clip_qkv", None):
        raise UnsupportedArchitecture("queries, keys and values are clipped")
    if decoder.shares:
        raise UnsupportedArchitecture("layers attend to what others keep")
    if any(kind.shape.joint for kind in decoder.kinds):
        raise UnsupportedArchitecture("latents are kept in place of keys and values")
    if decoder.plain_shape is None or not decoder.rotary.names:
        raise UnsupportedArchitecture("layers keep keys and values of different shapes")


def _whole(module: Any) -> Projection:
    if not isinstance(module, torch.nn.Linear):
        raise UnsupportedArchitecture(f"{type(module).__name__} is no plain linear layer")
    return Projection(module, 0, module.out_features)


def _parts(module: Any, fused: str, names: tuple[str, ...], sizes: list[int]) -> list[Projection]:
    if hasattr(module, fused):
        whole = _whole(getattr(module, fused))
        starts = [sum(sizes[:count]) for count in range(len(sizes))]
        parts = [Projection(whole.module, start, size) for start, size in zip(starts, sizes, strict=True)]
        fits = whole.rows == sum(sizes)
    else:
        parts = [_whole(getattr(module, name)) for name in names]
        fits = [part.rows for part in parts] == sizes
    if not fits:
        raise UnsupportedArchitecture(f"{names[0]} and its like have other sizes")
    return parts
