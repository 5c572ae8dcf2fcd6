"""Placing in one launch: Triton's kernel in its interpreter against torch's operations, bit for bit, and compiled."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

from kvtool.core.kernels import placing_triton as triton_place
from kvtool.core.kernels.placing_triton import Piece, Side, described, fits, place
from tests.codec.processes import compile_for_cuda, needs_triton
from tests.kernels.formulas import random, rotated
from tests.wording import refused

CAPACITY = 150
SPANS = ((3, 40), (50, 1), (51, 32), (90, 60))  # first position, tokens


@dataclass(frozen=True)
class Shape:
    heads: int
    head_dim: int
    rotary_dim: int  # 0: nothing is rotated
    dtype: torch.dtype = torch.float32
    apart: int = 0  # numbers between rows


def sides_of(shape: Shape) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for _, tokens in SPANS:
        width = shape.head_dim + shape.apart
        keys = random(shape.heads, tokens, width, dtype=shape.dtype, seed=tokens)
        values = random(tokens, shape.heads, width, dtype=shape.dtype, seed=-tokens).transpose(0, 1)
        found.append((keys[:, :, : shape.head_dim], values[:, :, : shape.head_dim]))
    return found


def turns_of(shape: Shape) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    if not shape.rotary_dim:
        return None, None
    angles = random(CAPACITY, shape.rotary_dim // 2).repeat(1, 2)
    return angles.cos(), angles.sin()


def by_torch(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """The buffers as torch's operations fill them; what no segment covers is 7."""
    placed = torch.full((2, 1, shape.heads, CAPACITY, shape.head_dim), 7.0, dtype=shape.dtype)
    cos, sin = turns_of(shape)
    for (start, tokens), (keys, values) in zip(SPANS, sides_of(shape), strict=True):
        span = slice(start, start + tokens)
        placed[0, 0, :, span], placed[1, 0, :, span] = keys, values
        if cos is None or sin is None:
            continue
        placed[0, 0, :, span] = rotated(keys.float(), cos[span], sin[span]).to(shape.dtype)
    return placed[0], placed[1]


def pieces_of(sides: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Piece]:
    spans = zip(SPANS, sides, strict=True)
    return [Piece(Side.of(keys), Side.of(values), *span) for span, (keys, values) in spans]


def placed(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs in the interpreter's process."""
    sides = sides_of(shape)
    buffers = torch.full((2, 1, shape.heads, CAPACITY, shape.head_dim), 7.0, dtype=shape.dtype)
    table = described(pieces_of(sides))
    place(table, torch.from_numpy(table), buffers[0], buffers[1], *turns_of(shape))
    return buffers[0], buffers[1]


@pytest.mark.some(1)
@needs_triton
@pytest.mark.parametrize(
    "shape",
    [
        Shape(2, 64, 64),
        Shape(3, 80, 80, torch.float16),
        Shape(1, 96, 24),
        Shape(2, 16, 0, torch.bfloat16),
        Shape(2, 20, 10, apart=3),
        Shape(2, 64, 64, torch.bfloat16, apart=8),
    ],
)
def test_what_torch_would_place(interpreter: ProcessPoolExecutor, shape: Shape) -> None:
    found, wanted = interpreter.submit(placed, shape).result(), by_torch(shape)
    if shape.dtype == torch.bfloat16 and shape.rotary_dim:  # truncated by the interpreter
        torch.testing.assert_close(found[0], wanted[0], atol=0, rtol=2**-7)
    else:
        assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_what_does_not_fit_is_refused_before_anything_runs() -> None:
    shape = Shape(2, 16, 8)
    sides, (cos, sin) = sides_of(shape), turns_of(shape)
    assert cos is not None
    assert sin is not None
    keys, values = torch.zeros((2, 1, 2, CAPACITY, 16)).unbind()
    pieces = pieces_of(sides)
    behind, before = replace(pieces[3], start=CAPACITY - 59), replace(pieces[0], start=-1)
    cases = [
        ([behind], keys, values, cos, sin),
        ([before], keys, values, cos, sin),
        ([replace(pieces[0], tokens=-1)], keys, values, cos, sin),
        (pieces, keys, values[:, :, :-1], cos, sin),
        (pieces, keys, values.double(), cos, sin),
        (pieces, keys.mT.contiguous().mT, values, cos, sin),
        (pieces, keys, values, cos[:-1], sin[:-1]),
        (pieces, keys, values, cos.half(), sin.half()),
        (pieces, keys, values, cos, sin[:, :6]),
        (pieces, keys, values, cos[:, :7], sin[:, :7]),
        (pieces, keys, values, cos, None),
        (pieces, keys, values, cos.repeat(1, 3), sin.repeat(1, 3)),
    ]
    for bad, *arrays in cases:
        table = described(bad)
        with pytest.raises(ValueError):
            place(table, torch.from_numpy(table), *arrays)
    table = described(pieces)
    with refused(ValueError):
        place(table, torch.from_numpy(table)[:1], keys, values, cos, sin)
    place(described([]), torch.empty(0, dtype=torch.int64), keys, values, cos, sin)
    assert not fits(sides[0][0].half(), keys)
    assert not fits(sides[0][0][:1], keys)
    assert not fits(sides[0][0].mT.contiguous().mT, keys)
    assert fits(sides[0][1], values)


def compiled(head_dim: int, half: int, aligned: bool) -> str:
    """PTX; runs in a process that compiles."""
    constants = triton_place.constants(8, head_dim, half, aligned)
    known = {"table": "*i64", "keys": "*bf16", "values": "*bf16", "cos": "*fp32", "sin": "*fp32"}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    kernel, aligned_types = triton_place._kernel(), ("*", "i32")
    return str(compile_for_cuda(kernel, 90, known, constants, "i32", aligned_types, **options).asm["ptx"])


@pytest.mark.slow
@needs_triton
def test_it_compiles_to_wide_reads_and_nothing_fused(compiler: ProcessPoolExecutor) -> None:
    whole = compiler.submit(compiled, 128, 64, True).result()
    odd = compiler.submit(compiled, 80, 10, False).result()
    assert "ld.global.v4" in whole
    assert "st.global.v4" in whole
    assert "fma." not in whole + odd
