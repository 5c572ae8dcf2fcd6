"""Text submodel of a multimodal checkpoint: its configuration, its class, and the names of its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
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
