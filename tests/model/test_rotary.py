"""Keys lose their position and get another one, as the model itself would rotate them."""

from __future__ import annotations

import sys

import pytest
import torch

from kvtool.core.errors import ModelError
from kvtool.core.model.rotary import _model_function
from tests.fusion.making import NAMES, case

POSITIONS = torch.tensor([0, 1, 5, 77, 1000, 1999])


def keys_of(name: str, dtype: str = "float32") -> torch.Tensor:
    decoder = case(name, dtype).decoder
    shape = (1, decoder.kv_heads, len(POSITIONS), decoder.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(decoder.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_as_the_model_rotates(name: str) -> None:
    decoder, keys = case(name).decoder, keys_of(name)
    cos, sin = decoder.base.rotary_emb(keys, position_ids=POSITIONS[None])
    module = sys.modules[type(decoder.layers[0].self_attn).__module__]
    expected = module.apply_rotary_pos_emb(keys, keys, cos, sin)[1]
    for layer in range(len(decoder.layers)):
        moved = decoder.rotary.rotate(keys, decoder.rotary.table(POSITIONS), layer)
        without = name == "smollm3" and layer == 1
        torch.testing.assert_close(moved, keys if without else expected)


@pytest.mark.parametrize("name", NAMES)
def test_off_and_on_again(name: str) -> None:
    rotary, keys = case(name).decoder.rotary, keys_of(name)
    table = rotary.table(POSITIONS)
    torch.testing.assert_close(
        rotary.rotate(rotary.rotate(keys, table.inverse(), 0), table, 0), keys, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("name", NAMES)
def test_scores_depend_on_the_distance_alone(name: str) -> None:
    """A key and a query moved by the same number of positions have the same product."""
    rotary, keys = case(name).decoder.rotary, keys_of(name)
    query, key = keys[:, :, :1], keys[:, :, 1:2]

    def product(at: int) -> torch.Tensor:
        ends = [rotary.table(torch.tensor([position])) for position in (at + 10, at)]
        return (rotary.rotate(query, ends[0], 0) * rotary.rotate(key, ends[1], 0)).sum(-1)

    torch.testing.assert_close(product(0), product(900), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_rounded_once(name: str) -> None:
    """In bfloat16 a key goes through float32 and is rounded at the end."""
    rotary, keys = case(name, "bfloat16").decoder.rotary, keys_of(name, "bfloat16")
    table = rotary.table(POSITIONS)
    moved = rotary.rotate(keys, table, 0)
    assert moved.dtype == torch.bfloat16
    assert torch.equal(moved, rotary.rotate(keys.float(), table, 0).bfloat16())


def test_a_copy_is_rotated() -> None:
    rotary, keys = case("llama").decoder.rotary, keys_of("llama")
    before = keys.clone()
    rotary.rotate(keys, rotary.table(POSITIONS), 0)
    assert torch.equal(keys, before)


def test_a_table_by_rows() -> None:
    rotary, keys = case("llama").decoder.rotary, keys_of("llama")
    whole = rotary.rotate(keys, rotary.table(POSITIONS), 0)
    part = rotary.rotate(keys[:, :, 2:4], rotary.table(POSITIONS)[2:4], 0)
    assert torch.equal(part, whole[:, :, 2:4])


def test_yarn_scales_keys_and_the_inverse_takes_it_off() -> None:
    rotary, keys = case("llama-yarn").decoder.rotary, keys_of("llama-yarn")
    table = rotary.table(POSITIONS)
    assert rotary.rotate(keys, table, 0).norm() > 1.05 * keys.norm()
    torch.testing.assert_close(
        rotary.rotate(rotary.rotate(keys, table, 0), table.inverse(), 0), keys, atol=1e-5, rtol=1e-5
    )


def test_a_model_without_a_rotary_function_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        _model_function(torch.nn.Linear(1, 1))
    assert "Linear" in caught.value.message
