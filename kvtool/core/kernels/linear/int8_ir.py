"""GEMM as LLVM IR of rows of X in 8-bit integers with weights kept packed, as llama.cpp multiplies a prompt's rows.

Each group of columns that shares a scale of W has one of X, too: x ≈ scale · q, q from -127 to 127. A group's sum of
code · q is one of whole numbers, and exact; y adds up sum · scale of W · scale of X, and W's min times the group's Σ x.

Weights are unpacked some rows at a time, into bytes that stay in a core's own cache: those of four columns of as many
rows as a register has lanes are side by side, so that one instruction multiplies 64 bytes (AVX-512 VNNI) or 32 (AVX2,
sums of 16 bits, which a group's codes must not exceed). A row comes out the same whatever rows come with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.core.kernels.linear.gemm_ir import PackedRows, whole_codes
from kvtool.core.kernels.linear.qtensor import BLOCK, BLOCKS, LAYOUTS, Layout
from kvtool.core.native.builder import Fields, FunctionBuilder, Value
from kvtool.core.native.isa import AVX2, AVX512, AVX512_VNNI, Isa
from kvtool.core.native.job import Job, WorkQueue
from kvtool.core.native.simd import MAGIC, each, fma

TOP = 127  # the largest q
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
    """Return the rows of X in a tile, the least that there must be: their sums stay in registers."""
    return isa.width // 2


def multiplies(isa: Isa | None, layout: Layout) -> bool:
    """Return whether there is code for a kind of weights: for codes of 8 bits sums of 16 are too small."""
    return not layout.dense and (isa is AVX512_VNNI or (isa in (AVX2, AVX512) and layout.bits < 8))


def scratch_bytes(isa: Isa, layout: Layout, columns: int) -> int:
    """Return the bytes that a thread unpacks weights to: codes, scales and mins of as many rows as there are lanes."""
    return isa.width * columns + 2 * 4 * isa.width * (columns // layout.group)


def quantize(isa: Isa, group: int) -> FunctionBuilder:
    """Make `quantize_GROUP(job)`: q, a scale and scale · Σ q for each group of columns of X."""
    k = FunctionBuilder(f"quantize_{group}", isa, "i64* job")
    job = QUANTIZE_JOB.load(k, k.args.job)
    groups = job.columns // group
    with (
        WorkQueue(k, k.args.job, job.share, job.rows) as queue,
        k.loop(queue.last - queue.first) as index,
        k.loop(groups) as number,
    ):
        row = queue.first + index
        _quantize_group(job, group, row * job.columns + number * group, row * groups + number)
    return k


def _quantize_group(job: Fields, group: int, first: Value, place: Value) -> None:
    """Write what a group comes to; `first`: its first number, `place`: its own number."""
    k, width = first.k, first.k.width
    loaded = [job.x.at(first).load(start, width) for start in range(0, group, width)]
    largest = k.call(f"llvm.fabs.v{width}f32", loaded[0].type, loaded[0])
    for x in loaded[1:]:
        largest = k.call(f"llvm.maxnum.v{width}f32", x.type, largest, k.call(f"llvm.fabs.v{width}f32", x.type, x))
    most = k.call(f"llvm.vector.reduce.fmax.v{width}f32", "float", largest, flags="nnan")
    factor = (most > 0.0).select(TOP / most, 0.0).splat(width)
    total = k.zeros(width, "i32")
    for part, x in enumerate(loaded):
        rounded = fma(x, factor, MAGIC).bitcast("i32") - x.like(MAGIC).bitcast("i32")
        total = total + rounded
        job.q.at(first).store(rounded.to("i8"), part * width)
    scale = most * (1 / TOP)
    summed = k.call(f"llvm.vector.reduce.add.v{width}i32", "i32", total).to("float", signed=True)
    job.scales.store(scale, place)
    job.sums.store(summed * scale, place)


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
    """Unpack a row of W into its lane of a panel."""
    row, width, layout = rows.row(number), number.k.width, rows.layout
    codes, scales, mins = panel
    whole = layout.bits == 8  # codes have a sign then; instructions take them without

    def unpack(blocks: int, first: Value) -> None:
        found, shifts, _ = rows.factors(row, first, blocks)
        groups = blocks * BLOCK // layout.group
        for at in range(groups):
            scale, place = found.lane(at), (first * (BLOCK // layout.group) + at) * width + lane
            scales.store(scale, place)
            least = shifts.lane(at) if shifts is not None else scale * 0.0
            mins.store(least - scale * 128.0 if whole else least, place)
        for block in range(blocks):
            own = first + block
            for part, some in enumerate(whole_codes(layout, row[0], own)):
                quads = ((some ^ 128) if whole else some).to("i8").bitcast(f"<{width // 4} x i32>")
                for quad in range(width // 4):
                    place = (own * _QUADS + (part * width // 4 + quad)) * width + lane
                    codes.of("i32").store(quads.lane(quad), place)

    each(number.k, rows.blocks, unpack, width=BLOCKS)


def _multiply_panel(job: Fields, layout: Layout, output: Value, panel: _Panel) -> None:
    """Multiply the rows of a panel with all rows of X, a tile at a time."""
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
        own = codes.of("i32").at(number * (quads * width))
        sums = _dot(layout, own, [one.at(number * quads) for one in q])
        scale, least = scales.load(number * width, width), mins.load(number * width, width)
        grown = []
        for row, value, whole in zip(rows, loop.values, sums, strict=True):
            place = row * groups + number
            x_scale, x_sum = (each.load(place).splat(width) for each in (job.x_scales, job.x_sums))
            value = fma(whole.to("float", signed=True) * x_scale, scale, value)
            grown.append(fma(least, x_sum, value) if layout.is_shifted or layout.bits == 8 else value)
        for row, value in zip(rows, loop.close(*grown), strict=True):
            job.out.at(row * job.outputs).store(value, output)


def _dot(layout: Layout, codes: Value, q: Sequence[Value]) -> list[Value]:
    """Sum code · q over a group, i32, for each row of X: four columns at a time."""
    k, width = codes.k, codes.k.width
    sums, halves = [k.zeros(width, "i32")] * len(q), [k.zeros(2 * width, "i16")] * len(q)
    ones = k.constant(f"<{2 * width} x i16>", 1)
    most = (2**15 - 1) // (2 * TOP * (2**layout.bits - 1))  # products of pairs that a sum of 16 bits holds
    last = layout.group // 4 - 1
    for quad in range(last + 1):
        own = codes.load(quad * width, width)
        for row, one in enumerate(q):
            four = one.load(quad, align=1).splat(width)
            if k.isa is AVX512_VNNI:
                sums[row] = k.call("llvm.x86.avx512.vpdpbusd.512", sums[row].type, sums[row], own, four)
                continue
            pairs = [side.bitcast(f"<{4 * width} x i8>") for side in (own, four)]
            halves[row] = halves[row] + k.call(_PAIRS[width], halves[row].type, *pairs)
            if quad % most == most - 1 or quad == last:
                sums[row] = sums[row] + k.call(_SUM_PAIRS[width], sums[row].type, halves[row], ones)
                halves[row] = k.zeros(2 * width, "i16")
    return sums


_PAIRS = {8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}
_SUM_PAIRS = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
