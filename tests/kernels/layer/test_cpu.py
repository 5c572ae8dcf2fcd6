"""Norm, gate and rotation in machine code give what torch gives, rounded where the model rounds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvtool.core.kernels import layer_cpu
from kvtool.core.kernels.layer_cpu import LayerKernels, Rounding, layer_kernels
from kvtool.core.native.isa import ISAS, Isa, runnable
from tests.kernels.formulas import random, rotated
from tests.spying import calls_of
from tests.wording import refused

DTYPES = [torch.float32, torch.bfloat16]


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """In bfloat16 the same bits; a sum in another order may move a last place of float32."""
    torch.testing.assert_close(ours, expected, rtol=2e-6 if ours.dtype == torch.float32 else 0, atol=1e-6)


@pytest.fixture(params=[(ISAS[name], dtype) for name in runnable() for dtype in DTYPES], ids=str)
def code(request: pytest.FixtureRequest) -> LayerKernels:
    return layer_kernels(*request.param, "silu")


@pytest.mark.parametrize("isa", [ISAS[name] for name in runnable()], ids=str)
def test_a_norm_that_rounds_once_and_a_rotation_in_float32(isa: Isa) -> None:
    code = layer_kernels(isa, torch.bfloat16, "silu", Rounding(norm_first=False, rope_in_float32=True))
    x, weight = random(13, 77, dtype=torch.bfloat16, seed=0), random(77, seed=1)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(code.norm(x, weight, 1e-6)[1], (weight * normed).bfloat16())
    queries, keys = (random(9, heads, 64, dtype=torch.bfloat16, seed=heads) for heads in (6, 2))
    cos, sin = (random(9, 24, seed=seed).repeat(1, 2) for seed in range(2))
    expected = [rotated(side.float(), cos[:, None], sin[:, None]).bfloat16() for side in (queries, keys)]
    code.apply_rope(queries, keys, cos, sin)
    assert torch.equal(queries, expected[0])
    assert torch.equal(keys, expected[1])
    with refused(ValueError):
        code.apply_rope(queries, keys, cos.bfloat16(), sin.bfloat16())


@pytest.mark.parametrize("count", [1, 7, 16, 37, 576])
@pytest.mark.parametrize("adding", [False, True])
def test_a_norm_is_the_models(code: LayerKernels, count: int, adding: bool) -> None:
    x, more, weight = (random(1, 13, count, dtype=code.dtype, seed=seed) for seed in range(3))
    weight = weight[0, 0].contiguous()
    given = x.clone()
    sum_, y = code.norm(x, weight.float(), 1e-6, more if adding else None)
    expected = given + more if adding else given
    wide = expected.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(code.dtype)
    assert torch.equal(sum_, expected)
    assert torch.equal(x, given)
    close(y, weight * normed)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("count", [1, 33, 1536])
def test_a_gate_is_the_models(code: LayerKernels, activation: str, count: int) -> None:
    isa = next(ISAS[name] for name in runnable() if layer_kernels(ISAS[name], code.dtype, "silu") is code)
    y, x = (4 * random(5, count, dtype=code.dtype, seed=seed) for seed in range(2))
    act = F.silu if activation == "silu" else lambda given: F.gelu(given, approximate="tanh")
    expected = act(y) * x
    assert layer_kernels(isa, code.dtype, activation).gate(y, x) is y
    torch.testing.assert_close(y, expected, rtol=1e-5 if code.dtype == torch.float32 else 2**-7, atol=1e-5)


@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (64, 32), (80, 80), (6, 2)], ids=str)
def test_heads_turn_as_the_models_do(code: LayerKernels, dims: tuple[int, int]) -> None:
    head_dim, rotary = dims
    queries, keys = (random(9, heads, head_dim, dtype=code.dtype, seed=heads) for heads in (6, 2))
    cos, sin = (random(9, rotary // 2, dtype=code.dtype, seed=seed).repeat(1, 2) for seed in range(2))
    expected = [rotated(side, cos[:, None], sin[:, None]) for side in (queries, keys)]
    code.apply_rope(queries, keys, cos, sin)
    assert torch.equal(queries, expected[0])
    assert torch.equal(keys, expected[1])


def test_threads_share_rows_and_change_nothing(code: LayerKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    x, more = (random(11, 48, dtype=code.dtype, seed=seed) for seed in range(2))
    weight = torch.ones(48)
    alone = code.norm(x, weight, 1e-6, more)
    threads = calls_of(monkeypatch, layer_cpu, "launch", lambda function, job, count: count)
    monkeypatch.setattr(layer_cpu, "_ONE_THREAD", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for ours, expected in zip(code.norm(x, weight, 1e-6, more), alone, strict=True):
        assert torch.equal(ours, expected)
    assert threads == [3]


def test_machine_code_sees_no_wrong_sizes(code: LayerKernels) -> None:
    x, other = (random(4, 32, dtype=code.dtype, seed=seed) for seed in range(2))
    heads, table = x.view(4, 2, 16), torch.zeros(4, 16, dtype=code.dtype)
    weight = torch.ones(32)
    for wrong in (
        lambda: code.norm(x, torch.ones(31), 1e-6),
        lambda: code.norm(x, weight.double(), 1e-6),
        lambda: code.norm(x, torch.ones(64)[::2], 1e-6),
        lambda: code.norm(x.double(), weight, 1e-6),
        lambda: code.norm(x.T, torch.ones(4), 1e-6),
        lambda: code.norm(x[:0], weight, 1e-6),
        lambda: code.norm(x, weight, 1e-6, other[:3]),
        lambda: code.norm(x, weight, 1e-6, other.double()),
        lambda: code.gate(x, other[:3]),
        lambda: code.gate(x, other.half()),
        lambda: code.apply_rope(heads, heads.clone(), table[:3], table[:3]),
        lambda: code.apply_rope(heads, heads.clone(), table, table[:, :8]),
        lambda: code.apply_rope(heads, heads[:3].clone(), table, table),
        lambda: code.apply_rope(heads, heads.view(4, 4, 8).clone(), table, table),
        lambda: code.apply_rope(heads, heads.clone(), table.repeat(1, 2), table.repeat(1, 2)),
        lambda: code.apply_rope(heads, heads.clone(), table.double(), table.double()),
    ):
        with refused(ValueError):
            wrong()
