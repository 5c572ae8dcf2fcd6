"""LLVM IR of Y = X · Wᵀ for few rows of X in bfloat16, over weights as oneDNN has laid them out.

W lies in panels of 64 outputs, each `[columns / 2, 64, 2]`: pairs of columns beside each other, as AVX-512 BF16
multiplies them. oneDNN's own products of 32 rows wait for each panel to come from memory; here the next one is asked
for while this one is multiplied.
"""

from __future__ import annotations

from kvtool.core.native import builder
from kvtool.core.native.builder import Fields, FunctionBuilder, Value, WorkQueue
from kvtool.core.native.isa import AVX512_BF16
from kvtool.core.native.job import Job
from kvtool.core.native.simd import dot_pairs

OUTPUTS = 64  # of a panel
ROWS = 8  # of X in a tile: the least that there must be
_WIDTH = AVX512_BF16.width
_VECTORS = 2  # of outputs in a tile: sixteen sums, and few loads of weights, which come from a second cache
_LINES = OUTPUTS // _WIDTH  # of a pair of columns
# `next` is the first panel that nobody has taken yet, `share` how many are taken at once.
JOB = Job(
    **{"next": "i64", "share": "i64", "panels": "i64", "weights": "i16*", "columns": "i64", "x": "i16*", "rows": "i64"},
    **{"out": "bfloat16*", "bias": "float*"},
)


def module() -> str:
    """The function `void panels(ptr job)`: any number of threads may run it with the same job."""
    k = FunctionBuilder("panels", AVX512_BF16, "i64* job")
    job = JOB.load(k, k.args.job)
    with WorkQueue(k, k.args.job, job.share, job.panels) as queue, k.loop(queue.last - queue.first) as index:
        _panel(k, job, queue.first + index)
    return builder.module(k)


def _panel(k: FunctionBuilder, job: Fields, panel: Value) -> None:
    """All rows of X by one panel, a tile after the other; the last begins where it ends with the last row."""
    size = job.columns * OUTPUTS
    weights = job.weights.at(panel * size)
    behind, output = weights.at(size), panel * OUTPUTS
    tiles = _LINES // _VECTORS
    with k.loop((job.rows + (ROWS - 1)) // ROWS * tiles) as tile:
        row = k.minimum(tile // tiles * ROWS, job.rows - ROWS, signed=True)
        across = tile % tiles * (_VECTORS * _WIDTH)
        line = (tile & (_LINES - 1)) * (2 * _WIDTH)
        x = job.x.at(row * job.columns)
        own = weights.of("i32").at(across).of("i16")
        _store(job, _sums(k, job.columns, x, own, behind.at(line)), row, output + across)


def _sums(k: FunctionBuilder, columns: Value, x: Value, weights: Value, ahead: Value) -> list[Value]:
    """The tile's sums; every step asks for a line of the next panel, each tile of four for another one."""
    rows = [x.at(columns * number).of("i32") for number in range(ROWS)]
    deep = k.loop(columns // 2, *[k.zeros(_WIDTH)] * (ROWS * _VECTORS))
    place = deep.index * (2 * OUTPUTS)
    k.prefetch(ahead.at(place))
    own = weights.at(place).of("i32")
    loaded = [own.load(number * _WIDTH, _WIDTH) for number in range(_VECTORS)]
    grown = []
    for number, row in enumerate(rows):
        pair = row.load(deep.index).splat(_WIDTH)
        sums = deep.values[number * _VECTORS : (number + 1) * _VECTORS]
        grown += [dot_pairs(pair, right, onto) for right, onto in zip(loaded, sums, strict=True)]
    return deep.close(*grown)


def _store(job: Fields, sums: list[Value], row: Value, output: Value) -> None:
    """Add the bias, round to bfloat16, and write a tile."""
    width = job.panels * OUTPUTS
    for vector in range(_VECTORS):
        place = output + vector * _WIDTH
        bias = job.bias.load(place, _WIDTH)
        for number in range(ROWS):
            at = (row + number) * width
            job.out.store(sums[number * _VECTORS + vector] + bias, at + place)
