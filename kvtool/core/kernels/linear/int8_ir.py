"""GEMM as LLVM IR of rows of X in 8-bit integers with weights kept packed, as llama.cpp multiplies a prompt's rows.

Each group of columns that shares a scale of W has one of X, too: x ≈ scale · q, q from -127 to 127. A group's sum of
code · q is exact; y adds up sum · scale of W · scale of X, and W's min times the group's Σ x.

Weights are unpacked some rows at a time, into bytes that stay in a core's own cache: those of four columns of as many
rows as a register has lanes are side by side, so that one instruction multiplies 64 bytes (AVX-512 VNNI), 32 (AVX2,
sums of 16 bits) or 16 (ARM's dot product). `row_product` unpacks bytes of a few blocks at a time in registers, and q
has their order: the first 16 columns of each block, then the last 16 of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from kvtool.core.kernels.linear.gemm_ir import (
    SUMS,
    Addresses,
    Input,
    Inputs,
    PackedRows,
    add_shifts,
    packed_row,
    product_function,
    whole_codes,
    with_all_inputs,
)
from kvtool.core.kernels.linear.qtensor import BLOCK, LAYOUTS, Layout
from kvtool.core.native.builder import Fields, FunctionBuilder, Value
from kvtool.core.native.isa import AVX2, AVX512, AVX512_VNNI, NEON_DOT, Isa
from kvtool.core.native.jit import Job, WorkQueue
from kvtool.core.native.simd import MAGIC, each, fma

TOP = 127  # the largest q
_LEAST = 2.0**-120  # a group whose largest number is no larger counts as 0: TOP divided by it is no float32
_QUADS = BLOCK // 4  # of columns whose codes are multiplied together
# `next` is the first row of X, or of W, that no thread has taken yet, `share` how many are taken at a time.
QUANTIZE_JOB = Job(
    **{"next": "i64", "share": "i64", "rows": "i64", "columns": "i64"},
    **{"x": "float*", "q": "i8*", "scales": "float*", "sums": "float*"},
)
INT8_JOB = Job(
    **{"next": "i64", "thread": "i64", "share": "i64", "last": "i64", "columns": "i64"},
    **{"data": "ptr", "scales": "ptr", "group_mins": "ptr", "q": "i8*", "x_scales": "float*", "x_sums": "float*"},
    **{"rows": "i64", "out": "float*", "outputs": "i64", "bias": "float*", "scratch": "i8*", "scratch_bytes": "i64"},
)


def tile_rows(isa: Isa) -> int:
    """The least rows of X that there must be: their sums stay in registers."""
    return isa.width // 2


def multiplies(isa: Isa | None, layout: Layout) -> bool:
    """Whether there is code for a kind of weights: for codes of 8 bits sums of 16 are too small."""
    return not layout.dense and (isa in (AVX512_VNNI, NEON_DOT) or (isa in (AVX2, AVX512) and layout.bits < 8))


def multiplies_row(isa: Isa, layout: Layout) -> bool:
    """Whether `row_product` has code for a kind: only AVX-512 has a quick way from bits to bytes."""
    return multiplies(isa, layout) and (isa.width == 16 or 1 not in layout.planes)


def scratch_bytes(isa: Isa, layout: Layout, columns: int) -> int:
    return isa.width * columns + 2 * 4 * isa.width * (columns // layout.group)


def quantize(isa: Isa, group: int) -> FunctionBuilder:
    k = FunctionBuilder(f"quantize_{group}", isa, "i64* job")
    job = QUANTIZE_JOB.load(k, k.args.job)
    groups = job.columns // group
    with (
        WorkQueue(k, k.args.job, job.share, job.rows) as queue,
        k.loop(queue.last - queue.first) as index,
        k.loop(groups) as number,
    ):
        row = queue.first + index
        first = row * job.columns + number * group
        _quantize_group(job, job.x.at(first), row * groups + number, lambda start: job.q.at(first).at(start), group)
    return k


def _quantize_group(out: Fields, x: Value, number: Value, where: Callable[[int], Value], group: int) -> None:
    """Write what group `number`, from `x` on, comes to; `where` gives the address of a column's q."""
    k, width = x.k, x.k.width
    loaded = [x.load(start, width) for start in range(0, group, width)]
    # As whole numbers: NaN is the largest then, and comes out as NaN. What 127 cannot be divided by is 0.
    largest, *others = [x.bitcast("i32") & 0x7FFFFFFF for x in loaded]
    for size in others:
        largest = k.call(f"llvm.umax.v{width}i32", size.type, largest, size)
    most = k.call(f"llvm.vector.reduce.umax.v{width}i32", "i32", largest).bitcast("float")
    factor = (most > _LEAST).select(TOP / most, 0.0).splat(width)
    total = k.zeros(width, "i32")
    for part, x in enumerate(loaded):
        rounded = fma(x, factor, MAGIC).bitcast("i32") - x.like(MAGIC).bitcast("i32")
        total = total + rounded
        where(part * width).store(rounded.to("i8"))
    scale = most * (1 / TOP)
    summed = k.call(f"llvm.vector.reduce.add.v{width}i32", "i32", total).to("float", signed=True)
    out.scales.store(scale, number)
    out.sums.store(summed * scale, number)


def int8_gemm(isa: Isa, kind: str) -> FunctionBuilder:
    """Make `int8_gemm_KIND(job)`, Y = X · Wᵀ, which any number of threads may run with the same job.

    Rows of W come in multiples of a register's lanes, rows of X are at least `tile_rows`.
    """
    k = FunctionBuilder(f"int8_gemm_{kind}", isa, "i64* job", features=isa.extra)
    job, layout, width = INT8_JOB.load(k, k.args.job), LAYOUTS[kind], k.width
    thread = k.atomic_add(k.args.job.at(INT8_JOB.places["thread"]), 1)
    codes = job.scratch.at(thread * job.scratch_bytes)
    scales = codes.at(job.columns * width).of("float")
    panel = codes, scales, scales.at(job.columns // layout.group * width)
    rows = PackedRows(k, layout, job)
    with WorkQueue(k, k.args.job, job.share, job.last) as queue, k.loop((queue.last - queue.first) // width) as index:
        output = queue.first + index * width
        with k.loop(width) as lane:
            _unpack_row(rows, output + lane, lane, panel)
        _multiply_panel(job, layout, output, panel)
    return k


_Panel = tuple[Value, Value, Value]  # addresses of unpacked codes, scales and mins


def _unpack_row(rows: PackedRows, number: Value, lane: Value, panel: _Panel) -> None:
    row, width, layout = rows.row(number), number.k.width, rows.layout
    codes, scales, mins = panel
    whole = _loses_sign(number.k.isa, layout)

    def unpack(blocks: int, first: Value) -> None:
        group_scales, shifts, _ = rows.factors(row, first, blocks)
        groups = blocks * BLOCK // layout.group
        for at in range(groups):
            scale, offset = group_scales.lane(at), (first * (BLOCK // layout.group) + at) * width + lane
            scales.store(scale, offset)
            least = shifts.lane(at) if shifts is not None else scale * 0.0
            mins.store(least - scale * 128.0 if whole else least, offset)
        for block in range(blocks):
            block_number = first + block
            for part, vector in enumerate(whole_codes(layout, row[0], block_number)):
                quads = ((vector ^ 128) if whole else vector).to("i8").bitcast(f"<{width // 4} x i32>")
                for quad in range(width // 4):
                    offset = (block_number * _QUADS + (part * width // 4 + quad)) * width + lane
                    codes.of("i32").store(quads.lane(quad), offset)

    each(number.k, rows.blocks, unpack, width=rows.step)


def _multiply_panel(job: Fields, layout: Layout, output: Value, panel: _Panel) -> None:
    k, group, (codes, scales, mins) = output.k, layout.group, panel
    width, high, quads = k.width, tile_rows(k.isa), group // 4
    groups, bias = job.columns // group, job.bias.load(output, k.width)
    with k.loop((job.rows + (high - 1)) // high) as down:
        # The last tile begins where it ends with the last row: what it computes again comes out the same.
        first = k.minimum(down * high, job.rows - high)
        rows = [first + number for number in range(high)]
        q = [job.q.at(row * job.columns).of("i32") for row in rows]
        loop = k.loop(groups, *[bias] * high)
        number = loop.index
        group_codes = codes.of("i32").at(number * (quads * width))
        sums = _dot(layout, group_codes, [address.at(number * quads) for address in q])
        scale, least = scales.load(number * width, width), mins.load(number * width, width)
        grown = []
        for row, value, whole in zip(rows, loop.values, sums, strict=True):
            offset = row * groups + number
            x_scale, x_sum = (each.load(offset).splat(width) for each in (job.x_scales, job.x_sums))
            value = fma(whole.to("float", signed=True) * x_scale, scale, value)
            grown.append(fma(least, x_sum, value) if _is_shifted(k.isa, layout) else value)
        for row, value in zip(rows, loop.close(*grown), strict=True):
            job.out.at(row * job.outputs).store(value, output)


def _dot(layout: Layout, codes: Value, q: Sequence[Value]) -> list[Value]:
    k, width = codes.k, codes.k.width
    sums, halves = [k.zeros(width, "i32")] * len(q), [k.zeros(2 * width, "i16")] * len(q)
    ones = k.constant(f"<{2 * width} x i16>", 1)
    most = (2**15 - 1) // (2 * TOP * (2**layout.bits - 1))  # products of pairs that a sum of 16 bits holds
    last = layout.group // 4 - 1
    for quad in range(last + 1):
        quad_codes = codes.load(quad * width, width)
        for row, address in enumerate(q):
            four = address.load(quad, align=1).splat(width)
            if k.isa in (AVX512_VNNI, NEON_DOT):
                sums[row] = _add_fours(sums[row], quad_codes, four)
                continue
            pairs = [side.bitcast(f"<{4 * width} x i8>") for side in (quad_codes, four)]
            halves[row] = halves[row] + k.call(_PAIRS[width], halves[row].type, *pairs)
            if quad % most == most - 1 or quad == last:
                sums[row] = sums[row] + k.call(_SUM_PAIRS[width], sums[row].type, halves[row], ones)
                halves[row] = k.zeros(2 * width, "i16")
    return sums


def _add_fours(onto: Value, codes: Value, q: Value) -> Value:
    k = onto.k
    if k.isa is AVX512_VNNI:
        return k.call("llvm.x86.avx512.vpdpbusd.512", onto.type, onto, codes, q)
    parts = []
    for first in (0, 4):  # two registers
        sums, *bytes_ = (side.shuffle(range(first, first + 4)) for side in (onto, codes, q))
        bytes_ = [side.bitcast("<16 x i8>") for side in bytes_]
        parts.append(k.call("llvm.aarch64.neon.sdot.v4i32.v16i8", sums.type, sums, *bytes_))
    return parts[0].shuffle(range(8), parts[1])


def _loses_sign(isa: Isa, layout: Layout) -> bool:
    """Whether 128 is added to codes of 8 bits, which have a sign: x86's instructions take them without."""
    return layout.bits == 8 and isa is not NEON_DOT


def _is_shifted(isa: Isa, layout: Layout) -> bool:
    return layout.is_shifted or _loses_sign(isa, layout)


_PAIRS = {8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}
_SUM_PAIRS = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}


# ---- one row of X, as decoding has it -----------------------------------------------------------------------------

HALF = BLOCK // 2


def blocks_at_once(isa: Isa) -> int:
    return 4 * isa.width // HALF


def row_product(isa: Isa, kind: str, height: int = 1) -> FunctionBuilder:
    """Make `product_KIND_int8`, as `product` with each x rounded to 8-bit integers; `columns` of whole registers."""
    layout, k = LAYOUTS[kind], product_function(isa, f"{kind}_int8", height, isa.extra)
    row = packed_row(PackedRows(k, layout, divisor=blocks_at_once(isa)), _add_blocks, _is_shifted(isa, layout))
    return with_all_inputs(row, _RoundedInputs(k, layout, height), layout.bits)


class _RoundedInputs(Inputs):
    """Inputs as whole numbers, rounded by each thread for itself: next to the product that takes no time."""

    def _prepare(self) -> None:
        k, group, (count, pitch) = self.k, self._layout.group, self._count_and_pitch
        columns, at_once = k.args.columns, blocks_at_once(k.isa)
        self._q = k.alloca("i8", columns * count)
        scales, sums = (k.alloca("float", self._groups * count) for _ in range(2))
        self._out = Fields({"scales": scales, "sums": sums})
        with k.loop(count) as number, k.loop(self._groups) as index:

            def where(start: int) -> Value:
                column = index * group + start
                block, half = column // BLOCK, column % BLOCK // HALF
                position = (block // at_once * 2 + half) * at_once + block % at_once
                return self._q.at(number * columns).at(position * HALF + column % HALF)

            x = k.args.x.at(number * pitch).at(index * group)
            _quantize_group(self._out, x, number * self._groups + index, where, group)

    def _input(self, number: Value | None) -> Input:
        args, out = self.k.args, self._out
        if number is None:
            return Input(self._q, args.out, out.sums, out.scales)
        q, y, offset = self._q.at(number * args.columns), args.out.at(number * args.y_pitch), number * self._groups
        return Input(q, y, out.sums.at(offset), out.scales.at(offset))


def _add_blocks(
    rows: PackedRows, row: Addresses, block: Value, blocks: int, tile: Sequence[Input], sums: Sequence[Value]
) -> list[Value]:
    k, layout, grown, at_once = rows.k, rows.layout, list(sums), blocks_at_once(rows.k.isa)
    scales, shifts, count = rows.factors(row, block, blocks)
    groups, first = BLOCK // layout.group, block * (BLOCK // layout.group)
    factors = [scales * cast(Value, operand.scales).load(first, count) for operand in tile]
    for index in range(0, blocks, at_once):
        block_number = block + index
        halves = _byte_halves(layout, row[0], block_number)
        for at, operand in enumerate(tile):
            q = [operand.x.at(block_number * BLOCK).load(half * k.width * 4, 4 * k.width) for half in range(2)]
            parts = [(halves, q)] if groups == 1 else [([c], [x]) for c, x in zip(halves, q, strict=True)]
            for group, (codes, x) in enumerate(parts):
                lanes = [(index + lane // 4) * groups + group for lane in range(k.width)]
                value = grown[SUMS * at + group]
                grown[SUMS * at + group] = fma(
                    _dot_bytes(k, codes, x).to("float", signed=True), factors[at].shuffle(lanes), value
                )
            if groups == 1:
                grown[SUMS * at], grown[SUMS * at + 1] = grown[SUMS * at + 1], grown[SUMS * at]
    if _loses_sign(k.isa, layout):
        shifts = scales * -128.0
    add_shifts(rows, shifts, block, tile, grown)
    return grown


def _byte_halves(layout: Layout, data: Value, block: Value) -> list[Value]:
    k, size = data.k, 4 * layout.bits
    at_once = blocks_at_once(k.isa)
    first, halves, at, done = data.at(block * size), list[Value](), 0, 0
    for width in layout.planes:
        planes = [first.at(number * size + at) for number in range(at_once)]
        fields = _HALVES[width](k, planes)
        halves = [low | (high << done) for low, high in zip(halves, fields, strict=True)] if halves else fields
        at, done = at + 4 * width, done + width
    return halves


def _joined(parts: Sequence[Value]) -> Value:
    while len(parts) > 1:
        order = range(2 * parts[0].lanes)
        parts = [low.shuffle(order, high) for low, high in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _eights(k: FunctionBuilder, planes: Sequence[Value]) -> list[Value]:
    halves = [_joined([plane.load(start, HALF) for plane in planes]) for start in (0, HALF)]
    return halves if k.isa is NEON_DOT else [half ^ 128 for half in halves]


def _fours(k: FunctionBuilder, planes: Sequence[Value]) -> list[Value]:
    both = _joined([plane.load(0, HALF) for plane in planes])
    return [both & 15, both >> 4]


def _twos(k: FunctionBuilder, planes: Sequence[Value]) -> list[Value]:
    words = _joined([plane.of("i64").load(align=1).splat(2) for plane in planes])
    kind = f"<{8 * words.lanes} x i8>"
    shifts = [k.lanes("i64", [first, first + 2] * len(planes)) for first in (0, 4)]
    return [(words >> shift).bitcast(kind) & 3 for shift in shifts]


def _ones(k: FunctionBuilder, planes: Sequence[Value]) -> list[Value]:
    halves = [_joined([plane.of("i16").load(start, align=1).splat(1) for plane in planes]) for start in (0, 1)]
    lanes = HALF * len(planes)
    return [half.bitcast(f"<{lanes} x i1>").to("i8") for half in halves]


_HALVES = {8: _eights, 4: _fours, 2: _twos, 1: _ones}


def _dot_bytes(k: FunctionBuilder, codes: Sequence[Value], q: Sequence[Value]) -> Value:
    total = k.zeros(k.width, "i32")
    if k.isa in (AVX512_VNNI, NEON_DOT):
        for code_bytes, x_bytes in zip(codes, q, strict=True):
            total = _add_fours(total, *(side.bitcast(total.type) for side in (code_bytes, x_bytes)))
        return total
    halves = k.zeros(2 * k.width, "i16")
    for code_bytes, x_bytes in zip(codes, q, strict=True):
        halves = halves + k.call(_PAIRS[k.width], halves.type, code_bytes, x_bytes)
    return k.call(_SUM_PAIRS[k.width], total.type, halves, k.constant(halves.type, 1))
