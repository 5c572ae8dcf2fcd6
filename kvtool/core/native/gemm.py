"""Matrix products (GEMM) in float32: a tile of the result stays in registers while rows and columns stream by.

The order of the sums depends only on the depth, so a row's result does not depend on the other rows of the product; it
is the same bit for bit on every CPU that has fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvtool.core.native.builder import FunctionBuilder, Value
from kvtool.core.native.isa import AVX2, AVX512, AVX512_BF16, NEON, Isa
from kvtool.core.native.job import aligned
from kvtool.core.native.simd import dot_pairs, fma

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile of sums that stays in registers: rows, and vectors of `width` columns each."""

    rows: int
    vectors: int
    width: int
    pairs: bool = False  # two bfloat16 along the depth in place of a float32, summed in float32 (AVX-512 BF16)

    @property
    def columns(self) -> int:
        return self.vectors * self.width

    @property
    def features(self) -> str:
        return AVX512_BF16.extra if self.pairs else ""


_TILES = {AVX512: Tile(8, 2, 16), AVX2: Tile(6, 2, 8), NEON: Tile(6, 2, 8)}
_PLAIN = Tile(4, 2, 4)  # sixteen registers of four
PAIRS = Tile(8, 2, 16, pairs=True)


def tile_of(isa: Isa) -> Tile:
    return _TILES.get(isa, _PLAIN)


def panels(weights: F32, tile: Tile) -> F32:
    """Arrange weights `[depth, columns]` as `[panels, steps, tile.columns]`, with zeros after the last column.

    Pairs are rounded to bfloat16, the first in the lower half of a float32's bits; an odd depth ends with a zero.
    """
    if tile.pairs:
        weights = _paired(weights)
    depth, columns = weights.shape
    count = -(-columns // tile.columns)
    padded = np.zeros((depth, count * tile.columns), np.float32)
    padded[:, :columns] = weights
    laid = aligned(padded.size, np.float32).reshape(count, depth, tile.columns)
    laid[:] = padded.reshape(depth, count, tile.columns).transpose(1, 0, 2)
    return laid


def _paired(weights: F32) -> F32:
    """Rows two by two as the bits of bfloat16: `[(depth + 1) / 2, columns]`; weights are not NaN."""
    depth, columns = weights.shape
    even = np.zeros((depth + depth % 2, columns), np.float32)
    even[:depth] = weights
    bits = even.view(np.uint32)
    nearest = (bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)) >> 16
    return np.ascontiguousarray(nearest[::2] | nearest[1::2] << 16).view(np.float32)


def gemm(isa: Isa, tile: Tile, pitch: int) -> FunctionBuilder:
    """Make `gemm(a, weights, c, blocks, panels, steps)`: `c = a @ weights`, summed in float32.

    Steps are the depth, or half of it where the tile takes pairs. `a` has `blocks * tile.rows` rows, `pitch` places of
    32 bits apart, `weights` are as `panels` lays them out, and the rows of `c` hold `panels * tile.columns` numbers.
    All three counts are at least 1.
    """
    arguments = "float* a, float* weights, float* c, i64 blocks, i64 panels, i64 steps"
    k = FunctionBuilder("gemm", isa, arguments, internal=True, features=tile.features)
    stride = k.args.panels * tile.columns
    with k.loop(k.args.panels) as across:
        panel = k.args.weights.at(across * (k.args.steps * tile.columns))
        out = k.args.c.at(across * tile.columns)
        with k.loop(k.args.blocks) as down:
            a, block = k.args.a.at(down * (tile.rows * pitch)), down * (stride * tile.rows)
            sums = _summed(tile, pitch, a, panel, k.args.steps)
            for row in range(tile.rows):
                address = out.at(block + stride * row)
                for number in range(tile.vectors):
                    address.store(sums[row * tile.vectors + number], number * tile.width)
    return k


def _summed(tile: Tile, pitch: int, a: Value, panel: Value, steps: Value) -> list[Value]:
    def factors(step: Value) -> tuple[Iterable[Value], list[Value]]:
        column, weights = a.at(step), panel.at(step * tile.columns)
        loaded = [weights.load(number * tile.width, tile.width) for number in range(tile.vectors)]
        return (column.load(row * pitch).splat(tile.width) for row in range(tile.rows)), loaded

    return accumulate(steps, [a.k.zeros(tile.width)] * (tile.rows * tile.vectors), factors, pairs=tile.pairs)


Factors: TypeAlias = Callable[[Value], tuple[Iterable[Value], Sequence[Value]]]


def accumulate(
    steps: Value, sums: Sequence[Value], factors: Factors, *, pairs: bool = False, unroll: int = 1
) -> list[Value]:
    """Add to sums, over some steps, the product of each of a step's first factors with each of its second ones.

    Every matrix product keeps such a tile of sums in registers; the products differ in how factors are loaded. Sums are
    row by row of the tile: each first factor with all second ones; first ones are loaded one by one, where registers
    are few. With `pairs` factors are two bfloat16 in the place of a float32. The steps are a multiple of `unroll`.
    """
    k, multiply = steps.k, dot_pairs if pairs else fma
    deep = k.loop(steps // unroll if unroll > 1 else steps, *sums)
    grown = list(deep.values)
    for part in range(unroll):
        step = deep.index * unroll + part if unroll > 1 else deep.index
        (rows, columns), onto = factors(step), iter(grown)
        grown = [multiply(row, column, next(onto)) for row in rows for column in columns]
    return deep.close(*grown)
