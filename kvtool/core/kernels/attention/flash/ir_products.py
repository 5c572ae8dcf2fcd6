"""The two products of a tile, as LLVM IR: keys · queries, and values · weights; lanes stand in registers."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.core.kernels.attention.flash.tiling import Tiling
from kvtool.core.native.builder import FunctionBuilder, Value
from kvtool.core.native.simd import dot_pairs, fma, larger

_UNROLLED = 2  # steps of a sum: rows are a multiple of it


def scores_function(tiling: Tiling) -> FunctionBuilder:
    """`void scores(queries, keys, steps, groups, scores, before, largest)`: scores of one strip and a tile of keys.

    queries `[steps, strip]`, keys `[groups · keys_once, steps]`, in numbers (or pairs) of 32 bits. `largest` is the
    larger of `before` and what a lane finds.
    """
    k = tiling.function(
        "scores", "float* queries, float* keys, i64 steps, i64 groups, float* scores, float* before, float* largest"
    )
    args = k.args
    group = k.loop(args.groups, *(args.before.load(lane, k.width) for lane in tiling.starts))
    row = group.index * tiling.keys_once
    rows = [args.keys.at((row + key) * args.steps) for key in range(tiling.keys_once)]
    sums = iter(_product(tiling, args.queries, rows, 1, args.steps))
    largest = list(group.values)
    for key in range(tiling.keys_once):
        start = (row + key) * tiling.strip
        for at, lane in enumerate(tiling.starts):
            value = next(sums)
            args.scores.store(value, start + lane)
            largest[at] = larger(value, largest[at])
    for lane, value in zip(tiling.starts, group.close(*largest), strict=True):
        args.largest.store(value, lane)
    return k


def sum_function(tiling: Tiling) -> FunctionBuilder:
    """`void sum(weights, values, steps, groups, shrink, results)`: results · shrink + values · weights of one strip.

    weights `[steps, strip]`, values `[steps, groups · keys_once]`, in numbers (or pairs of keys) of 32 bits; results
    float32 `[groups · keys_once, strip]`.
    """
    k = tiling.function("sum", "float* weights, float* values, i64 steps, i64 groups, float* shrink, float* results")
    args = k.args
    shrink = [args.shrink.load(lane, k.width) for lane in tiling.starts]
    columns = args.groups * tiling.keys_once
    with k.loop(args.groups) as group:
        column = group * tiling.keys_once
        starts = [(column + at) * tiling.strip for at in range(tiling.keys_once)]
        places = [start + lane for start in starts for lane in tiling.starts]
        first = [args.results.load(place, k.width) * shrink[at % len(shrink)] for at, place in enumerate(places)]
        values = [args["values"].at(column + at) for at in range(tiling.keys_once)]
        sums = _product(tiling, args.weights, values, columns, args.steps, first)
        for place, value in zip(places, sums, strict=True):
            args.results.store(value, place)
    return k


def _product(
    tiling: Tiling,
    lanes: Value,
    rows: Sequence[Value],
    stride: Value | int,
    steps: Value,
    first: Sequence[Value] = (),
) -> list[Value]:
    """Sums over `steps` of lanes `[steps, strip]` · a number of each row; row by row, then by register of lanes.

    A row's numbers are the stride apart.
    """
    k, add = lanes.k, dot_pairs if tiling.pairs else fma
    begin = first or [k.zeros(k.width)] * (len(rows) * tiling.registers)
    each = k.loop(steps // _UNROLLED, *begin)
    sums = list(each.values)
    for part in range(_UNROLLED):
        step = each.index * _UNROLLED + part
        start = step * tiling.strip
        held = [lanes.load(start + lane, k.width) for lane in tiling.starts]
        for row, pointer in enumerate(rows):
            one = pointer.load(step * stride if isinstance(stride, Value) else step).splat(k.width)
            for at, other in enumerate(held, row * tiling.registers):
                sums[at] = add(one, other, sums[at])
    return each.close(*sums)
