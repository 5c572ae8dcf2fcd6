"""FlashAttention as LLVM IR: threads take blocks of query rows from a list until none is left.

A row's numbers depend on its own query and the keys it sees, in tiles counted from the first: not on the rows next to
it, nor on the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from kvtool.core.native.builder import FunctionBuilder, Value, module
from kvtool.core.native.isa import AVX512, Isa
from kvtool.core.native.jit import LINE, Job, WorkQueue
from kvtool.core.native.simd import EXP2, EXP2_BFLOAT16, accumulate, exp2, fma, larger, transpose

# Strides in numbers as stored. `blocks` has three i64 each: first row, rows, first own key.
JOB = Job(
    **{"query": "ptr", "query_head": "i64", "query_row": "i64", "key": "ptr", "key_head": "i64", "key_row": "i64"},
    **{"value": "ptr", "value_head": "i64", "value_row": "i64", "out": "ptr", "out_head": "i64", "out_row": "i64"},
    **{"lead_key": "ptr", "lead_key_head": "i64", "lead_key_row": "i64"},
    **{"lead_value": "ptr", "lead_value_head": "i64", "lead_value_row": "i64"},
    leads="i64",  # keys of the lead-in, seen by every row before its own
    limits="i64*",  # for each row: the last key it sees, lead-in included; ascending within a block
    begins="i64*",  # for each row: the first key it sees, counted and ascending as those
    rests="float*",  # for each head: the largest score before any key, which weighs as much as one
    bend="float",  # -2 · log₂e · scale / cap; 0: scores are not capped
    top="float",  # the cap
    blocks="i64*",
    count="i64",  # of blocks
    kv_heads="i64",
    group="i64",  # query heads for each of keys
    head_dim="i64",
    value_dim="i64",
    scale="float",  # log₂e included
    counters="i64*",  # tasks taken, threads begun
    scratch="i8*",
    scratch_bytes="i64",  # for each thread
)
KEYS = 96  # of a tile: a multiple of every `key_unroll`
_KEY_MULTIPLE = 8  # keys of a tile are filled up to a multiple of so many
_SIDE = 8  # of the squares that are transposed
_UNROLLED = 2  # steps of a sum: rows are a multiple of it


@dataclass(frozen=True, slots=True)
class Tiling:
    """Constants that a kernel is made for. A *lane* is a query row of a head; heads that share a key are adjacent
    lanes. Scores are held transposed, keys × lanes: maximum and sum are plain operations between registers."""

    isa: Isa
    stored: str  # of queries, keys, values and results
    pairs: bool = False  # products of bfloat16 pairs summed in float32 (AVX-512 BF16); else all is float32
    registers: ClassVar[int] = 3  # of lanes that a product holds next to each other

    @property
    def width(self) -> int:
        return self.isa.width

    @property
    def key_unroll(self) -> int:
        """Keys, or columns of values, of a product: with `registers` they fill all registers that there are."""
        return 8 if self.width == AVX512.width else 4

    @property
    def row_block(self) -> int:
        return self.registers * self.width

    @property
    def max_rows(self) -> int:
        """Lanes of a block: for so many, keys and values are read from memory once."""
        return 5 * self.row_block

    @property
    def kept(self) -> str:
        return "i16" if self.pairs else "float"

    @property
    def starts(self) -> range:
        return range(0, self.row_block, self.width)

    def function(self, name: str, arguments: str) -> FunctionBuilder:
        return FunctionBuilder(name, self.isa, arguments, internal=True)

    def scratch(self) -> dict[str, int]:
        """Offsets in bytes; sizes after "sized" depend on head_dim and value_dim."""
        words = dict.fromkeys(("limits", "begins"), self.max_rows)
        words |= dict.fromkeys(("queries_at", "results_at"), 2 * self.max_rows)  # addresses
        words |= dict.fromkeys(("largest", "sums"), self.max_rows)
        words |= dict.fromkeys(("now_largest", "shrink"), self.row_block) | {"scores": KEYS * self.row_block}
        offsets, end = dict[str, int](), 0
        for name, count in (words | {"sized": 0}).items():
            offsets[name] = end
            end = -(-(end + 4 * count) // LINE) * LINE
        return offsets

    def scratch_bytes(self, head_dim: int, value_dim: int) -> int:
        """The above, queries, results, keys, values twice, and an unused row."""
        rows = (self.max_rows + KEYS) * (head_dim + value_dim) + (KEYS + 1) * value_dim
        return self.scratch()["sized"] + 4 * rows


def attention_module(tiling: Tiling) -> str:
    """Write a module with `void run(job)`, which any number of threads may call for the same job."""
    makers = [_scores, _cap, _mask, _weights, _sum, _rows, _queries, _results, *([_pairs] if tiling.pairs else [])]
    return module(*(make(tiling) for make in makers), _Block(tiling).function(), _run(tiling))


def _run(tiling: Tiling) -> FunctionBuilder:
    k = FunctionBuilder("run", tiling.isa, "i64* job")
    job = JOB.load(k, k.args.job)
    scratch = job.scratch.at(k.atomic_add(job.counters.at(1), 1) * job.scratch_bytes)
    with WorkQueue(k, job.counters, 1, job.count * job.kv_heads) as queue:
        # The last block sees the most keys: it begins first, so that no thread is left with it at the end.
        block = job.count - 1 - queue.first // job.kv_heads
        k.call_void("block", k.args.job, scratch, block, queue.first % job.kv_heads)
    return k


class _Block:
    def __init__(self, tiling: Tiling) -> None:
        self._tiling, self._offsets = tiling, tiling.scratch()
        self._k = k = tiling.function("block", "i64* job, i8* scratch, i64 block, i64 head")
        self._job = job = JOB.load(k, k.args.job)
        self._first, self._rows, self._start = (job.blocks.at(k.args.block * 3).load(at) for at in range(3))
        self._lanes = self._rows * job.group
        self._row_blocks = (self._lanes + (tiling.row_block - 1)) // tiling.row_block
        self._last = job.limits.load(self._first + self._rows - 1)
        self._begin = job.begins.load(self._first)
        self._steps = job.head_dim >> (1 if tiling.pairs else 0)
        self._queries_of = self._part("sized")
        self._results_of = self._queries_of.at(job.head_dim * tiling.max_rows)
        self._keys = self._results_of.at(job.value_dim * tiling.max_rows)
        self._values = self._keys.at(job.head_dim * KEYS)
        self._came = self._values.at(job.value_dim * KEYS)  # values, before they are made pairs
        self._nobody = self._came.at(job.value_dim * KEYS)

    def function(self) -> FunctionBuilder:
        k = self._k
        self._prepare()
        before = self._begin // KEYS  # tiles that no row sees; a row sees a key, so one is left
        with k.loop(self._last // KEYS + 1 - before) as tile:
            first = (tile + before) * KEYS
            count = k.minimum((self._last + _KEY_MULTIPLE - first) & -_KEY_MULTIPLE, KEYS)
            self._bring(first, count)
            self._each_row_block(first, count)
        with k.loop(self._row_blocks) as index:
            lane = index * self._tiling.row_block
            sums, rows = self._part("sums").at(lane), self._part("results_at", "ptr").at(lane)
            value_dim = self._job.value_dim
            k.call_void("results", self._row_block(self._results_of, index, value_dim), sums, value_dim, rows)
        return k

    def _part(self, name: str, kind: str = "float") -> Value:
        return self._k.args.scratch.at(self._offsets[name]).of(kind)

    def _prepare(self) -> None:
        """Lanes after the last do as the last does, and are not kept."""
        k, job, tiling = self._k, self._job, self._tiling
        last, heads = self._lanes - 1, k.args.head * job.group
        with k.loop(self._row_blocks * tiling.row_block) as index:
            lane = k.minimum(index, last)
            row, head = self._first + lane // job.group, heads + lane % job.group
            self._part("limits", "i32").store(job.limits.load(row).to("i32"), index)
            self._part("begins", "i32").store(job.begins.load(row).to("i32"), index)
            query, out = (job[side].of(tiling.stored).at(self._offset(side, head, row)) for side in ("query", "out"))
            self._part("queries_at", "ptr").store(query, index)
            self._part("results_at", "ptr").store(lane.eq(index).select(out, self._nobody), index)
            self._part("largest").store(job.rests.load(head), index)
            self._part("sums").store(1.0, index)
        with k.loop(self._row_blocks) as index:
            addresses = self._part("queries_at", "ptr").at(index * tiling.row_block)
            k.call_void("queries", addresses, self._steps, self._row_block(self._queries_of, index, self._steps))
        with k.loop(self._row_blocks * tiling.registers * job.value_dim) as index:
            self._results_of.store(k.zeros(tiling.width), index * tiling.width)

    def _offset(self, side: str, head: Value, row: Value) -> Value:
        return head * self._job[f"{side}_head"] + row * self._job[f"{side}_row"]

    def _row_block(self, pointer: Value, number: Value, size: Value) -> Value:
        return pointer.at(number * self._tiling.row_block * size)

    def _bring(self, first: Value, count: Value) -> None:
        pairs, job = self._tiling.pairs, self._job
        self._rows_of("key", first, count, job.head_dim, self._keys)
        self._rows_of("value", first, count, job.value_dim, self._came if pairs else self._values)
        if pairs:
            self._k.call_void("pairs", self._came, count, job.value_dim, self._values)

    def _rows_of(self, side: str, first: Value, count: Value, columns: Value, to: Value) -> None:
        k, job, stored = self._k, self._job, self._tiling.stored
        chunk = job[side].of(stored).at(self._offset(side, k.args.head, self._start))
        lead = job[f"lead_{side}"].of(stored).at(k.args.head * job[f"lead_{side}_head"])
        rows = lead, job[f"lead_{side}_row"], job.leads, chunk, job[f"{side}_row"]
        k.call_void("rows", *rows, first, self._last, count, columns, to)

    def _each_row_block(self, first: Value, count: Value) -> None:
        k, tiling = self._k, self._tiling
        with k.loop(self._row_blocks) as number:
            lane = number * tiling.row_block
            limits, begins = (self._part(side, "i32").at(lane) for side in ("limits", "begins"))
            lowest, highest = (limits.load(at).to("i64") for at in (0, tiling.row_block - 1))
            with k.when((first <= highest) & (begins.load().to("i64") < first + count)):
                self._tile(number, lane, (limits, begins), lowest, first, count)

    def _tile(
        self, number: Value, lane: Value, spans: tuple[Value, Value], lowest: Value, first: Value, count: Value
    ) -> None:
        k, tiling, job = self._k, self._tiling, self._job
        scores, now, shrink = (self._part(side) for side in ("scores", "now_largest", "shrink"))
        largest, sums = (self._part(side).at(lane) for side in ("largest", "sums"))
        queries, groups = self._row_block(self._queries_of, number, self._steps), count // tiling.key_unroll
        k.call_void("scores", queries, self._keys, self._steps, groups, scores, largest, now)
        with k.when(job.bend.ne(0.0)):
            k.call_void("cap", scores, count, largest, now, job.bend, job.top)
        latest = spans[1].load(tiling.row_block - 1).to("i64")
        with k.when((latest > first) | (first + count > lowest + 1)):
            k.call_void("mask", *spans, first, count, scores, largest, now)
        k.call_void("weights", scores, count, largest, now, sums, shrink, job.scale)
        for at in tiling.starts:
            largest.store(now.load(at, tiling.width), at)
        steps, columns = count >> (1 if tiling.pairs else 0), job.value_dim // tiling.key_unroll
        results = self._row_block(self._results_of, number, job.value_dim)
        k.call_void("sum", scores, self._values, steps, columns, shrink, results)


# ---- functions of a tile -----------------------------------------------------------------------------------------


def _scores(tiling: Tiling) -> FunctionBuilder:
    """Products of queries `[steps, row_block]` and keys `[groups · key_unroll, steps]`, in numbers or pairs of 32 bits.

    `largest` is the larger of `before` and what a lane finds.
    """
    k = tiling.function(
        "scores", "float* queries, float* keys, i64 steps, i64 groups, float* scores, float* before, float* largest"
    )
    args = k.args
    group = k.loop(args.groups, *(args.before.load(lane, k.width) for lane in tiling.starts))
    row, largest = group.index * tiling.key_unroll, list(group.values)
    rows = [args.keys.at((row + key) * args.steps) for key in range(tiling.key_unroll)]
    sums = iter(_product(tiling, args.queries, rows, 1, args.steps))
    for key in range(tiling.key_unroll):
        start = (row + key) * tiling.row_block
        for at, lane in enumerate(tiling.starts):
            value = next(sums)
            args.scores.store(value, start + lane)
            largest[at] = larger(value, largest[at])
    for lane, value in zip(tiling.starts, group.close(*largest), strict=True):
        args.largest.store(value, lane)
    return k


def _sum(tiling: Tiling) -> FunctionBuilder:
    """results · shrink + values · weights.

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
        offsets = [start + lane for start, lane in product(starts, tiling.starts)]
        first = [args.results.load(offset, k.width) * shrink[at % len(shrink)] for at, offset in enumerate(offsets)]
        values = [args["values"].at(column + at) for at in range(tiling.key_unroll)]
        for offset, value in zip(
            offsets, _product(tiling, args.weights, values, columns, args.steps, first), strict=True
        ):
            args.results.store(value, offset)
    return k


def _product(
    tiling: Tiling, lanes: Value, rows: Sequence[Value], stride: Value | int, steps: Value, first: Sequence[Value] = ()
) -> list[Value]:
    """Sum over `steps` of lanes `[steps, row_block]` · a number of each row: row by row, then by register of lanes.

    `stride` is between a row's numbers.
    """
    k = lanes.k

    def factors(step: Value) -> tuple[Iterable[Value], list[Value]]:
        start, offset = step * tiling.row_block, step * stride if isinstance(stride, Value) else step
        registers = [lanes.load(start + lane, k.width) for lane in tiling.starts]
        return (row.load(offset).splat(k.width) for row in rows), registers

    begin = first or [k.zeros(k.width)] * (len(rows) * tiling.registers)
    return accumulate(steps, begin, factors, pairs=tiling.pairs, unroll=_UNROLLED)


def _rows(tiling: Tiling) -> FunctionBuilder:
    """Row i is row first + i of `leads` lead rows and those of `own` after them; from `last` on the last one again.

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
        chunk = args.own.of(stored).at((row - args.leads) * args.own_stride)
        source = (row < args.leads).select(lead, chunk)
        target = args.to.of(tiling.kept).at(index * args.columns)
        with k.loop(args.columns // (2 * _SIDE)) as part:
            for half in range(2):
                column = part * (2 * _SIDE) + half * _SIDE
                target.store(source.load(column, _SIDE), column)
    return k


def _pairs(tiling: Tiling) -> FunctionBuilder:
    """i16 `[rows, columns]` become `[rows / 2, columns, 2]`."""
    k, side = tiling.function("pairs", "i16* from, i64 rows, i64 columns, i16* to"), 2 * _SIDE
    args = k.args
    with k.loop(args.rows >> 1) as index:
        start = index * 2 * args.columns
        low, high, target = args["from"].at(start), args["from"].at(start + args.columns), args.to.at(start)
        with k.loop(args.columns // side) as part:
            first, second = (row.load(part * side, side) for row in (low, high))
            order = [lane + side * row for lane, row in product(range(side), range(2))]
            target.store(first.shuffle(order, second), part * side * 2)
    return k


def _queries(tiling: Tiling) -> FunctionBuilder:
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


def _results(tiling: Tiling) -> FunctionBuilder:
    k = tiling.function("results", "float* from, float* sums, i64 columns, ptr* addresses")
    k.keeps_nan = True
    with k.loop(tiling.row_block // _SIDE) as lanes:
        lane = lanes * _SIDE
        sums = k.args.sums.load(lane, _SIDE)
        rows = [k.args.addresses.load(lane + at).of(tiling.stored) for at in range(_SIDE)]
        with k.loop(k.args.columns // _SIDE) as part:
            column = part * _SIDE
            offsets: list[Value] = [(column + at) * tiling.row_block + lane for at in range(_SIDE)]
            values = [k.args["from"].load(offset, _SIDE) / sums for offset in offsets]
            for row, value in zip(rows, transpose(values), strict=True):
                row.store(value, column)
    return k


def _cap(tiling: Tiling) -> FunctionBuilder:
    """Scores s become top · tanh(s · scale / top), as sign(s) · (1 - e) / (1 + e) with e = 2^(bend · |s|)."""
    k = tiling.function("cap", "float* scores, i64 keys, float* before, float* largest, float bend, float top")
    bend, top = (side.splat(k.width) for side in (k.args.bend, k.args.top))
    kind = f"v{k.width}f32"

    def bent(at: int, score: Value) -> Value:
        power = exp2(k.call(f"llvm.fabs.{kind}", score.type, score) * bend, EXP2)
        curve = (1.0 - power) / (power + 1.0) * top
        return k.call(f"llvm.copysign.{kind}", score.type, curve, score)

    _each_score(tiling, k, lambda index: bent)
    return k


def _mask(tiling: Tiling) -> FunctionBuilder:
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
    """Change all scores in their place; `largest` becomes each lane's largest of them and of `before`.

    `changing` makes, by a key's index, what makes a register's new scores of its number and its scores.
    """
    args = k.args
    each = k.loop(args.keys, *(args.before.load(lane, k.width) for lane in tiling.starts))
    change = changing(each.index)
    row, largest = each.index * tiling.row_block, []
    for at, (lane, value) in enumerate(zip(tiling.starts, each.values, strict=True)):
        score = change(at, args.scores.load(row + lane, k.width))
        args.scores.store(score, row + lane)
        largest.append(larger(score, value))
    for lane, value in zip(tiling.starts, each.close(*largest), strict=True):
        args.largest.store(value, lane)


def _weights(tiling: Tiling) -> FunctionBuilder:
    """Scores become 2^((score - largest) · scale), as float32 or two adjacent keys' in bfloat16.

    `shrink` is what sums and results up to now are to be multiplied with, since they were shifted by `before`; `sums`
    are so and counted on.
    """
    arguments = "float* scores, i64 keys, float* before, float* largest, float* sums, float* shrink, float scale"
    k = tiling.function("weights", arguments)
    args = k.args
    scale = args.scale.splat(k.width)
    minus = -scale
    shifts, sums = [], []
    for lane in tiling.starts:
        largest = args.largest.load(lane, k.width)
        shifts.append(largest * minus)
        # Of the difference: where the largest stays, this is exactly 1.
        shrink = exp2((args.before.load(lane, k.width) - largest) * scale, EXP2)
        args.shrink.store(shrink, lane)
        sums.append(args.sums.load(lane, k.width) * shrink)
    each = k.loop(args.keys >> 1, *sums)
    row, totals = each.index * (2 * tiling.row_block), []
    for lane, shift, total in zip(tiling.starts, shifts, each.values, strict=True):
        offsets = [row + (lane + key * tiling.row_block) for key in range(2)]
        exponents = [fma(args.scores.load(offset, k.width), scale, shift) for offset in offsets]
        low, high = (exp2(exponent, EXP2_BFLOAT16 if tiling.pairs else EXP2) for exponent in exponents)
        totals.append(total + low + high)
        if tiling.pairs:
            args.scores.of("i32").store(_pair(low, high), (row >> 1) + lane)
        else:
            for power, offset in zip((low, high), offsets, strict=True):
                args.scores.store(power, offset)
    for lane, total in zip(tiling.starts, each.close(*totals), strict=True):
        args.sums.store(total, lane)
    return k


def _pair(low: Value, high: Value) -> Value:
    both = low.k.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", "<32 x bfloat>", high, low)
    return both.shuffle([lane + 16 * key for lane, key in product(range(16), range(2))]).bitcast("<16 x i32>")
