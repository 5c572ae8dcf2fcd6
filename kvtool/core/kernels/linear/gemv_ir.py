"""LLVM IR of y = W·x for weights kept packed: they are unpacked in registers, on their way to the multiplication.

What it takes is mostly reading W once. For one group of 32 columns of four bits with AVX2: 2 loads that widen bytes to
32 bits, 4 operations that take halves of them apart, 4 conversions to float32, 4 multiplications onto a sum, and one of
that sum by the group's scale. x stays float32, so nothing is lost but the order of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.core.kernels.linear.qtensor import BLOCK, BLOCKS, LAYOUTS, SUPERBLOCK, Layout
from kvtool.core.native.builder import FunctionBuilder, Value, rounded
from kvtool.core.native.isa import Isa
from kvtool.core.native.job import Job, WorkQueue
from kvtool.core.native.simd import fma, total

_UNROLLED = 4  # vectors of a dense row at a time, with a sum for each
# Of weights, and at least a row, that are multiplied with every x before the next ones: they stay in a core's own cache
# and are many enough to be fetched ahead. Measured with eight x on an AMD EPYC: rows one by one take twice as long.
_BLOCK_BYTES = 2**17
_SUMS = 3  # of a packed row: every other group's, the others', and that of what is added to scale · code
_ARGUMENTS = "ptr data, ptr scales, ptr group_mins, float* x, float* out, i64 first, i64 last, i64 columns"


def product(isa: Isa, kind: str, height: int = 1) -> FunctionBuilder:
    """Make the function `product_KIND`, whose arguments are `_ARGUMENTS`.

    It sets y[r] = Σ w[r, c] · x[c] for rows r from `first` to before `last`, which is not less; x and y float32, y
    counted from row 0; data, scales and group_mins those of a `QuantizedTensor`. Calls for different rows may run in
    parallel.

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
    """Where an x lies, its y, and Σ x over each group of columns: what a min, or a zero point, is multiplied by."""

    x: Value
    y: Value
    sums: Value | None


class _Inputs:
    """What a row of weights is multiplied with, some at a time."""

    def __init__(self, k: FunctionBuilder, layout: Layout, height: int) -> None:
        self._k, self._group, self._height = k, layout.group, height
        self._groups = k.args.columns // layout.group
        self._sums = self._group_sums() if layout.group_mins or layout.zero_point else None

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
        count = SUPERBLOCK // self._layout.group
        each = [k.zeros(k.width), k.zeros(k.width), k.zeros(count)]
        chunks = k.loop(self._rows.chunks, *each * len(tile), may_be_empty=True)
        sums = chunks.close(*self._spans(place, chunks.index * BLOCKS, BLOCKS, tile, chunks.values))
        lasts: Sequence[Value | None] = [None] * len(tile)
        if not self._layout.superblocks:
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
        k, behind = self._k, self._rows.chunks * BLOCKS
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
        each = BLOCK // self._layout.group
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
        x = one.x.at(span * BLOCK)
        loaded = [x.load(part * width, width) for part in range(len(parts))]
        each, sums = self._layout.group // width, []
        for first in range(0, len(parts), each):
            value = parts[first] * loaded[first]
            for at in range(first + 1, first + each):
                value = fma(parts[at], loaded[at], value)
            sums.append(value)
        return sums


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
    return [data.load(start, k.width).to("i32", signed=True) for start in range(0, BLOCK, k.width)]


def _fours(k: FunctionBuilder, data: Value) -> list[Value]:
    pairs = [data.load(start, k.width).to("i32") for start in range(0, BLOCK // 2, k.width)]
    return [pair & 15 for pair in pairs] + [pair >> 4 for pair in pairs]


def _twos(k: FunctionBuilder, data: Value) -> list[Value]:
    """Eight bytes, which hold four columns each: with 16 lanes every byte stands in two of them."""
    each = range(k.width)
    wide = data.load(lanes=8).shuffle([lane % 8 for lane in each]).to("i32")
    shifts = [k.lanes("i32", (2 * ((first + lane) // 8) for lane in each)) for first in range(0, BLOCK, k.width)]
    return [(wide >> shift) & 3 for shift in shifts]


def _ones(k: FunctionBuilder, data: Value) -> list[Value]:
    """A bit for every column."""
    wide = data.of("i32").load(align=1).splat(k.width)
    shifts = [k.lanes("i32", range(first, first + k.width)) for first in range(0, BLOCK, k.width)]
    return [(wide >> shift) & 1 for shift in shifts]


_FIELDS = {8: _eights, 4: _fours, 2: _twos, 1: _ones}


class PackedRows:
    """Rows of a matrix that a function has as its arguments data, scales, group_mins and columns."""

    def __init__(self, k: FunctionBuilder, layout: Layout) -> None:
        self._k, self.layout = k, layout
        self.shifted = layout.group_mins or layout.zero_point != 0
        columns = k.args.columns
        if layout.superblocks:
            self._scales_of_row = columns // SUPERBLOCK * layout.block_bytes
        else:
            self._scales_of_row = columns // layout.group
        spans = columns // BLOCK
        self.chunks, self.rest = spans // BLOCKS, spans % BLOCKS
        self._row_bytes = spans * (4 * layout.bits)

    def row(self, row: Value) -> tuple[Value, Value, Value]:
        """Addresses of a row's codes, scales and group_mins."""
        args, first = self._k.args, row * self._scales_of_row
        scales = args.scales.of("i8" if self.layout.superblocks else "float16")
        data = args.data.of("i8").at(row * self._row_bytes)
        return data, scales.at(first), args.group_mins.of("float16").at(first)

    def factors(self, row: tuple[Value, Value, Value], span: Value, spans: int) -> tuple[Value, Value | None, int]:
        """Scales of some spans, what is added to scale · code (a min, or the zero point's part), and how many."""
        _, scales, group_mins = row
        if self.layout.superblocks:
            return self._block(scales, span)
        found = scales.load(span, spans)
        if self.layout.group_mins:
            return found, group_mins.load(span, spans), spans
        return found, found * -float(self.layout.zero_point) if self.shifted else None, spans

    def _block(self, scales: Value, span: Value) -> tuple[Value, Value, int]:
        layout = self.layout
        block = scales.at(span // BLOCKS * layout.block_bytes)
        count, kinds = SUPERBLOCK // layout.group, 1 + layout.group_mins
        products = []
        for kind in range(kinds):  # a float16 times an int8 for each group
            factor = block.at(2 * kind).of("float16").load(lanes=1, align=1).shuffle([0] * count)
            numbers = block.load(2 * kinds + kind * count, count)
            products.append(factor * numbers.to("float", signed=True))
        found, *group_mins = products
        return found, -group_mins[0] if group_mins else found * -float(layout.zero_point), count


_UNPACKING = "ptr data, ptr scales, ptr group_mins, ptr out, i64 first, i64 last, i64 columns"


def unpack(isa: Isa, kind: str, to: str) -> FunctionBuilder:
    """Make the function `unpack_KIND_TO`, whose arguments are `_UNPACKING`.

    It writes the numbers of the rows from `first` to before `last`, which is not less, row r to `out` + r · columns.
    Each is rounded to the nearest bfloat16, and written as `to` says: "float32" or "bfloat16". The kind is none of
    plain numbers.
    """
    k = FunctionBuilder(f"unpack_{kind}_{to}", isa, _UNPACKING)
    args, rows = k.args, PackedRows(k, LAYOUTS[kind])
    with k.loop(args.last - args.first, may_be_empty=True) as index:
        number = args.first + index
        row = rows.row(number)
        out = args.out.of(to).at(number * args.columns)
        with k.loop(rows.chunks, may_be_empty=True) as chunk:
            _unpack_spans(rows, row, chunk * BLOCKS, BLOCKS, out)
        if not LAYOUTS[kind].superblocks:
            with k.loop(rows.rest, may_be_empty=True) as behind:
                _unpack_spans(rows, row, rows.chunks * BLOCKS + behind, 1, out)
    return k


def _unpack_spans(rows: PackedRows, row: tuple[Value, Value, Value], span: Value, spans: int, out: Value) -> None:
    width, group = out.k.width, rows.layout.group
    scales, shifts, _ = rows.factors(row, span, spans)
    for index in range(spans):
        own = span + index
        place = out.at(own * BLOCK)
        for part, code in enumerate(codes(rows.layout, row[0], own)):
            lanes = [index * BLOCK // group + part // (group // width)] * width
            scale = scales.shuffle(lanes)
            weight = code * scale if shifts is None else fma(code, scale, shifts.shuffle(lanes))
            _store(weight, place, part * width)


def _store(weights: Value, place: Value, at: int) -> None:
    k = weights.k
    if place.target == "bfloat16" and "avx512bf16" in k.isa.features:  # one instruction
        short = k.call("llvm.x86.avx512bf16.cvtneps2bf16.512", "<16 x bfloat>", weights)
        place.of("i16").store(short.bitcast("i16"), at)
    else:
        place.store(rounded(weights, "bfloat16") if place.target == "float32" else weights, at)


# `next` is the first row that nobody has taken yet, `share` how many are taken at a time.
JOB = Job(
    **{"next": "i64", "share": "i64", "last": "i64", "columns": "i64"},
    **dict.fromkeys(("data", "scales", "group_mins", "x", "out"), "ptr"),
)


def share(function: FunctionBuilder) -> FunctionBuilder:
    """The function `void share_FUNCTION(ptr job)`: any number of threads may run it with the same job."""
    k = FunctionBuilder(f"share_{function.name}", function.isa, "ptr job")
    job = JOB.load(k, k.args.job)
    with WorkQueue(k, k.args.job, job.share, job.last) as queue:
        own = {"first": queue.first, "last": queue.last}
        k.call_void(function.name, *(own[name] if name in own else job[name] for name in function.args.names))
    return k
