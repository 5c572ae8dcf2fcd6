"""LLVM IR that brings codes and scales of packed weights into registers, as float32."""

from __future__ import annotations

from kvtool.core.kernels.linear.qtensor import CHUNK, SPAN, Layout
from kvtool.core.native.builder import FunctionBuilder, Value


def codes(layout: Layout, data: Value, span: Value) -> list[Value]:
    """The codes of 32 columns as float32 vectors of a register's lanes, in the order of the columns.

    Parameters
    ----------
    data : address of the row's first byte.
    span : which 32 columns.
    """
    k = data.k
    first = data.at(span * (4 * layout.bits))
    parts: list[Value] = []
    at = done = 0
    for width in layout.planes:
        fields = _FIELDS[width](k, first.at(at))
        parts = [low | (high << done) for low, high in zip(parts, fields, strict=True)] if parts else fields
        at, done = at + 4 * width, done + width
    return [part.to("float", signed=True) for part in parts]


def _eights(k: FunctionBuilder, data: Value) -> list[Value]:
    return [data.load(start, k.width).to("i32", signed=True) for start in range(0, SPAN, k.width)]


def _fours(k: FunctionBuilder, data: Value) -> list[Value]:
    pairs = [data.load(start, k.width).to("i32") for start in range(0, SPAN // 2, k.width)]
    return [pair & 15 for pair in pairs] + [pair >> 4 for pair in pairs]


def _twos(k: FunctionBuilder, data: Value) -> list[Value]:
    """Eight bytes, which hold four columns each: with 16 lanes every byte stands in two of them."""
    each = range(k.width)
    wide = data.load(lanes=8).shuffle([lane % 8 for lane in each]).to("i32")
    shifts = [k.lanes("i32", (2 * ((first + lane) // 8) for lane in each)) for first in range(0, SPAN, k.width)]
    return [(wide >> shift) & 3 for shift in shifts]


def _ones(k: FunctionBuilder, data: Value) -> list[Value]:
    """A bit for every column."""
    wide = data.of("i32").load(align=1).splat(k.width)
    shifts = [k.lanes("i32", range(first, first + k.width)) for first in range(0, SPAN, k.width)]
    return [(wide >> shift) & 1 for shift in shifts]


_FIELDS = {8: _eights, 4: _fours, 2: _twos, 1: _ones}


class PackedRows:
    """Rows of a matrix that a function has as its arguments data, scales, mins and columns."""

    def __init__(self, k: FunctionBuilder, layout: Layout) -> None:
        self._k, self.layout = k, layout
        self.shifted = layout.mins or layout.centre != 0
        columns = k.args.columns
        if layout.blocks:
            self._scales_of_row = columns // (SPAN * CHUNK) * layout.block_bytes
        else:
            self._scales_of_row = columns // layout.group
        spans = columns // SPAN
        self.chunks, self.rest = spans // CHUNK, spans % CHUNK
        self._row_bytes = spans * (4 * layout.bits)

    def row(self, row: Value) -> tuple[Value, Value, Value]:
        """Addresses of a row's codes, scales and mins."""
        args, first = self._k.args, row * self._scales_of_row
        scales = args.scales.of("i8" if self.layout.blocks else "float16")
        data = args.data.of("i8").at(row * self._row_bytes)
        return data, scales.at(first), args.mins.of("float16").at(first)

    def factors(self, row: tuple[Value, Value, Value], span: Value, spans: int) -> tuple[Value, Value | None, int]:
        """Scales of some spans, what is added to scale · code (a min, or what the centre comes to), and how many."""
        _, scales, mins = row
        if self.layout.blocks:
            return self._block(scales, span)
        found = scales.load(span, spans)
        if self.layout.mins:
            return found, mins.load(span, spans), spans
        return found, found * -float(self.layout.centre) if self.shifted else None, spans

    def _block(self, scales: Value, span: Value) -> tuple[Value, Value, int]:
        layout = self.layout
        block = scales.at(span // CHUNK * layout.block_bytes)
        count, kinds = SPAN * CHUNK // layout.group, 1 + layout.mins
        products = []
        for kind in range(kinds):  # a float16 times an int8 for each group
            factor = block.at(2 * kind).of("float16").load(lanes=1, align=1).shuffle([0] * count)
            numbers = block.load(2 * kinds + kind * count, count)
            products.append(factor * numbers.to("float", signed=True))
        found, *mins = products
        return found, -mins[0] if mins else found * -float(layout.centre), count
