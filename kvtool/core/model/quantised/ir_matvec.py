"""LLVM IR of y = W·x for weights kept packed: they are unpacked in registers, on their way to the multiplication.

What it takes is mostly reading W once. For one group of 32 columns of four bits with AVX2: 2 loads that widen bytes to
32 bits, 4 operations that take halves of them apart, 4 conversions to float32, 4 multiplications onto a sum, and one of
that sum by the group's scale. x stays float32, so nothing is lost but the order of the sum.
"""

from __future__ import annotations

from kvtool.core.model.quantised.ir_codes import Factors, codes, fma, lane, of_bfloat16, total
from kvtool.core.model.quantised.matrix import CHUNK, LAYOUTS, SPAN, Layout
from kvtool.core.native.ir import Body, Isa, Loop, vector

_UNROLLED = 4  # vectors of a dense row at a time, with a sum for each


def product(isa: Isa, kind: str) -> str:
    """The function `void product_KIND(ptr data, ptr scales, ptr mins, ptr x, ptr y, i64 first, i64 last, i64 columns)`.

    It sets y[r] = Σ w[r, c] · x[c] for rows r from `first` to before `last`, which is not less; x and y float32, y
    counted from row 0; data, scales and mins those of a `Matrix`. Calls for different rows may run side by side. The
    module needs `ir_codes.declarations` once.
    """
    layout = LAYOUTS[kind]
    body = Body()
    kernel = _Dense(body, isa, layout) if layout.dense else _Packed(body, isa, layout)
    each = Loop(body, body("sub i64 %last, %first"), may_be_empty=True)
    row = body(f"add i64 %first, {each.index}")
    body.store("float", kernel.row(row), "%y", row)
    each.close()
    body.do("ret void")
    arguments = "ptr %data, ptr %scales, ptr %mins, ptr %x, ptr %y, i64 %first, i64 %last, i64 %columns"
    return f"define void @product_{kind}({arguments}) {{\n{body.text()}\n}}\n"


class _Dense:
    """A row of plain numbers."""

    def __init__(self, body: Body, isa: Isa, layout: Layout) -> None:
        self._body, self._width = body, isa.width
        self._floats = vector(isa.width, "float")
        self._element = "float" if layout.bits == 32 else "i16"
        self._step = _UNROLLED * isa.width
        self._steps = body(f"udiv i64 %columns, {self._step}")
        self._rest = body(f"urem i64 %columns, {self._step}")

    def row(self, row: str) -> str:
        """The product of one row."""
        body = self._body
        data = body.at(self._element, "%data", body(f"mul i64 {row}, %columns"))
        each = Loop(body, self._steps, [(self._floats, "zeroinitializer")] * _UNROLLED, may_be_empty=True)
        first = body(f"mul i64 {each.index}, {self._step}")
        sums = each.close([self._add(data, first, part, value) for part, value in enumerate(each.values)])
        return self._tail(data, total(body, self._width, sums))

    def _add(self, data: str, first: str, part: int, value: str) -> str:
        body, column = self._body, self._body(f"add i64 {first}, {part * self._width}")
        x = body.load(self._floats, "%x", column)
        return fma(body, self._width, self._numbers(data, column, self._width), x, value)

    def _numbers(self, data: str, column: str, width: int) -> str:
        if self._element == "float":
            return self._body.load(vector(width, "float"), data, column)
        return of_bfloat16(self._body, width, self._body.load(vector(width, "i16"), data, column))

    def _tail(self, data: str, value: str) -> str:
        """The columns behind the last whole step, one by one."""
        body = self._body
        first = body(f"mul i64 {self._steps}, {self._step}")
        each = Loop(body, self._rest, [("float", value)], may_be_empty=True)
        column = body(f"add i64 {first}, {each.index}")
        weight = body(f"extractelement <1 x float> {self._numbers(data, column, 1)}, i32 0")
        x = body.load("float", "%x", column)
        (value,) = each.close(
            [body(f"call float @llvm.fmuladd.f32(float {weight}, float {x}, float {each.values[0]})")]
        )
        return value


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
        self._sums = self._group_sums() if self._factors.shifted else ""

    def _group_sums(self) -> str:
        """Σ x over each group of columns: what a min, or a centre, is multiplied by."""
        body, width, group = self._body, self._isa.width, self._layout.group
        groups = body(f"udiv i64 %columns, {group}")
        sums = body(f"alloca float, i64 {groups}, align 64")
        each = Loop(body, groups)
        x = body.at("float", "%x", body(f"mul i64 {each.index}, {group}"))
        parts = [body.load(self._floats, x, start) for start in range(0, group, width)]
        body.store("float", total(body, width, parts), sums, each.index)
        each.close()
        return sums

    def row(self, row: str) -> str:
        """The product of one row."""
        body = self._body
        data = body.at("i8", "%data", body(f"mul i64 {row}, {self._row_bytes}"))
        factors = self._factors.of_row(row)
        sums = [(self._floats, "zeroinitializer")] * 2
        count = CHUNK * SPAN // self._layout.group
        chunks = Loop(body, self._chunks, [*sums, (vector(count, "float"), "zeroinitializer")], may_be_empty=True)
        span = body(f"mul i64 {chunks.index}, {CHUNK}")
        *values, shift = chunks.close(self._spans(data, factors, span, CHUNK, chunks.values))
        last = ""
        if not self._layout.blocks:
            *values, last = self._tail(data, factors, values)
        value = total(body, self._isa.width, values)
        if self._factors.shifted:
            value = body(f"fadd float {value}, {total(body, count, [shift])}")
            if last:
                value = body(f"fadd float {value}, {body(f'extractelement <1 x float> {last}, i32 0')}")
        return value

    def _tail(self, data: str, factors: tuple[str, str], values: list[str]) -> list[str]:
        """The spans behind the last whole chunk, one by one."""
        body = self._body
        behind = body(f"mul i64 {self._chunks}, {CHUNK}")
        carried = [*((self._floats, value) for value in values), ("<1 x float>", "zeroinitializer")]
        rest = Loop(body, self._rest, carried, may_be_empty=True)
        span = body(f"add i64 {behind}, {rest.index}")
        return rest.close(self._spans(data, factors, span, 1, rest.values))

    def _spans(self, data: str, factors: tuple[str, str], span: str, spans: int, values: list[str]) -> list[str]:
        """Some spans of a row: the sums grown by them."""
        body, width = self._body, self._isa.width
        even, odd, shift = values
        scales, shifts, count = self._factors.load(factors, span, spans)
        groups = [group for index in range(spans) for group in self._groups(data, body(f"add i64 {span}, {index}"))]
        for index, value in enumerate(groups):
            even, odd = odd, fma(body, width, value, lane(body, scales, count, index, width), even)
        if shifts:
            first = body(f"mul i64 {span}, {SPAN // self._layout.group}")
            sums = body.load(vector(count, "float"), self._sums, first)
            shift = fma(body, count, shifts, sums, shift)
        return [even, odd, shift]

    def _groups(self, data: str, span: str) -> list[str]:
        """Σ code · x over each group of a span, in as many lanes as there are."""
        body, width = self._body, self._isa.width
        x = body.at("float", "%x", body(f"mul i64 {span}, {SPAN}"))
        parts = codes(body, self._isa, self._layout, data, span)
        loaded = [body.load(self._floats, x, part * width) for part in range(len(parts))]
        each = self._layout.group // width
        return [
            self._sum(parts[first : first + each], loaded[first : first + each]) for first in range(0, len(parts), each)
        ]

    def _sum(self, left: list[str], right: list[str]) -> str:
        value = self._body(f"fmul {self._floats} {left[0]}, {right[0]}")
        for one, other in zip(left[1:], right[1:], strict=True):
            value = fma(self._body, self._isa.width, one, other, value)
        return value
