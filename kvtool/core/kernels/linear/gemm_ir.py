"""GEMV and small GEMM as LLVM IR, for packed weights, which are unpacked in registers on their way to the product.

For a few rows of X, some rows of W at a time are unpacked into memory that stays in a core's own cache, and multiplied
there with all rows of X. A register holds adjacent numbers of either, and sums are taken across its lanes at the end:
no layout is changed. A row comes out the same whatever rows come with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvtool.core.kernels.linear.qtensor import BLOCK, BLOCKS, LAYOUTS, SUPERBLOCK, Layout
from kvtool.core.native.builder import Fields, FunctionBuilder, Value, narrow, rounded
from kvtool.core.native.isa import Isa
from kvtool.core.native.jit import Job, WorkQueue
from kvtool.core.native.simd import Split, accumulate, along, each, fma, total, totals

_UNROLLED = 4  # vectors of a dense row at a time, with a sum for each
# Of weights, and at least a row, that are multiplied with every x before the next ones: they stay in a core's own cache
# and are many enough to be fetched ahead. Measured with eight x on an AMD EPYC: rows one by one take twice as long.
_BLOCK_BYTES = 2**17
SUMS = 3  # of a packed row: every other group's, the others', and that of what is added to scale · code
_WEIGHTS = "ptr data, ptr scales, ptr group_mins"  # of a `QuantizedTensor`


def product(isa: Isa, kind: str, height: int = 1) -> FunctionBuilder:
    """Make `product_KIND(data, scales, group_mins, x, out, first, last, columns)`: y[r] = Σ w[r, c] · x[c].

    It sets rows r from `first` to before `last`, which is not less; x and y float32, y counted from row 0. Calls for
    different rows may run in parallel. With more than one `height` it is `product_KIND_HEIGHT`, which takes `i64
    inputs, i64 x_pitch, i64 y_pitch`, too, and sets a y for each of so many x, at least `height`: so many are
    multiplied with a row of weights at a time. What comes out is the same, bit by bit, whatever the height and however
    many there are.
    """
    layout, k = LAYOUTS[kind], product_function(isa, kind, height)
    inputs = Inputs(k, layout, height)
    row = _dense_row(k, kind) if layout.dense else packed_row(PackedRows(k, layout), _add_blocks, layout.is_shifted)
    return with_all_inputs(row, inputs, layout.bits)


def product_function(isa: Isa, kind: str, height: int, features: str = "") -> FunctionBuilder:
    name, arguments = f"product_{kind}", f"{_WEIGHTS}, float* x, float* out, i64 first, i64 last, i64 columns"
    if height > 1:
        name, arguments = f"{name}_{height}", f"{arguments}, i64 inputs, i64 x_pitch, i64 y_pitch"
    return FunctionBuilder(name, isa, arguments, features=features)


def with_all_inputs(multiply_row: Row, inputs: Inputs, bits: int) -> FunctionBuilder:
    k = inputs.k
    if inputs.height == 1:
        _multiply(k, multiply_row, k.args.first, k.args.last, inputs.tile(k.constant("i64")))
    else:
        _multiply_tiles(k, multiply_row, inputs, inputs.height, bits)
    return k


def _multiply(k: FunctionBuilder, multiply_row: Row, first: Value, last: Value, tile: Sequence[Input]) -> None:
    with k.loop(last - first, may_be_empty=True) as index:
        row = first + index
        for operand, value in zip(tile, multiply_row(row, tile), strict=True):
            operand.y.store(value, row)


def _multiply_tiles(k: FunctionBuilder, multiply_row: Row, inputs: Inputs, height: int, bits: int) -> None:
    args = k.args
    size = k.constant("i64", _BLOCK_BYTES) // (args.columns * bits // 8) + 1
    more = args.last - args.first + (size - 1)
    with k.loop(more // size, may_be_empty=True) as block:
        first = args.first + block * size
        last = k.minimum(first + size, args.last)
        with k.loop((args.inputs + (height - 1)) // height) as index:
            # The last tile begins where it ends with the last input: what it computes again comes out the same.
            number = k.minimum(index * height, args.inputs - height)
            _multiply(k, multiply_row, first, last, inputs.tile(number))


@dataclass(frozen=True, slots=True)
class Input:
    """An x, its y, and Σ x over each group of columns: what a min, or a zero point, is multiplied by."""

    x: Value
    y: Value
    sums: Value | None
    scales: Value | None = None  # of each group, where x is of whole numbers


Row: TypeAlias = Callable[[Value, Sequence[Input]], list[Value]]  # the products of a row of weights with a tile


class Inputs:
    def __init__(self, k: FunctionBuilder, layout: Layout, height: int) -> None:
        self.k, self.height = k, height
        self._layout, self._groups = layout, k.args.columns // layout.group
        self._prepare()

    def _prepare(self) -> None:
        self._sums = self._group_sums() if self._layout.is_shifted else None

    def tile(self, first: Value) -> list[Input]:
        if self.height == 1:
            return [self._input(None)]
        numbers = [first + index for index in range(self.height)]
        return [self._input(number) for number in numbers]

    def _input(self, number: Value | None) -> Input:
        args = self.k.args
        if number is None:
            return Input(args.x, args.out, self._sums)
        x, y = args.x.at(number * args.x_pitch), args.out.at(number * args.y_pitch)
        return Input(x, y, self._sums and self._sums.at(number * self._groups))

    @property
    def _count_and_pitch(self) -> tuple[Value, Value]:
        unit = self.k.constant("i64", 1)
        return (unit, unit) if self.height == 1 else (self.k.args.inputs, self.k.args.x_pitch)

    def _group_sums(self) -> Value:
        k, group, (count, pitch) = self.k, self._layout.group, self._count_and_pitch
        sums = k.alloca("float", self._groups * count)
        with k.loop(count) as number:
            source, out = k.args.x.at(number * pitch), sums.at(number * self._groups)
            with k.loop(self._groups) as index:
                x = source.at(index * group)
                out.store(total(*(x.load(start, k.width) for start in range(0, group, k.width))), index)
        return sums


def _dense_row(k: FunctionBuilder, kind: str) -> Row:
    columns = Split.of(k.args.columns, _UNROLLED * k.width)

    def multiply(row: Value, tile: Sequence[Input]) -> list[Value]:
        data = k.args.data.of(kind).at(row * k.args.columns)

        def step(width: int, first: Value, sums: Sequence[Value]) -> list[Value]:
            if width == 1:
                weight = data.load(first, 1).lane(0)
                return [fma(weight, operand.x.load(first), value) for operand, value in zip(tile, sums, strict=True)]
            grown = list(sums)
            for part in range(_UNROLLED):
                column = first + part * k.width
                weights = data.load(column, k.width)
                for at, operand in enumerate(tile):
                    index = at * _UNROLLED + part
                    grown[index] = fma(weights, operand.x.load(column, k.width), grown[index])
            return grown

        def single(wide: Sequence[Value]) -> list[Value]:
            return [total(*wide[at : at + _UNROLLED]) for at in range(0, len(wide), _UNROLLED)]

        zeros = [k.zeros(k.width)] * _UNROLLED * len(tile)
        return along(k, columns, _UNROLLED * k.width, step, zeros, single)

    return multiply


def packed_row(rows: PackedRows, add_blocks: AddBlocks, is_shifted: bool) -> Row:
    k, layout = rows.k, rows.layout

    def multiply(number: Value, tile: Sequence[Input]) -> list[Value]:
        row, wide = rows.row(number), list[Value]()

        def step(blocks: int, first: Value, sums: Sequence[Value]) -> list[Value]:
            return add_blocks(rows, row, first, blocks, tile, sums)

        def single(sums: Sequence[Value]) -> list[Value]:
            wide[:] = sums[SUMS - 1 :: SUMS]  # of shifts, in as many lanes as a superblock has groups
            return [k.zeros(1) if at % SUMS == SUMS - 1 else value for at, value in enumerate(sums)]

        zeros = [k.zeros(k.width), k.zeros(k.width), k.zeros(rows.step * BLOCK // layout.group)]
        sums = along(k, rows.blocks, rows.step, step, zeros * len(tile), single)
        results = []
        for at, (even, odd, shift) in enumerate(zip(*[iter(sums)] * SUMS, strict=True)):
            value = total(even, odd)
            if is_shifted:
                value = value + total(wide[at] if wide else shift)
                value = value + shift.lane(0) if wide else value
            results.append(value)
        return results

    return multiply


def _add_blocks(
    rows: PackedRows, row: Addresses, block: Value, blocks: int, tile: Sequence[Input], sums: Sequence[Value]
) -> list[Value]:
    grown, width, layout = list(sums), block.k.width, rows.layout
    scales, shifts, _ = rows.factors(row, block, blocks)
    groups = BLOCK // layout.group
    for index in range(blocks):
        block_number = block + index
        parts = codes(layout, row[0], block_number)
        for at, operand in enumerate(tile):
            even, odd = grown[SUMS * at : SUMS * at + 2]
            for group, value in enumerate(_group_products(layout, parts, operand.x.at(block_number * BLOCK))):
                scale = scales.shuffle([index * groups + group] * width)
                even, odd = odd, fma(value, scale, even)
            grown[SUMS * at : SUMS * at + 2] = even, odd
    add_shifts(rows, shifts, block, tile, grown)
    return grown


def add_shifts(rows: PackedRows, shifts: Value | None, block: Value, tile: Sequence[Input], sums: list[Value]) -> None:
    if shifts is None:
        return
    for at, operand in enumerate(tile, 1):
        assert operand.sums is not None
        x = operand.sums.load(block * (BLOCK // rows.layout.group), shifts.lanes)
        sums[SUMS * at - 1] = fma(shifts, x, sums[SUMS * at - 1])


def _group_products(layout: Layout, parts: Sequence[Value], x: Value) -> list[Value]:
    width = x.k.width
    loaded = [x.load(part * width, width) for part in range(len(parts))]
    size, sums = layout.group // width, []
    for first in range(0, len(parts), size):
        value = parts[first] * loaded[first]
        for at in range(first + 1, first + size):
            value = fma(parts[at], loaded[at], value)
        sums.append(value)
    return sums


def codes(layout: Layout, data: Value, block: Value) -> list[Value]:
    """Unpack the codes of 32 columns as float32 vectors, in the order of the columns; `data`: the row's first byte."""
    return [part.to("float", signed=True) for part in whole_codes(layout, data, block)]


def whole_codes(layout: Layout, data: Value, block: Value) -> list[Value]:
    first = data.at(block * (4 * layout.bits))
    parts: list[Value] = []
    at = done = 0
    for width in layout.planes:
        fields = _FIELDS[width](data.k, first.at(at))
        parts = [low | (high << done) for low, high in zip(parts, fields, strict=True)] if parts else fields
        at, done = at + 4 * width, done + width
    return parts


def _eights(k: FunctionBuilder, data: Value) -> list[Value]:
    return [data.load(start, k.width).to("i32", signed=True) for start in range(0, BLOCK, k.width)]


def _fours(k: FunctionBuilder, data: Value) -> list[Value]:
    pairs = [data.load(start, k.width).to("i32") for start in range(0, BLOCK // 2, k.width)]
    return [pair & 15 for pair in pairs] + [pair >> 4 for pair in pairs]


def _twos(k: FunctionBuilder, data: Value) -> list[Value]:
    """Unpack eight bytes, which hold four columns each: with 16 lanes every byte is in two of them."""
    lanes = range(k.width)
    wide = data.load(lanes=8).shuffle([lane % 8 for lane in lanes]).to("i32")
    shifts = [k.lanes("i32", (2 * ((first + lane) // 8) for lane in lanes)) for first in range(0, BLOCK, k.width)]
    return [(wide >> shift) & 3 for shift in shifts]


def _ones(k: FunctionBuilder, data: Value) -> list[Value]:
    wide = data.of("i32").load(align=1).splat(k.width)
    shifts = [k.lanes("i32", range(first, first + k.width)) for first in range(0, BLOCK, k.width)]
    return [(wide >> shift) & 1 for shift in shifts]


_FIELDS = {8: _eights, 4: _fours, 2: _twos, 1: _ones}
Addresses: TypeAlias = tuple[Value, Value, Value]  # of a row's codes, scales and mins
AddBlocks: TypeAlias = Callable[
    ["PackedRows", Addresses, Value, int, Sequence[Input], Sequence[Value]], list[Value]
]  # adds some blocks of a row, from one on, to the sums


class PackedRows:
    """Rows of a packed matrix, given by a function's arguments or a job's fields: data, scales, group_mins, columns. A
    step takes the blocks of a superblock, or as many as divide a row."""

    def __init__(
        self, k: FunctionBuilder, layout: Layout, given: Fields | None = None, divisor: int | None = None
    ) -> None:
        self.k, self._args, self.layout = k, given or k.args, layout
        columns = self._args.columns
        if layout.superblocks:
            self._scales_of_row = columns // SUPERBLOCK * layout.block_bytes
        else:
            self._scales_of_row = columns // layout.group
        blocks = columns // BLOCK
        self.step = BLOCKS if layout.superblocks else divisor or BLOCKS
        self.blocks = Split.of(blocks, self.step, has_rest=not layout.superblocks and divisor is None)
        self._row_bytes = blocks * (4 * layout.bits)

    def row(self, row: Value) -> Addresses:
        args, first = self._args, row * self._scales_of_row
        scales = args.scales.of("i8" if self.layout.superblocks else "float16")
        data = args.data.of("i8").at(row * self._row_bytes)
        return data, scales.at(first), args.group_mins.of("float16").at(first)

    def factors(self, row: Addresses, block: Value, blocks: int) -> tuple[Value, Value | None, int]:
        """Load scales of some blocks, what is added to scale · code (a min, or the zero point's part), and how many."""
        _, scales, group_mins = row
        layout = self.layout
        if layout.superblocks:
            return self._superblock(scales, block)
        group_scales = scales.load(block, blocks)
        if layout.group_mins:
            return group_scales, group_mins.load(block, blocks), blocks
        return group_scales, group_scales * -float(layout.zero_point) if layout.is_shifted else None, blocks

    def _superblock(self, scales: Value, block: Value) -> tuple[Value, Value, int]:
        layout = self.layout
        superblock = scales.at(block // BLOCKS * layout.block_bytes)
        count, kinds = SUPERBLOCK // layout.group, 1 + layout.group_mins
        products = []
        for kind in range(kinds):  # a float16 times an int8 for each group
            factor = superblock.at(2 * kind).of("float16").load(lanes=1, align=1).shuffle([0] * count)
            numbers = superblock.load(2 * kinds + kind * count, count)
            products.append(factor * numbers.to("float", signed=True))
        group_scales, *mins = products
        return group_scales, -mins[0] if mins else group_scales * -float(layout.zero_point), count


def unpack(isa: Isa, kind: str, to: str) -> FunctionBuilder:
    """Make `unpack_KIND_TO(data, scales, group_mins, out, first, last, columns)`, of a kind of codes.

    It writes the rows from `first` to before `last`, which is not less, row r to `out` + r · columns, rounded to the
    nearest bfloat16, as "float32" or "bfloat16".
    """
    k = FunctionBuilder(f"unpack_{kind}_{to}", isa, f"{_WEIGHTS}, ptr out, i64 first, i64 last, i64 columns")
    args, rows = k.args, PackedRows(k, LAYOUTS[kind])
    with k.loop(args.last - args.first, may_be_empty=True) as index:
        number = args.first + index
        row, out = rows.row(number), args.out.of(to).at(number * args.columns)

        def work(blocks: int, first: Value) -> None:
            _unpack_blocks(rows, row, first, blocks, out)

        each(k, rows.blocks, work, width=rows.step)
    return k


def _unpack_blocks(rows: PackedRows, row: Addresses, block: Value, blocks: int, out: Value) -> None:
    width, group = out.k.width, rows.layout.group
    scales, shifts, _ = rows.factors(row, block, blocks)
    for index in range(blocks):
        block_number = block + index
        address = out.at(block_number * BLOCK)
        for part, code in enumerate(codes(rows.layout, row[0], block_number)):
            lanes = [index * BLOCK // group + part // (group // width)] * width
            scale = scales.shuffle(lanes)
            weight = code * scale if shifts is None else fma(code, scale, shifts.shuffle(lanes))
            _store_weights(weight, address, part * width)


def _store_weights(weights: Value, address: Value, at: int) -> None:
    k = weights.k
    if address.target == "bfloat16" and "avx512bf16" in k.isa.features:  # one instruction
        short = k.call("llvm.x86.avx512bf16.cvtneps2bf16.512", "<16 x bfloat>", weights)
        address.of("i16").store(short.bitcast("i16"), at)
    else:
        address.store(rounded(weights, "bfloat16") if address.target == "float32" else weights, at)


# `next` is the first row that no thread has taken yet, `share` how many are taken at a time.
SHARE_JOB = Job(
    **{"next": "i64", "share": "i64", "last": "i64", "columns": "i64"},
    **dict.fromkeys(("data", "scales", "group_mins", "x", "out"), "ptr"),
)


def share(function: FunctionBuilder) -> FunctionBuilder:
    """Write `share_FUNCTION(job)`, which any number of threads may run with the same job."""
    k = FunctionBuilder(f"share_{function.name}", function.isa, "ptr job")
    job = SHARE_JOB.load(k, k.args.job)
    with WorkQueue(k, k.args.job, job.share, job.last) as queue:
        bounds = {"first": queue.first, "last": queue.last}
        k.call_void(function.name, *(bounds[name] if name in bounds else job[name] for name in function.args.names))
    return k


# ---- a few rows of X ---------------------------------------------------------------------------------------------

OUTPUTS = 4  # rows of W in a tile; they come in multiples of it
# `next` is the first row of W that no thread has taken yet, `share` how many are taken at a time, `thread` how many
# threads have begun; each has `scratch_bytes` of scratch of its own.
SMALL_GEMM_JOB = Job(
    **{"next": "i64", "thread": "i64", "share": "i64", "last": "i64", "columns": "i64"},
    **{"data": "ptr", "scales": "ptr", "group_mins": "ptr", "x": "ptr", "rows": "i64", "out": "ptr", "outputs": "i64"},
    **{"bias": "float*", "scratch": "i8*", "scratch_bytes": "i64"},
)


def tile_rows(isa: Isa) -> int:
    return isa.width // OUTPUTS


def small_gemm(isa: Isa, kind: str, element: str) -> FunctionBuilder:
    """Make `small_gemm_KIND_ELEMENT(job)`, Y = X · Wᵀ, which any number of threads may run with the same job.

    X, Y and the unpacked weights are "float32", or "bfloat16" where the CPU has AVX-512 BF16. It needs
    `unpack_KIND_ELEMENT` of the same module, unless the kind is of plain numbers, which then have the same format.
    """
    k = FunctionBuilder(f"small_gemm_{kind}_{element}", isa, "i64* job")
    job = SMALL_GEMM_JOB.load(k, k.args.job)
    thread = k.atomic_add(k.args.job.at(SMALL_GEMM_JOB.places["thread"]), 1)
    scratch = job.scratch.at(thread * job.scratch_bytes)
    with WorkQueue(k, k.args.job, job.share, job.last) as queue:
        stored = "float" if element == "float32" else "i16"
        before = queue.first * job.columns
        if LAYOUTS[kind].dense:
            weights = job.data.of(stored).at(before)
        else:
            weights = scratch.of(stored)
            parts = job.data, job.scales, job.group_mins, weights.at(0 - before)
            k.call_void(f"unpack_{kind}_{element}", *parts, queue.first, queue.last, job.columns)
        _multiply_taken(k, job, weights, queue)
    return k


def _multiply_taken(k: FunctionBuilder, job: Fields, weights: Value, taken: WorkQueue) -> None:
    high = tile_rows(k.isa)
    with k.loop((taken.last - taken.first) // OUTPUTS) as across:
        output = across * OUTPUTS
        tile_weights = weights.at(output * job.columns)
        output = taken.first + output
        with k.loop((job.rows + (high - 1)) // high) as down:
            # The last tile begins where it ends with the last row: what it computes again comes out the same.
            row = k.minimum(down * high, job.rows - high)
            x = job.x.of(weights.target).at(row * job.columns)
            _store_tile(job, weights.target, totals(_sums(k, job.columns, tile_weights, x)), row, output)


def _sums(k: FunctionBuilder, columns: Value, weights: Value, x: Value) -> list[Value]:
    pairs = weights.target == "i16"
    lanes = k.width * (2 if pairs else 1)
    rows = [x.at(columns * number) for number in range(tile_rows(k.isa))]
    outputs = [weights.at(columns * number) for number in range(OUTPUTS)]

    def factors(step: Value) -> tuple[list[Value], list[Value]]:
        column = step * lanes
        vectors = [output.load(column, lanes) for output in outputs]
        return [row.load(column, lanes) for row in rows], vectors

    return accumulate(columns // lanes, [k.zeros(k.width)] * k.width, factors, pairs=pairs)


def _store_tile(job: Fields, element: str, value: Value, row: Value, output: Value) -> None:
    width = value.lanes
    value = value + job.bias.load(output, OUTPUTS).shuffle([lane % OUTPUTS for lane in range(width)])
    if element == "i16":
        value = narrow(value, "bfloat16")
    for number in range(width // OUTPUTS):
        part = value.shuffle(range(number * OUTPUTS, (number + 1) * OUTPUTS))
        job.out.of(element).store(part, (row + number) * job.outputs + output)
