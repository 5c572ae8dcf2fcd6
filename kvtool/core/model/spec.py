"""Model spec: what each layer of a model computes, read once off its modules, for every fast path alike.

A family is not known by name. A layer has a spec if every module of it is one that is known here, and what cannot be
seen from outside is tried: what a norm does with its weight, which function an MLP's gate is, how heads are rotated.
What a path computes by a spec is compared with the model's own forward in any case (`trial.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.nn.functional as F

from kvtool.core.errors import ModelError
from kvtool.core.model.kinds import LayerKind, angles_of, rotary_of
from kvtool.core.model.trial import UnsupportedArchitecture

if TYPE_CHECKING:
    from kvtool.core.kernels.rope import RopeTables
    from kvtool.core.model.decoder import Decoder

_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_LAYER = {"self_attn", "mlp", *_NORMS, "resid_attn_dropout", "resid_mlp_dropout"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"}
_ACTIVATION = ("act_fn", "activation_fn")
_MLP = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", *_ACTIVATION}
_BASE = {"embed_tokens", "layers", "norm", "rotary_emb"}
_CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_TRIED_POSITION = 37
P = TypeVar("P")
Q = TypeVar("Q")


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """Rows `first` … `first + rows` of a linear layer's weight: all of them, or one of several fused products."""

    module: Any
    first: int
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class NormSpec:
    """A norm.

    Attributes
    ----------
    weight : float32: what a root mean square norm multiplies by; empty: another norm, which only its module computes.
    epsilon : what is added to the mean square.
    adds_one : whether its module keeps the weight less one (Gemma).
    rounds_first : whether the normed number is rounded to the model's dtype before it is multiplied (Llama), or the
        product only (Gemma, OLMo 2).
    """

    module: Any
    weight: torch.Tensor
    epsilon: float
    adds_one: bool
    rounds_first: bool

    @property
    def is_rms(self) -> bool:
        """Return True for a root mean square norm."""
        return self.weight.numel() > 0


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP(Generic[P]):
    """down · (function(gate · x) * (up · x)); `activation`: "silu", "gelu_tanh", or "" for another function."""

    gate: P
    up: P
    down: P
    activation: str
    function: Callable[[torch.Tensor], torch.Tensor]

    def with_linears(self, change: Callable[[P], Q]) -> GatedMLP[Q]:
        """Return the same MLP with its products as another path keeps them."""
        return GatedMLP(change(self.gate), change(self.up), change(self.down), self.activation, self.function)


@dataclass(frozen=True, slots=True, eq=False)
class LayerSpec(Generic[P]):
    """One decoder layer.

    Attributes
    ----------
    kind : of its attention: RoPE, window.
    before : norms in front of attention and MLP; `after`: behind them, before the sum. None where there is none.
    head_norms : of queries and keys: over each head (Qwen3), or over all of them together (OLMo 2).
    rotary : how many numbers of a head are rotated; 0: none. `by_halves`: number i with the one half of them further
        on, as is usual.
    scale : of the scores.
    residual : what the outputs of attention and MLP are multiplied by.
    mlp : None: something else, which only its module computes (experts).
    """

    module: Any
    kind: LayerKind
    before: tuple[NormSpec | None, NormSpec | None]
    after: tuple[NormSpec | None, NormSpec | None]
    query: P
    key: P
    value: P
    out: P
    head_norms: tuple[NormSpec, NormSpec] | None
    rotary: int
    by_halves: bool
    scale: float
    residual: float
    mlp: GatedMLP[P] | None

    @property
    def norms(self) -> Iterator[NormSpec]:
        """Return all its norms."""
        yield from (norm for norm in (*self.before, *self.after, *(self.head_norms or ())) if norm is not None)

    @property
    def normed_by_head(self) -> bool:
        """Return True where queries and keys are normed head by head."""
        return self.head_norms is not None and self.head_norms[0].weight.numel() == self.kind.shape.key_dim

    def gated_mlp(self) -> GatedMLP[P]:
        """Return its MLP.

        Raises
        ------
        UnsupportedArchitecture : it has another one.
        """
        if self.mlp is None:
            module = self.module.mlp
            raise UnsupportedArchitecture(_unknown(module, _MLP) or f"{type(module).__name__} has no gate")
        return self.mlp

    @property
    def linears(self) -> tuple[P, ...]:
        """Return all its products that are known."""
        mlp = () if self.mlp is None else (self.mlp.gate, self.mlp.up, self.mlp.down)
        return (self.query, self.key, self.value, self.out, *mlp)

    def with_linears(self, change: Callable[[P], Q]) -> LayerSpec[Q]:
        """Return the same layer with its products as another path keeps them."""
        mlp, (query, key, value, out) = self.mlp, map(change, (self.query, self.key, self.value, self.out))
        return LayerSpec(
            *(self.module, self.kind, self.before, self.after, query, key, value, out),
            *(self.head_norms, self.rotary, self.by_halves, self.scale, self.residual),
            None if mlp is None else mlp.with_linears(change),
        )


@dataclass(frozen=True, slots=True, eq=False)
class ModelSpec(Generic[P]):
    """A whole model, all of whose layers have keys and values of one shape.

    Attributes
    ----------
    embedding : what a token's embedding is multiplied by; `logits`: what the logits are.
    rope_in_float32 : whether cos and sin are float32 whatever the model computes in (OLMo 2).
    unknown : a module between embedding and head that is not known here, or "".
    """

    layers: tuple[LayerSpec[P], ...]
    norm: NormSpec
    head: P
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    embedding: float
    logits: float
    rope_in_float32: bool
    unknown: str

    @property
    def activation(self) -> str:
        """Return the one function of all gated MLPs, "silu" where there are none.

        Raises
        ------
        UnsupportedArchitecture : they have several, or one that no machine code is made for.
        """
        found = {layer.mlp.activation for layer in self.layers if layer.mlp is not None} or {"silu"}
        if len(found) != 1 or "" in found:
            raise UnsupportedArchitecture("an MLP has another activation")
        return found.pop()

    def check_halves(self) -> None:
        """Refuse a model that rotates heads otherwise than by halves, which is what all machine code here does."""
        if not all(layer.by_halves for layer in self.layers):
            raise UnsupportedArchitecture("heads are not rotated in halves")

    def with_linears(self, change: Callable[[P], Q]) -> ModelSpec[Q]:
        """Return the same model with its products as another path keeps them."""
        return ModelSpec(
            layers=tuple(layer.with_linears(change) for layer in self.layers),
            norm=self.norm,
            head=change(self.head),
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            embedding=self.embedding,
            logits=self.logits,
            rope_in_float32=self.rope_in_float32,
            unknown=self.unknown,
        )


def read_model_spec(decoder: Decoder) -> ModelSpec[Projection]:
    """Read a model.

    Raises
    ------
    UnsupportedArchitecture : its layers compute something that no fast path knows.
    """
    try:
        return _Reader(decoder).model()
    except (AttributeError, ValueError, RuntimeError, TypeError, ModelError) as error:  # modules that only look known
        raise UnsupportedArchitecture(str(error)) from error


class _Reader:
    """Reads the layers of one model; the first norm of a class is tried, the others are of the same code."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        _check_attention(decoder)
        self._shape = decoder.shapes[0]
        self._heads = int(decoder.config.num_attention_heads)
        self._norm_kinds: dict[tuple[type, torch.dtype], tuple[bool, bool] | None] = {}
        self._functions: dict[Any, str] = {}

    def model(self) -> ModelSpec[Projection]:
        decoder = self._decoder
        base, config, shape = decoder.base, decoder.config, self._shape
        table = decoder.rotary.table(torch.tensor([_TRIED_POSITION], device=decoder.device))
        layers = tuple(self._layer(number, layer, table) for number, layer in enumerate(decoder.layers))
        return ModelSpec(
            layers=layers,
            norm=self._norm_of(base.norm),
            head=_whole(decoder.model.get_output_embeddings()),
            hidden=config.hidden_size,
            heads=self._heads,
            kv_heads=shape.heads,
            head_dim=shape.key_dim,
            embedding=float(getattr(base, "embedding_multiplier", 1.0)),
            logits=1.0 / float(getattr(config, "logits_scaling", 1.0)),
            rope_in_float32=self._angles().dtype == torch.float32,
            unknown=_unknown(base, _BASE),
        )

    def _angles(self) -> torch.Tensor:
        """Return a cosine as the model's own layers are given it."""
        like = torch.empty(0, dtype=self._decoder.dtype, device=self._decoder.device)
        at = torch.tensor([_TRIED_POSITION], device=self._decoder.device)
        return angles_of(rotary_of(self._decoder.base), self._decoder.rotary.names[0], like, at)[0]

    def _layer(self, number: int, layer: Any, table: RopeTables) -> LayerSpec[Projection]:
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
            scale=float(attention.scaling),
            residual=float(getattr(layer, "residual_multiplier", 1.0)),
            mlp=self._mlp(layer.mlp),
        )

    def _norms(
        self, layer: Any
    ) -> tuple[tuple[NormSpec | None, NormSpec | None], tuple[NormSpec | None, NormSpec | None]]:
        """Read the norms before and behind attention and MLP: most families have the first, OLMo 2 the second, Gemma 3
        both."""
        first, second, third, last = (self._norm(getattr(layer, name, None)) for name in _NORMS)
        have = tuple(norm is not None for norm in (first, second, third, last))
        if have == (True, True, True, True):
            return (first, third), (second, last)
        if have == (True, True, False, False):
            return (first, second), (None, None)
        if have == (False, True, False, True):
            return (None, None), (second, last)
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
        weight: Any = getattr(module, "weight", None)
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        found = None
        if isinstance(epsilon, float) and getattr(weight, "ndim", 0) == 1 and getattr(module, "bias", None) is None:
            known = type(module), weight.dtype
            if known not in self._norm_kinds:
                self._norm_kinds[known] = _tried_norm(module, epsilon)
            found = self._norm_kinds[known]
        if found is None or epsilon is None:
            return NormSpec(module, torch.empty(0, dtype=torch.float32), 0.0, False, False)
        adds_one, rounds_first = found
        factor = weight.detach().float() + float(adds_one)
        return NormSpec(module, factor.contiguous(), epsilon, adds_one, rounds_first)

    def _mlp(self, module: Any) -> GatedMLP[Projection] | None:
        function = next((one for name in _ACTIVATION if callable(one := getattr(module, name, None))), None)
        names = {name for name, _ in module.named_children()} - set(_ACTIVATION)
        gated = names in ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
        if function is None or not gated or next(module.named_parameters(recurse=False), None) is not None:
            return None
        inner = module.down_proj.in_features
        gate, up = _parts(module, "gate_up_proj", ("gate_proj", "up_proj"), [inner, inner])
        kind = type(function) if isinstance(function, torch.nn.Module) else function
        if kind not in self._functions:
            self._functions[kind] = _activation(function, self._decoder.device)
        return GatedMLP(gate, up, _whole(module.down_proj), self._functions[kind], function)

    def _rope(self, number: int, table: RopeTables) -> tuple[int, bool]:
        """Try how many numbers of a head a layer rotates, and whether it does so in halves."""
        rotary = self._decoder.rotary
        angles = rotary.angles(table, number)
        if angles is None:
            return 0, True
        width, half = angles.cos.shape[-1], angles.cos.shape[-1] // 2
        probe = torch.linspace(-1, 1, self._shape.key_dim, dtype=torch.float32, device=self._decoder.device)[
            None, None, None
        ]
        turned = torch.cat([-probe[..., half:width], probe[..., :half]], -1)
        halves = torch.cat([probe[..., :width] * angles.cos + turned * angles.sin, probe[..., width:]], -1)
        found = rotary.rotate(probe, table, number)
        return width, torch.allclose(found.cpu(), halves.cpu(), atol=1e-6)


def _unknown(module: Any, known: set[str]) -> str:
    """Name a part of a module that is not among those known here; "": there is none."""
    own = (*module.named_children(), *module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    strange = sorted({name for name, _ in own} - known)
    return f"{type(module).__name__} has {strange[0]}" if strange else ""


def _check_attention(decoder: Decoder) -> None:
    """Take layers only whose scores are plain ones, and whose keys and values have one shape."""
    if any(kind.softcap is not None or kind.sinks for kind in decoder.kinds):
        raise UnsupportedArchitecture("capped scores or sinks")
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
    """Read several products of one input: matrices of their own, or rows of one matrix."""
    if hasattr(module, fused):
        whole = _whole(getattr(module, fused))
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        found = [Projection(whole.module, start, size) for start, size in zip(starts, sizes, strict=True)]
        fits = whole.rows == sum(sizes)
    else:
        found = [_whole(getattr(module, name)) for name in names]
        fits = [one.rows for one in found] == sizes
    if not fits:
        raise UnsupportedArchitecture(f"{names[0]} and its like have other sizes")
    return found


def _tried_norm(module: Any, epsilon: float) -> tuple[bool, bool] | None:
    """Try what a norm does with its weight: whether it adds one, and whether it rounds first; None: it is another norm.

    The trial is of a copy whose weights are no ones, which would not tell.
    """
    weight = module.weight
    probe, factor = (
        torch.linspace(first, last, weight.numel(), dtype=torch.float32).to(weight.device, weight.dtype)
        for first, last in ((-2, 3), (0.5, 2))
    )
    tried = copy.copy(module)
    tried._parameters = {**module._parameters, "weight": torch.nn.Parameter(factor, requires_grad=False)}
    with torch.inference_mode():
        given = tried(probe)
        plain = probe.float() * torch.rsqrt(probe.float().square().mean() + epsilon)
        for adds_one in (False, True):
            multiplied = factor.float() + float(adds_one)
            once = (plain * multiplied).to(weight.dtype)
            if _apart(given, once) <= _CLOSE[weight.dtype]:
                twice = (plain.to(weight.dtype).float() * multiplied).to(weight.dtype)
                return adds_one, bool((given != twice).sum() <= (given != once).sum())
    return None


def _apart(given: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((given.float() - wanted.float()).abs().max() / wanted.float().abs().max())


def _activation(function: Callable[[torch.Tensor], torch.Tensor], device: str) -> str:
    """Try which function a gate goes through, by what it gives; "": one that no machine code is made for."""
    probe = torch.linspace(-6, 6, 49, dtype=torch.float32, device=device)
    known: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": F.silu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    with torch.inference_mode():
        given = function(probe)
        alike = [name for name, one in known.items() if torch.allclose(given, one(probe), rtol=1e-5, atol=1e-6)]
    return alike[0] if alike else ""
