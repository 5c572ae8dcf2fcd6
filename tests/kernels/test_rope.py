"""Keys rotated by machine code have the bits that the model's own function gives them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvtool.core.kernels.linear.modules import pack_weights
from kvtool.core.kernels.rope import CopyWithRope, CosSin, copy_with_rope
from kvtool.core.model import rope
from kvtool.core.model.decoder import Decoder
from kvtool.core.native.isa import ISAS, Isa, isa_here, runnable
from tests.families import tiny_model
from tests.fusion.making import NAMES, case, new_case
from tests.kernels.formulas import random, rotated
from tests.spying import calls_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
POSITIONS = torch.tensor([0, 1, 5, 77, 1000, 1999])


def table_of(rows: int, rotary_dim: int, seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = (random(rows, rotary_dim // 2, seed=seed + side).repeat(1, 2) for side in range(2))
    return cos, sin


def rotate_halves(to: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, isa: Isa) -> None:
    assert copy_with_rope([CopyWithRope(to, keys, CosSin(cos[None], sin[None]))], isa)


def by_torch(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """In float32, rounded once."""
    return rotated(keys.float(), cos, sin).to(keys.dtype)


@pytest.mark.parametrize("isa", [name for name in runnable() if name != "scalar"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (64, 32), (80, 80), (128, 128), (256, 64)], ids=str)
def test_the_bits_are_those_of_torch(isa: str, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    keys, (cos, sin) = random(3, 37, dims[0], dtype=dtype), table_of(37, dims[1])
    keys[0, 0, 0], keys[1, 2, 3], keys[2, 5, -1] = torch.inf, 6e-8, torch.nan
    expected = by_torch(keys, cos, sin)
    out = torch.zeros_like(keys)
    rotate_halves(out, keys, cos, sin, ISAS[isa])
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(7), expected.nan_to_num(7))
    rotate_halves(keys, keys, cos, sin, ISAS[isa])
    assert torch.equal(keys.nan_to_num(7), out.nan_to_num(7))  # in place


@pytest.mark.parametrize("isa", [name for name in runnable() if name != "scalar"])
def test_from_a_record_into_a_buffer_with_room(isa: str) -> None:
    keys = random(20, 3, 32, dtype=torch.bfloat16).transpose(0, 1)
    buffer = torch.full((3, 50, 32), 9.0, dtype=torch.bfloat16)
    cos, sin = table_of(40, 32)
    rotate_halves(buffer[:, 10:30], keys, cos[5:25], sin[5:25], ISAS[isa])
    assert torch.equal(buffer[:, 10:30], by_torch(keys, cos[5:25], sin[5:25]))
    assert (buffer[:, :10] == 9).all()
    assert (buffer[:, 30:] == 9).all()


def test_no_keys_are_rotated_to_none() -> None:
    rotate_halves(*[torch.empty(2, 0, 16)] * 2, *table_of(0, 16), ISAS[runnable()[0]])


OTHERWISE = ("phi3-longrope", "stablelm", "cohere2", "glm", "deepseek-v2")  # a part of a head; by pairs


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHERWISE])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_family_takes_it_and_gets_the_models_bits(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if isa_here() is None:
        pytest.skip("there is no machine code for this CPU")
    decoder = new_case(name, dtype).decoder
    keys = random(1, decoder.shapes[0].heads, len(POSITIONS), decoder.shapes[0].key_dim, dtype=decoder.dtype)
    table = decoder.rotary.table(POSITIONS)
    decoder.rotary.rotate(keys, table, 0)  # whether it may be taken is tried once
    calls = calls_of(monkeypatch, rope, "copy_with_rope", lambda moves, isa: len(moves))
    for one in (table, table.inverse()):
        ours = decoder.rotary.rotate(keys, one, 0)
        angles = decoder.rotary.angles(one, 0)
        assert angles is not None
        assert torch.equal(ours, decoder.rotary._layout.rotate(keys, angles))
    assert calls == [1, 1]


def test_a_model_whose_weights_are_packed_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameters are on the device "meta", its keys are not."""
    loaded = case("llama", "bfloat16").decoder.loaded
    model = tiny_model("llama", "bfloat16")
    if not pack_weights(model):
        pytest.skip("no bfloat16 layout here")
    decoder, calls = Decoder(replace(loaded, model=model)), []
    keys = random(1, decoder.shapes[0].heads, len(POSITIONS), decoder.shapes[0].key_dim, dtype=decoder.dtype)
    assert decoder.rotary.halves == (isa_here() is not None)
    monkeypatch.setattr(rope.Layout, "rotate", lambda *_: calls.append(1) or keys)
    decoder.rotary.rotate(keys, decoder.rotary.table(POSITIONS), 0)
    assert bool(calls) == (isa_here() is None)


def test_keys_and_what_goes_beside_them_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = case("llama").decoder
    shape = decoder.shapes[0]
    table, out = decoder.rotary.table(torch.arange(20)), torch.zeros(2, 1, shape.heads, 20, shape.key_dim)
    spans = [slice(3, 9), slice(9, 20)]
    for dtype in (torch.float32, torch.bfloat16):
        sides = random(2, 1, decoder.shapes[0].heads, 20, decoder.shapes[0].key_dim, dtype=dtype)
        turns = [(out[0][:, :, span], sides[0][:, :, span], table[span]) for span in spans]
        decoder.rotary.place(turns, [(out[1][:, :, span], sides[1][:, :, span]) for span in spans], 0)
        expected = decoder.rotary._layout.rotate(sides[0].float(), table.by_name[""])
        assert torch.equal(out[0][:, :, 3:], expected[:, :, 3:])
        assert torch.equal(out[1][:, :, 3:], sides[1][:, :, 3:].float())
        monkeypatch.setattr(rope, "copy_with_rope", lambda moves, isa: False)
        by_torch_ = torch.zeros_like(out)
        turns = [(by_torch_[0][:, :, span], sides[0][:, :, span], table[span]) for span in spans]
        decoder.rotary.place(turns, [(by_torch_[1][:, :, span], sides[1][:, :, span]) for span in spans], 0)
        monkeypatch.undo()
        assert torch.equal(out, by_torch_)


def test_moves_that_machine_code_does_not_know_move_nothing() -> None:
    isa, out, numbers = ISAS[runnable()[0]], torch.zeros(2, 10, 32), random(2, 10, 32)
    cos, sin = table_of(10, 32)
    good = CopyWithRope(out, numbers)
    for to, source, *table in (
        (out[:, :9], numbers),
        (out[..., :12], numbers[..., :12]),
        (out.bfloat16(), numbers),
        (out.transpose(1, 2), numbers.transpose(1, 2)),
        (out, numbers.bfloat16()),  # fits, but not together with another format
        (out.double(), numbers.double()),
        (out[:, :9], numbers, cos, sin),
        (out, numbers, cos[:9], sin[:9]),
        (out, numbers, cos, sin[:9]),
        (out, numbers, cos.double(), sin.double()),
        (out, numbers, *table_of(10, 48)),
        (out, numbers, *table_of(10, 24)),
    ):
        angles = CosSin(*(side[None] for side in table)) if table else None
        assert not copy_with_rope([good, CopyWithRope(to, source, angles)], isa)
    assert not out.any()
    assert copy_with_rope([], isa)


def test_gradients_pass() -> None:
    decoder = new_case("llama").decoder
    keys = random(1, decoder.shapes[0].heads, 6, decoder.shapes[0].key_dim).requires_grad_()
    decoder.rotary.rotate(keys, decoder.rotary.table(POSITIONS), 0).sum().backward()
    assert keys.grad is not None
