"""Products of matrices: a tile of the result stays in registers while its rows and columns stream by.

The order of the sums depends on nothing but the depth, so that a row comes out the same whatever rows stand beside it;
in float32 the same bit for bit on every CPU that has fused multiply-add. One core; weights are laid out once
(`panels`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtool.core.native.ir import Body, Loop, allowed, vector
from kvtool.core.native.isa import AVX2, AVX512, AVX512_BF16, Isa
from kvtool.core.native.job import aligned

F32 = npt.NDArray[np.float32]
_OF_PAIRS, _PAIR = "llvm.x86.avx512bf16.dpbf16ps.512", "<32 x bfloat>"


@dataclass(frozen=True, slots=True)
class Tile:
    """What stays in registers: rows, and vectors of so many columns each.

    Attributes
    ----------
    pairs : what is multiplied are bfloat16, two beside each other along the depth in the place of a float32; sums are
        float32 (AVX-512 BF16).
    """

    rows: int
    vectors: int
    width: int
    pairs: bool = False

    @property
    def columns(self) -> int:
        """Columns of a panel of weights."""
        return self.vectors * self.width

    @property
    def features(self) -> str:
        """What the CPU must have beyond its instruction set."""
        return AVX512_BF16.extra if self.pairs else ""


_TILES = {AVX512: Tile(8, 2, 16), AVX2: Tile(6, 2, 8)}
_PLAIN = Tile(4, 2, 4)  # sixteen registers of four
PAIRS = Tile(8, 2, 16, pairs=True)


def tile_of(isa: Isa) -> Tile:
    """The tile of an instruction set."""
    return _TILES.get(isa, _PLAIN)


def panels(weights: F32, tile: Tile) -> F32:
    """Lay out weights `[depth, columns]` as `[panels, steps, tile.columns]`, zeros behind the last column.

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


def product(tile: Tile, pitch: int) -> str:
    """A function of a module, which computes `c = a @ weights`, summed in float32:

    `void @product(ptr a, ptr weights, ptr c, i64 blocks, i64 panels, i64 steps)`

    Parameters
    ----------
    pitch : places of 32 bits from row to row of `a`, at least the steps.

    Steps are the depth, or half of it where the tile takes pairs. `a` has `blocks * tile.rows` rows, `weights` are as
    `panels` lays them out, and the rows of `c` hold `panels * tile.columns` numbers. All three counts are at least 1.
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
    if tile.pairs:
        head = f"declare {floats} @{_OF_PAIRS}({floats}, {_PAIR}, {_PAIR})\n"
    return f"{head}define internal void @product({arguments}) {allowed(tile.features)}{{\n{body.text()}\n}}\n"


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
            sums[at] = _added(body, tile, spread, loaded[number], sums[at])
    _, *sums = deep.close([body.at("float", weights, tile.columns), *sums])
    return sums


def _added(body: Body, tile: Tile, one: str, other: str, more: str) -> str:
    """`one * other + more`, lane by lane; of pairs both products are added."""
    floats = vector(tile.width, "float")
    if not tile.pairs:
        operands = ", ".join(f"{floats} {value}" for value in (one, other, more))
        return body(f"call {floats} @llvm.fmuladd.v{tile.width}f32({operands})")
    first, second = (body(f"bitcast {floats} {side} to {_PAIR}") for side in (one, other))
    return body(f"call {floats} @{_OF_PAIRS}({floats} {more}, {_PAIR} {first}, {_PAIR} {second})")
