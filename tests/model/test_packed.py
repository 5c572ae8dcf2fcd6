"""Packed weights give the same numbers, bit for bit, and are said to be what they are."""

from __future__ import annotations

import pytest
import torch

from kvtool.core.model.packed import can_pack, keep_freed_memory, pack_weights, return_freed_memory
from tests.families import FAMILIES, tiny_model

IDS = torch.arange(5, 60)[None]
needed = pytest.mark.skipif(not can_pack(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="no bfloat16 layout here")


@needed
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("rows", [1, 55])
def test_the_same_bits(name: str, rows: int) -> None:
    plain, packed = tiny_model(name, "bfloat16"), tiny_model(name, "bfloat16")
    assert pack_weights(packed) > 0
    with torch.inference_mode():
        assert torch.equal(plain(IDS[:, :rows]).logits, packed(IDS[:, :rows]).logits)


@needed
def test_shapes_stay_known_and_memory_does_not() -> None:
    model = tiny_model("llama", "bfloat16")
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    pack_weights(model)
    assert {name: tuple(weight.shape) for name, weight in model.named_parameters()} == shapes
    assert model.model.layers[0].mlp.up_proj.weight.is_meta
    assert not model.get_input_embeddings().weight.is_meta


def test_other_dtypes_are_left_alone() -> None:
    model = tiny_model("llama", "float32")
    assert pack_weights(model) == 0
    assert not any(weight.is_meta for weight in model.parameters())


def test_keeping_memory_can_be_asked_for_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_freed_memory()
    return_freed_memory()
    monkeypatch.setattr("sys.platform", "win32")
    keep_freed_memory()
    return_freed_memory()
