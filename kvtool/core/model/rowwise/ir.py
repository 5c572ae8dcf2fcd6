"""LLVM IR of what a decoder layer does to each row between its products, every result rounded as the model rounds it.

A model that computes in bfloat16 rounds after every operation of torch's. So does this, so that its numbers are the
model's own but for the order of a norm's sum and the last place of an exponential.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtool.core.native import builder, simd
from kvtool.core.native.builder import Fields, FunctionBuilder, Value, rounded
from kvtool.core.native.isa import Isa
from kvtool.core.native.job import Job, WorkQueue
from kvtool.core.native.simd import each, rotate

# `next` is the first row that nobody has taken yet, `share` how many are taken at a time.
_TAKING = {"next": "i64", "share": "i64", "rows": "i64"}
JOBS = {
    # sum = x + more, where there is more; y = sum / √(mean(sum²) + ε), rounded, · weight
    "norm": Job(
        **_TAKING,
        **{"x": "ptr", "more": "ptr", "sum": "ptr", "weight": "float*", "y": "ptr", "count": "i64", "epsilon": "float"},
    ),
    # y = act(y) · x
    "gate": Job(**_TAKING, x="ptr", y="ptr", count="i64"),
    # heads of queries and of keys, `[rows, heads, head_dim]`, rotated by halves where they are
    "turn": Job(
        **_TAKING,
        **dict.fromkeys(("queries", "keys", "cos", "sin"), "ptr"),
        **dict.fromkeys(("heads", "kv_heads", "head_dim", "half"), "i64"),
    ),
}


@dataclass(frozen=True, slots=True)
class Rounding:
    """Where a model that computes in bfloat16 rounds.

    Attributes
    ----------
    norm_first : before a norm multiplies by its weight (Llama); else the product only (Gemma, OLMo 2).
    rope_in_float32 : cos, sin and their products are float32, a rotated number is rounded once (OLMo 2).
    """

    norm_first: bool = True
    rope_in_float32: bool = False


AS_LLAMA = Rounding()


def module(isa: Isa, element: str, activation: str, rounding: Rounding = AS_LLAMA) -> str:
    """All functions `void NAME(ptr job)`: any number of threads may run one with the same job.

    Parameters
    ----------
    element : "float32" or "bfloat16": what the model computes in.
    activation : one of `ACTIVATIONS`.
    """
    functions = {name: FunctionBuilder(name, isa, "i64* job") for name in JOBS}
    with _each_row(functions["norm"]) as (job, row):
        sides = (job[name].of(element).at(row * job.count) for name in ("x", "more", "sum", "y"))
        _norm(job, rounding.norm_first, *sides)
    with _each_row(functions["gate"]) as (job, row):
        x, y = (side.of(element).at(row * job.count) for side in (job.x, job.y))
        simd.gate(y, x, job.count, activation)
    with _each_row(functions["turn"]) as (job, row):
        _rotate(job, element, "float32" if rounding.rope_in_float32 else element, row)
    return builder.module(*functions.values())


@contextlib.contextmanager
def _each_row(k: FunctionBuilder) -> Iterator[tuple[Fields, Value]]:
    """Take some rows after the other until none is left."""
    job = JOBS[k.name].load(k, k.args.job)
    with WorkQueue(k, k.args.job, job.share, job.rows) as queue, k.loop(queue.last - queue.first) as index:
        yield job, queue.first + index


def _norm(job: Fields, rounds_first: bool, x: Value, more: Value, sum_: Value, y: Value) -> None:
    k = x.k
    some = k.when(job.more.ne(0), x)

    def add(lanes: int, index: Value) -> None:
        sum_.store(x.load(index, lanes) + more.load(index, lanes), index)

    each(k, job.count, add)
    (source,) = some.close(sum_)
    simd.rms_norm(source, job.weight, y, job.count, job.epsilon, rounds_first)


def _rotate(job: Fields, element: str, angles: str, row: Value) -> None:
    """The heads of a row in their place."""
    k, width = row.k, job.half * 2
    table = [side.of(angles).at(row * width) for side in (job.cos, job.sin)]
    for side, heads in ((job.queries, job.heads), (job.keys, job.kv_heads)):
        with k.loop(heads) as index:
            _rotate_head(side.of(element).at((row * heads + index) * job.head_dim), table, job.half)


def _rotate_head(head: Value, table: Sequence[Value], half: Value) -> None:
    """Round each product as the table is stored."""

    def work(lanes: int, index: Value) -> None:
        places = index, index + half
        low, high = (head.load(place, lanes) for place in places)
        cos, sin = (side.load(index, lanes) for side in table)
        for value, place in zip(
            rotate(low, high, cos, sin, lambda product: rounded(product, table[0].target)), places, strict=True
        ):
            head.store(value, place)

    each(head.k, half, work)
