"""RMSNorm, rotary positions and gated activation on a CPU, row by row in machine code, rounded as the model rounds.

A model that computes in bfloat16 rounds after every operation of torch's. So does this code: its numbers differ only by
the order of a norm's sum and the last place of an exponential.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvtool.core.kernels import FORMATS
from kvtool.core.native import builder, simd
from kvtool.core.native.builder import Fields, FunctionBuilder, Value, rounded
from kvtool.core.native.isa import Isa
from kvtool.core.native.jit import Function, Job, WorkQueue, compile_once, compiled
from kvtool.core.native.simd import each, rotate
from kvtool.core.native.threads import launch

_ONE_THREAD = 2**16  # numbers; fewer are done before a second thread has started
_SHARES = 4  # of each thread: a thread that is kept waiting leaves its rest to the others

# `next` is the first row that no thread has taken yet, `share` how many rows a thread takes at a time.
_QUEUE = {"next": "i64", "share": "i64", "rows": "i64"}
JOBS = {
    # sum = x + more, if more is given; y = sum / √(mean(sum²) + ε), rounded, · weight
    "norm": Job(
        **_QUEUE,
        **{"x": "ptr", "more": "ptr", "sum": "ptr", "weight": "float*", "y": "ptr", "count": "i64", "epsilon": "float"},
    ),
    # y = act(y) · x
    "gate": Job(**_QUEUE, x="ptr", y="ptr", count="i64"),
    # heads of queries and of keys, `[rows, heads, head_dim]`, rotated by halves in place
    "rope": Job(
        **_QUEUE,
        **dict.fromkeys(("queries", "keys", "cos", "sin"), "ptr"),
        **dict.fromkeys(("heads", "kv_heads", "head_dim", "half"), "i64"),
    ),
}


@dataclass(frozen=True, slots=True)
class Rounding:
    norm_first: bool = True  # before a norm multiplies by its weight (Llama); else the product only (Gemma, OLMo 2)
    rope_in_float32: bool = False  # a rotated number is rounded once (OLMo 2)


AS_LLAMA = Rounding()


@dataclass(frozen=True, slots=True)
class LayerKernels:
    functions: dict[str, Function]
    dtype: torch.dtype
    angles: torch.dtype  # of cos and sin

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, more: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `more` to x, both `[..., count]`, if it is given; return the sum and its RMS norm."""
        count = weight.numel()
        rows = self._rows(x, count)
        if weight.dtype != torch.float32 or not weight.is_contiguous():
            raise ValueError("a norm's weight is float32 numbers in a row")
        if more is not None and (more.shape != x.shape or self._rows(more, count) != rows):
            raise ValueError(f"{tuple(more.shape)} cannot be added to {tuple(x.shape)}")
        sum_ = x if more is None else torch.empty_like(x)
        y = torch.empty_like(x)
        added = 0 if more is None else more.data_ptr()
        places = {"x": x.data_ptr(), "more": added, "sum": sum_.data_ptr(), "weight": weight.data_ptr()}
        self._run("norm", rows, count, **places, y=y.data_ptr(), count=count, epsilon=epsilon)
        return sum_, y

    def gate(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        count = y.shape[-1]
        rows = self._rows(y, count)
        if x.shape != y.shape or self._rows(x, count) != rows:
            raise ValueError(f"no gate for {tuple(y.shape)} and {tuple(x.shape)}")
        self._run("gate", rows, count, x=x.data_ptr(), y=y.data_ptr(), count=count)
        return y

    def apply_rope(self, queries: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate heads `[rows, heads, head_dim]` by halves, in place; cos and sin: `[rows, rotary_dim]` in `angles`."""
        rows, heads, head_dim = queries.shape
        whole = heads * head_dim
        fit = self._rows(queries, whole) == self._rows(keys, keys[0].numel()) == rows == len(cos)
        alike = keys.shape[2] == head_dim and cos.shape == sin.shape
        if not (fit and alike and cos.shape[1] <= head_dim and cos.shape[1] % 2 == 0):
            raise ValueError(f"{tuple(queries.shape)} and {tuple(keys.shape)} are not rotated by {tuple(cos.shape)}")
        if not all(side.dtype == self.angles and side.is_contiguous() and side.is_cpu for side in (cos, sin)):
            raise ValueError(f"cos and sin are {self.angles} here, in a row")
        tensors = {"queries": queries, "keys": keys, "cos": cos, "sin": sin}
        sizes = {"heads": heads, "kv_heads": keys.shape[1], "head_dim": head_dim, "half": cos.shape[1] // 2}
        self._run("rope", rows, whole, **{name: tensor.data_ptr() for name, tensor in tensors.items()}, **sizes)

    def _rows(self, tensor: torch.Tensor, count: int) -> int:
        """Count the rows of so many numbers: machine code knows no bounds."""
        if tensor.dtype != self.dtype or not tensor.is_contiguous() or not tensor.is_cpu:
            raise ValueError(f"{tensor.dtype} {tuple(tensor.shape)} is no row of {self.dtype} after the other")
        rows, rest = divmod(tensor.numel(), count)
        if rest or not rows:
            raise ValueError(f"{tuple(tensor.shape)} has no rows of {count}")
        return rows

    def _run(self, name: str, rows: int, numbers: int, **values: int | float) -> None:
        threads = torch.get_num_threads() if rows * numbers > _ONE_THREAD else 1
        share = -(-rows // (_SHARES * threads)) if threads > 1 else rows
        job = JOBS[name].pack(next=0, share=share, rows=rows, **values)
        launch(self.functions[name], job, threads)


@compile_once
def layer_kernels(isa: Isa, dtype: torch.dtype, activation: str, rounding: Rounding = AS_LLAMA) -> LayerKernels:
    functions = compiled(layer_module(isa, FORMATS[dtype], activation, rounding), isa, *JOBS)
    angles = torch.float32 if rounding.rope_in_float32 else dtype
    return LayerKernels(dict(zip(JOBS, functions, strict=True)), dtype, angles)


def layer_module(isa: Isa, element: str, activation: str, rounding: Rounding = AS_LLAMA) -> str:
    """Write all functions `void NAME(ptr job)`: any number of threads may run one with the same job."""
    functions = {name: FunctionBuilder(name, isa, "i64* job") for name in JOBS}
    with _each_row(functions["norm"]) as (job, row):
        sides = (job[name].of(element).at(row * job.count) for name in ("x", "more", "sum", "y"))
        _norm(job, rounding.norm_first, *sides)
    with _each_row(functions["gate"]) as (job, row):
        x, y = (side.of(element).at(row * job.count) for side in (job.x, job.y))
        simd.gate(y, x, job.count, activation)
    with _each_row(functions["rope"]) as (job, row):
        _rotate(job, element, "float32" if rounding.rope_in_float32 else element, row)
    return builder.module(*functions.values())


@contextlib.contextmanager
def _each_row(k: FunctionBuilder) -> Iterator[tuple[Fields, Value]]:
    job = JOBS[k.name].load(k, k.args.job)
    with WorkQueue(k, k.args.job, job.share, job.rows) as queue, k.loop(queue.last - queue.first) as index:
        yield job, queue.first + index


def _norm(job: Fields, rounds_first: bool, x: Value, more: Value, sum_: Value, y: Value) -> None:
    k = x.k
    branch = k.when(job.more.ne(0), x)

    def add(lanes: int, index: Value) -> None:
        sum_.store(x.load(index, lanes) + more.load(index, lanes), index)

    each(k, job.count, add)
    (source,) = branch.close(sum_)
    simd.rms_norm(source, job.weight, y, job.count, job.epsilon, rounds_first)


def _rotate(job: Fields, element: str, angles: str, row: Value) -> None:
    k, width = row.k, job.half * 2
    table = [side.of(angles).at(row * width) for side in (job.cos, job.sin)]
    for side, heads in ((job.queries, job.heads), (job.keys, job.kv_heads)):
        with k.loop(heads) as index:
            _rotate_head(side.of(element).at((row * heads + index) * job.head_dim), table, job.half)


def _rotate_head(head: Value, table: Sequence[Value], half: Value) -> None:
    def work(lanes: int, index: Value) -> None:
        columns = index, index + half
        low, high = (head.load(column, lanes) for column in columns)
        cos, sin = (side.load(index, lanes) for side in table)
        for value, column in zip(
            rotate(low, high, cos, sin, lambda product: rounded(product, table[0].target)), columns, strict=True
        ):
            head.store(value, column)

    each(head.k, half, work)
