"""The module of one attention kernel, as LLVM IR: threads take blocks of rows from a list until none is left.

Each block goes over its keys tile by tile (FlashAttention's order: scores, softmax shifted by the largest so far, sum
of values). A row's numbers depend on its own query and the keys it sees, in tiles counted from the first: not on the
rows beside it, nor on the thread.
"""

from __future__ import annotations

from kvtool.core.kernels.attention.flash_tile_ir import (
    KEYS,
    Scratch,
    Tiling,
    cap_function,
    mask_function,
    pairs_function,
    queries_function,
    results_function,
    rows_function,
    scores_function,
    sum_function,
    weights_function,
)
from kvtool.core.native.builder import FunctionBuilder, Value, module
from kvtool.core.native.job import Job, WorkQueue

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
_KEY_MULTIPLE = 8  # keys of a tile are filled up to a multiple of so many


def attention_module(tiling: Tiling) -> str:
    """The text of a module with `void run(job)`, which any number of threads may call for the same job."""
    makers = [scores_function, cap_function, mask_function, weights_function, sum_function]
    makers += [rows_function, queries_function, results_function, *([pairs_function] if tiling.pairs else [])]
    return module(*(make(tiling) for make in makers), _Block(tiling).function(), _run_function(tiling))


def _run_function(tiling: Tiling) -> FunctionBuilder:
    k = FunctionBuilder("run", tiling.isa, "i64* job")
    job = JOB.load(k, k.args.job)
    scratch = job.scratch.at(k.atomic_add(job.counters.at(1), 1) * job.scratch_bytes)
    with WorkQueue(k, job.counters, 1, job.count * job.kv_heads) as queue:
        # The last block sees the most keys: it begins first, so that no thread is left with it at the end.
        block = job.count - 1 - queue.first // job.kv_heads
        k.call_void("block", k.args.job, scratch, block, queue.first % job.kv_heads)
    return k


class _Block:
    """`void block(job, scratch, block, head)`: a block's rows for one head of keys."""

    def __init__(self, tiling: Tiling) -> None:
        self._tiling, self._places = tiling, Scratch.of(tiling)
        self._k = k = tiling.function("block", "i64* job, i8* scratch, i64 block, i64 head")
        self._job = job = JOB.load(k, k.args.job)
        self._first, self._rows, self._start = (job.blocks.at(k.args.block * 3).load(at) for at in range(3))
        self._lanes = self._rows * job.group
        self._row_blocks = (self._lanes + (tiling.row_block - 1)) // tiling.row_block
        self._last = job.limits.load(self._first + self._rows - 1)
        self._begin = job.begins.load(self._first)
        self._steps = job.head_dim >> (1 if tiling.pairs else 0)
        # What depends on head_dim and value_dim stands behind the rest of the scratch.
        self._queries = self._place(self._places.sized, "float")
        self._results = self._queries.at(job.head_dim * tiling.max_rows)
        self._keys = self._results.at(job.value_dim * tiling.max_rows)
        self._values = self._keys.at(job.head_dim * KEYS)
        self._came = self._values.at(job.value_dim * KEYS)
        self._nobody = self._came.at(job.value_dim * KEYS)

    def function(self) -> FunctionBuilder:
        """The whole function."""
        k = self._k
        self._prepare()
        self._turn_queries()
        before = self._begin // KEYS  # tiles that no row sees; a row sees a key, so one is left
        with k.loop(self._last // KEYS + 1 - before) as tile:
            first = (tile + before) * KEYS
            count = k.minimum((self._last + _KEY_MULTIPLE - first) & -_KEY_MULTIPLE, KEYS)
            self._bring(first, count)
            self._each_row_block(first, count)
        self._give()
        return k

    def _place(self, offset: int, kind: str) -> Value:
        return self._k.args.scratch.at(offset).of(kind)

    def _prepare(self) -> None:
        """Every lane's limit and addresses; those behind the last do as the last does, and are not kept."""
        k, job, places, stored = self._k, self._job, self._places, self._tiling.stored
        last, heads = self._lanes - 1, k.args.head * job.group
        with k.loop(self._row_blocks * self._tiling.row_block) as index:
            lane = k.minimum(index, last)
            row, head = self._first + lane // job.group, heads + lane % job.group
            self._place(places.limits, "i32").store(job.limits.load(row).to("i32"), index)
            self._place(places.begins, "i32").store(job.begins.load(row).to("i32"), index)
            query, out = (job[side].of(stored).at(self._offset(side, head, row)) for side in ("query", "out"))
            self._place(places.queries_at, "ptr").store(query, index)
            self._place(places.results_at, "ptr").store(lane.eq(index).select(out, self._nobody), index)
            self._place(places.largest, "float").store(job.rests.load(head), index)
            self._place(places.sums, "float").store(1.0, index)

    def _offset(self, side: str, head: Value, row: Value) -> Value:
        return head * self._job[f"{side}_head"] + row * self._job[f"{side}_row"]

    def _row_block(self, pointer: Value, row_block: Value, size: Value) -> Value:
        """What belongs to a row block where every lane has `size` numbers of 32 bits."""
        return pointer.at(row_block * self._tiling.row_block * size)

    def _turn_queries(self) -> None:
        k, job, tiling = self._k, self._job, self._tiling
        with k.loop(self._row_blocks) as index:
            row_block = self._place(self._places.queries_at, "ptr").at(index * tiling.row_block)
            k.call_void("queries", row_block, self._steps, self._row_block(self._queries, index, self._steps))
        with k.loop(self._row_blocks * tiling.registers * job.value_dim) as index:
            self._results.store(k.zeros(tiling.width), index * tiling.width)

    def _bring(self, first: Value, count: Value) -> None:
        """A tile's keys and values."""
        pairs, job = self._tiling.pairs, self._job
        self._rows_of("key", first, count, job.head_dim, self._keys)
        self._rows_of("value", first, count, job.value_dim, self._came if pairs else self._values)
        if pairs:
            self._k.call_void("pairs", self._came, count, job.value_dim, self._values)

    def _rows_of(self, side: str, first: Value, count: Value, columns: Value, to: Value) -> None:
        k, job, stored = self._k, self._job, self._tiling.stored
        own = job[side].of(stored).at(self._offset(side, k.args.head, self._start))
        lead = job[f"lead_{side}"].of(stored).at(k.args.head * job[f"lead_{side}_head"])
        rows = lead, job[f"lead_{side}_row"], job.leads, own, job[f"{side}_row"]
        k.call_void("rows", *rows, first, self._last, count, columns, to)

    def _each_row_block(self, first: Value, count: Value) -> None:
        """The tile for every row block that sees any of it."""
        k, tiling, places = self._k, self._tiling, self._places
        with k.loop(self._row_blocks) as row_block:
            lane = row_block * tiling.row_block
            limits, begins = (self._place(side, "i32").at(lane) for side in (places.limits, places.begins))
            lowest, highest = (limits.load(at).to("i64") for at in (0, tiling.row_block - 1))
            earliest = begins.load().to("i64")
            with k.when((first <= highest) & (earliest < first + count)):
                self._tile(row_block, lane, (limits, begins), lowest, first, count)

    def _tile(
        self, row_block: Value, lane: Value, spans: tuple[Value, Value], lowest: Value, first: Value, count: Value
    ) -> None:
        k, tiling, places, job = self._k, self._tiling, self._places, self._job
        scores, now, shrink = (
            self._place(side, "float") for side in (places.scores, places.now_largest, places.shrink)
        )
        largest, sums = (self._place(side, "float").at(lane) for side in (places.largest, places.sums))
        queries, groups = self._row_block(self._queries, row_block, self._steps), count // tiling.key_unroll
        k.call_void("scores", queries, self._keys, self._steps, groups, scores, largest, now)
        with k.when(job.bend.compare("une", 0.0)):
            k.call_void("cap", scores, count, largest, now, job.bend, job.top)
        limits, begins = spans
        latest = begins.load(tiling.row_block - 1).to("i64")
        with k.when((latest > first) | (first + count > lowest + 1)):
            k.call_void("mask", limits, begins, first, count, scores, largest, now)
        k.call_void("weights", scores, count, largest, now, sums, shrink, job.scale)
        for at in tiling.starts:
            largest.store(now.load(at, tiling.width), at)
        steps, columns = count >> (1 if tiling.pairs else 0), job.value_dim // tiling.key_unroll
        results = self._row_block(self._results, row_block, job.value_dim)
        k.call_void("sum", scores, self._values, steps, columns, shrink, results)

    def _give(self) -> None:
        k, job, places = self._k, self._job, self._places
        with k.loop(self._row_blocks) as index:
            lane = index * self._tiling.row_block
            sums, rows = self._place(places.sums, "float").at(lane), self._place(places.results_at, "ptr").at(lane)
            k.call_void("results", self._row_block(self._results, index, job.value_dim), sums, job.value_dim, rows)
