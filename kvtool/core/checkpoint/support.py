"""Supported models: those whose KV can be cut, moved and fused, by their configuration; a refusal states its reason.

A multimodal checkpoint holds a whole language model, whose weights have a prefix in their names. That model is built
without the rest, and only its weights are read from the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from kvtool.core.checkpoint.files import tensor_table, weight_files
from kvtool.core.errors import ModelError

_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_BASE = "model."  # prefix of the decoder's weights in a causal model of `transformers`
_CACHES = ("past_key_values", "cache")  # names of the prompt cache in a model's output, by release of `transformers`
_HINT = "use only the text model, or another one"
# Changes of logits that a wrapper could make, by the names that configurations have for them.
_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def text_config(config: Any) -> Any:
    return config if getattr(config, "text_config", None) is None else config.get_text_config(decoder=True)


@dataclass(frozen=True, slots=True)
class TextNames:
    base: str  # prefix of the decoder's weights ("language_model.model.")
    head: str | None  # prefix of "weight" of the LM head; None: the embedding is the head

    @property
    def mapping(self) -> dict[str, str]:
        changes = {self.base: _BASE} | ({} if self.head is None else {self.head: "lm_head."})
        return {f"^{re.escape(old)}": new for old, new in changes.items() if old != new}

    def own(self, name: str) -> str | None:
        """Return a causal model's name for a weight of the files; None: it is no part of the text model."""
        if self.head is not None and name.startswith(self.head):
            return f"lm_head.{name.removeprefix(self.head)}"
        return _BASE + name.removeprefix(self.base) if name.startswith(self.base) else None


@dataclass(frozen=True, slots=True)
class TextSubmodel:
    """The part of a checkpoint that is loaded: a causal language model."""

    config: Any
    kind: Any  # the class that builds it
    names: TextNames | None  # of its weights; None: as the model has them

    def empty(self, dtype: Any) -> Any:
        more = {"trust_remote_code": False} if self.names is None else {}
        build = self.kind.from_config if self.names is None else self.kind._from_config
        return build(self.config, dtype=dtype, attn_implementation="eager", **more)

    def own(self, name: str) -> str | None:
        return name if self.names is None else self.names.own(name)


def text_submodel(folder: Path, config: Any) -> TextSubmodel:
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    text = text_config(config)
    if text is config:
        return TextSubmodel(config, AutoModelForCausalLM, None)
    tables = {name: entry for path in weight_files(folder) for name, entry in tensor_table(path).items()}
    names = names_among(tables, (text.vocab_size, text.hidden_size))
    text.tie_word_embeddings = names.head is None
    return TextSubmodel(text, _causal_class(text, config), names)


def names_among(tables: Mapping[str, Mapping[str, Any]], shape: tuple[int, int]) -> TextNames:
    """Find a text model's weights among those of its wrapper: its embedding is the one of a shape."""
    found = [name for name, entry in tables.items() if name.endswith(_EMBEDDING) and tuple(entry["shape"]) == shape]
    if len(found) != 1:
        needed = "that would need to know which one is the text model's"
        raise ModelError(f"the weights hold {len(found)} embeddings of {shape[0]} tokens; {needed}", _HINT)
    heads = [name.removesuffix("weight") for name in tables if name == _HEAD or name.endswith("." + _HEAD)]
    return TextNames(found[0].removesuffix(_EMBEDDING), min(heads, key=len, default=None))


def _causal_class(text: Any, wrapper: Any) -> Any:
    from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM

    kind = AutoModelForCausalLM._model_mapping.get(type(text), None)
    if kind is not None and getattr(kind, "config_class", None) is type(text):
        return kind
    base = AutoModel._model_mapping.get(type(text), None)
    shaped = [name for name in _LOGITS if getattr(text, name, None) is not None]
    if base is None or shaped:
        why = f"shapes its logits in its wrapper ({shaped[0]})" if shaped else "has no class of its own"
        needed = "that would need its logits made here"
        raise ModelError(f"the text model ({text.model_type}) {why}; {needed}", _HINT)
    return causal_lm_for(base, wrapper.model_type)


@cache
def causal_lm_for(base: Any, wrapper: str) -> Any:
    """Make a causal language model of text models that `transformers` has only inside a multimodal one (Qwen2.5-VL).

    By the type of that wrapper it knows the layout of the weights in files.
    """
    import torch
    from transformers import GenerationMixin, conversion_mapping
    from transformers.core_model_loading import WeightConverter
    from transformers.modeling_outputs import CausalLMOutputWithPast

    family: Any = next(kind for kind in base.__mro__[1:] if kind.__name__.endswith("PreTrainedModel"))

    class CausalLM(family, GenerationMixin):
        config_class = base.config_class
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (as `transformers` has it)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = base(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: Any = None, logits_to_keep: Any = 0, **more: Any) -> CausalLMOutputWithPast:
            out = self.model(input_ids=input_ids, **more)
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            cache = {name: value for name, value in out.items() if name in _CACHES}
            return CausalLMOutputWithPast(logits=self.lm_head(out.last_hidden_state[:, kept]), **cache)

    CausalLM.__name__ = base.__name__.removesuffix("Model") + "ForCausalLM"
    changes = conversion_mapping.get_checkpoint_conversion_mapping(wrapper) or []
    laid_out = [change for change in changes if isinstance(change, WeightConverter)]
    if laid_out:
        conversion_mapping.register_checkpoint_conversion_mapping(CausalLM.__name__, laid_out, overwrite=True)
    return CausalLM


SUPPORTED = (
    "decoder-only models whose keys are rotated by their positions (RoPE), such as Llama, Qwen, Mistral, Gemma, "
    "DeepSeek, gpt-oss, GLM and the text of models that see; `kvtool help models` lists the families that are tested"
)
ONLY_EXACTLY = "use `--fusion prefix` or `--fusion full`"  # with a model that keeps states
Refusal = tuple[str, str]  # what a model is or does, and what support of it would need
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional")
_A_LAYER = "a layer of the prompt cache for such states"
_A_WAY = "another way to move a key"
_FULL = "full_attention"
_CHUNKED = "chunked_attention"
_ATTENTION = (_FULL, "sliding_attention", _CHUNKED, "attention")
_BOTH = "hybrid"  # keys and values and a state in one layer
STATEFUL = frozenset({"linear_attention", "conv", _BOTH})
_KEEPING_NOTHING = frozenset({"moe", "mlp"})
_RECURRENT = (
    *("mamba_d_state", "mamba_d_ssm", "state_size", "ssm_state_size", "conv_L_cache", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "lru_width", "time_mix_extra_dim", "attn_layer_period"),
)


def check_supported(config: Any) -> None:
    text = text_config(config)
    refusals = chain(_modalities(config), _states(text), _masks(text), _positions(text))
    if (refusal := next(refusals, None)) is not None:
        name, (what, needed) = getattr(config, "model_type", "") or type(config).__name__, refusal
        raise ModelError(f"the model ({name}) {what}; that would need {needed}", f"supported: {SUPPORTED}")


def context_limit(config: Any) -> int:
    """Return how many tokens prompt and answer may have together: positions are trained up to there.

    `longrope` rotates a longer prompt by other factors, from its first token on, and so does `dynamic` beyond
    `max_position_embeddings`: stored keys would no longer fit, and a longer prompt is refused. So it is beyond the
    first step at which queries are scaled by their position (Ministral 3, Llama 4): from there on a chunk's values
    depend on its place. And beyond the first attention chunk, which rows of some layers see no further than (Llama 4).
    """
    steps = [
        int(getattr(config, "floor_scale", 0) or 0) - 1 if getattr(config, "attn_temperature_tuning", False) else 0,
        int(getattr(config, "attention_chunk_size", 0) or 0) if _CHUNKED in _layer_types(config) else 0,
    ]
    limits = [_limit(config, rope) for rope in _ropes(config) or [{}]]
    return min([*limits, *(step for step in steps if step > 0)])


def _limit(config: Any, rope: dict[str, Any]) -> int:
    limit = int(getattr(config, "max_position_embeddings", 0) or 0)
    original = int(rope.get("original_max_position_embeddings") or 0)
    if rope.get("rope_type") == "longrope" or rope.get("llama_4_scaling_beta"):
        return min(limit, original or limit)
    if rope.get("rope_type") in ("yarn", "linear") and original:
        return max(limit, int(original * float(rope.get("factor") or 1.0)))
    return limit


def _layer_types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or [])


def _ropes(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    several = [one for one in rope.values() if isinstance(one, dict)]
    return [{**one, "rope_type": one.get("rope_type", one.get("type", "default"))} for one in several or [rope] if one]


def keeps_states(config: Any) -> bool:
    """True if some layer keeps a recurrent state, so that only a prompt's exact beginning is reused."""
    return not STATEFUL.isdisjoint(_layer_types(config))


def kv_layers(config: Any) -> int:
    return int(config.num_hidden_layers) - int(getattr(config, "num_kv_shared_layers", 0) or 0)


def _modalities(config: Any) -> Iterator[Refusal]:
    if getattr(config, "is_encoder_decoder", False):
        yield "is an encoder-decoder", "keys of a text that an encoder has read whole to be moved"
    parts = [name for name in ("vision_config", "audio_config") if getattr(config, name, None) is not None]
    if parts and getattr(config, "text_config", None) is None:
        what = f"has no text model apart from what it sees or hears ({', '.join(parts)})"
        yield what, "a text model of its own among its weights"


def _states(config: Any) -> Iterator[Refusal]:
    layers = set(_layer_types(config))
    if layers & STATEFUL:
        if other := layers - STATEFUL - _KEEPING_NOTHING - {_FULL}:
            yield f"keeps a recurrent state besides {', '.join(sorted(other))}", _A_LAYER
        if not layers & {_FULL, _BOTH}:
            yield "keeps a recurrent state in every layer, and keys in none", _A_LAYER
    elif not layers:
        names = (name for name in _RECURRENT if getattr(config, name, None) is not None)
        yield from ((f"keeps a recurrent state ({name})", _A_LAYER) for name in names)


def _masks(config: Any) -> Iterator[Refusal]:
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):  # of images only
        yield "uses bidirectional attention", "a mask that is not causal"
    if getattr(config, "cross_attention_layers", None):
        yield "has layers that attend to images", "images"
    if getattr(config, "altup_num_inputs", 0):
        what = "computes several hidden states of every token (altup_num_inputs)"
        yield what, "each of them to be cut with its chunk"
    for sparse in ("index_topk", "keep_window_size"):
        if getattr(config, sparse, None):
            yield f"chooses keys by their content ({sparse})", "records that hold what tokens are chosen by, too"


def _positions(config: Any) -> Iterator[Refusal]:
    if keeps_states(config):  # nothing of it is moved
        return
    if kinds := sorted(set(_layer_types(config)) - set(_ATTENTION)):
        yield f"has layers of an unknown kind ({', '.join(kinds)})", "to know what their rows see and keep"
    if getattr(config, "alibi", False) or getattr(config, "use_alibi", False):
        yield "marks positions by ALiBi, not RoPE", _A_WAY
    if not _ropes(config):
        yield "has no rotary positions (RoPE), so a key cannot be moved", _A_WAY
    for rope in _ropes(config):
        if rope["rope_type"] not in _ROPE_TYPES:
            yield f"scales its RoPE in an unknown way ({rope['rope_type']})", "to know how its keys are rotated"
    is_hybrid = getattr(config, "mamba_d_state", None) is not None  # built without recurrent layers and positions
    if is_hybrid and getattr(config, "position_embedding_type", "rope") != "rope":
        yield "has no rotary positions (RoPE) in use", _A_WAY


_WIDE = ("vocab_size", "intermediate_size", "moe_intermediate_size")  # rows or columns of a matrix of hidden states
_MANY = ("num_experts", "num_local_experts", "n_routed_experts")  # that have such a matrix each
_IN_A_BYTE = 8  # weights that a packed integer may hold


def check_extent(source: Path, config: Any, tensors: Sequence[Mapping[str, Any]] | None = None) -> None:
    """Refuse a model that is far larger than its weights. `tensors`: shapes and dtypes of a file, else the folder's."""
    text, tables = text_config(config), _tables(source) if tensors is None else tensors
    held, width = _elements(tables), max(1, _number(text, "hidden_size"))
    described = {name: (_number(text, name) * width, held) for name in (*_WIDE, *_MANY)}
    described["num_hidden_layers"] = _number(text, "num_hidden_layers"), len(tables)
    for name, (wanted, most) in described.items():
        if wanted > most:
            raise _too_large(source, f"{name} = {_number(text, name):,}")


def check_laid_out(folder: Path, text: TextSubmodel) -> None:
    """Refuse a model far larger than its files, before the loader fills it with random numbers."""
    import torch

    with torch.device("meta"):
        empty = text.empty(torch.bfloat16)
    wanted = sum(weights.numel() for weights in {id(one): one for one in empty.parameters()}.values())
    if wanted > 2 * _elements(_tables(folder)):
        raise _too_large(folder, f"{wanted:,} weights")


def _number(config: Any, name: str) -> int:
    value = getattr(config, name, None) or 0
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ModelError(f"config.json asks for {name} = {str(value)[:80]}", "download the model again")
    return max(numbers)


def _tables(folder: Path) -> list[Mapping[str, Any]]:
    return [entry for path in weight_files(folder) for entry in tensor_table(path).values()]


def _elements(tables: Iterable[Mapping[str, Any]]) -> int:
    return sum(prod(entry["shape"]) * (1 if "F" in entry["dtype"] else _IN_A_BYTE) for entry in tables)


def _too_large(source: Path, what: str) -> ModelError:
    return ModelError(f"{source} describes a larger model than its weights are: {what}", "download the model again")
