"""The text model of a multimodal checkpoint: what of the configuration is its own, its class, and its weights' names.

A wrapper for images holds a whole language model, its layers under a name of the wrapper's. That model is built alone;
of the files only its weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvtool.core.checkpoint.files import tensor_table, weight_files
from kvtool.core.errors import ModelError

_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_BASE = "model."  # where a causal model of `transformers` has its decoder
_CACHES = ("past_key_values", "cache")  # names of the prompt cache in a model's output, by release of `transformers`
_HINT = "use the text model alone, or another one"
# What a wrapper could do to logits, by the names that configurations have for it: only its own head would know.
_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def text_part(config: Any) -> Any:
    """The configuration of the model that writes text: a wrapper's `text_config`, or the configuration itself."""
    return config if getattr(config, "text_config", None) is None else config.get_text_config(decoder=True)


@dataclass(frozen=True, slots=True)
class TextNames:
    """How the files of a checkpoint call the weights of its text model.

    Attributes
    ----------
    base : what stands before the names of the decoder's weights ("language_model.model.").
    head : before "weight" of the LM head, or None where it is the embedding.
    """

    base: str
    head: str | None

    def own(self, name: str) -> str | None:
        """What a causal model calls a weight of the files; None: it is no part of the text model."""
        if self.head is not None and name.startswith(self.head):
            return f"lm_head.{name.removeprefix(self.head)}"
        return _BASE + name.removeprefix(self.base) if name.startswith(self.base) else None


@dataclass(frozen=True, slots=True)
class Part:
    """What of a checkpoint is loaded.

    Attributes
    ----------
    config, kind : of the causal language model, and the class that builds it.
    names : of its weights; None: as the model has them.
    """

    config: Any
    kind: Any
    names: TextNames | None

    @property
    def mapping(self) -> dict[str, str] | None:
        """Patterns of the files' names, and what stands in the model's for them."""
        if self.names is None:
            return None
        heads = {} if self.names.head is None else {self.names.head: "lm_head."}
        changes = {self.names.base: _BASE} | heads
        return {f"^{re.escape(old)}": new for old, new in changes.items() if old != new}

    def empty(self, dtype: Any) -> Any:
        """Build the model without its weights."""
        more = {"trust_remote_code": False} if self.names is None else {}
        build = self.kind.from_config if self.names is None else self.kind._from_config
        return build(self.config, dtype=dtype, attn_implementation="eager", **more)

    def own(self, name: str) -> str | None:
        """What the model calls a weight of the files; None: it has none such."""
        return name if self.names is None else self.names.own(name)


def wanted_part(folder: Path, config: Any) -> Part:
    """Say what of a checkpoint is the model that writes text.

    Parameters
    ----------
    config : the checkpoint's, supported.

    Raises
    ------
    ModelError : the weights of a wrapper's text model are not found, or nothing is known that could run them.
    """
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    text = text_part(config)
    if text is config:
        return Part(config, AutoModelForCausalLM, None)
    names = text_names(folder, text)
    text.tie_word_embeddings = names.head is None
    return Part(text, _causal_class(text, config), names)


def text_names(folder: Path, config: Any) -> TextNames:
    """Find a text model's weights among those of its wrapper: its embedding has the shape that `config` states.

    Parameters
    ----------
    config : of the text model.

    Raises
    ------
    ModelError : none is there, or several.
    """
    tables = {name: entry for path in weight_files(folder) for name, entry in tensor_table(path).items()}
    return names_among(tables, (config.vocab_size, config.hidden_size))


def names_among(tables: Mapping[str, Mapping[str, Any]], shape: tuple[int, int]) -> TextNames:
    """Do what `text_names` does, among the tables of files."""
    found = [name for name, entry in tables.items() if name.endswith(_EMBEDDING) and tuple(entry["shape"]) == shape]
    if len(found) != 1:
        needed = "that would need to be told which one is the text model's"
        raise ModelError(f"the weights hold {len(found)} embeddings of {shape[0]} tokens; {needed}", _HINT)
    base = found[0].removesuffix(_EMBEDDING)
    return TextNames(base, _head(tables, shape))


def _head(names: Iterable[str], shape: tuple[int, int]) -> str | None:
    heads = [name for name in names if name == _HEAD or name.endswith("." + _HEAD)]
    return min(heads, key=len).removesuffix("weight") if heads else None


def _causal_class(text: Any, wrapper: Any) -> Any:
    """The class of a causal language model for the configuration of a text model; made here where there is none.

    Raises
    ------
    ModelError : it has none that could be made.
    """
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
def causal_lm_for(decoder: Any, wrapper: str) -> Any:
    """Make a causal language model's class of a decoder's, with an LM head that gives logits as they are.

    Parameters
    ----------
    decoder : a class of text models in `transformers`, whose configuration states `hidden_size` and `vocab_size`;
        `transformers` has some only inside a multimodal model (Qwen2.5-VL).
    wrapper : the type of the multimodal model, by which `transformers` knows how its weights are laid out in files.
    """
    import torch
    from transformers import GenerationMixin
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.core_model_loading import WeightConverter
    from transformers.modeling_outputs import CausalLMOutputWithPast

    family: Any = next(kind for kind in decoder.__mro__[1:] if kind.__name__.endswith("PreTrainedModel"))

    class CausalLM(family, GenerationMixin):
        config_class = decoder.config_class
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (as `transformers` has it)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = decoder(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: Any = None, logits_to_keep: Any = 0, **more: Any) -> CausalLMOutputWithPast:
            """Compute the logits of the last rows, or of those that are named; 0: of all."""
            out = self.model(input_ids=input_ids, **more)
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            cache = {name: value for name, value in out.items() if name in _CACHES}
            return CausalLMOutputWithPast(logits=self.lm_head(out.last_hidden_state[:, kept]), **cache)

    CausalLM.__name__ = decoder.__name__.removesuffix("Model") + "ForCausalLM"
    laid_out = [
        change for change in get_checkpoint_conversion_mapping(wrapper) or [] if isinstance(change, WeightConverter)
    ]
    if laid_out:
        register_checkpoint_conversion_mapping(CausalLM.__name__, laid_out, overwrite=True)
    return CausalLM
