"""Vector arithmetic (SIMD) that several kernels share: fused products, sums across lanes, exp, RMSNorm, gates; and
matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtool.core.native.builder import FunctionBuilder, Value, rounded
from kvtool.core.native.isa import AVX2, AVX512, AVX512_BF16, NEON, SCALAR, Isa
from kvtool.core.native.jit import aligned

MAGIC = 1.5 * 2.0**23  # adding it to a small float32 leaves the nearest whole number in the lowest bits
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOWEST, _HIGHEST = -87.0, 88.0
# 2^f for -.5 ≤ f ≤ .5 is 1 + f·(c₁ + f·(c₂ + …)), least squares of the relative error, weighted until it is even:
# 9e-8 with five, and 1e-4 with three, which is nothing next to bfloat16's 4e-3.
EXP2 = (0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
EXP2_BFLOAT16 = (0.6932829022407532, 0.2422109842300415, 0.055008936673402786)
_LEAST = -126.0  # the exponent of the least normal float32; below it the power is taken for 0
_GELU = (0.7978845608028654, 0.044715)  # √(2/π)


def fma(left: Value, right: Value | float, onto: Value | float) -> Value:
    if left.lanes == 1:
        return left * right + onto
    kind = f"v{left.lanes}f32" if left.lanes else "f32"
    return left.k.call(f"llvm.fmuladd.{kind}", left.type, left, left.like(right), left.like(onto))


def dot_pairs(left: Value, right: Value, onto: Value) -> Value:
    """`onto` and both products of each lane, whose 32 bits are two bfloat16 (AVX-512 BF16)."""
    pairs = [side.bitcast("<32 x bfloat>") for side in (left, right)]
    return onto.k.call("llvm.x86.avx512bf16.dpbf16ps.512", onto.type, onto, *pairs)


def total(*vectors: Value) -> Value:
    summed = list(vectors)
    while len(summed) > 1:
        odd = summed[-1:] if len(summed) % 2 else []
        summed = [left + right for left, right in zip(summed[::2], summed[1::2], strict=False)] + odd
    return total_onto(-0.0, summed[0])


def total_onto(onto: Value | float, value: Value) -> Value:
    k, name = value.k, f"llvm.vector.reduce.fadd.v{value.lanes}f32"
    first = k.constant("float", onto) if isinstance(onto, float) else onto
    return k.call(name, "float", first, value, flags="reassoc")


def largest(value: Value) -> Value:
    return value.k.call(f"llvm.vector.reduce.fmax.v{value.lanes}f32", "float", value, flags="nnan")


def larger(left: Value, right: Value | float) -> Value:
    """The larger of two; `right` where one is NaN."""
    return (left > right).select(left, right)


def exp(value: Value) -> Value:
    """Compute e^x lane by lane, within 2 units of the last place; x is clamped to -87 … 88, and NaN taken for -87.

    x = n · ln 2 + r: 2ⁿ is written into a float's exponent, e to the power of r a polynomial (that of Cephes' expf).
    """
    low = larger(value, _LOWEST)
    x = (low < _HIGHEST).select(low, _HIGHEST)
    power = (x * 1.44269504088896341 + MAGIC) - MAGIC
    rest = fma(power, 2.12194440e-4, fma(power, -0.693359375, x))
    sum_ = value.like(_EXP[0])
    for factor in _EXP[1:]:
        sum_ = fma(sum_, rest, factor)
    sum_ = fma(sum_, rest * rest, rest) + 1.0
    return sum_ * ((power.to("i32") + 127) << 23).bitcast("float")


def exp2(exponents: Value, polynomial: Sequence[float]) -> Value:
    """Compute 2^x for x ≤ 0; exactly 0 below 2^-126, and for -∞. The polynomial is `EXP2` or `EXP2_BFLOAT16`."""
    shifted = exponents + MAGIC
    rest = exponents - (shifted - MAGIC)
    value = rest.like(polynomial[-1])
    for factor in [*reversed(polynomial[:-1]), 1.0]:
        value = fma(value, rest, factor)
    power = (value.bitcast("i32") + (shifted.bitcast("i32") << 23)).bitcast("float")
    return (exponents < _LEAST).select(rest.like(0.0), power)


def sigmoid(value: Value) -> Value:
    return 1.0 / (exp(-value) + 1.0)


ACTIVATIONS: dict[str, Callable[[Value], Value]] = {
    "silu": lambda x: x * sigmoid(x),
    "gelu_tanh": lambda x: x * sigmoid(x * fma(x * x, _GELU[1], 1.0) * (2 * _GELU[0])),  # (1 + tanh z) / 2 = σ(2z)
}


def rotate(
    low: Value, high: Value, cos: Value, sin: Value, rounded: Callable[[Value], Value] = lambda value: value
) -> tuple[Value, Value]:
    first = rounded(low * cos) - rounded(high * sin)
    return first, rounded(high * cos) + rounded(low * sin)


def transpose(rows: Sequence[Value]) -> list[Value]:
    """Transpose a square of numbers: at each step those off the diagonal of 2 × 2 blocks change places."""
    size, step = len(rows), 1
    turned = list(rows)
    while step < size:
        for low in (row for row in range(size) if not row & step):
            first, second = turned[low], turned[low + step]
            even = [lane if not lane & step else size + lane - step for lane in range(size)]
            odd = [lane + step if not lane & step else size + lane for lane in range(size)]
            turned[low], turned[low + step] = first.shuffle(even, second), first.shuffle(odd, second)
        step *= 2
    return turned


def totals(vectors: Sequence[Value]) -> Value:
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        orders = [range(odd, 2 * vectors[0].lanes, 2) for odd in range(2)]
        mixed = [[first.shuffle(order, second) for order in orders] for first, second in pairs]
        vectors = [even + odd for even, odd in mixed]
    return vectors[0]


def bits_of(mask: Value) -> Value:
    return mask.k.emit_value(f"i{mask.lanes}", f"bitcast {mask.typed} to i{mask.lanes}").to("i64")


def count_bits(bits: Value) -> Value:
    return bits.k.call("llvm.ctpop.i64", "i64", bits)


def any_bits(value: Value) -> Value:
    return value.k.call(f"llvm.vector.reduce.or.v{value.lanes}i32", "i32", value)


def each_bit(bits: Value, number: Value, work: Callable[[Value, Value], None]) -> Value:
    """Do `work(lane, number)` for each bit that is set, the lowest first; number + 1 belongs to the next one.

    Bits are rarely set: one branch passes all of them. Returns the number that comes next.
    """
    k = bits.k
    branch = k.when(bits.ne(0), number)
    loop = k.loop(count_bits(bits), bits, number)
    left, now = loop.values
    work(k.call("llvm.cttz.i64", "i64", left, k.constant("i1", True)), now)
    _, after = loop.close(left & (left - 1), now + 1)
    return branch.close(after)[0]


def permutations(name: str, rows: Sequence[Sequence[int]]) -> str:
    texts = ("<8 x i8> <" + ", ".join(f"i8 {lane}" for lane in row) + ">" for row in rows)
    return f"@{name} = private constant [256 x <8 x i8>] [{', '.join(texts)}], align 64"


def permuted(name: str, bits: Value, lanes: Value) -> Value:
    """Permute the lower halves of eight i32 lanes by row `bits` of a constant; upper ones come along or become 0."""
    k = bits.k
    order = Value(k, "ptr", f"@{name}", "<8 x i8>").load(bits, align=8)
    if k.isa is SCALAR:
        result = k.poison(lanes.type)
        for lane in range(lanes.lanes):
            number = order.lane(lane).to("i32")
            result = result.with_lane(lane, k.emit_value("i32", f"extractelement {lanes.typed}, {number.typed}"))
        return result
    if k.isa is not NEON:
        return k.call("llvm.x86.avx2.permd", lanes.type, lanes, order.to("i32"))
    # A table of bytes in one register: lane i is bytes 2i and 2i + 1.
    pairs = (order.to("i16") * 0x0202 + 0x0100).bitcast("<16 x i8>")
    table = lanes.to("i16").bitcast("<16 x i8>")
    return k.call("llvm.aarch64.neon.tbl1.v16i8", table.type, table, pairs).bitcast("<8 x i16>").to("i32")


def lanes_for(width: int, *counts: int) -> int:
    return next(lanes for lanes in (16, 8, 4, 2, 1) if lanes <= width and not any(count % lanes for count in counts))


# ---- loops over numbers, a register's lanes at a time ---------------------------------------------------------

# What is done with some numbers from an index on: takes how many, and what is carried; gives that of the next round.
Step: TypeAlias = Callable[[int, Value, Sequence[Value]], Sequence[Value]]


class Split(NamedTuple):
    whole: Value
    rest: Value | None

    @classmethod
    def of(cls, count: Value, width: int, has_rest: bool = True) -> Split:
        """Divide a count, once for many loops; `has_rest` False: it is a multiple of the width."""
        return cls(count // width, count % width if has_rest else None)


def along(
    k: FunctionBuilder,
    count: Value | int | Split,
    width: int,
    step: Step,
    wide: Sequence[Value] = (),
    single: Callable[[Sequence[Value]], Sequence[Value]] = lambda wide: (),
    first: Value | int = 0,
) -> list[Value]:
    """Go along `count` numbers from `first` on, `width` at a time, then one by one; returns what the last steps leave.

    `wide` is carried by the steps of `width`; `single` makes what those of one number carry of what these leave.
    """
    count = k.constant("i64", count) if isinstance(count, int) else count
    whole = count.whole if isinstance(count, Split) else count // width
    loop = k.loop(whole, *wide, may_be_empty=True)
    left = loop.close(*step(width, loop.index * width + first, loop.values))
    over = count.rest if isinstance(count, Split) else count % width
    if over is None:
        return left
    done = whole * width + first
    rest = k.loop(over, *single(left), may_be_empty=True)
    return rest.close(*step(1, rest.index + done, rest.values))


def each(
    k: FunctionBuilder,
    count: Value | int | Split,
    work: Callable[[int, Value], None],
    first: Value | int = 0,
    width: int = 0,
) -> None:
    """Do `work(lanes, index)` for `count` numbers: as many at a time as a register holds, then one by one."""

    def step(lanes: int, index: Value, carried: Sequence[Value]) -> Sequence[Value]:
        work(lanes, index)
        return ()

    along(k, count, width or k.width, step, first=first)


# ---- rows of numbers in any stored format ------------------------------------------------------------------------


def inverse_rms(x: Value, count: Value | int, epsilon: Value) -> Value:
    k = x.k
    count = k.constant("i64", count) if isinstance(count, int) else count

    def step(lanes: int, index: Value, sums: Sequence[Value]) -> Sequence[Value]:
        value = x.load(index, lanes)
        if lanes > 1:
            return [fma(value, value, sums[0])]
        single = value.lane(0)
        return [sums[0] + single * single]

    (squares,) = along(k, count, k.width, step, [k.zeros(k.width)], lambda wide: [total(*wide)])
    return 1.0 / k.call("llvm.sqrt.f32", "float", squares / count.to("float") + epsilon)


def rms_norm(x: Value, weight: Value, y: Value, count: Value, epsilon: Value, rounds_first: bool = True) -> None:
    factor = inverse_rms(x, count, epsilon)

    def scale(lanes: int, index: Value) -> None:
        normed = x.load(index, lanes) * factor.splat(lanes)
        y.store((rounded(normed, x.target) if rounds_first else normed) * weight.load(index, lanes), index)

    each(x.k, count, scale)


def gate(y: Value, x: Value, count: Value, activation: str, first: Value | int = 0) -> None:
    def work(lanes: int, index: Value) -> None:
        value = rounded(ACTIVATIONS[activation](y.load(index, lanes)), y.target)
        y.store(value * x.load(index, lanes), index)

    each(y.k, count, work, first)


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
