"""Unmodified `transformers`, over a prompt or over given keys and values of its context."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from tests.fusion.making import Case, plain_model, swapped


def past_of(one: Case, layers: Iterable[tuple[torch.Tensor, torch.Tensor]], length: int) -> DynamicCache:
    past = DynamicCache()
    for number, sides in enumerate(layers):
        past.update(*swapped(one.decoder.model, *(side[:, :, :length].clone() for side in sides)), number)
    return past


def run_plain(one: Case, ids: Sequence[int], past: DynamicCache | None = None, **more: Any) -> Any:
    seen = past.get_seq_length() if past is not None else 0
    positions, model = torch.arange(seen, seen + len(ids))[None], plain_model(one.name, one.dtype)
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), position_ids=positions, past_key_values=past, **more)


def attention_of(one: Case, ids: Sequence[int], past: DynamicCache | None = None) -> list[torch.Tensor]:
    """Weights `[heads, rows, keys]` of each layer."""
    return [weights[0].double() for weights in run_plain(one, ids, past, output_attentions=True).attentions]
