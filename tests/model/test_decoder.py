"""The decoder's own hands on the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtool.core.errors import DamagedError
from kvtool.core.model.prefill import LeadIn, PrefillItem, prefill_chunks
from tests.families import VOCAB, tiny_model
from tests.fusion.making import decoder_of


def test_the_lm_head_gets_rows_with_strides_of_their_own() -> None:
    """With a slice's strides `matmul` takes the batched kernel, which copies the LM head's weight at every call."""
    model = tiny_model("llama")
    decoder = decoder_of(model, "cpu")
    decoder.prefill([1])
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def spy(head: Any, args: tuple[torch.Tensor, ...]) -> None:
        seen.append((args[0].stride(), torch.empty(args[0].shape).stride()))

    model.get_output_embeddings().register_forward_pre_hook(spy)
    decoder.prefill([1, 2, 3, 4, 5])
    assert seen
    assert all(strides == own for strides, own in seen)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_that_the_model_does_not_know_is_told(token: int) -> None:
    """As a damaged store may give one: a GPU would end the process for it."""
    decoder = decoder_of(tiny_model("llama"), "cpu")
    with pytest.raises(DamagedError, match=f"token {token} is none of the model's {VOCAB}"):
        decoder.prefill([1, token, 3])
    with pytest.raises(DamagedError, match="none of the model's"):
        prefill_chunks(decoder, LeadIn(decoder, [1]), [PrefillItem((1, token))])
