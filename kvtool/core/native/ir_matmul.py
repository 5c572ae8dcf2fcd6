"""Products of float32 matrices: a tile of the result stays in registers while its rows and columns stream by.

The order of the sums depends on nothing but the depth, so that a row comes out the same whatever rows stand beside it,
and the same bit for bit on every CPU that has fused multiply-add. One core; weights are laid out once (`panels`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtool.core.native.ir import AVX2, AVX512, Body, Isa, Loop, vector

F32 = npt.NDArray[np.float32]
_LINE = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """What stays in registers: rows, and vectors of so many columns each."""

    rows: int
    vectors: int
    width: int

    @property
    def columns(self) -> int:
        """Columns of a panel of weights."""
        return self.vectors * self.width


_TILES = {AVX512: Tile(8, 2, 16), AVX2: Tile(6, 2, 8)}
_PLAIN = Tile(4, 2, 4)  # sixteen registers of four


def tile_of(isa: Isa) -> Tile:
    """The tile of an instruction set."""
    return _TILES.get(isa, _PLAIN)


def panels(weights: F32, tile: Tile) -> F32:
    """Lay out weights `[depth, columns]` as `[panels, depth, tile.columns]`, zeros behind the last column."""
    depth, columns = weights.shape
    count = -(-columns // tile.columns)
    padded = np.zeros((depth, count * tile.columns), np.float32)
    padded[:, :columns] = weights
    laid = aligned(padded.size, np.float32).reshape(count, depth, tile.columns)
    laid[:] = padded.reshape(depth, count, tile.columns).transpose(1, 0, 2)
    return laid


def aligned(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that begin with a line of the cache: a load across two lines takes twice as long."""
    wanted = np.dtype(dtype)
    whole = np.zeros(count * wanted.itemsize + _LINE, np.uint8)
    first = -int(whole.__array_interface__["data"][0]) % _LINE
    return whole[first : first + count * wanted.itemsize].view(wanted)


def product(tile: Tile, pitch: int) -> str:
    """A function of a module, which computes `c = a @ weights` in float32:

    `void @product(ptr a, ptr weights, ptr c, i64 blocks, i64 panels, i64 depth)`

    Parameters
    ----------
    pitch : numbers from row to row of `a`, at least the depth.

    `a` has `blocks * tile.rows` rows, `weights` are as `panels` lays them out, and the rows of `c` hold
    `panels * tile.columns` numbers. All three counts are at least 1.
    """
    body, floats = Body(), vector(tile.width, "float")
    stride = body(f"mul i64 %panels, {tile.columns}")
    across = Loop(body, "%panels")
    size = body(f"mul i64 %depth, {tile.columns}")
    panel = body.at("float", "%weights", body(f"mul i64 {across.index}, {size}"))
    out = body.at("float", "%c", body(f"mul i64 {across.index}, {tile.columns}"))
    down = Loop(body, "%blocks")
    a = body.at("float", "%a", body(f"mul i64 {down.index}, {tile.rows * pitch}"))
    block = body(f"mul i64 {down.index}, {body(f'mul i64 {stride}, {tile.rows}')}")
    sums = _summed(body, tile, pitch, a, panel)
    for row in range(tile.rows):
        place = body.at("float", out, body(f"add i64 {block}, {body(f'mul i64 {stride}, {row}')}"))
        for number in range(tile.vectors):
            body.store(floats, sums[row * tile.vectors + number], place, number * tile.width)
    down.close()
    across.close()
    body.do("ret void")
    arguments = "ptr %a, ptr %weights, ptr %c, i64 %blocks, i64 %panels, i64 %depth"
    head = f"declare {floats} @llvm.fmuladd.v{tile.width}f32({floats}, {floats}, {floats})\n"
    return f"{head}define internal void @product({arguments}) {{\n{body.text()}\n}}\n"


def _summed(body: Body, tile: Tile, pitch: int, a: str, panel: str) -> list[str]:
    """The tile's sums over the depth: one step is a column of `a` times a row of weights."""
    floats = vector(tile.width, "float")
    first = [(floats, "zeroinitializer")] * (tile.rows * tile.vectors)
    deep = Loop(body, "%depth", [("ptr", panel), *first])
    weights, *sums = deep.values
    column = body.at("float", a, deep.index)
    loaded = [body.load(floats, weights, number * tile.width) for number in range(tile.vectors)]
    for row in range(tile.rows):
        factor = body(f"insertelement {floats} poison, float {body.load('float', column, row * pitch)}, i32 0")
        spread = body(f"shufflevector {floats} {factor}, {floats} poison, <{tile.width} x i32> zeroinitializer")
        for number in range(tile.vectors):
            at = row * tile.vectors + number
            operands = ", ".join(f"{floats} {value}" for value in (spread, loaded[number], sums[at]))
            sums[at] = body(f"call {floats} @llvm.fmuladd.v{tile.width}f32({operands})")
    _, *sums = deep.close([body.at("float", weights, tile.columns), *sums])
    return sums
