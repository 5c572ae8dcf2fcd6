"""LLVM IR of Y = X · Wᵀ for few rows of X and weights kept packed.

Some rows of W at a time are unpacked into memory that stays in a core's own cache, and multiplied there with all rows
of X: W is read from memory once and packed. Numbers of a row of X and of a row of W lie one after the other, so that a
register holds some of either, and sums are taken across its lanes at the end: nothing is laid out anew. A row comes
out the same whatever rows stand beside it.
"""

from __future__ import annotations

from kvtool.core.kernels.linear.qtensor import LAYOUTS
from kvtool.core.native.builder import Fields, FunctionBuilder, Value, narrow
from kvtool.core.native.gemm import accumulate
from kvtool.core.native.isa import Isa
from kvtool.core.native.job import Job, WorkQueue
from kvtool.core.native.simd import totals

OUTPUTS = 4  # rows of W in a tile; they come in multiples of it
# `next` is the first row of W that nobody has taken yet, `share` how many are taken at a time, `thread` how many
# threads have begun; each has `scratch_bytes` of scratch to itself.
JOB = Job(
    **{"next": "i64", "thread": "i64", "share": "i64", "last": "i64", "columns": "i64"},
    **{"data": "ptr", "scales": "ptr", "group_mins": "ptr", "x": "ptr", "rows": "i64", "out": "ptr", "outputs": "i64"},
    **{"bias": "float*", "scratch": "i8*", "scratch_bytes": "i64"},
)


def inputs(isa: Isa) -> int:
    """Rows of X in a tile: the least that there must be. A tile has a sum for each lane of a register."""
    return isa.width // OUTPUTS


def few(isa: Isa, kind: str, element: str) -> FunctionBuilder:
    """The function `void few_KIND_ELEMENT(ptr job)`: any number of threads may run it with the same job.

    It needs `unpack_KIND_ELEMENT` of the same module, unless the kind is of plain numbers; those are of the same
    format then.

    Parameters
    ----------
    element : "float32", or "bfloat16" where the CPU has AVX-512 BF16: of X, of Y and of the unpacked weights.
    """
    k = FunctionBuilder(f"few_{kind}_{element}", isa, "i64* job")
    job = JOB.load(k, k.args.job)
    thread = k.atomic_add(k.args.job.at(JOB.places["thread"]), 1)
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
        _multiply(k, job, weights, queue)
    return k


def _multiply(k: FunctionBuilder, job: Fields, weights: Value, taken: WorkQueue) -> None:
    """The rows that were taken, which lie at `weights`, with all rows of X, a tile of sums at a time."""
    high = inputs(k.isa)
    with k.loop((taken.last - taken.first) // OUTPUTS) as across:
        output = across * OUTPUTS
        own = weights.at(output * job.columns)
        output = taken.first + output
        with k.loop((job.rows + (high - 1)) // high) as down:
            # The last tile begins where it ends with the last row: what it computes again comes out the same.
            row = k.minimum(down * high, job.rows - high)
            x = job.x.of(weights.target).at(row * job.columns)
            _store(job, weights.target, totals(_sums(k, job.columns, own, x)), row, output)


def _sums(k: FunctionBuilder, columns: Value, weights: Value, x: Value) -> list[Value]:
    """Sum the tile, row of X by row of X, each sum still in lanes."""
    pairs = weights.target == "i16"
    lanes = k.width * (2 if pairs else 1)
    rows = [x.at(columns * number) for number in range(inputs(k.isa))]
    outputs = [weights.at(columns * number) for number in range(OUTPUTS)]

    def factors(step: Value) -> tuple[list[Value], list[Value]]:
        column = step * lanes
        return [row.load(column, lanes) for row in rows], [output.load(column, lanes) for output in outputs]

    return accumulate(columns // lanes, [k.zeros(k.width)] * k.width, factors, pairs=pairs)


def _store(job: Fields, element: str, value: Value, row: Value, output: Value) -> None:
    """Add the bias, round, and write a tile."""
    width = value.lanes
    value = value + job.bias.load(output, OUTPUTS).shuffle([lane % OUTPUTS for lane in range(width)])
    if element == "i16":
        value = narrow(value, "bfloat16")
    for number in range(width // OUTPUTS):
        part = value.shuffle(range(number * OUTPUTS, (number + 1) * OUTPUTS))
        job.out.of(element).store(part, (row + number) * job.outputs + output)
