"""Architecture of a dense decoder, read from its config.json alone: what is computed without transformers.

A family has a row in `FAMILIES` for what its configuration does not say. A configuration with a setting that is not
known here is not read: transformers builds that model (`load.py`), and its layers are asked what they compute.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

# By the type in config.json: the settings that it has.
SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, slots=True)
class RopeSettings:
    kind: str  # a key of `SCALINGS`
    theta: float
    width: int  # how many numbers of a head are rotated
    scaling: Mapping[str, float]

    def frequencies(self) -> Any:
        """Return the radians per position of each pair, float32 `[width / 2]`."""
        import torch

        steps = torch.arange(0, self.width, 2, dtype=torch.int64).to(torch.float32) / self.width
        frequencies = 1.0 / (self.theta**steps)
        if self.kind == "linear":
            return frequencies / self.scaling["factor"]
        return frequencies if self.kind == "default" else self._by_wavelength(frequencies)

    def _by_wavelength(self, frequencies: Any) -> Any:
        """Divide frequencies whose waves are longer than the context that the model was trained with by a factor, keep
        short ones, and pass smoothly from those to these between (Llama 3.1)."""
        import torch

        factor, low, high, context = (self.scaling[name] for name in SCALINGS["llama3"])
        waves = 2 * math.pi / frequencies
        smooth = (context / waves - low) / (high - low)
        between = (1 - smooth) * frequencies / factor + smooth * frequencies
        long = torch.where(waves > context / low, frequencies / factor, frequencies)
        return torch.where((waves <= context / low) & (waves >= context / high), between, long)


class UnlistedArchitecture(Exception):
    """Raised for a model that only transformers builds; the text is shown."""


_BEFORE = ("input_layernorm", "post_attention_layernorm")
_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
_AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class Family:
    """`norms`: of a layer; with `head_norms`, of its queries and keys, too. `adds_one`: norms multiply by their weight
    plus one. `rounds_first`: to the model's dtype, before a norm multiplies. `scales_embeddings`: by √hidden.
    `windows`: of "all" layers, or of the "listed" ones; `rotates_windows`: only in these, where there are some.
    `sinks`: each head has a score without a key. `settings`: what only this family's configuration has."""

    norms: tuple[str, ...] = _BEFORE
    head_norms: bool = False
    adds_one: bool = False
    rounds_first: bool = True
    scales_embeddings: bool = False
    rope_in_float32: bool = False
    windows: str = ""
    rotates_windows: bool = False
    sinks: bool = False
    settings: frozenset[str] = frozenset()


_GEMMA = Family(adds_one=True, rounds_first=False, scales_embeddings=True)
_CAPPED = replace(
    _GEMMA,
    norms=_AROUND,
    windows="listed",
    settings=frozenset({"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}),
)
_PART = frozenset({"partial_rotary_factor"})
_MULTIPLIERS = frozenset({"attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"})
_LISTED = Family(windows="listed")
FAMILIES = {
    "llama": Family(),
    "mistral": Family(windows="all"),
    "ministral": _LISTED,
    "qwen2": _LISTED,
    "qwen3": replace(_LISTED, head_norms=True),
    "phi3": Family(windows="all", settings=_PART),
    "smollm3": replace(_LISTED, settings=frozenset({"no_rope_layers", "no_rope_layer_interval"})),
    "seed_oss": Family(),
    "olmo2": Family(_AFTER, head_norms=True, rounds_first=False, rope_in_float32=True),
    "gemma": _GEMMA,
    "gemma2": _CAPPED,
    "gemma3_text": replace(_CAPPED, head_norms=True),
    "granite": Family(settings=_MULTIPLIERS),
}
_EXAONE = replace(_LISTED, rotates_windows=True)
# Those too that transformers builds, of which only the attention is read here.
ATTENTIONS = FAMILIES | {
    **dict.fromkeys(("arcee", "aria_text", "flex_olmo", "glm4_moe", "glm4v_moe_text", "hy_v3", "jais2"), Family()),
    **dict.fromkeys(("minimax_m2", "nemotron", "phimoe", "qwen3_vl_text", "qwen3_vl_moe_text", "solar_open"), Family()),
    **dict.fromkeys(("ministral3", "mixtral", "olmoe", "qwen3_moe", "starcoder2"), Family(windows="all")),
    **dict.fromkeys(("cwm", "dots1", "mellum", "olmo3", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text"), _LISTED),
    **{"vaultgemma": _CAPPED, "gpt_oss": replace(_LISTED, sinks=True), "exaone4": _EXAONE, "exaone_moe": _EXAONE},
    "flint": replace(_EXAONE, sinks=True),
}
_READ = frozenset(  # by every family
    "model_type vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps "
    "hidden_act hidden_activation tie_word_embeddings rope_parameters rope_theta rope_scaling max_position_embeddings "
    "original_max_position_embeddings layer_types sliding_window use_sliding_window".split()
)
# Settings of training, of generation and of files; and those that the weights show, such as biases.
_WITHOUT_EFFECT = frozenset(
    "architectures dtype torch_dtype transformers_version cache_implementation "
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id use_cache output_attentions output_hidden_states "
    "return_dict chunk_size_feed_forward problem_type id2label label2id initializer_range attention_dropout embd_pdrop "
    "resid_pdrop dropout residual_dropout intermediate_size attention_bias attention_out_bias mlp_bias pretraining_tp "
    "max_window_layers is_llama_config rope_interleaved unsloth_version".split()
)
_MOST_LAYERS = 1000
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Architecture:
    family: Family
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    activation: str  # "silu" or "gelu_tanh"
    scale: float  # of scores
    softcap: float | None  # of scores
    cap: float | None  # of logits
    embedding: float  # what embeddings are multiplied by
    residual: float  # what the outputs of attention and MLP are multiplied by
    logits_scaling: float
    is_tied: bool
    windows: tuple[int | None, ...]  # by layer: how many positions a row sees
    rotations: tuple[str | None, ...]  # by layer: the name of its RoPE; None: keys are not rotated
    ropes: Mapping[str, RopeSettings]  # by name; "" where there is one for all
    config: Any  # all settings, as attributes


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read the settings of a config.json. Raises UnlistedArchitecture."""
    name = config.get("model_type")
    if (family := FAMILIES.get(str(name))) is None:
        raise UnlistedArchitecture(f"the family {name} is not listed")
    listed = _READ | _WITHOUT_EFFECT | family.settings
    stated = [key for key, value in config.items() if value not in (None, False, 0) and not key.startswith("_")]
    if unknown := sorted(set(stated) - listed):
        raise UnlistedArchitecture(f"the setting {unknown[0]} is not known")
    try:
        return _architecture(family, config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnlistedArchitecture(f"config.json is not as usual: {error!r}") from error


def _architecture(family: Family, config: Mapping[str, Any]) -> Architecture:
    hidden, heads, layers = (int(config[name]) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    if min(hidden, heads, layers) < 1 or layers > _MOST_LAYERS:
        raise UnlistedArchitecture(f"{layers} layers of {heads} heads")
    head_dim = int(config.get("head_dim") or hidden // heads)
    activation = ACTIVATIONS[config.get("hidden_activation") or config["hidden_act"]]
    ropes = _ropes(family, config, head_dim)
    queried = config.get("query_pre_attn_scalar") or head_dim
    return Architecture(
        family=family,
        hidden=hidden,
        vocabulary=int(config["vocab_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        epsilon=float(config["rms_norm_eps"]),
        activation=activation,
        scale=float(config.get("attention_multiplier") or queried**-0.5),
        softcap=config.get("attn_logit_softcapping"),
        cap=config.get("final_logit_softcapping"),
        embedding=hidden**0.5 if family.scales_embeddings else float(config.get("embedding_multiplier", 1.0)),
        residual=float(config.get("residual_multiplier", 1.0)),
        logits_scaling=float(config.get("logits_scaling", 1.0)),
        is_tied=_is_tied(config),
        windows=_windows(family, config, layers),
        rotations=_rotations(config, ropes, layers),
        ropes=ropes,
        config=SimpleNamespace(**config),
    )


@dataclass(frozen=True, slots=True)
class Attention:
    """What `Architecture` has of the same names, and whether heads have sinks."""

    kv_heads: int
    head_dim: int
    softcap: float | None
    sinks: bool
    windows: tuple[int | None, ...]
    rotations: tuple[str | None, ...]


def read_attention(config: Mapping[str, Any]) -> Attention:
    """Read what a configuration of one of `ATTENTIONS` says of its layers. Raises UnlistedArchitecture."""
    if (family := ATTENTIONS.get(str(config.get("model_type")))) is None:
        raise UnlistedArchitecture("the family is not listed")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    if config.get("sliding_window") and not family.windows:
        raise UnlistedArchitecture("the configuration has a window, which the family does not know")
    windows = _windows(family, config, layers)
    stated = config.get("rope_parameters") or {}
    if (softcap := config.get("attn_logit_softcapping")) == 0:
        raise UnlistedArchitecture("scores are capped at 0")
    names = [name for name, rope in stated.items() if isinstance(rope, Mapping)] or [""]
    rotations = _rotations(config, names, layers)
    if family.rotates_windows and any(windows):
        rotations = tuple(name if each else None for name, each in zip(rotations, windows, strict=True))
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return Attention(kv_heads, head_dim, softcap, family.sinks, windows, rotations)


def _is_tied(config: Mapping[str, Any]) -> bool:
    tied = config.get("tie_word_embeddings")
    return bool(tied) if tied is not None else str(config["model_type"]).startswith("gemma")


def _windows(family: Family, config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if not family.windows or config.get("use_sliding_window") is False:
        window = None
    types = _layer_types(config, layers)
    if family.windows == "listed" and types is None and window:
        raise UnlistedArchitecture("which layers have windows is not listed")
    if window is not None and int(window) < 1:
        raise UnlistedArchitecture(f"windows of {window} tokens")
    sliding = [kind == "sliding_attention" for kind in types] if types is not None else [bool(window)] * layers
    if family.windows == "listed" and any(sliding) and not window:
        raise UnlistedArchitecture("layers have windows of a size that is not stated")
    return tuple(int(window) if slides and window else None for slides in sliding)


def _layer_types(config: Mapping[str, Any], layers: int) -> Sequence[str] | None:
    types = config.get("layer_types")
    if types is not None and (len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}):
        raise UnlistedArchitecture("layer_types lists other layers")
    return types


def _rotations(config: Mapping[str, Any], ropes: Collection[str], layers: int) -> tuple[str | None, ...]:
    if set(ropes) != {""}:
        types = _layer_types(config, layers)
        if types is None or not set(types) <= set(ropes):
            raise UnlistedArchitecture("layers have a RoPE that is not listed")
        return tuple(types)
    rotated = config.get("no_rope_layers") or [1] * layers
    if len(rotated) != layers:
        raise UnlistedArchitecture("no_rope_layers lists other layers")
    return tuple("" if rotates else None for rotates in rotated)


def _ropes(family: Family, config: Mapping[str, Any], head_dim: int) -> dict[str, RopeSettings]:
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in stated.values()):
        return {name: _rope(family, config, settings, head_dim) for name, settings in stated.items()}
    return {"": _rope(family, config, stated, head_dim)}


def _rope(family: Family, config: Mapping[str, Any], stated: Mapping[str, Any], head_dim: int) -> RopeSettings:
    kind = stated.get("rope_type", stated.get("type", "default"))
    scaling = SCALINGS.get(kind)
    if scaling is None:
        raise UnlistedArchitecture(f"a RoPE of the type {kind}")
    rest = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if unknown := sorted(set(stated) - rest - set(scaling)):
        raise UnlistedArchitecture(f"the setting {unknown[0]} of its RoPE is not known")
    part = float(stated.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0)
    if part != 1 and not family.settings & _PART:
        raise UnlistedArchitecture("a part of each head is rotated")
    theta = stated.get("rope_theta", config.get("rope_theta"))
    values = {name: float(stated[name]) for name in scaling}
    return RopeSettings(kind, float(10_000.0 if theta is None else theta), int(head_dim * part), values)
