"""The module of one attention kernel, as LLVM IR: threads take blocks of rows from a list until none is left.

Each block goes over its keys tile by tile (FlashAttention's order: scores, softmax shifted by the largest so far, sum
of values). A row's numbers depend on its own query and the keys it sees, in tiles counted from the first: not on the
rows beside it, nor on the thread.
"""

from __future__ import annotations

from kvtool.core.model.flash.ir_moves import pairs_function, queries_function, results_function, rows_function
from kvtool.core.model.flash.ir_products import scores_function, sum_function
from kvtool.core.model.flash.ir_softmax import cap_function, mask_function, weights_function
from kvtool.core.model.flash.tiling import KEYS, STORED, Scratch, Tiling
from kvtool.core.native.ir import Body, Loop

# One job, 8 bytes each. Strides in numbers as stored. `blocks` has three i64 each: first row, rows, first own key.
FIELDS = {
    "query": "ptr",
    "query_head": "i64",
    "query_row": "i64",
    "key": "ptr",
    "key_head": "i64",
    "key_row": "i64",
    "value": "ptr",
    "value_head": "i64",
    "value_row": "i64",
    "out": "ptr",
    "out_head": "i64",
    "out_row": "i64",
    "lead_key": "ptr",
    "lead_key_head": "i64",
    "lead_key_row": "i64",
    "lead_value": "ptr",
    "lead_value_head": "i64",
    "lead_value_row": "i64",
    "leads": "i64",  # keys of the lead-in, seen by every row before its own
    "limits": "ptr",  # i64 for each row: the last key it sees, lead-in included; ascending within a block
    "begins": "ptr",  # i64 for each row: the first key it sees, counted and ascending as those
    "rests": "ptr",  # float32 for each head: the largest score before any key, which weighs as much as one
    "bend": "i64",  # bits of a float32: -2 · log₂e · scale / cap; 0: scores are not capped
    "top": "i64",  # bits of a float32: the cap
    "blocks": "ptr",
    "count": "i64",  # of blocks
    "kv_heads": "i64",
    "group": "i64",  # query heads for each of keys
    "head_dim": "i64",
    "value_dim": "i64",
    "scale": "i64",  # bits of a float32, log₂e included
    "counters": "ptr",  # two i64: tasks taken, threads begun
    "scratch": "ptr",
    "scratch_bytes": "i64",  # for each thread
}
_STRIP_ROWS = 8  # keys of a tile are filled up to a multiple of so many


def attention_module(tiling: Tiling) -> str:
    """The text of a module with `void run(job)`, which any number of threads may call for the same job."""
    parts = [
        _declarations(tiling),
        scores_function(tiling),
        cap_function(tiling),
        mask_function(tiling),
        weights_function(tiling),
        sum_function(tiling),
        rows_function(tiling),
        queries_function(tiling),
        results_function(tiling),
        _Block(tiling).text(),
        _run_function(),
    ]
    if tiling.pairs:
        parts.append(pairs_function())
    return "\n".join(parts)


def _declarations(tiling: Tiling) -> str:
    floats = tiling.floats()
    lines = [
        f"declare {floats} @llvm.fmuladd.v{tiling.width}f32({floats}, {floats}, {floats})",
        f"declare {floats} @llvm.fabs.v{tiling.width}f32({floats})",
        f"declare {floats} @llvm.copysign.v{tiling.width}f32({floats}, {floats})",
        "declare i64 @llvm.umin.i64(i64, i64)",
    ]
    if tiling.pairs:
        lines += [
            f"declare {floats} @llvm.x86.avx512bf16.dpbf16ps.512({floats}, <32 x bfloat>, <32 x bfloat>)",
            f"declare <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512({floats}, {floats})",
        ]
    return "\n".join(lines)


def _job(body: Body) -> dict[str, str]:
    return {name: body.load(kind, body.at("i64", "%job", index)) for index, (name, kind) in enumerate(FIELDS.items())}


def _run_function() -> str:
    body = Body()
    job = _job(body)
    thread = body(f"atomicrmw add ptr {body.at('i64', job['counters'], 1)}, i64 1 monotonic")
    scratch = body.at("i8", job["scratch"], body(f"mul i64 {thread}, {job['scratch_bytes']}"))
    tasks = body(f"mul i64 {job['count']}, {job['kv_heads']}")
    again, work, done = body.new_block(), body.new_block(), body.new_block()
    body.do(f"br label %{again}")
    body.enter(again)
    task = body(f"atomicrmw add ptr {job['counters']}, i64 1 monotonic")
    body.do(f"br i1 {body(f'icmp ult i64 {task}, {tasks}')}, label %{work}, label %{done}")
    body.enter(work)
    # The last block sees the most keys: it begins first, so that no thread is left with it at the end.
    earlier = body(f"udiv i64 {task}, {job['kv_heads']}")
    latest = body(f"sub i64 {job['count']}, 1")
    block = body(f"sub i64 {latest}, {earlier}")
    head = body(f"urem i64 {task}, {job['kv_heads']}")
    body.do(f"call void @block(ptr %job, ptr {scratch}, i64 {block}, i64 {head})")
    body.do(f"br label %{again}")
    body.enter(done)
    body.do("ret void")
    return f"define void @run(ptr %job) {{\n{body.text()}\n}}\n"


class _Block:
    """`void block(job, scratch, block, head)`: a block's rows for one head of keys."""

    def __init__(self, tiling: Tiling) -> None:
        self._tiling, self._places = tiling, Scratch.of(tiling)
        self._body = body = Body()
        self._job = job = _job(body)
        place = body.at("i64", job["blocks"], body("mul i64 %block, 3"))
        self._first, self._rows, self._start = (body.load("i64", place, at) for at in range(3))
        self._lanes = body(f"mul i64 {self._rows}, {job['group']}")
        more = body(f"add i64 {self._lanes}, {tiling.strip - 1}")
        self._strips = body(f"udiv i64 {more}, {tiling.strip}")
        behind = body(f"add i64 {self._first}, {self._rows}")
        self._last = body.load("i64", job["limits"], body(f"sub i64 {behind}, 1"))
        self._begin = body.load("i64", job["begins"], self._first)
        self._sizes()

    def _sizes(self) -> None:
        """Where in the scratch stands what depends on head_dim and value_dim."""
        body, job, lanes = self._body, self._job, self._tiling.lanes
        at = body.at("i8", "%scratch", self._places.sized)
        self._queries = at
        at = self._results = body.at("float", at, body(f"mul i64 {job['head_dim']}, {lanes}"))
        at = self._keys = body.at("float", at, body(f"mul i64 {job['value_dim']}, {lanes}"))
        at = self._values = body.at("float", at, body(f"mul i64 {job['head_dim']}, {KEYS}"))
        at = self._came = body.at("float", at, body(f"mul i64 {job['value_dim']}, {KEYS}"))
        self._nobody = body.at("float", at, body(f"mul i64 {job['value_dim']}, {KEYS}"))
        shift = 1 if self._tiling.pairs else 0
        self._steps = body(f"lshr i64 {job['head_dim']}, {shift}")

    def text(self) -> str:
        """The whole function."""
        body = self._body
        self._prepare()
        self._turn_queries()
        before = body(f"udiv i64 {self._begin}, {KEYS}")  # tiles that no row sees; a row sees a key, so one is left
        tiles = body(f"add i64 {body(f'udiv i64 {self._last}, {KEYS}')}, 1")
        tile = Loop(body, body(f"sub i64 {tiles}, {before}"))
        first = body(f"mul i64 {body(f'add i64 {tile.index}, {before}')}, {KEYS}")
        filled = body(f"add i64 {self._last}, {_STRIP_ROWS}")
        left = body(f"sub i64 {filled}, {first}")
        count = body(f"call i64 @llvm.umin.i64(i64 {body(f'and i64 {left}, -{_STRIP_ROWS}')}, i64 {KEYS})")
        self._bring(first, count)
        self._each_strip(first, count)
        tile.close()
        self._give()
        body.do("ret void")
        return f"define internal void @block(ptr %job, ptr %scratch, i64 %block, i64 %head) {{\n{body.text()}\n}}\n"

    def _place(self, offset: int) -> str:
        return self._body.at("i8", "%scratch", offset)

    def _prepare(self) -> None:
        """Every lane's limit and addresses; those behind the last do as the last does, and are not kept."""
        body, job, places = self._body, self._job, self._places
        stored = STORED[self._tiling.stored]
        limits, queries, results = map(self._place, (places.limits, places.queries_at, places.results_at))
        largest, sums = self._place(places.largest), self._place(places.sums)
        last = body(f"sub i64 {self._lanes}, 1")
        heads = body(f"mul i64 %head, {job['group']}")
        each = Loop(body, body(f"mul i64 {self._strips}, {self._tiling.strip}"))
        lane = body(f"call i64 @llvm.umin.i64(i64 {each.index}, i64 {last})")
        group = job["group"]
        row = body(f"add i64 {self._first}, {body(f'udiv i64 {lane}, {group}')}")
        head = body(f"add i64 {heads}, {body(f'urem i64 {lane}, {group}')}")
        limit = body(f"trunc i64 {body.load('i64', job['limits'], row)} to i32")
        body.store("i32", limit, limits, each.index)
        begin = body(f"trunc i64 {body.load('i64', job['begins'], row)} to i32")
        body.store("i32", begin, self._place(places.begins), each.index)
        query, out = (body.at(stored, job[side], self._offset(side, head, row)) for side in ("query", "out"))
        body.store("ptr", query, queries, each.index)
        kept = body(f"icmp eq i64 {lane}, {each.index}")
        body.store("ptr", body(f"select i1 {kept}, ptr {out}, ptr {self._nobody}"), results, each.index)
        body.store("float", body.load("float", job["rests"], head), largest, each.index)
        body.store("float", "1.0", sums, each.index)
        each.close()

    def _offset(self, side: str, head: str, row: str) -> str:
        body, by_head, by_row = self._body, self._job[f"{side}_head"], self._job[f"{side}_row"]
        return body(f"add i64 {body(f'mul i64 {head}, {by_head}')}, {body(f'mul i64 {row}, {by_row}')}")

    def _strip(self, pointer: str, strip: str, size: str | int) -> str:
        """What belongs to a strip where every lane has `size` numbers of 32 bits."""
        body = self._body
        return body.at("float", pointer, body(f"mul i64 {body(f'mul i64 {strip}, {self._tiling.strip}')}, {size}"))

    def _turn_queries(self) -> None:
        body, job = self._body, self._job
        addresses = self._place(self._places.queries_at)
        each = Loop(body, self._strips)
        strip = body.at("ptr", addresses, body(f"mul i64 {each.index}, {self._tiling.strip}"))
        to = self._strip(self._queries, each.index, self._steps)
        body.do(f"call void @queries(ptr {strip}, i64 {self._steps}, ptr {to})")
        each.close()
        registers = body(f"mul i64 {self._strips}, {self._tiling.registers}")
        zeros = Loop(body, body(f"mul i64 {registers}, {job['value_dim']}"))
        place = body(f"mul i64 {zeros.index}, {self._tiling.width}")
        body.store(self._tiling.floats(), "zeroinitializer", self._results, place)
        zeros.close()

    def _bring(self, first: str, count: str) -> None:
        """A tile's keys and values."""
        pairs, job = self._tiling.pairs, self._job
        self._rows_of("key", first, count, job["head_dim"], self._keys)
        self._rows_of("value", first, count, job["value_dim"], self._came if pairs else self._values)
        if pairs:
            came, values = self._came, self._values
            self._body.do(f"call void @pairs(ptr {came}, i64 {count}, i64 {job['value_dim']}, ptr {values})")

    def _rows_of(self, side: str, first: str, count: str, columns: str, to: str) -> None:
        body, job, stored = self._body, self._job, STORED[self._tiling.stored]
        own = body.at(stored, job[side], self._offset(side, "%head", self._start))
        by_head, strides = job[f"lead_{side}_head"], (job[f"lead_{side}_row"], job[f"{side}_row"])
        lead = body.at(stored, job[f"lead_{side}"], body(f"mul i64 %head, {by_head}"))
        body.do(
            f"call void @rows(ptr {lead}, i64 {strides[0]}, i64 {job['leads']}, ptr {own}, i64 {strides[1]}, "
            f"i64 {first}, i64 {self._last}, i64 {count}, i64 {columns}, ptr {to})"
        )

    def _each_strip(self, first: str, count: str) -> None:
        """The tile for every strip that sees any of it."""
        body, tiling, places = self._body, self._tiling, self._places
        each = Loop(body, self._strips)
        lane = body(f"mul i64 {each.index}, {tiling.strip}")
        limits = body.at("i32", self._place(places.limits), lane)
        lowest = body(f"zext i32 {body.load('i32', limits)} to i64")
        highest = body(f"zext i32 {body.load('i32', limits, tiling.strip - 1)} to i64")
        begins = body.at("i32", self._place(places.begins), lane)
        earliest = body(f"zext i32 {body.load('i32', begins)} to i64")
        seen, after = body.new_block(), body.new_block()
        begun = body(f"icmp ult i64 {earliest}, {body(f'add i64 {first}, {count}')}")
        some = body(f"and i1 {body(f'icmp ule i64 {first}, {highest}')}, {begun}")
        body.do(f"br i1 {some}, label %{seen}, label %{after}")
        body.enter(seen)
        self._tile(each.index, lane, (limits, begins), lowest, first, count)
        body.do(f"br label %{after}")
        body.enter(after)
        each.close()

    def _tile(self, strip: str, lane: str, spans: tuple[str, str], lowest: str, first: str, count: str) -> None:
        body, tiling, places, job = self._body, self._tiling, self._places, self._job
        scores, now, shrink = map(self._place, (places.scores, places.now_largest, places.shrink))
        largest = body.at("float", self._place(places.largest), lane)
        sums = body.at("float", self._place(places.sums), lane)
        groups = body(f"udiv i64 {count}, {tiling.keys_once}")
        queries = self._strip(self._queries, strip, self._steps)
        body.do(
            f"call void @scores(ptr {queries}, ptr {self._keys}, i64 {self._steps}, i64 {groups}, ptr {scores}, "
            f"ptr {largest}, ptr {now})"
        )
        self._cap(scores, count, largest, now)
        limits, begins = spans
        behind = body(f"add i64 {first}, {count}")
        latest = body(f"zext i32 {body.load('i32', begins, tiling.strip - 1)} to i64")
        cut = body(f"icmp ugt i64 {latest}, {first}")
        after = body(f"add i64 {lowest}, 1")
        hidden = body(f"or i1 {cut}, {body(f'icmp ugt i64 {behind}, {after}')}")
        hide, on = body.new_block(), body.new_block()
        body.do(f"br i1 {hidden}, label %{hide}, label %{on}")
        body.enter(hide)
        body.do(
            f"call void @mask(ptr {limits}, ptr {begins}, i64 {first}, i64 {count}, ptr {scores}, ptr {largest}, "
            f"ptr {now})"
        )
        body.do(f"br label %{on}")
        body.enter(on)
        scale = self._number("scale")
        body.do(
            f"call void @weights(ptr {scores}, i64 {count}, ptr {largest}, ptr {now}, ptr {sums}, ptr {shrink}, "
            f"float {scale})"
        )
        self._keep_largest(now, largest)
        steps = body(f"lshr i64 {count}, {1 if tiling.pairs else 0}")
        columns = body(f"udiv i64 {job['value_dim']}, {tiling.keys_once}")
        results = self._strip(self._results, strip, job["value_dim"])
        body.do(
            f"call void @sum(ptr {scores}, ptr {self._values}, i64 {steps}, i64 {columns}, ptr {shrink}, ptr {results})"
        )

    def _number(self, name: str) -> str:
        """A float32 of the job."""
        bits = self._body(f"trunc i64 {self._job[name]} to i32")
        return self._body(f"bitcast i32 {bits} to float")

    def _cap(self, scores: str, count: str, largest: str, now: str) -> None:
        """Bend a tile's scores where there is a cap."""
        body, bend, on = self._body, self._body.new_block(), self._body.new_block()
        given = self._job["bend"]
        body.do(f"br i1 {body(f'icmp ne i64 {given}, 0')}, label %{bend}, label %{on}")
        body.enter(bend)
        factor, top = self._number("bend"), self._number("top")
        body.do(f"call void @cap(ptr {scores}, i64 {count}, ptr {largest}, ptr {now}, float {factor}, float {top})")
        body.do(f"br label %{on}")
        body.enter(on)

    def _keep_largest(self, now: str, largest: str) -> None:
        body, tiling = self._body, self._tiling
        for at in range(tiling.registers):
            value = body.load(tiling.floats(), now, at * tiling.width)
            body.store(tiling.floats(), value, largest, at * tiling.width)

    def _give(self) -> None:
        body, tiling, job, places = self._body, self._tiling, self._job, self._places
        each = Loop(body, self._strips)
        lane = body(f"mul i64 {each.index}, {tiling.strip}")
        sums = body.at("float", self._place(places.sums), lane)
        rows = body.at("ptr", self._place(places.results_at), lane)
        results = self._strip(self._results, each.index, job["value_dim"])
        body.do(f"call void @results(ptr {results}, ptr {sums}, i64 {job['value_dim']}, ptr {rows})")
        each.close()
