"""Attention of scattered rows on a GPU: Triton's kernel in its interpreter and compiled."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from kvtool.core.kernels.attention import triton_rows
from kvtool.core.kernels.attention.params import AttentionParams, KeyRanges
from kvtool.core.kernels.attention.triton_rows import Tile, attend, splits_for, tile_for
from kvtool.core.model.forward import QueryRows
from tests.codec.processes import compile_for_cuda, needs_triton
from tests.kernels.formulas import attention

HALF = Tile(16, 16, 4, 2)
PLAIN = AttentionParams(0.3)


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    keys: int
    rows: int
    dtype: torch.dtype = torch.float32


def made(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, and keys and values as in a buffer with spare rows after them: not adjacent."""
    draw = torch.Generator().manual_seed(shape.rows)
    query = torch.randn((1, shape.rows, shape.heads, shape.head_dim), generator=draw).transpose(1, 2)
    sides = torch.randn((2, 1, shape.kv_heads, shape.keys + 9, shape.head_dim), generator=draw)
    sides[:, :, :, shape.keys :] = torch.nan  # no row sees so far
    at = torch.randperm(shape.keys, generator=draw)[: shape.rows].sort().values
    key, value = (side[:, :, : shape.keys].to(shape.dtype) for side in sides)
    return query.to(shape.dtype), key, value, at


def attended(shape: Shape, tile: Tile | None, splits: int | None, params: AttentionParams) -> torch.Tensor:
    """Runs in the interpreter's process."""
    query, key, value, at = made(shape)
    return attend(query, key, value, params, QueryRows.of(at, "cpu").seen(params.window), tile, splits)


SHAPED = {
    "window": AttentionParams(0.3, window=13),
    "window of one": AttentionParams(0.3, window=1),
    "cap": AttentionParams(0.3, softcap=1.5),
    "sinks": AttentionParams(0.3, sinks=torch.linspace(-1, 3, 4)),
    "all": AttentionParams(0.3, window=30, softcap=1.5, sinks=torch.linspace(-1, 3, 4)),
}
SPLIT = [(Shape(4, 2, 16, 50, 7), HALF, 3), (Shape(4, 2, 16, 90, 90), HALF, 1), (Shape(4, 2, 16, 129, 1), HALF, 5)]


@pytest.mark.some(2)
@needs_triton
@pytest.mark.parametrize(
    ("shape", "tile", "splits", "params"),
    [
        (Shape(4, 2, 16, 50, 7), None, None, PLAIN),
        (Shape(4, 2, 16, 50, 50), HALF, 1, PLAIN),
        (Shape(4, 2, 16, 50, 7), HALF, 3, PLAIN),
        (Shape(6, 2, 96, 70, 33), Tile(32, 32, 4, 2), 2, PLAIN),
        (Shape(3, 3, 80, 40, 40), None, 1, PLAIN),
        (Shape(14, 2, 64, 129, 1), HALF, 5, PLAIN),
        (Shape(2, 1, 8, 20, 3), None, 1, PLAIN),
        (Shape(8, 2, 128, 130, 2, torch.float16), None, 4, PLAIN),
        (Shape(2, 1, 64, 129, 40, torch.bfloat16), HALF, 5, PLAIN),
        *((*case, params) for params in SHAPED.values() for case in SPLIT),
    ],
)
def test_rows_see_the_keys_of_their_window_up_to_their_own(
    interpreter: ProcessPoolExecutor, shape: Shape, tile: Tile | None, splits: int | None, params: AttentionParams
) -> None:
    out = interpreter.submit(attended, shape, tile, splits, params).result()
    *sides, at = made(shape)
    exact = attention(*sides, params, at)
    assert out.shape == exact.shape
    assert (out.double() - exact).norm() < (1e-6 if shape.dtype == torch.float32 else 1e-2) * exact.norm()


def test_arrays_that_do_not_fit_are_refused_before_anything_runs() -> None:
    query, key, value, at = made(Shape(4, 2, 16, 50, 7))
    for *sides, places in (
        (query[:, :3], key, value, at),
        (query, key.double(), value, at),
        (query, key, value[:, :, :5], at),
        (query, key.transpose(2, 3).contiguous().transpose(2, 3), value, at),
        (query, key, value, at[:3]),
        (query, key, value, at.int()),
    ):
        with pytest.raises(ValueError):
            attend(*sides, PLAIN, KeyRanges([], places))


@pytest.mark.slow
def test_few_blocks_split_the_keys_and_many_do_not() -> None:
    tile = tile_for(32, 128, torch.bfloat16)
    assert splits_for(8, 65536, tile, 132) == 32
    assert splits_for(8, 512, tile, 132) == 2
    assert splits_for(4096, 65536, tile, 132) == 1


def compiled(
    dtype: torch.dtype, head_dim: int, rows: int, capability: int, memory: int = 100 * 1024, shaped: bool = False
) -> tuple[str, int]:
    """PTX and bytes of shared memory; runs in a process that compiles."""
    kernel, tile = triton_rows.kernel(), tile_for(rows, head_dim, dtype, memory)
    params = AttentionParams(1.0, 30, 50.0, torch.zeros(1)) if shaped else AttentionParams(1.0)
    constants = triton_rows.constants(4, head_dim, tile, 4, dtype, params, windowed=shaped)
    of = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}[dtype]
    known = {"query": of, "key": of, "value": of, "out": "*fp32", "sums": "*fp32", "at": "*i64"}
    known |= {"begins": "*i64", "sinks": of, "cap": "fp32"}
    known |= {"scale": "fp32", "rows": "i32"}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    built = compile_for_cuda(kernel, capability, known, constants, "i64", ("*", "i64"), **options)
    return built.asm["ptx"], built.metadata.shared


@pytest.mark.slow
@pytest.mark.nightly
@needs_triton
def test_it_compiles_for_the_gpus_it_is_meant_for(compiler: ProcessPoolExecutor) -> None:
    many = compiler.submit(compiled, torch.bfloat16, 128, 512, 90).result()
    few = compiler.submit(compiled, torch.bfloat16, 64, 4, 80).result()
    wide = compiler.submit(compiled, torch.float32, 96, 512, 90).result()
    shaped = compiler.submit(compiled, torch.bfloat16, 64, 512, 90, shaped=True).result()
    for sm, kb in ((80, 163), (90, 227)):
        assert compiler.submit(compiled, torch.bfloat16, 128, 512, sm, kb * 1024).result()[1] < kb * 1024
    assert "wgmma.mma_async" in many[0]  # Hopper's own products
    assert "mma.sync" in few[0]
    assert few[1] < 100 * 1024
    assert max(shared for _, shared in (many, few, wide, shaped)) < 227 * 1024
