"""LLVM IR of y = W·x for weights kept packed: they are unpacked in registers, on their way to the multiplication.

What it takes is mostly reading W once. For one group of 32 columns of four bits with AVX2: 2 loads that widen bytes to
32 bits, 4 operations that take halves of them apart, 4 conversions to float32, 4 multiplications onto a sum, and one of
that sum by the group's scale. x stays float32, so nothing is lost but the order of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.core.kernels.linear.ir_codes import PackedRows, codes
from kvtool.core.kernels.linear.qtensor import CHUNK, LAYOUTS, SPAN, Layout
from kvtool.core.native.builder import FunctionBuilder, Value
from kvtool.core.native.isa import Isa
from kvtool.core.native.simd import fma, total

_UNROLLED = 4  # vectors of a dense row at a time, with a sum for each
# Of weights, and at least a row, that are multiplied with every x before the next ones: they stay in a core's own cache
# and are many enough to be fetched ahead. Measured with eight x on an AMD EPYC: rows one by one take twice as long.
_BLOCK_BYTES = 2**17
_SUMS = 3  # of a packed row: every other group's, the others', and that of what is added to scale · code
_ARGUMENTS = "ptr data, ptr scales, ptr mins, float* x, float* out, i64 first, i64 last, i64 columns"


def product(isa: Isa, kind: str, height: int = 1) -> FunctionBuilder:
    """The function `void product_KIND(ptr data, ptr scales, ptr mins, ptr x, ptr y, i64 first, i64 last, i64 columns)`.

    It sets y[r] = Σ w[r, c] · x[c] for rows r from `first` to before `last`, which is not less; x and y float32, y
    counted from row 0; data, scales and mins those of a `Matrix`. Calls for different rows may run side by side.

    Parameters
    ----------
    height : with more than one it is `product_KIND_HEIGHT`, which takes `i64 inputs, i64 x_pitch, i64 y_pitch`, too,
        and sets a y for each of so many x, at least `height`, from pitch to pitch. So many are multiplied with a row of
        weights at a time, and with some rows before the next ones take their place in the core's own cache. What comes
        out is the same, bit by bit, whatever the height and whoever else is there.
    """
    layout, name, arguments = LAYOUTS[kind], f"product_{kind}", _ARGUMENTS
    if height > 1:
        name, arguments = f"{name}_{height}", f"{arguments}, i64 inputs, i64 x_pitch, i64 y_pitch"
    k = FunctionBuilder(name, isa, arguments)
    inputs = _Inputs(k, layout, height)
    kernel = _Dense(k, kind) if layout.dense else _Packed(k, layout)
    if height == 1:
        _multiply(k, kernel, k.args.first, k.args.last, inputs.tile(k.constant("i64")))
    else:
        _multiply_tiles(k, kernel, inputs, height, layout.bits)
    return k


def _multiply(k: FunctionBuilder, kernel: _Dense | _Packed, first: Value, last: Value, tile: Sequence[_Input]) -> None:
    """The rows from one to before another, each with all of a tile."""
    with k.loop(last - first, may_be_empty=True) as index:
        row = first + index
        for one, value in zip(tile, kernel.row(row, tile), strict=True):
            one.y.store(value, row)


def _multiply_tiles(k: FunctionBuilder, kernel: _Dense | _Packed, inputs: _Inputs, height: int, bits: int) -> None:
    """Some rows at a time, of so many bits a number, with every tile of the inputs."""
    args = k.args
    size = k.constant("i64", _BLOCK_BYTES) // (args.columns * bits // 8) + 1
    more = args.last - args.first + (size - 1)
    with k.loop(more // size, may_be_empty=True) as block:
        first = args.first + block * size
        last = k.minimum(first + size, args.last)
        with k.loop((args.inputs + (height - 1)) // height) as index:
            # The last tile begins where it ends with the last input: what it computes again comes out the same.
            place = k.minimum(index * height, args.inputs - height)
            _multiply(k, kernel, first, last, inputs.tile(place))


@dataclass(frozen=True, slots=True)
class _Input:
    """Where an x lies, its y, and Σ x over each group of columns: what a min, or a centre, is multiplied by."""

    x: Value
    y: Value
    sums: Value | None


class _Inputs:
    """What a row of weights is multiplied with, some at a time."""

    def __init__(self, k: FunctionBuilder, layout: Layout, height: int) -> None:
        self._k, self._group, self._height = k, layout.group, height
        self._groups = k.args.columns // layout.group
        self._sums = self._group_sums() if layout.mins or layout.centre else None

    def tile(self, first: Value) -> list[_Input]:
        """As many of them as the code takes at a time, from one on."""
        args = self._k.args
        if self._height == 1:
            return [_Input(args.x, args.out, self._sums)]
        numbers = [first + place for place in range(self._height)]
        return [
            _Input(
                args.x.at(number * args.x_pitch),
                args.out.at(number * args.y_pitch),
                self._sums and self._sums.at(number * self._groups),
            )
            for number in numbers
        ]

    def _group_sums(self) -> Value:
        k, one = self._k, self._k.constant("i64", 1)
        count, pitch = (one, one) if self._height == 1 else (k.args.inputs, k.args.x_pitch)
        sums = k.alloca("float", self._groups * count)
        with k.loop(count) as number:
            own, out = k.args.x.at(number * pitch), sums.at(number * self._groups)
            with k.loop(self._groups) as group:
                x = own.at(group * self._group)
                out.store(total(*(x.load(start, k.width) for start in range(0, self._group, k.width))), group)
        return sums


class _Dense:
    """A row of plain numbers."""

    def __init__(self, k: FunctionBuilder, kind: str) -> None:
        self._k, self._kind = k, kind
        self._step = _UNROLLED * k.width
        self._steps, self._rest = k.args.columns // self._step, k.args.columns % self._step

    def row(self, row: Value, tile: Sequence[_Input]) -> list[Value]:
        """The products of one row of weights."""
        k = self._k
        data = k.args.data.of(self._kind).at(row * k.args.columns)
        each = k.loop(self._steps, *[k.zeros(k.width)] * _UNROLLED * len(tile), may_be_empty=True)
        first = each.index * self._step
        grown = list(each.values)
        for part in range(_UNROLLED):
            column = first + part * k.width
            weights = data.load(column, k.width)
            for place, one in enumerate(tile):
                at = place * _UNROLLED + part
                grown[at] = fma(weights, one.x.load(column, k.width), grown[at])
        found = each.close(*grown)
        starts = range(0, len(found), _UNROLLED)
        return self._tail(data, tile, [total(*found[at : at + _UNROLLED]) for at in starts])

    def _tail(self, data: Value, tile: Sequence[_Input], values: list[Value]) -> list[Value]:
        """The columns behind the last whole step, one by one."""
        first = self._steps * self._step
        each = self._k.loop(self._rest, *values, may_be_empty=True)
        column = first + each.index
        weight = data.load(column, 1).lane(0)
        pairs = zip(tile, each.values, strict=True)
        return each.close(*(fma(weight, one.x.load(column), value) for one, value in pairs))


class _Packed:
    """A row of codes."""

    def __init__(self, k: FunctionBuilder, layout: Layout) -> None:
        self._k, self._layout, self._rows = k, layout, PackedRows(k, layout)

    def row(self, row: Value, tile: Sequence[_Input]) -> list[Value]:
        """The products of one row of weights."""
        k, place = self._k, self._rows.row(row)
        count = CHUNK * SPAN // self._layout.group
        each = [k.zeros(k.width), k.zeros(k.width), k.zeros(count)]
        chunks = k.loop(self._rows.chunks, *each * len(tile), may_be_empty=True)
        sums = chunks.close(*self._spans(place, chunks.index * CHUNK, CHUNK, tile, chunks.values))
        lasts: Sequence[Value | None] = [None] * len(tile)
        if not self._layout.blocks:
            sums, lasts = self._tail(place, tile, sums)
        return [self._whole(sums[_SUMS * at : _SUMS * (at + 1)], last) for at, last in enumerate(lasts)]

    def _whole(self, sums: Sequence[Value], last: Value | None) -> Value:
        """A product, of its sums."""
        *values, shift = sums
        value = total(*values)
        if self._rows.shifted:
            value = value + total(shift)
            if last:
                value = value + last.lane(0)
        return value

    def _tail(
        self, row: tuple[Value, Value, Value], tile: Sequence[_Input], sums: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        """The spans behind the last whole chunk, one by one: all sums, and those of their shifts alone."""
        k, behind = self._k, self._rows.chunks * CHUNK
        before = [k.zeros(1) if at % _SUMS == _SUMS - 1 else value for at, value in enumerate(sums)]
        rest = k.loop(self._rows.rest, *before, may_be_empty=True)
        found = rest.close(*self._spans(row, behind + rest.index, 1, tile, rest.values))
        lasts = found[_SUMS - 1 :: _SUMS]
        found[_SUMS - 1 :: _SUMS] = sums[_SUMS - 1 :: _SUMS]
        return found, lasts

    def _spans(
        self,
        row: tuple[Value, Value, Value],
        span: Value,
        spans: int,
        tile: Sequence[_Input],
        sums: Sequence[Value],
    ) -> list[Value]:
        """Some spans of a row, from one on: the sums grown by them."""
        grown = list(sums)
        scales, shifts, count = self._rows.factors(row, span, spans)
        each = SPAN // self._layout.group
        for index in range(spans):
            own = span + index
            parts = codes(self._layout, row[0], own)
            for at, one in enumerate(tile):
                even, odd = grown[_SUMS * at : _SUMS * at + 2]
                for group, value in enumerate(self._groups(parts, one, own)):
                    scale = scales.shuffle([index * each + group] * self._k.width)
                    even, odd = odd, fma(value, scale, even)
                grown[_SUMS * at : _SUMS * at + 2] = even, odd
        if shifts:
            first = span * each
            for at, one in enumerate(tile, 1):
                assert one.sums
                grown[_SUMS * at - 1] = fma(shifts, one.sums.load(first, count), grown[_SUMS * at - 1])
        return grown

    def _groups(self, parts: Sequence[Value], one: _Input, span: Value) -> list[Value]:
        """Σ code · x over each group of a span, in as many lanes as there are."""
        width = self._k.width
        x = one.x.at(span * SPAN)
        loaded = [x.load(part * width, width) for part in range(len(parts))]
        each, sums = self._layout.group // width, []
        for first in range(0, len(parts), each):
            value = parts[first] * loaded[first]
            for at in range(first + 1, first + each):
                value = fma(parts[at], loaded[at], value)
            sums.append(value)
        return sums
