"""LLVM IR of y = W·x for weights kept packed: they are unpacked in registers, on their way to the multiplication.

What it takes is mostly reading W once. For one group of 32 columns of four bits with AVX2: 2 loads that widen bytes to
32 bits, 4 operations that take halves of them apart, 4 conversions to float32, 4 multiplications onto a sum, and one of
that sum by the group's scale. x stays float32, so nothing is lost but the order of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.core.model.quantised.ir_codes import Factors, codes, fma, lane, of_bfloat16, total
from kvtool.core.model.quantised.matrix import CHUNK, LAYOUTS, SPAN, Layout
from kvtool.core.native.ir import Body, Isa, Loop, vector

_UNROLLED = 4  # vectors of a dense row at a time, with a sum for each
# Of weights, and at least a row, that are multiplied with every x before the next ones: they stay in a core's own cache
# and are many enough to be fetched ahead. Measured with eight x on an AMD EPYC: rows one by one take twice as long.
_BLOCK_BYTES = 2**17
_SUMS = 3  # of a packed row: every other group's, the others', and that of what is added to scale · code


def product(isa: Isa, kind: str, height: int = 1) -> str:
    """The function `void product_KIND(ptr data, ptr scales, ptr mins, ptr x, ptr y, i64 first, i64 last, i64 columns)`.

    It sets y[r] = Σ w[r, c] · x[c] for rows r from `first` to before `last`, which is not less; x and y float32, y
    counted from row 0; data, scales and mins those of a `Matrix`. Calls for different rows may run side by side. The
    module needs `ir_codes.declarations` once.

    Parameters
    ----------
    height : with more than one it is `product_KIND_HEIGHT`, which takes `i64 inputs, i64 x_pitch, i64 y_pitch`, too,
        and sets a y for each of so many x, at least `height`, from pitch to pitch. So many are multiplied with a row of
        weights at a time, and with some rows before the next ones take their place in the core's own cache. What comes
        out is the same, bit by bit, whatever the height and whoever else is there.
    """
    layout = LAYOUTS[kind]
    body = Body()
    inputs = _Inputs(body, isa, layout, height)
    kernel = _Dense(body, isa, layout) if layout.dense else _Packed(body, isa, layout)
    if height == 1:
        _multiply(body, kernel, ("%first", "%last"), inputs.tile("0"))
    else:
        _multiply_tiles(body, kernel, inputs, height, layout.bits)
    body.do("ret void")
    name, arguments = f"product_{kind}", _ARGUMENTS
    if height > 1:
        name, arguments = f"{name}_{height}", f"{arguments}, i64 %inputs, i64 %x_pitch, i64 %y_pitch"
    return f"define void @{name}({arguments}) {{\n{body.text()}\n}}\n"


_ARGUMENTS = "ptr %data, ptr %scales, ptr %mins, ptr %x, ptr %y, i64 %first, i64 %last, i64 %columns"


def _multiply(body: Body, kernel: _Dense | _Packed, rows: tuple[str, str], tile: Sequence[_Input]) -> None:
    """The rows from one to before another, each with all of a tile."""
    first, last = rows
    each = Loop(body, body(f"sub i64 {last}, {first}"), may_be_empty=True)
    row = body(f"add i64 {first}, {each.index}")
    for one, value in zip(tile, kernel.row(row, tile), strict=True):
        body.store("float", value, one.y, row)
    each.close()


def _multiply_tiles(body: Body, kernel: _Dense | _Packed, inputs: _Inputs, height: int, bits: int) -> None:
    """Some rows at a time, of so many bits a number, with every tile of the inputs."""
    row_bytes = body(f"udiv i64 {body(f'mul i64 %columns, {bits}')}, 8")
    size = body(f"add i64 {body(f'udiv i64 {_BLOCK_BYTES}, {row_bytes}')}, 1")
    more = body(f"add i64 {body('sub i64 %last, %first')}, {body(f'sub i64 {size}, 1')}")
    blocks = Loop(body, body(f"udiv i64 {more}, {size}"), may_be_empty=True)
    first = body(f"add i64 %first, {body(f'mul i64 {blocks.index}, {size}')}")
    last = body(f"call i64 @llvm.umin.i64(i64 {body(f'add i64 {first}, {size}')}, i64 %last)")
    more = body(f"add i64 %inputs, {height - 1}")
    tiles = Loop(body, body(f"udiv i64 {more}, {height}"))
    # The last tile begins where it ends with the last input: what it computes again comes out the same.
    place = body(f"mul i64 {tiles.index}, {height}")
    place = body(f"call i64 @llvm.umin.i64(i64 {place}, i64 {body(f'sub i64 %inputs, {height}')})")
    _multiply(body, kernel, (first, last), inputs.tile(place))
    tiles.close()
    blocks.close()


@dataclass(frozen=True, slots=True)
class _Input:
    """Where an x lies, its y, and Σ x over each group of columns: what a min, or a centre, is multiplied by."""

    x: str
    y: str
    sums: str


class _Inputs:
    """What a row of weights is multiplied with, some at a time."""

    def __init__(self, body: Body, isa: Isa, layout: Layout, height: int) -> None:
        self._body, self._isa, self._layout, self._height = body, isa, layout, height
        self._count = "%inputs" if height > 1 else "1"
        self._groups = body(f"udiv i64 %columns, {layout.group}")
        self._sums = self._group_sums() if layout.mins or layout.centre else ""

    def tile(self, first: str) -> list[_Input]:
        """As many of them as the code takes at a time, from one on."""
        return [self._input(first, place) for place in range(self._height)]

    def _input(self, first: str, place: int) -> _Input:
        if self._height == 1:
            return _Input("%x", "%y", self._sums)
        body = self._body
        number = body(f"add i64 {first}, {place}")
        x, y = (body.at("float", f"%{side}", body(f"mul i64 {number}, %{side}_pitch")) for side in "xy")
        sums = body.at("float", self._sums, body(f"mul i64 {number}, {self._groups}")) if self._sums else ""
        return _Input(x, y, sums)

    def _group_sums(self) -> str:
        body, width, group = self._body, self._isa.width, self._layout.group
        sums = body(f"alloca float, i64 {body(f'mul i64 {self._groups}, {self._count}')}, align 64")
        inputs = Loop(body, self._count)
        pitch = "0" if self._height == 1 else "%x_pitch"
        own = body.at("float", "%x", body(f"mul i64 {inputs.index}, {pitch}"))
        out = body.at("float", sums, body(f"mul i64 {inputs.index}, {self._groups}"))
        each = Loop(body, self._groups)
        x = body.at("float", own, body(f"mul i64 {each.index}, {group}"))
        parts = [body.load(vector(width, "float"), x, start) for start in range(0, group, width)]
        body.store("float", total(body, width, parts), out, each.index)
        each.close()
        inputs.close()
        return sums


class _Dense:
    """A row of plain numbers."""

    def __init__(self, body: Body, isa: Isa, layout: Layout) -> None:
        self._body, self._width = body, isa.width
        self._floats = vector(isa.width, "float")
        self._element = "float" if layout.bits == 32 else "i16"
        self._step = _UNROLLED * isa.width
        self._steps = body(f"udiv i64 %columns, {self._step}")
        self._rest = body(f"urem i64 %columns, {self._step}")

    def row(self, row: str, tile: Sequence[_Input]) -> list[str]:
        """The products of one row of weights."""
        body = self._body
        data = body.at(self._element, "%data", body(f"mul i64 {row}, %columns"))
        sums = [(self._floats, "zeroinitializer")] * _UNROLLED * len(tile)
        each = Loop(body, self._steps, sums, may_be_empty=True)
        first = body(f"mul i64 {each.index}, {self._step}")
        grown = list(each.values)
        for part in range(_UNROLLED):
            column = body(f"add i64 {first}, {part * self._width}")
            weights = self._numbers(data, column, self._width)
            for place, one in enumerate(tile):
                x, at = body.load(self._floats, one.x, column), place * _UNROLLED + part
                grown[at] = fma(body, self._width, weights, x, grown[at])
        found = each.close(grown)
        starts = range(0, len(found), _UNROLLED)
        return self._tail(data, tile, [total(body, self._width, found[at : at + _UNROLLED]) for at in starts])

    def _numbers(self, data: str, column: str, width: int) -> str:
        if self._element == "float":
            return self._body.load(vector(width, "float"), data, column)
        return of_bfloat16(self._body, width, self._body.load(vector(width, "i16"), data, column))

    def _tail(self, data: str, tile: Sequence[_Input], values: list[str]) -> list[str]:
        """The columns behind the last whole step, one by one."""
        body = self._body
        first = body(f"mul i64 {self._steps}, {self._step}")
        each = Loop(body, self._rest, [("float", value) for value in values], may_be_empty=True)
        column = body(f"add i64 {first}, {each.index}")
        weight = body(f"extractelement <1 x float> {self._numbers(data, column, 1)}, i32 0")
        grown = []
        for one, value in zip(tile, each.values, strict=True):
            x = body.load("float", one.x, column)
            grown.append(body(f"call float @llvm.fmuladd.f32(float {weight}, float {x}, float {value})"))
        return each.close(grown)


class _Packed:
    """A row of codes."""

    def __init__(self, body: Body, isa: Isa, layout: Layout) -> None:
        self._body, self._isa, self._layout = body, isa, layout
        self._floats = vector(isa.width, "float")
        self._factors = Factors(body, isa, layout)
        spans = body(f"udiv i64 %columns, {SPAN}")
        self._chunks = body(f"udiv i64 {spans}, {CHUNK}")
        self._rest = body(f"urem i64 {spans}, {CHUNK}")
        self._row_bytes = body(f"mul i64 {spans}, {4 * layout.bits}")

    def row(self, row: str, tile: Sequence[_Input]) -> list[str]:
        """The products of one row of weights."""
        body = self._body
        data = body.at("i8", "%data", body(f"mul i64 {row}, {self._row_bytes}"))
        factors = self._factors.of_row(row)
        count = CHUNK * SPAN // self._layout.group
        each = [*[(self._floats, "zeroinitializer")] * 2, (vector(count, "float"), "zeroinitializer")]
        chunks = Loop(body, self._chunks, each * len(tile), may_be_empty=True)
        span = body(f"mul i64 {chunks.index}, {CHUNK}")
        sums = chunks.close(self._spans(data, factors, (span, CHUNK), tile, chunks.values))
        lasts = [""] * len(tile)
        if not self._layout.blocks:
            sums, lasts = self._tail(data, factors, tile, sums)
        return [self._whole(sums[_SUMS * place : _SUMS * (place + 1)], count, last) for place, last in enumerate(lasts)]

    def _whole(self, sums: Sequence[str], count: int, last: str) -> str:
        """A product, of its sums."""
        body = self._body
        *values, shift = sums
        value = total(body, self._isa.width, values)
        if self._factors.shifted:
            value = body(f"fadd float {value}, {total(body, count, [shift])}")
            if last:
                value = body(f"fadd float {value}, {body(f'extractelement <1 x float> {last}, i32 0')}")
        return value

    def _tail(
        self, data: str, factors: tuple[str, str], tile: Sequence[_Input], sums: list[str]
    ) -> tuple[list[str], list[str]]:
        """The spans behind the last whole chunk, one by one: all sums, and those of their shifts alone."""
        body = self._body
        behind = body(f"mul i64 {self._chunks}, {CHUNK}")
        kinds = [self._floats, self._floats, "<1 x float>"] * len(tile)
        before = ["zeroinitializer" if at % _SUMS == _SUMS - 1 else value for at, value in enumerate(sums)]
        rest = Loop(body, self._rest, list(zip(kinds, before, strict=True)), may_be_empty=True)
        span = body(f"add i64 {behind}, {rest.index}")
        found = rest.close(self._spans(data, factors, (span, 1), tile, rest.values))
        lasts = found[_SUMS - 1 :: _SUMS]
        found[_SUMS - 1 :: _SUMS] = sums[_SUMS - 1 :: _SUMS]
        return found, lasts

    def _spans(
        self, data: str, factors: tuple[str, str], part: tuple[str, int], tile: Sequence[_Input], sums: Sequence[str]
    ) -> list[str]:
        """Some spans of a row, from one on: the sums grown by them."""
        body, width, (span, spans) = self._body, self._isa.width, part
        grown = list(sums)
        scales, shifts, count = self._factors.load(factors, span, spans)
        each = SPAN // self._layout.group
        for index in range(spans):
            own = body(f"add i64 {span}, {index}")
            parts = codes(body, self._isa, self._layout, data, own)
            for at, one in enumerate(tile):
                even, odd = grown[_SUMS * at : _SUMS * at + 2]
                for group, value in enumerate(self._groups(parts, one, own)):
                    scale = lane(body, scales, count, index * each + group, width)
                    even, odd = odd, fma(body, width, value, scale, even)
                grown[_SUMS * at : _SUMS * at + 2] = even, odd
        if shifts:
            first = body(f"mul i64 {span}, {each}")
            for at, one in enumerate(tile, 1):
                sums_of = body.load(vector(count, "float"), one.sums, first)
                grown[_SUMS * at - 1] = fma(body, count, shifts, sums_of, grown[_SUMS * at - 1])
        return grown

    def _groups(self, parts: Sequence[str], one: _Input, span: str) -> list[str]:
        """Σ code · x over each group of a span, in as many lanes as there are."""
        body, width = self._body, self._isa.width
        x = body.at("float", one.x, body(f"mul i64 {span}, {SPAN}"))
        loaded = [body.load(self._floats, x, part * width) for part in range(len(parts))]
        each = self._layout.group // width
        return [
            self._sum(parts[first : first + each], loaded[first : first + each]) for first in range(0, len(parts), each)
        ]

    def _sum(self, left: Sequence[str], right: Sequence[str]) -> str:
        value = self._body(f"fmul {self._floats} {left[0]}, {right[0]}")
        for one, other in zip(left[1:], right[1:], strict=True):
            value = fma(self._body, self._isa.width, one, other, value)
        return value
