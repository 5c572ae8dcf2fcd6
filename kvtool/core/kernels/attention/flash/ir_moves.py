"""Numbers on their way in and out, as LLVM IR: formats changed, rows turned into lanes and back."""

from __future__ import annotations

from kvtool.core.kernels.attention.flash.tiling import Tiling
from kvtool.core.native.builder import FunctionBuilder, Value
from kvtool.core.native.simd import transpose

_SIDE = 8  # of the squares that are turned


def rows_function(tiling: Tiling) -> FunctionBuilder:
    """`void rows(lead, lead stride, leads, own, own stride, first, last, count, columns, to)`: a tile's rows in order.

    Row i is row first + i of `leads` lead rows and those of `own` behind them; from `last` on the last one again.
    Strides in numbers; `to` `[count, columns]` in the tile's format.
    """
    k = tiling.function(
        "rows",
        "ptr lead, i64 lead_stride, i64 leads, ptr own, i64 own_stride, "
        "i64 first, i64 last, i64 count, i64 columns, ptr to",
    )
    args, stored = k.args, tiling.kept if tiling.pairs else tiling.stored
    with k.loop(args.count) as index:
        row = k.minimum(args.first + index, args.last)
        lead = args.lead.of(stored).at(row * args.lead_stride)
        own = args.own.of(stored).at((row - args.leads) * args.own_stride)
        source = (row < args.leads).select(lead, own)
        target = args.to.of(tiling.kept).at(index * args.columns)
        with k.loop(args.columns // (2 * _SIDE)) as part:
            column = part * (2 * _SIDE)
            for half in range(2):
                place = column + half * _SIDE
                target.store(source.load(place, _SIDE), place)
    return k


def pairs_function(tiling: Tiling) -> FunctionBuilder:
    """`void pairs(from, rows, columns, to)`: i16 `[rows, columns]` → `[rows / 2, columns, 2]`."""
    k, side = tiling.function("pairs", "i16* from, i64 rows, i64 columns, i16* to"), 2 * _SIDE
    args = k.args
    with k.loop(args.rows >> 1) as index:
        start = index * 2 * args.columns
        low, high, target = args["from"].at(start), args["from"].at(start + args.columns), args.to.at(start)
        with k.loop(args.columns // side) as part:
            column = part * side
            one, other = (row.load(column, side) for row in (low, high))
            order = [lane + side * row for lane in range(side) for row in range(2)]
            target.store(one.shuffle(order, other), column * 2)
    return k


def queries_function(tiling: Tiling) -> FunctionBuilder:
    """`void queries(addresses, steps, to)`: rows of one strip become lanes, `[steps, strip]` of 32 bits."""
    k = tiling.function("queries", "ptr* addresses, i64 steps, float* to")
    stored = "float" if tiling.pairs else tiling.stored
    with k.loop(tiling.strip // _SIDE) as lanes:
        lane = lanes * _SIDE
        rows = [k.args.addresses.load(lane + at).of(stored) for at in range(_SIDE)]
        with k.loop(k.args.steps // _SIDE) as part:
            step = part * _SIDE
            for at, value in enumerate(transpose([row.load(step, _SIDE) for row in rows])):
                k.args.to.store(value, (step + at) * tiling.strip + lane)
    return k


def results_function(tiling: Tiling) -> FunctionBuilder:
    """`void results(from, sums, columns, addresses)`: lanes of one strip, over their sums, become rows as stored."""
    k = tiling.function("results", "float* from, float* sums, i64 columns, ptr* addresses")
    k.keeps_nan = True
    with k.loop(tiling.strip // _SIDE) as lanes:
        lane = lanes * _SIDE
        sums = k.args.sums.load(lane, _SIDE)
        rows = [k.args.addresses.load(lane + at).of(tiling.stored) for at in range(_SIDE)]
        with k.loop(k.args.columns // _SIDE) as part:
            column = part * _SIDE
            places: list[Value] = [(column + at) * tiling.strip + lane for at in range(_SIDE)]
            values = [k.args["from"].load(place, _SIDE) / sums for place in places]
            for row, value in zip(rows, transpose(values), strict=True):
                row.store(value, column)
    return k
