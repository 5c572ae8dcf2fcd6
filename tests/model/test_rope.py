"""Keys lose their position and get another one, as the model itself would rotate them."""

from __future__ import annotations

import sys

import pytest
import torch

from kvtool.core.model.rope import _model_function
from kvtool.lmcache import Rope
from tests.fusion.making import NAMES, case

POSITIONS = torch.tensor([0, 1, 5, 77, 1000, 1999])


UNROTATED = {"smollm3": 1, "cohere2": 2, "exaone4": 2}  # the layer that rotates nothing


def keys_of(name: str, dtype: str = "float32") -> torch.Tensor:
    decoder = case(name, dtype).decoder
    shape = (1, decoder.shapes[0].heads, len(POSITIONS), decoder.shapes[0].key_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(decoder.dtype)


# Whose function takes complex numbers, or queries and keys one by one: law 4 holds these.
OTHERWISE = ("deepseek-v2", "gemma4", "gemma4-shared")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHERWISE])
def test_as_the_model_rotates(name: str) -> None:
    decoder, keys = case(name).decoder, keys_of(name)
    module = sys.modules[type(decoder.layers[0].self_attn).__module__]
    for layer in range(len(decoder.layers)):
        kind = (decoder.config.layer_types[layer],) if name in ("gemma3", "olmo3") else ()
        cos, sin = decoder.base.rotary_emb(keys, POSITIONS[None], *kind)
        part = cos.shape[-1] if name == "stablelm" else keys.shape[-1]  # where its attention takes a part of a head
        turned = module.apply_rotary_pos_emb(keys[..., :part], keys[..., :part], cos, sin)[1]
        expected = torch.cat([turned, keys[..., part:]], -1)
        moved = decoder.rotary.rotate(keys, decoder.rotary.table(POSITIONS), layer)
        torch.testing.assert_close(moved, keys if layer == UNROTATED.get(name) else expected)


@pytest.mark.parametrize("name", NAMES)
def test_off_and_on_again(name: str) -> None:
    rotary, keys = case(name).decoder.rotary, keys_of(name)
    table = rotary.table(POSITIONS)
    bare = rotary.rotate(keys, table.inverse(), 0)
    torch.testing.assert_close(rotary.rotate(bare, table, 0), keys, atol=1e-5, rtol=1e-5)


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


def test_yarn_scales_keys() -> None:
    rotary, keys = case("llama-yarn").decoder.rotary, keys_of("llama-yarn")
    assert rotary.rotate(keys, rotary.table(POSITIONS), 0).norm() > 1.05 * keys.norm()


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
