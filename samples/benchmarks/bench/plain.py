"""A plain call of the model that a decoder runs, by the attention of `transformers`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvtool.core.checkpoint.load import plain_attention
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.hf.modules import IMPLEMENTATION


@contextmanager
def attention_of_transformers(decoder: Decoder) -> Iterator[None]:
    """Let the model attend by `transformers`' default attention inside, without gradients of its parameters."""
    gradients = [(parameter, parameter.requires_grad) for parameter in decoder.model.parameters()]
    decoder.model.set_attn_implementation(plain_attention(decoder.model))
    decoder.model.requires_grad_(False)
    try:
        yield
    finally:
        decoder.model.set_attn_implementation(IMPLEMENTATION)
        for parameter, required in gradients:
            parameter.requires_grad_(required)
