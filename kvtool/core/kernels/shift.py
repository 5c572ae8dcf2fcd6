"""Shift of reused KV by the mean change of the recomputed rows (probes) of its chunk, in machine code.

`keep` saves the probes before they are recomputed; `add` adds their mean change to the other rows of the span.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch

from kvtool.core.kernels import FORMATS
from kvtool.core.kernels.rope import RopeTables
from kvtool.core.native.builder import BYTES, STORED, Fields, FunctionBuilder, Value, module
from kvtool.core.native.isa import Isa, isa_here
from kvtool.core.native.jit import Function, Job, Jobs, WorkQueue, address, compiled
from kvtool.core.native.simd import lanes_for, rotate, total
from kvtool.core.native.threads import current

Whole: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Sides: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # keys and values of a layer

_LEAST = 8  # numbers handled together
_ALONE = 2**16  # numbers; fewer are moved before a helper is there


@dataclass(frozen=True, slots=True)
class ShiftSpans:
    """Spans of rows that do not overlap, each with probes among its rows."""

    spans: Whole  # int64 `[spans, 2]`, the first row of each and the one after its last
    counts: Whole  # int64 `[spans]`, probes of each, at least 1
    places: torch.Tensor  # int64 `[probes]`, their rows, span by span
    factors: torch.Tensor  # float32 `[rows]`, the share of its span's offset that each row takes; 0: the row stays
    table: RopeTables  # of the positions of all rows up to the last one of a span
    back: RopeTables  # takes the positions off the probes

    @property
    def widths(self) -> set[int]:
        tables = self.table.by_name, self.back.by_name
        return {angles.cos.shape[2] for table in tables for angles in table.values()}

    @property
    def fits(self) -> bool:
        """Whether machine code, which checks no bounds, may take them."""
        rows, probes = len(self.factors), len(self.places)
        return (
            self.places.dtype == torch.int64
            and self.places.is_cpu
            and self.places.is_contiguous()
            and _are_factors(self.factors, rows)
            and _are_spans(self.spans, rows)
            and all(angles.fits(int(self.spans.max())) for angles in self.table.by_name.values())
            and all(angles.fits(probes) for angles in self.back.by_name.values())
            and len(self.widths) == 1
            and max(self.widths) % 2 == 0
            and self.counts.shape == (len(self.spans),)
            and int(self.counts.min()) > 0
            and int(self.counts.sum()) == probes
            and 0 <= int(self.places.min()) <= int(self.places.max()) < rows
        )


def _are_factors(factors: torch.Tensor, rows: int) -> bool:
    return factors.dtype == torch.float32 and factors.shape == (rows,) and factors.is_contiguous() and factors.is_cpu


def _are_spans(spans: Whole, rows: int) -> bool:
    if spans.shape[1:] != (2,) or not len(spans):
        return False
    first, end = spans[:, 0], spans[:, 1]
    return bool((first >= 0).all() and (first <= end).all() and (end <= rows).all())


def shift_kernel(spans: ShiftSpans, layers: Sequence[Sides], rotations: Sequence[str | None]) -> ShiftKernel | None:
    """Make a `ShiftKernel` for this machine; None where there is no machine code."""
    isa = isa_here()
    try:
        return None if isa is None else ShiftKernel(spans, layers, isa, rotations)
    except ValueError:
        return None


class ShiftKernel:
    """Moves the spans of one pass, layer by layer: `keep`, then `add` once the layer's rows are written.

    Layers are keys and values `[heads, rows, head_dim]`, all laid out alike, and changed in place. `rotations`: by
    which RoPE each layer's keys are rotated to their positions. Raises ValueError: there is no machine code for these.
    """

    def __init__(self, runs: ShiftSpans, layers: Sequence[Sides], isa: Isa, rotations: Sequence[str | None]) -> None:
        like = layers[0][0]
        alike = len({_layout(side) for layer in layers for side in layer}) == 1
        if not (runs.fits and alike and _is_known(like, runs) and _lanes(isa, like.shape[2], max(runs.widths))):
            raise ValueError(f"no machine code moves rows of {like.dtype} {tuple(like.shape)}")
        self._runs, self._rotations = runs, rotations
        self._layers = [*layers]  # whose memory the jobs point to
        heads, _, head_dim = like.shape
        self._kept = torch.empty((2, heads, len(runs.places), head_dim), dtype=like.dtype)
        self._sums = torch.empty((len(layers), len(runs.spans), heads, 2), dtype=torch.float32)
        first, end = runs.spans[:, 0], runs.spans[:, 1]
        # First row, rows, first probe and probes of each span.
        self._spans = np.stack([first, end - first, runs.counts.cumsum() - runs.counts, runs.counts], 1)
        self._jobs = Jobs(JOB, len(layers))
        self._jobs.set(
            **{"units": len(self._spans) * heads, "heads": heads, "runs": address(self._spans)},
            **{"places": runs.places.data_ptr(), "probes": len(runs.places), "kept": self._kept.data_ptr()},
            **{"head": like.stride(0), "row": like.stride(1), "sums": [sums.data_ptr() for sums in self._sums]},
            **{side: [layer[at].data_ptr() for layer in layers] for at, side in enumerate(("keys", "values"))},
        )
        self._set_tables("", "table_row", runs.table)
        self._set_tables("back_", "back_row", runs.back)
        self._addresses = [address(row) for row in self._jobs.words]
        (self._keep, self._plain), (_, self._turned) = (
            _compiled(isa, FORMATS[like.dtype], head_dim, half) for half in (0, max(runs.widths) // 2)
        )
        self._helped = like[:, : int(self._spans[:, 1].sum())].numel() > _ALONE

    def keep(self, layer: int) -> None:
        self._keep(self._addresses[layer])

    def add(self, layer: int, factors: torch.Tensor | None = None) -> Sides:
        """Add to each run's rows what its probes have changed by since, on the mean; in float32, rounded once.

        Returns the sums of the squares of values, float32 `[runs, heads]` each: of the probes' changes, and of the mean
        of these. `factors` replace those of the runs.
        """
        factors = self._runs.factors if factors is None else factors
        if not _are_factors(factors, len(self._runs.factors)):
            raise ValueError(f"{factors.dtype} {tuple(factors.shape)} are no factors of these rows")
        job, where = self._jobs.words[layer], self._addresses[layer]
        job[JOB.places["next"]], job[JOB.places["factors"]] = 0, factors.data_ptr()
        code, pool = self._plain if self._rotations[layer] is None else self._turned, current()
        # Waiting for OpenMP's team would take longer than the rows do, where other programs run.
        if pool is not None and self._helped:
            pool.run(code, where, torch.get_num_threads())
        else:
            code(where)
        changes, offsets = self._sums[layer].unbind(-1)
        return changes, offsets

    def _set_tables(self, prefix: str, row: str, tables: RopeTables) -> None:
        default = next(iter(tables.by_name))
        layer_tables = [tables.by_name[default if name is None else name] for name in self._rotations]
        self._jobs.set(
            **{
                f"{prefix}cos": [table.cos.data_ptr() for table in layer_tables],
                f"{prefix}sin": [table.sin.data_ptr() for table in layer_tables],
            },
            **{row: [table.cos.stride(1) for table in layer_tables]},
        )


def _layout(rows: torch.Tensor) -> tuple[object, ...]:
    return rows.dtype, rows.is_cpu, rows.shape, rows.stride()


def _is_known(rows: torch.Tensor, runs: ShiftSpans) -> bool:
    return (
        rows.is_cpu
        and rows.dtype in FORMATS
        and rows.stride(2) == 1
        and rows.shape[1] >= len(runs.factors)
        and max(runs.widths) <= rows.shape[2]
    )


def _lanes(isa: Isa, head_dim: int, rotated: int) -> int:
    """Count the numbers handled together; 0: the shape does not fit registers."""
    lanes = lanes_for(isa.width, rotated // 2, head_dim - rotated)
    return lanes if lanes >= _LEAST else 0


@cache
def _compiled(isa: Isa, stored: str, head_dim: int, half: int) -> tuple[Callable[[int], None], Function]:
    text = offsets_module(isa, stored, _lanes(isa, head_dim, 2 * half), head_dim, half)
    keep, add = compiled(text, isa, "keep", "add")
    # Little is copied: a thread that gave up Python's lock for it might wait longer to get it back.
    return ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(keep.address), add


# Strides in numbers. A unit is one head of one run.
JOB = Job(
    next="i64",  # the first unit that no thread has taken yet
    units="i64",
    heads="i64",
    runs="i64*",  # first row, rows, first probe, probes
    places="i64*",  # the probes' rows
    probes="i64",
    **{"keys": "ptr", "values": "ptr", "head": "i64", "row": "i64"},
    kept="ptr",  # [2, heads, probes, head_dim]
    factors="float*",
    **{"cos": "float*", "sin": "float*", "table_row": "i64"},
    **{"back_cos": "float*", "back_sin": "float*", "back_row": "i64"},
    sums="float*",  # [units, 2]
)
_Row = dict[int, Value]  # a row's numbers, by first column


def offsets_module(isa: Isa, stored: str, lanes: int, head_dim: int, half: int) -> str:
    """Write `void keep(job)` and `void add(job)`, the latter for any number of threads with the same job.

    `half` of the numbers are rotated with as many after them; the rest are not.
    """
    return module(_keep(isa, stored, head_dim), _Add(isa, stored, lanes, head_dim, half).function())


def _keep(isa: Isa, stored: str, head_dim: int) -> FunctionBuilder:
    k = FunctionBuilder("keep", isa, "ptr job")
    job = JOB.load(k, k.args.job)
    behind = job.probes * head_dim * job.heads
    size = k.constant("i64", head_dim * BYTES[STORED[stored]])
    with k.loop(job.heads) as head:
        sources = [side.of(stored).at(head * job.head) for side in (job.keys, job.values)]
        first = head * job.probes
        with k.loop(job.probes) as probe:
            row = job.places.load(probe) * job.row
            address = job.kept.of(stored).at((first + probe) * head_dim)
            for source, target in zip(sources, (address, address.at(behind)), strict=True):
                k.call_void("llvm.memcpy.p0.p0.i64", target, source.at(row), size, k.constant("i1"))
    return k


class _Add:
    def __init__(self, isa: Isa, stored: str, lanes: int, head_dim: int, half: int) -> None:
        self._k = FunctionBuilder("add", isa, "ptr job")
        self._k.keeps_nan = True
        self._stored, self._lanes, self._head_dim, self._half = stored, lanes, head_dim, half

    def function(self) -> FunctionBuilder:
        k = self._k
        job = JOB.load(k, k.args.job)
        with WorkQueue(k, k.args.job, 1, job.units) as queue:
            unit = queue.first
            run, head = unit // job.heads, unit % job.heads
            first, rows, probe, probes = (job.runs.at(run * 4).load(number) for number in range(4))
            sides = [side.of(self._stored).at(head * job.head) for side in (job.keys, job.values)]
            keys, values, squares = self._means(job, sides, head, probe, probes)
            sums = job.sums.at(unit * 2)
            sums.store(total(squares))
            sums.store(total(self._squared(values, k.zeros(self._lanes))), 1)
            self._move(job, sides, (first, rows), (keys, values))
        return k

    def _load(self, row: Value) -> _Row:
        return {start: row.load(start, self._lanes) for start in range(0, self._head_dim, self._lanes)}

    def _means(
        self, job: Fields, sides: list[Value], head: Value, first: Value, probes: Value
    ) -> tuple[_Row, _Row, Value]:
        """Means of the changes of keys, positions taken off, and of values; squares of the latter."""
        k, starts = self._k, range(0, self._head_dim, self._lanes)
        loop = k.loop(probes, *[k.zeros(self._lanes)] * (2 * len(starts) + 1))
        *sums, squares = loop.values
        probe = first + loop.index
        row = job.places.load(probe)
        new = [side.at(row * job.row) for side in sides]
        address = job.kept.of(self._stored).at((head * job.probes + probe) * self._head_dim)
        old = address, address.at(job.heads * job.probes * self._head_dim)
        back = [table.at(probe * job.back_row) for table in (job.back_cos, job.back_sin)]
        keys, values = (self._changes(*pair) for pair in zip(new, old, strict=True))
        added = [*self._rotated(keys, back).values(), *values.values()]
        sums = [value + change for value, change in zip(sums, added, strict=True)]
        *sums, squares = loop.close(*sums, self._squared(values, squares))
        share = (1.0 / probes.to("float")).splat(self._lanes)
        means = [value * share for value in sums]
        return dict(zip(starts, means, strict=False)), dict(zip(starts, means[len(starts) :], strict=True)), squares

    def _changes(self, now: Value, before: Value) -> _Row:
        new, old = self._load(now), self._load(before)
        return {start: new[start] - old[start] for start in new}

    def _squared(self, values: _Row, onto: Value) -> Value:
        for value in values.values():
            onto = onto + value * value
        return onto

    def _rotated(self, numbers: _Row, table: list[Value]) -> _Row:
        rotated = dict(numbers)
        for start in range(0, self._half, self._lanes):
            cos, sin = (side.load(start, self._lanes) for side in table)
            high = start + self._half
            rotated[start], rotated[high] = rotate(numbers[start], numbers[high], cos, sin)
        return rotated

    def _move(self, job: Fields, sides: list[Value], span: tuple[Value, Value], offsets: tuple[_Row, _Row]) -> None:
        k, (first, rows) = self._k, span
        with k.loop(rows, may_be_empty=True) as index:
            row = first + index
            factor = job.factors.load(row)
            with k.when(factor.compare("une", 0.0)):
                share = factor.splat(self._lanes)
                table = [side.at(row * job.table_row) for side in (job.cos, job.sin)]
                keys, values = ({start: share * value for start, value in side.items()} for side in offsets)
                for side, more in zip(sides, (self._rotated(keys, table), values), strict=True):
                    target = side.at(row * job.row)
                    for start, value in more.items():
                        target.store(target.load(start, self._lanes) + value, start)
