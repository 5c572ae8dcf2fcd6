"""Attention kind of each layer of a model that transformers has built: read from the configuration of a listed family.

The layers of another are asked, and compared with its configuration: one row runs through the attention module of a
layer of each kind, up to the attention call and its arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from kvtool.core.checkpoint.architecture import UnlistedArchitecture, read_attention
from kvtool.core.checkpoint.load import Loaded
from kvtool.core.checkpoint.support import context_limit, keeps_states
from kvtool.core.errors import ModelError
from kvtool.core.kernels.attention.params import KV, AttentionParams
from kvtool.core.model.hf.modules import (
    HINT,
    IMPLEMENTATION,
    ForwardEnded,
    LayerProbe,
    attend_latents,
    attentions_of,
    base_of,
    cache_name,
    disable_query_scaling,
    layers_of,
    rows_attention,
)
from kvtool.core.model.prompt_cache import KVShape, LayerKind, Outline, Sample, rotary_of, tables_of

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NEAR = (3, 40)  # positions of one and the same row: do its keys differ?
_ALIKE = {torch.float32: 1e-3, torch.bfloat16: 0.03, torch.float16: 0.01}  # lengths of a query at two positions


def probed(loaded: Loaded) -> Outline:
    """Let a model of transformers attend by `rows_attention` from here on, and ask its layers what they are."""
    from transformers.generation.configuration_utils import GenerationConfig
    from transformers.modeling_utils import AttentionInterface

    model = loaded.model
    AttentionInterface.register(IMPLEMENTATION, rows_attention)
    model.set_attn_implementation(IMPLEMENTATION)
    # Special ids only: Qwen2.5's repetition penalty, for example, works against words of the passages.
    ids = {name: getattr(model.generation_config, name, None) for name in _SPECIAL_IDS}
    model.generation_config = GenerationConfig(**ids)
    base = base_of(model)
    attentions = attentions_of(layers_of(base), in_some=keeps_states(model.config))
    attend_latents([*attentions.values()], IMPLEMENTATION)
    disable_query_scaling([*attentions.values()])
    if stated := stated_kinds(model.config):
        return Outline(base, tuple(attentions), stated)
    kinds, samples = kinds_of(base, attentions, model.config, model.dtype, loaded.device)
    return Outline(base, tuple(attentions), kinds, samples)


def stated_kinds(config: Any) -> tuple[LayerKind, ...]:
    """Return the kinds of a family whose attention is listed (`architecture.py`); empty: its layers have to be asked,
    as where its configuration has a window that is no number of tokens, or that the family does not know."""
    with suppress(UnlistedArchitecture):
        read = read_attention(config.to_dict())
        shape = KVShape(read.kv_heads, read.head_dim, read.head_dim)
        return tuple(
            LayerKind(rotation, window, read.softcap, read.sinks, tempered=False, shape=shape)
            for rotation, window in zip(read.rotations, read.windows, strict=True)
        )
    return ()


def kinds_of(
    base: Any, attentions: Mapping[int, Any], config: Any, dtype: torch.dtype, device: str
) -> tuple[tuple[LayerKind, ...], dict[int, Sample]]:
    """Ask one layer of each kind; return all kinds, and the sample of each asked layer by its number. `base` is the
    decoder without its LM head; layers that only keep a state have no attention module."""
    if not attentions:
        raise ModelError("no layer of the model attends as others do; that would need another way to ask it", HINT)
    names = rotations_of(rotary_of(base), config, 1 + max(attentions))
    positions = (*_NEAR, max(context_limit(config) - 1, *_NEAR))
    by_signature: dict[Any, LayerKind] = {}
    samples: dict[int, Sample] = {}
    kinds: list[LayerKind] = []
    shared = _Shared({}, {})
    for layer, (number, attention) in enumerate(attentions.items()):
        name = names[number]
        alike = _signature(attention, name)
        if alike not in by_signature:
            probed = _probe_attention(base, attention, name, positions, dtype, device, shared)
            shared.note(layer)
            by_signature[alike] = _kind(probed, name)
            samples[layer] = Sample(positions, probed.kv[0][0].float())
        if by_signature[alike].softcap == 0:
            nothing = "so that they are no numbers; that would need a cap above 0, or none"
            raise ModelError(f"layer {number} caps its scores at 0, {nothing}", HINT)
        check_window(base, config, number, by_signature[alike].window)
        kinds.append(by_signature[alike])
    keeps = [kind.source is None for kind in kinds]
    if keeps != sorted(keeps, reverse=True):
        needed = "that would need records of some layers among others"
        raise ModelError(f"layers that keep keys and values follow some that keep none; {needed}", HINT)
    return tuple(kinds), samples


def rotations_of(rotary: Any, config: Any, layers: int) -> list[str | None]:
    """Return the name of each layer's RoPE in a rotary module; "" where it has one for all; None: a layer has none."""
    if rotary is None:
        return [None] * layers
    if "layer_type" not in inspect.signature(type(rotary).forward).parameters:
        return [""] * layers
    rope = config.rope_parameters
    return [kind if rope.get(kind) is not None else None for kind in config.layer_types]


@dataclass(frozen=True, slots=True)
class _Shared:
    """Keys and values that layers share with later ones, by the modules' names for them, and the layers' numbers."""

    states: dict[str, tuple[torch.Tensor, ...]]
    layers: dict[str, int]

    def note(self, layer: int) -> None:
        for name in self.states:
            self.layers.setdefault(name, layer)

    def source_of(self, key: torch.Tensor) -> int | None:
        return next((self.layers[name] for name, (keys, _) in self.states.items() if keys is key), None)

    def taken_by(self, attention: Any) -> dict[str, Any]:
        takes = "shared_kv_states" in inspect.signature(type(attention).forward).parameters
        return {"shared_kv_states": self.states} if takes else {}


@dataclass(frozen=True, slots=True)
class _Probed:
    query: torch.Tensor
    key: torch.Tensor
    params: AttentionParams
    kv: KV  # the keys and values that the layer keeps
    source: int | None  # see `LayerKind`


@torch.inference_mode()
def _probe_attention(
    base: Any, attention: Any, name: str | None, at: tuple[int, ...], dtype: torch.dtype, device: str, shared: _Shared
) -> _Probed:
    width = int(base.config.hidden_size)
    draw = torch.linspace(-1, 1, width, dtype=torch.float32).sin().to(dtype).to(device)
    hidden = draw.expand(1, len(at), width).contiguous()
    positions, probe = torch.tensor(at, device=device), LayerProbe(until="attention")
    tables = None if name is None else tables_of(rotary_of(base), name, hidden, positions)
    try:
        probe.run(
            attention,
            hidden_states=hidden,
            position_embeddings=tables,
            attention_mask=None,
            position_ids=positions[None],
            rows=probe,
            **{cache_name(attention): probe.cache},
            **shared.taken_by(attention),
        )
    except (TypeError, AttributeError, ValueError, LookupError, RuntimeError) as error:
        needed = f"that would need its own arguments given to it ({error})"
        raise ModelError(f"{type(attention).__name__} takes no rows as other attention does; {needed}", HINT) from error
    if probe.attention is None:
        needed = "that would need what it does instead done for single rows"
        raise ModelError(f"{type(attention).__name__} does not ask for attention as others do; {needed}", HINT)
    query, key, value, params = probe.attention
    source = None if probe.kv is not None else shared.source_of(key)
    kv = (key, value) if source is not None else _kept(key, value, probe.kv, attention)
    return _Probed(query, key, params, kv, source)


def _kept(key: torch.Tensor, value: torch.Tensor, given: KV | None, attention: Any) -> KV:
    """Return the keys and values that a layer keeps; refuse one that attends over others (DiffLlama, JetMoE)."""
    if given is None:
        raise ModelError(f"{type(attention).__name__} attends without a cache; that would need one for it", HINT)
    is_joint = key.shape[3] != given[0].shape[3]
    if not is_joint and not (torch.equal(given[0], key) and torch.equal(given[1], value)):
        needed = "that would need the same change made to those that are loaded"
        raise ModelError(f"{type(attention).__name__} attends over other keys and values than it keeps; {needed}", HINT)
    return given


def _kind(probed: _Probed, name: str | None) -> LayerKind:
    (key, value), params = (side[0].float() for side in probed.kv), probed.params
    is_rotated = not torch.equal(key[:, 0], key[:, 1])
    lengths = probed.query[0].float().norm(dim=-1)  # of one row's queries at several positions
    return LayerKind(
        rotation=name if is_rotated else None,
        window=params.window,
        softcap=params.softcap,
        sinks=params.sinks is not None,
        tempered=bool(((lengths / lengths[:, :1] - 1).abs() > _ALIKE[probed.query.dtype]).any()),
        shape=KVShape(key.shape[0], key.shape[2], value.shape[2], joint=probed.key.shape[3] != key.shape[2]),
        source=probed.source,
    )


def _signature(attention: Any, name: str | None) -> tuple[Any, ...]:
    plain = {
        key: value
        for key, value in vars(attention).items()
        if key != "layer_idx" and isinstance(value, (int, float, str, bool, type(None)))
    }
    parts = [child for child, _ in attention.named_children()] + [child for child, _ in attention.named_parameters()]
    return (type(attention), name, tuple(sorted(plain.items(), key=lambda item: item[0])), tuple(parts))


# ---- sliding windows: what a layer asks for, compared with its configuration, which `transformers` masks by ----------


def check_window(base: Any, config: Any, layer: int, window: int | None) -> None:
    """Refuse a layer whose window is none, or another one than its configuration says and its model masks by."""
    if window is not None and window < 1:
        nothing = "so that its rows see nothing; that would need a window of at least their own token"
        raise ModelError(f"layer {layer} has a window of {window} tokens, {nothing}", HINT)
    if _slides(config, layer) and not getattr(config, "sliding_window", None):
        unknown = "of which its configuration has no size; that would need a `sliding_window` in it"
        raise ModelError(f"layer {layer} attends through a window, {unknown}", HINT)
    stated = _stated_window(config, layer)
    if window != stated and (window is not None or _masks(base, config, layer)):
        raise ModelError(
            f"layer {layer} attends over {_window_text(window)}, its configuration says {_window_text(stated)}; "
            "that would need to be known which of them the model was trained with",
            "this family is not known to kvtool; use another model",
        )


def _window_text(window: int | None) -> str:
    return "all tokens" if window is None else f"a window of {window}"


def _stated_window(config: Any, layer: int) -> int | None:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if not window or (types and not _slides(config, layer)):
        return None
    return int(window) if types or getattr(config, "use_sliding_window", True) is not False else None


def _slides(config: Any, layer: int) -> bool:
    types = getattr(config, "layer_types", None) or ()
    return layer < len(types) and types[layer] == "sliding_attention"


def _masks(base: Any, config: Any, layer: int) -> bool:
    """Ask the model for the mask of four tokens under a window of two: its family may not know windows (Llama)."""
    masks: list[torch.Tensor | None] = []

    def stop(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        masks.append(kwargs.get("attention_mask"))
        raise ForwardEnded

    before, ways = config.sliding_window, base.config._attn_implementation
    hook = base.layers[layer].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        config.sliding_window = 2
        base.set_attn_implementation("eager")
        with suppress(ForwardEnded):
            base(input_ids=torch.zeros((1, 4), dtype=torch.int64, device=base.device), use_cache=False)
    finally:
        hook.remove()
        config.sliding_window = before
        base.set_attn_implementation(ways)
    return any(mask is None or bool(mask[0, 0, 3, 0] != mask[0, 0, 3, 3]) for mask in masks or [None])
