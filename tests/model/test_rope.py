"""Keys lose their position and get another one. That it is as the model rotates is law 4."""

from __future__ import annotations

import pytest
import torch

from kvtool.core.model.rope import _model_function
from kvtool.lmcache import Rope
from tests.fusion.making import NAMES, case

POSITIONS = torch.tensor([0, 1, 5, 77, 1000, 1999])


def keys_of(name: str, dtype: str = "float32") -> torch.Tensor:
    decoder = case(name, dtype).decoder
    shape = (1, decoder.shapes[0].heads, len(POSITIONS), decoder.shapes[0].key_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(decoder.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_off_and_on_again(name: str) -> None:
    rotary, keys = case(name).decoder.rotary, keys_of(name)
    table = rotary.table(POSITIONS)
    bare = rotary.rotate(keys, table.inverse(), 0)
    torch.testing.assert_close(rotary.rotate(bare, table, 0), keys, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_rounded_once(name: str) -> None:
    """In bfloat16 a key is rotated in float32 and rounded at the end."""
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


def test_a_module_without_a_rotary_function_has_none() -> None:
    assert _model_function(torch.nn.Linear(1, 1)) is None


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "stablelm", "qwen3"])
def test_a_description_rotates_alike(name: str) -> None:
    """Other programs' rotated keys are un-rotated by it (kvtool/lmcache.py)."""
    rotary, keys = case(name).decoder.rotary, keys_of(name)
    told = rotary.by_halves
    assert told is not None
    rope = Rope(told["head_dim"], torch.tensor(told["frequencies"], dtype=torch.float64), told["scaling"])
    rows = keys.transpose(1, 2).flatten(2)
    made = rope.multiplied(rows, rope.turns(POSITIONS)).unflatten(2, (keys.shape[1], -1)).transpose(1, 2)
    torch.testing.assert_close(made, rotary.rotate(keys, rotary.table(POSITIONS), 0), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["glm", "smollm3", "deepseek-v3", "gemma3"])
def test_another_rope_has_no_description(name: str) -> None:
    """It rotates neighbours, leaves a layer out, has latents, or differs by layer."""
    assert case(name).decoder.rotary.by_halves is None
