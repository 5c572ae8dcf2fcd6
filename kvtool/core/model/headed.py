"""A causal language model made of a decoder that `transformers` has only inside a multimodal one (Qwen2.5-VL)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvtool.core.model.modules import cache_name


@cache
def headed(decoder: Any, wrapper: str) -> Any:
    """Make a class of a decoder's, with an LM head that gives logits as they are.

    Parameters
    ----------
    decoder : a class of text models in `transformers`, whose configuration states `hidden_size` and `vocab_size`.
    wrapper : the type of the multimodal model, by which `transformers` knows how its weights are laid out in files.
    """
    family: Any = next(kind for kind in decoder.__mro__[1:] if kind.__name__.endswith("PreTrainedModel"))

    class Headed(family, GenerationMixin):
        config_class = decoder.config_class
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (as `transformers` has it)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = decoder(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self,
            input_ids: torch.Tensor | None = None,
            logits_to_keep: int | torch.Tensor = 0,
            **more: Any,
        ) -> CausalLMOutputWithPast:
            """Logits of the last rows, or of those that are named; 0: of all."""
            out = self.model(input_ids=input_ids, **more)
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            name = cache_name(self.model)
            return CausalLMOutputWithPast(logits=self.lm_head(out.last_hidden_state[:, kept]), **{name: out[name]})

    Headed.__name__ = decoder.__name__.removesuffix("Model") + "ForCausalLM"
    laid_out = [
        change for change in get_checkpoint_conversion_mapping(wrapper) or [] if isinstance(change, WeightConverter)
    ]
    if laid_out:
        register_checkpoint_conversion_mapping(Headed.__name__, laid_out, overwrite=True)
    return Headed
