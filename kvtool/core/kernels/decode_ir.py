"""Decoding as a program: a list of operations over buffers, which one compiled function runs from end to end.

All threads run the same program. An operation divides its rows among them by their number; a barrier follows it where a
later one reads what other threads wrote. What every thread computes for itself (a norm) is in its own memory, `stride`
bytes after that of the thread before. A step takes one token of each of some sequences: only products take them
together.

An operation is 16 words of 8 bytes: the address of its code, whether a barrier follows, then its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvtool.core.kernels.linear.gemm_ir import product
from kvtool.core.kernels.linear.int8_ir import row_product
from kvtool.core.native import simd
from kvtool.core.native.builder import Fields, FunctionBuilder, Value
from kvtool.core.native.builder import module as text_of
from kvtool.core.native.isa import Isa, multiplies_int8
from kvtool.core.native.jit import Function, Job
from kvtool.core.native.simd import each, exp, fma, inverse_rms, lanes_for, larger, largest, total
from kvtool.core.native.threads import barrier

WORDS = 16
BLOCK = 128  # keys that one thread attends to at a time, for all heads that share them
UNIT = 16  # rows that are not dealt out to different threads: their results share a cache line
INT8 = "_int8"  # at the end of a kind of product
HEADROOM = 16  # floats before the sums of one block: its largest score, and the sum of its weights

# The parameters of an operation, in the order of its words. Strides are bytes from one thread's memory to the next.
FIELDS = {
    # y[r] = Σ w[r, c] · x[c], for `rows` rows from `first` on, and each of `inputs` inputs, at a pitch in numbers
    "product": Job(
        **dict.fromkeys(("data", "scales", "group_mins"), "ptr"),
        **{"x": "float32*", "x_stride": "i64", "y": "float32*", "first": "i64", "rows": "i64", "columns": "i64"},
        **dict.fromkeys(("inputs", "x_pitch", "y_pitch"), "i64"),
    ),
    # y = x / √(mean(x²) + ε) · weight, by every thread
    "norm": Job(
        **{"x": "float32*", "x_stride": "i64", "weight": "float*", "y": "float32*", "y_stride": "i64"},
        **{"count": "i64", "epsilon": "float"},
    ),
    # y = a · y + b · x
    "axpby": Job(x="float32*", x_stride="i64", y="float32*", count="i64", a="float", b="float"),
    # y = act(y) · x
    "gate": Job(x="float32*", y="float32*", count="i64"),
    # y = scaled, rotated, normed x for each head
    "queries": Job(
        **{"x": "float32*", "x_stride": "i64", "weight": "float*", "epsilon": "float", "y": "float32*"},
        **{"heads": "i64", "scale": "float", "cos": "float*", "sin": "float*"},
    ),
    # the same of the keys, and the values, into one row of the cache
    "keys": Job(
        **{"x": "float32*", "x_stride": "i64", "weight": "float*", "epsilon": "float", "values": "float32*"},
        **{"heads": "i64", "key_cache": "ptr", "value_cache": "ptr", "capacity": "i64", "row": "i64"},
        **{"cos": "float*", "sin": "float*"},
    ),
    # the sums of each block of keys, and of each head
    "attend": Job(
        **{"x": "float*", "key_cache": "ptr", "value_cache": "ptr", "capacity": "i64", "heads": "i64"},
        **{"parts": "float*", "blocks": "i64", "seen": "i64"},
    ),
    # y = those of all blocks together
    "combine": Job(parts="float*", blocks="i64", seen="i64", y="float*", heads="i64"),
}
# What the program is run with.
CONTEXT = Job(operations="i64*", count="i64", threads="i64", taken="i64*", barrier="i64*")


@dataclass(frozen=True, slots=True)
class Operation:
    code: str  # name of the compiled function
    kind: str  # whose fields it takes, one of FIELDS
    values: Mapping[str, int | float]  # by field; pointers as addresses
    barrier: bool = False  # the threads wait for each other after it


def encode(operations: list[Operation], codes: Mapping[str, Function]) -> np.ndarray:
    program = np.zeros((len(operations), WORDS), np.int64)
    for row, operation in zip(program, operations, strict=True):
        row[0], row[1] = codes[operation.code].address, operation.barrier
        fields = FIELDS[operation.kind].pack(**operation.values)
        row[2 : 2 + len(fields)] = fields
    return program


def word(kind: str, field: str) -> int:
    return 2 + FIELDS[kind].places[field]


# ---- LLVM IR of the operations --------------------------------------------------------------------------------------

ARGUMENTS = "i64* op, i64* context, i64 thread, i64 threads"


def operation(isa: Isa, kind: str, name: str = "") -> tuple[FunctionBuilder, Fields]:
    """Begin the function of an operation; its fields. A pointer with a stride is this thread's own."""
    k = FunctionBuilder(name or kind, isa, ARGUMENTS)
    loaded = FIELDS[kind].load(k, k.args.op, 2)
    fields = dict(zip(loaded.names, loaded, strict=True))
    for field, value in fields.items():
        if f"{field}_stride" in fields:
            address = value.of("i8").at(k.args.thread * fields[f"{field}_stride"])
            fields[field] = address.of(value.target)
    return k, Fields(fields)


def share(k: FunctionBuilder, count: Value, unit: int = 1) -> tuple[Value, Value]:
    """Return this thread's part of `count` things: the first, and how many; threads differ by one unit at most."""
    units = count if unit == 1 else (count + (unit - 1)) // unit
    bounds = [units * number // k.args.threads for number in (k.args.thread, k.args.thread + 1)]
    if unit != 1:
        bounds = [k.minimum(bound * unit, count) for bound in bounds]
    return bounds[0], bounds[1] - bounds[0]


def tiles(count: int, most: int) -> Sequence[range]:
    return [range(start, min(start + most, count)) for start in range(0, count, most)]


Write = Callable[[Value, int], None]


@dataclass(frozen=True, slots=True)
class Heads:
    dim: int  # numbers of a head
    group: int  # query heads that share a head of keys
    normed: bool  # whether queries and keys are normed head by head
    cache: str  # "float32" or "bfloat16": how keys and values are kept


def queries(isa: Isa, heads: Heads, rotary: int) -> FunctionBuilder:
    """Write `queries_ROTARY`: this thread's query heads, scaled for the softmax, `rotary` numbers rotated in halves."""
    k, have = operation(isa, "queries", f"queries_{rotary}")
    normed = k.alloca("float", heads.dim) if heads.normed else None
    first, count = share(k, have.heads)
    with k.loop(count, may_be_empty=True) as index:
        at = (first + index) * heads.dim
        out = have.y.at(at)

        def write(value: Value, start: int) -> None:
            out.store(value * have.scale.splat(value.lanes), start)

        _place_head(have, heads, rotary, normed, have.x.at(at), write)
    return k


def keys(isa: Isa, heads: Heads, rotary: int) -> FunctionBuilder:
    """Write `keys_ROTARY`: this thread's heads of keys and values, into the cache's row of the token."""
    k, have = operation(isa, "keys", f"keys_{rotary}")
    normed = k.alloca("float", heads.dim) if heads.normed else None
    first, count = share(k, have.heads)
    with k.loop(count, may_be_empty=True) as index:
        head = first + index
        offset = (head * have.capacity + have.row) * heads.dim
        at = head * heads.dim
        key, value = (side.of(heads.cache).at(offset) for side in (have.key_cache, have.value_cache))
        _place_head(have, heads, rotary, normed, have.x.at(at), key.store)
        source, lanes = have["values"].at(at), lanes_for(k.width, heads.dim)
        for start in range(0, heads.dim, lanes):
            value.store(source.load(start, lanes), start)
    return k


def _place_head(have: Fields, heads: Heads, rotary: int, normed: Value | None, source: Value, write: Write) -> None:
    """Norm the head at `source`, if there is memory for that, and rotate it; `write(value, index)` gets the result."""
    k = source.k
    if normed:
        lanes = lanes_for(k.width, heads.dim)
        factor = inverse_rms(source, heads.dim, have.epsilon).splat(lanes)
        for start in range(0, heads.dim, lanes):
            normed.store(source.load(start, lanes) * factor * have.weight.load(start, lanes), start)
        source = normed
    lanes = lanes_for(k.width, rotary // 2)
    for start in range(0, rotary, lanes):
        write(_rotated(have, rotary // 2, lanes, source, start), start)
    lanes = lanes_for(k.width, heads.dim - rotary, rotary)
    for start in range(rotary, heads.dim, lanes):
        write(source.load(start, lanes), start)


def _rotated(have: Fields, half: int, lanes: int, source: Value, start: int) -> Value:
    other = source.load(start + half if start < half else start - half, lanes)
    turned = (-other if start < half else other) * have.sin.load(start, lanes)
    return fma(source.load(start, lanes), have.cos.load(start, lanes), turned)


def multiply_name(kind: str, height: int) -> str:
    return f"multiply_{kind}" if height == 1 else f"multiply_{kind}_{height}"


def multiply(isa: Isa, kind: str, height: int = 1) -> list[FunctionBuilder]:
    """Write `multiply_KIND`, this thread's rows of a product with `height` inputs; with a kind that ends with `INT8`
    inputs are rounded to 8-bit integers."""
    rounds = multiplies_int8(isa) if kind.endswith(INT8) else None
    assert rounds is not None or not kind.endswith(INT8), f"{isa} multiplies no 8-bit integers"
    function = row_product(rounds, kind.removesuffix(INT8), height) if rounds else product(isa, kind, height)
    k, have = operation(isa, "product", multiply_name(kind, height))
    first, count = share(k, have.rows, UNIT)
    first = have.first + first
    given = {"first": first, "last": first + count, "out": have.y}
    k.call_void(function.name, *(given[name] if name in given else have[name] for name in function.args.names))
    return [function, k]


def norm(isa: Isa) -> FunctionBuilder:
    k, have = operation(isa, "norm")
    simd.rms_norm(have.x, have.weight, have.y, have.count, have.epsilon)
    return k


def axpby(isa: Isa) -> FunctionBuilder:
    k, have = operation(isa, "axpby")

    def mix(lanes: int, index: Value) -> None:
        y = have.y.load(index, lanes) * have.a.splat(lanes)
        have.y.store(fma(have.x.load(index, lanes), have.b.splat(lanes), y), index)

    first, count = share(k, have.count, UNIT)
    each(k, count, mix, first)
    return k


def gate(isa: Isa, activation: str) -> FunctionBuilder:
    k, have = operation(isa, "gate")
    first, count = share(k, have.count, UNIT)
    simd.gate(have.y, have.x, count, activation, first)
    return k


_LOW = -1e30  # below every score
_ROW = BLOCK + 16  # memory for the scores of one query head
_TOGETHER = 4  # query heads at a time: their sums stay in registers
_COLUMNS = 2  # vectors of values at a time


def attend(isa: Isa, heads: Heads) -> FunctionBuilder:
    """Emit the operation `attend`, of one row: this thread's blocks of keys, for all query heads that share them.
    Blocks are joined by log-sum-exp, the same bits whichever thread took one."""
    k, have = operation(isa, "attend")
    scores = k.alloca("float", heads.group * _ROW)
    blocks = (have.seen + (BLOCK - 1)) // BLOCK
    first, count = share(k, blocks * have.heads)
    with k.loop(count, may_be_empty=True) as index:
        task = first + index
        _Block(k, heads, have, scores, task // blocks, task % blocks).emit()
    return k


class _Block:
    def __init__(
        self, k: FunctionBuilder, heads: Heads, have: Fields, scores: Value, head: Value, block: Value
    ) -> None:
        self._k, self._heads, self._scores = k, heads, scores
        self._lanes = lanes_for(k.width, heads.dim)
        start = block * BLOCK
        self._count = k.minimum(have.seen - start, BLOCK)
        at = (head * have.capacity + start) * heads.dim
        self._keys, self._values = (side.of(heads.cache).at(at) for side in (have.key_cache, have.value_cache))
        first = head * heads.group
        self._queries = have.x.at(first * heads.dim)
        self._slot = have.blocks * (HEADROOM + heads.dim)  # floats from one head's to the next's
        self._parts = have.parts.at(first * self._slot).at(block * (HEADROOM + heads.dim))

    def emit(self) -> None:
        self._hide_the_rest()
        for tile in tiles(self._heads.group, _TOGETHER):
            self._score(tile)
        self._weigh()
        for tile in tiles(self._heads.group, _TOGETHER):
            for columns in tiles(self._heads.dim // self._lanes, _COLUMNS):
                self._sum(tile, columns)

    def _hide_the_rest(self) -> None:
        """Lowest scores from the last whole vector on: those of keys that are there are written over them."""
        width = self._k.width
        last = self._count // width * width
        low = self._k.zeros(width).like(_LOW)
        for head in range(self._heads.group):
            self._scores.at(head * _ROW).store(low, last)

    def _score(self, tile: range) -> None:
        k, lanes, dim = self._k, self._lanes, self._heads.dim
        with k.loop(self._count) as index:
            key = self._keys.at(index * dim)
            sums = [k.zeros(lanes)] * len(tile)
            for start in range(0, dim, lanes):
                numbers = key.load(start, lanes)
                queries = [self._queries.load(head * dim + start, lanes) for head in tile]
                sums = [fma(query, numbers, before) for query, before in zip(queries, sums, strict=True)]
            for head, value in zip(tile, sums, strict=True):
                self._scores.at(head * _ROW).store(total(value), index)

    def _weigh(self) -> None:
        """The largest score and the sum of the weights go into the head's slot."""
        k, width = self._k, self._k.width
        steps = (self._count + (width - 1)) // width
        with k.loop(self._heads.group) as head:
            row = self._scores.at(head * _ROW)
            loop = k.loop(steps, k.zeros(width).like(_LOW))
            (most,) = loop.close(larger(row.load(loop.index * width, width), loop.values[0]))
            top = largest(most)
            loop = k.loop(steps, k.zeros(width))
            at = loop.index * width
            score = row.load(at, width)
            weight = exp(score - top.splat(width))
            weight = (score > _LOW).select(weight, 0.0)  # nothing for a key that is not there
            row.store(weight, at)
            (sums,) = loop.close(loop.values[0] + weight)
            slot = self._parts.at(head * self._slot)
            slot.store(top)
            slot.store(total(sums), 1)

    def _sum(self, tile: range, columns: range) -> None:
        k, lanes, dim = self._k, self._lanes, self._heads.dim
        places = [(head, column) for head in tile for column in columns]
        loop = k.loop(self._count, *[k.zeros(lanes)] * len(places))
        value = self._values.at(loop.index * dim)
        numbers = {column: value.load(column * lanes, lanes) for column in columns}
        weights = {head: self._scores.at(head * _ROW).load(loop.index).splat(lanes) for head in tile}
        sums = loop.close(
            *(
                fma(weights[head], numbers[column], before)
                for (head, column), before in zip(places, loop.values, strict=True)
            )
        )
        for (head, column), value in zip(places, sums, strict=True):
            self._parts.at(self._slot * head).store(value, HEADROOM + column * lanes)


def combine(isa: Isa, heads: Heads) -> FunctionBuilder:
    k, have = operation(isa, "combine")
    blocks, each = (have.seen + (BLOCK - 1)) // BLOCK, HEADROOM + heads.dim
    first, count = share(k, have.heads)
    with k.loop(count, may_be_empty=True) as index:
        head = first + index
        slots = have.parts.at(head * have.blocks * each)
        out = have.y.at(head * heads.dim)
        _join(k, heads.dim, blocks, lambda block: slots.at(block * each), out)
    return k


def _join(k: FunctionBuilder, dim: int, blocks: Value, slot: Callable[[Value], Value], out: Value) -> None:
    loop = k.loop(blocks, k.constant("float", _LOW))
    (top,) = loop.close(larger(slot(loop.index).load(), loop.values[0]))
    lanes = lanes_for(k.width, dim)
    places = range(0, dim, lanes)
    loop = k.loop(blocks, k.constant("float"), *[k.zeros(lanes)] * len(places))
    here, (whole, *sums) = slot(loop.index), loop.values
    less = here.load() - top
    weight = exp(k.poison("<1 x float>").with_lane(0, less)).lane(0)
    whole = whole + weight * here.load(1)
    wide = weight.splat(lanes)
    sums = [fma(wide, here.load(HEADROOM + start, lanes), before) for start, before in zip(places, sums, strict=True)]
    whole, *sums = loop.close(whole, *sums)
    inverse = (1.0 / whole).splat(lanes)
    for start, value in zip(places, sums, strict=True):
        out.store(value * inverse, start)


@dataclass(frozen=True, slots=True)
class Code:
    heads: Heads
    kinds: frozenset[str]  # of its products (`multiply`)
    rotaries: frozenset[int]  # how many numbers of a head are rotated, of every layer that differs in that
    activation: str

    @property
    def names(self) -> tuple[str, ...]:
        kinds = [f"multiply_{kind}" for kind in sorted(self.kinds)]
        turns = [f"{side}_{rotary}" for rotary in sorted(self.rotaries) for side in ("queries", "keys")]
        return ("run_program", "norm", "axpby", "gate", "attend", "combine", *kinds, *turns)


def module(isa: Isa, code: Code) -> str:
    parts = [function for kind in sorted(code.kinds) for function in multiply(isa, kind)]
    parts += [norm(isa), axpby(isa), gate(isa, code.activation)]
    for rotary in sorted(code.rotaries):
        parts += [queries(isa, code.heads, rotary), keys(isa, code.heads, rotary)]
    parts += [attend(isa, code.heads), combine(isa, code.heads)]
    return text_of(*parts, barrier(isa), _run_program(isa))


def products(isa: Isa, kind: str, height: int) -> str:
    return text_of(*multiply(isa, kind, height))


def _run_program(isa: Isa) -> FunctionBuilder:
    k = FunctionBuilder("run_program", isa, "i64* context")
    have = CONTEXT.load(k, k.args.context)
    thread = k.atomic_add(have.taken, 1)
    with k.loop(have.count) as index:
        operation = have.operations.at(index * WORDS)
        k.call_void(operation.of("ptr").load(), operation, k.args.context, thread, have.threads)
        with k.when(operation.load(1).ne(0)):
            k.call_void("barrier", have.barrier, have.threads)
    k.call_void("barrier", have.barrier, have.threads)
    return k
