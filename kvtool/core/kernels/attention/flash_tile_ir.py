"""Tiling of flash attention, and LLVM IR of one tile: formats changed and rows turned into lanes, products, softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtool.core.native.builder import FunctionBuilder, Value
from kvtool.core.native.isa import AVX512, Isa
from kvtool.core.native.job import LINE
from kvtool.core.native.simd import MAGIC, dot_pairs, fma, larger, transpose

KEYS = 96  # of a tile: a multiple of every `key_unroll`


@dataclass(frozen=True, slots=True)
class Tiling:
    """What one kernel is made for.

    A *lane* is one query row of one head; the heads of a group that share a key stand beside each other. Scores are
    held transposed, keys × lanes: a row's maximum and sum are then plain operations between registers.

    Attributes
    ----------
    isa : the instruction set.
    stored : the format of queries, keys, values and results (a name of `STORED`).
    pairs : products of bfloat16 pairs summed in float32 (AVX-512 BF16); else everything is made float32 first.
    """

    isa: Isa
    stored: str
    pairs: bool = False

    @property
    def width(self) -> int:
        """float32 lanes of a register."""
        return self.isa.width

    @property
    def registers(self) -> int:
        """Registers of lanes that a product holds beside each other."""
        return 3

    @property
    def key_unroll(self) -> int:
        """Keys, or columns of values, that a product holds below each other: with `registers` all that there are."""
        return 8 if self.width == AVX512.width else 4

    @property
    def row_block(self) -> int:
        """Lanes that are handled together."""
        return self.registers * self.width

    @property
    def max_rows(self) -> int:
        """Most lanes of a block: for so many are keys and values brought from memory once."""
        return 5 * self.row_block

    @property
    def kept(self) -> str:
        """Numbers of a tile of keys or values, in LLVM's words."""
        return "i16" if self.pairs else "float"

    @property
    def starts(self) -> range:
        """The first lane of each register of a row block."""
        return range(0, self.row_block, self.width)

    def function(self, name: str, arguments: str) -> FunctionBuilder:
        """Begin a function of the kernel's own module."""
        return FunctionBuilder(name, self.isa, arguments, internal=True)


@dataclass(frozen=True, slots=True)
class Scratch:
    """What a thread has to itself: offsets in bytes."""

    limits: int
    begins: int
    queries_at: int
    results_at: int
    largest: int
    sums: int
    now_largest: int
    shrink: int
    scores: int
    sized: int  # from here on sizes depend on head_dim and value_dim

    @classmethod
    def of(cls, tiling: Tiling) -> Scratch:
        """Lay it out."""
        lanes, row_block = tiling.max_rows, tiling.row_block
        sizes = [4 * lanes, 4 * lanes, 8 * lanes, 8 * lanes, 4 * lanes, 4 * lanes]
        sizes += [4 * row_block, 4 * row_block, 4 * KEYS * row_block]
        places = [0]
        for size in sizes:
            places.append(-(-(places[-1] + size) // LINE) * LINE)
        return cls(*places)

    def bytes(self, tiling: Tiling, head_dim: int, value_dim: int) -> int:
        """All of it: beside the above queries, results, keys, values, values as they came, and a row nobody reads."""
        return self.sized + 4 * ((tiling.max_rows + KEYS) * (head_dim + value_dim) + (KEYS + 1) * value_dim)


_UNROLLED = 2  # steps of a sum: rows are a multiple of it


def scores_function(tiling: Tiling) -> FunctionBuilder:
    """`void scores(queries, keys, steps, groups, scores, before, largest)`: scores of a row block and a tile of keys.

    queries `[steps, row_block]`, keys `[groups · key_unroll, steps]`, in numbers (or pairs) of 32 bits. `largest` is
    the larger of `before` and what a lane finds.
    """
    k = tiling.function(
        "scores", "float* queries, float* keys, i64 steps, i64 groups, float* scores, float* before, float* largest"
    )
    args = k.args
    group = k.loop(args.groups, *(args.before.load(lane, k.width) for lane in tiling.starts))
    row = group.index * tiling.key_unroll
    rows = [args.keys.at((row + key) * args.steps) for key in range(tiling.key_unroll)]
    sums = iter(_product(tiling, args.queries, rows, 1, args.steps))
    largest = list(group.values)
    for key in range(tiling.key_unroll):
        start = (row + key) * tiling.row_block
        for at, lane in enumerate(tiling.starts):
            value = next(sums)
            args.scores.store(value, start + lane)
            largest[at] = larger(value, largest[at])
    for lane, value in zip(tiling.starts, group.close(*largest), strict=True):
        args.largest.store(value, lane)
    return k


def sum_function(tiling: Tiling) -> FunctionBuilder:
    """`void sum(weights, values, steps, groups, shrink, results)`: results · shrink + values · weights of a row block.

    weights `[steps, row_block]`, values `[steps, groups · key_unroll]`, in numbers (or pairs of keys) of 32 bits;
    results float32 `[groups · key_unroll, row_block]`.
    """
    k = tiling.function("sum", "float* weights, float* values, i64 steps, i64 groups, float* shrink, float* results")
    args = k.args
    shrink = [args.shrink.load(lane, k.width) for lane in tiling.starts]
    columns = args.groups * tiling.key_unroll
    with k.loop(args.groups) as group:
        column = group * tiling.key_unroll
        starts = [(column + at) * tiling.row_block for at in range(tiling.key_unroll)]
        places = [start + lane for start in starts for lane in tiling.starts]
        first = [args.results.load(place, k.width) * shrink[at % len(shrink)] for at, place in enumerate(places)]
        values = [args["values"].at(column + at) for at in range(tiling.key_unroll)]
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
    """Sums over `steps` of lanes `[steps, row_block]` · a number of each row; row by row, then by register of lanes.

    A row's numbers are the stride apart.
    """
    k, add = lanes.k, dot_pairs if tiling.pairs else fma
    begin = first or [k.zeros(k.width)] * (len(rows) * tiling.registers)
    each = k.loop(steps // _UNROLLED, *begin)
    sums = list(each.values)
    for part in range(_UNROLLED):
        step = each.index * _UNROLLED + part
        start = step * tiling.row_block
        held = [lanes.load(start + lane, k.width) for lane in tiling.starts]
        for row, pointer in enumerate(rows):
            one = pointer.load(step * stride if isinstance(stride, Value) else step).splat(k.width)
            for at, other in enumerate(held, row * tiling.registers):
                sums[at] = add(one, other, sums[at])
    return each.close(*sums)


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
    """`void queries(addresses, steps, to)`: rows of a row block become lanes, `[steps, row_block]` of 32 bits."""
    k = tiling.function("queries", "ptr* addresses, i64 steps, float* to")
    stored = "float" if tiling.pairs else tiling.stored
    with k.loop(tiling.row_block // _SIDE) as lanes:
        lane = lanes * _SIDE
        rows = [k.args.addresses.load(lane + at).of(stored) for at in range(_SIDE)]
        with k.loop(k.args.steps // _SIDE) as part:
            step = part * _SIDE
            for at, value in enumerate(transpose([row.load(step, _SIDE) for row in rows])):
                k.args.to.store(value, (step + at) * tiling.row_block + lane)
    return k


def results_function(tiling: Tiling) -> FunctionBuilder:
    """`void results(from, sums, columns, addresses)`: lanes of a row block, over their sums, become rows as stored."""
    k = tiling.function("results", "float* from, float* sums, i64 columns, ptr* addresses")
    k.keeps_nan = True
    with k.loop(tiling.row_block // _SIDE) as lanes:
        lane = lanes * _SIDE
        sums = k.args.sums.load(lane, _SIDE)
        rows = [k.args.addresses.load(lane + at).of(tiling.stored) for at in range(_SIDE)]
        with k.loop(k.args.columns // _SIDE) as part:
            column = part * _SIDE
            places: list[Value] = [(column + at) * tiling.row_block + lane for at in range(_SIDE)]
            values = [k.args["from"].load(place, _SIDE) / sums for place in places]
            for row, value in zip(rows, transpose(values), strict=True):
                row.store(value, column)
    return k


# 2^f for -.5 ≤ f ≤ .5 is 1 + f·(c₁ + f·(c₂ + …)), least squares of the relative error, weighted until it is even:
# 9e-8 with five, and 1e-4 with three, which is nothing beside bfloat16's 4e-3.
_EXACT = (0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
_BFLOAT16 = (0.6932829022407532, 0.2422109842300415, 0.055008936673402786)
_LEAST = -126.0  # the exponent of the least normal float32; below it the power is taken for 0


def cap_function(tiling: Tiling) -> FunctionBuilder:
    """`void cap(scores, keys, before, largest, bend, top)`: scores s become top · tanh(s · scale / top).

    As sign(s) · (1 - e) / (1 + e) with e = 2^(bend · |s|). Sets `largest` to the largest of `before` and these.
    """
    k = tiling.function("cap", "float* scores, i64 keys, float* before, float* largest, float bend, float top")
    bend, top = (side.splat(k.width) for side in (k.args.bend, k.args.top))
    kind = f"v{k.width}f32"

    def bent(at: int, score: Value) -> Value:
        power = _power(k.call(f"llvm.fabs.{kind}", score.type, score) * bend, _EXACT)
        curve = (1.0 - power) / (power + 1.0) * top
        return k.call(f"llvm.copysign.{kind}", score.type, curve, score)

    _each_score(tiling, k, lambda index: bent)
    return k


def mask_function(tiling: Tiling) -> FunctionBuilder:
    """`void mask(limits, begins, first key, keys, scores, before, largest)`: hides keys that a lane does not see.

    Sets `largest` to the largest of `before` and what is still seen.
    """
    k = tiling.function(
        "mask", "i32* limits, i32* begins, i64 first, i64 keys, float* scores, float* before, float* largest"
    )
    args = k.args
    limits, begins = ([side.load(lane, k.width) for lane in tiling.starts] for side in (args.limits, args.begins))

    def hidden(index: Value) -> Callable[[int, Value], Value]:
        key = (args.first + index).to("i32").splat(k.width)

        def hide(at: int, score: Value) -> Value:
            seen = key.compare("sle", limits[at]) & key.compare("sge", begins[at])
            return seen.select(score, float("-inf"))

        return hide

    _each_score(tiling, k, hidden)
    return k


def _each_score(tiling: Tiling, k: FunctionBuilder, changing: Callable[[Value], Callable[[int, Value], Value]]) -> None:
    """Change the scores of all keys in their place, and set `largest` to each lane's largest of them and of `before`.

    Parameters
    ----------
    changing : by a key's index, what makes a register's new scores of its number and its scores.
    """
    args = k.args
    each = k.loop(args.keys, *(args.before.load(lane, k.width) for lane in tiling.starts))
    change = changing(each.index)
    row, found = each.index * tiling.row_block, []
    for at, (lane, value) in enumerate(zip(tiling.starts, each.values, strict=True)):
        place = row + lane
        score = change(at, args.scores.load(place, k.width))
        args.scores.store(score, place)
        found.append(larger(score, value))
    for lane, value in zip(tiling.starts, each.close(*found), strict=True):
        args.largest.store(value, lane)


def weights_function(tiling: Tiling) -> FunctionBuilder:
    """`void weights(scores, keys, before, largest, sums, shrink, scale)`: scores become 2^((score - largest) · scale).

    They are written over the scores: as float32, or two keys' in bfloat16 beside each other. `shrink` is what sums and
    results up to now are to be multiplied with, since they were shifted by `before`; `sums` are so and counted on.
    """
    k = tiling.function(
        "weights",
        "float* scores, i64 keys, float* before, float* largest, float* sums, float* shrink, float scale",
    )
    args = k.args
    scale = args.scale.splat(k.width)
    minus = -scale
    shifts, sums = [], []
    for lane in tiling.starts:
        largest = args.largest.load(lane, k.width)
        shifts.append(largest * minus)
        # Of the difference: where the largest stays, this is exactly 1.
        shrink = _power((args.before.load(lane, k.width) - largest) * scale, _EXACT)
        args.shrink.store(shrink, lane)
        sums.append(args.sums.load(lane, k.width) * shrink)
    each = k.loop(args.keys >> 1, *sums)
    row = each.index * (2 * tiling.row_block)
    totals = []
    for lane, shift, total in zip(tiling.starts, shifts, each.values, strict=True):
        places = [row + (lane + key * tiling.row_block) for key in range(2)]
        exponents = [fma(args.scores.load(place, k.width), scale, shift) for place in places]
        low, high = (_power(exponent, _BFLOAT16 if tiling.pairs else _EXACT) for exponent in exponents)
        totals.append(total + low + high)
        if tiling.pairs:
            args.scores.of("i32").store(_pair(low, high), (row >> 1) + lane)
        else:
            for power, place in zip((low, high), places, strict=True):
                args.scores.store(power, place)
    for lane, total in zip(tiling.starts, each.close(*totals), strict=True):
        args.sums.store(total, lane)
    return k


def _pair(low: Value, high: Value) -> Value:
    """Two keys' weights of each lane in bfloat16, the first one low: i32."""
    both = low.k.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", "<32 x bfloat>", high, low)
    return both.shuffle([lane + 16 * key for lane in range(16) for key in range(2)]).bitcast("<16 x i32>")


def _power(exponents: Value, polynomial: Sequence[float]) -> Value:
    """2^x for x ≤ 0; exactly 0 below 2^-126, and for -∞."""
    shifted = exponents + MAGIC
    rest = exponents - (shifted - MAGIC)
    value = rest.like(polynomial[-1])
    for factor in [*reversed(polynomial[:-1]), 1.0]:
        value = fma(value, rest, factor)
    power = (value.bitcast("i32") + (shifted.bitcast("i32") << 23)).bitcast("float")
    return (exponents < _LEAST).select(rest.like(0.0), power)
