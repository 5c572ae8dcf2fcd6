"""Runs of rows moved as the probes among them have moved, in machine code: each row is read once and written once.

What probes hold is kept before they are written anew. Afterwards one call a layer takes their positions off what they
have changed by, and adds the mean of it to the other rows of their run, rotated to these rows' positions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch

from kvtool.core.model.flash.ir_moves import narrowed, widened
from kvtool.core.model.flash.tiling import STORED
from kvtool.core.model.rotary import Table
from kvtool.core.model.stepping.ir_common import function, lanes_for, spread, summed
from kvtool.core.native.compiling import compiled
from kvtool.core.native.crew import current
from kvtool.core.native.ir import Body, Isa, Loop, Shares, vector

Whole: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Sides: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # keys and values of a layer

_LEAST = 8  # numbers handled together
_ALONE = 2**16  # numbers; fewer are moved before a helper is there
# A job's fields, 8 bytes each; strides in numbers. A unit is one head of one run.
_FIELDS = {
    "next": "i64",  # the first unit that nobody has taken yet
    "units": "i64",
    "heads": "i64",
    "runs": "ptr",  # first row, rows, first probe, probes: int64 each
    "places": "ptr",  # the probes' rows, int64
    "probes": "i64",
    "keys": "ptr",
    "values": "ptr",
    "head": "i64",
    "row": "i64",
    "kept": "ptr",  # [2, heads, probes, head_dim]
    "factors": "ptr",
    "cos": "ptr",
    "sin": "ptr",
    "table_row": "i64",
    "back_cos": "ptr",
    "back_sin": "ptr",
    "back_row": "i64",
    "sums": "ptr",  # [units, 2] float32
}
_AT = {name: place for place, name in enumerate(_FIELDS)}


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of rows that do not overlap, each with probes among its rows.

    Attributes
    ----------
    spans : int64 `[runs, 2]`, the first row of each and the one behind its last.
    counts : int64 `[runs]`, how many probes each has, at least 1.
    places : int64 `[probes]`, their rows, run by run.
    factors : float32 `[rows]`, of all rows: how much of its run's offset each takes; one whose factor is 0 is not
        touched.
    table : of the positions of all rows up to the last one of a run.
    back : takes their positions off the probes.
    """

    spans: Whole
    counts: Whole
    places: torch.Tensor
    factors: torch.Tensor
    table: Table
    back: Table

    @property
    def fits(self) -> bool:
        """Whether there is machine code for them: it knows no bounds."""
        rows, probes = len(self.factors), len(self.places)
        return (
            self.places.dtype == torch.int64
            and self.places.is_cpu
            and self.places.is_contiguous()
            and _are_factors(self.factors, rows)
            and _are_spans(self.spans, rows)
            and _is_table(self.table, int(self.spans.max()))
            and _is_table(self.back, probes)
            and self.table.cos.shape[2] == self.back.cos.shape[2]
            and self.counts.shape == (len(self.spans),)
            and int(self.counts.min()) > 0
            and int(self.counts.sum()) == probes
            and 0 <= int(self.places.min()) <= int(self.places.max()) < rows
        )


def _are_factors(factors: torch.Tensor, rows: int) -> bool:
    return factors.dtype == torch.float32 and factors.shape == (rows,) and factors.is_contiguous() and factors.is_cpu


def _is_table(table: Table, least: int) -> bool:
    cos, sin = table.cos, table.sin
    return (
        cos.dtype == sin.dtype == torch.float32
        and cos.is_cpu
        and sin.is_cpu
        and cos.shape == sin.shape
        and len(cos) == 1
        and cos.shape[1] >= least
        and cos.stride() == sin.stride()
        and cos.stride(2) == 1
        and cos.shape[2] % 2 == 0
    )


def _are_spans(spans: Whole, rows: int) -> bool:
    if spans.shape[1:] != (2,) or not len(spans):
        return False
    first, behind = spans[:, 0], spans[:, 1]
    return bool((first >= 0).all() and (first <= behind).all() and (behind <= rows).all())


@dataclass(frozen=True, slots=True)
class _Code:
    """Of one shape: `keep` as the thread calls it that has Python's lock, `add` by its address and without the lock."""

    keep: Callable[[int], None]
    add: Callable[[int], None]
    address: int


class Mover:
    """Moves the runs of one pass, layer after layer: `keep`, then `add` once the layer's rows are written.

    Parameters
    ----------
    runs : ones that fit.
    layers : keys and values of each layer, `[heads, rows, head_dim]`, all laid out alike; changed in place.

    Raises
    ------
    ValueError : there is no machine code for these.
    """

    def __init__(self, runs: Runs, layers: Sequence[Sides], isa: Isa) -> None:
        like, rotated = layers[0][0], runs.table.cos.shape[2]
        alike = len({_layout(side) for layer in layers for side in layer}) == 1
        if not (runs.fits and alike and _is_known(like, runs) and _lanes(isa, like.shape[2], rotated)):
            raise ValueError(f"no machine code moves rows of {like.dtype} {tuple(like.shape)}")
        self._runs, self._layers = runs, layers
        heads, _, head_dim = like.shape
        self._kept = torch.empty((2, heads, len(runs.places), head_dim), dtype=like.dtype)
        self._sums = torch.empty((len(layers), len(runs.spans), heads, 2), dtype=torch.float32)
        self._told = _told(runs)
        self._job = np.zeros(len(_FIELDS), np.int64)
        for name, value in self._known(like).items():
            self._job[_AT[name]] = value
        self._address = self._job.ctypes.data
        self._plain, self._turned = (
            _compiled(isa, str(like.dtype).removeprefix("torch."), head_dim, half) for half in (0, rotated // 2)
        )
        self._helped = like[:, : int(self._told[:, 1].sum())].numel() > _ALONE

    def _known(self, like: torch.Tensor) -> dict[str, int]:
        """What is the same in all layers."""
        table, back = self._runs.table, self._runs.back
        return {
            "units": len(self._told) * len(like),
            "heads": len(like),
            "runs": self._told.ctypes.data,
            "places": self._runs.places.data_ptr(),
            "probes": len(self._runs.places),
            "head": like.stride(0),
            "row": like.stride(1),
            "kept": self._kept.data_ptr(),
            "cos": table.cos.data_ptr(),
            "sin": table.sin.data_ptr(),
            "table_row": table.cos.stride(1),
            "back_cos": back.cos.data_ptr(),
            "back_sin": back.sin.data_ptr(),
            "back_row": back.cos.stride(1),
        }

    def keep(self, layer: int) -> None:
        """Remember what a layer holds in the places of the probes."""
        self._aim(layer)
        self._plain.keep(self._address)

    def add(self, layer: int, turned: bool, factors: torch.Tensor | None = None) -> torch.Tensor:
        """Add to each run's rows what its probes have changed by since, on the mean; in float32, rounded once.

        Parameters
        ----------
        turned : whether this layer's keys are rotated to their positions.
        factors : in place of those of the runs.

        Returns
        -------
        Squares of values, float32 `[runs, heads, 2]`: the sum over the probes' changes, and over the mean of these.
        """
        factors = self._runs.factors if factors is None else factors
        if not _are_factors(factors, len(self._runs.factors)):
            raise ValueError(f"{factors.dtype} {tuple(factors.shape)} are no factors of these rows")
        sums = self._sums[layer]
        self._aim(layer)
        self._job[_AT["next"]] = 0
        self._job[_AT["factors"]] = factors.data_ptr()
        self._job[_AT["sums"]] = sums.data_ptr()
        code, crew = self._turned if turned else self._plain, current()
        # OpenMP's team would be waited for: beside other programs that takes longer than the rows do.
        if crew is not None and self._helped:
            crew.run(code.address, self._address, torch.get_num_threads())
        else:
            code.add(self._address)
        return sums

    def _aim(self, layer: int) -> None:
        keys, values = self._layers[layer]
        self._job[_AT["keys"]] = keys.data_ptr()
        self._job[_AT["values"]] = values.data_ptr()


def _told(runs: Runs) -> Whole:
    """What machine code is told of each run: first row, rows, first probe, probes."""
    first, behind = runs.spans[:, 0], runs.spans[:, 1]
    told: Whole = np.stack([first, behind - first, runs.counts.cumsum() - runs.counts, runs.counts], 1)
    return told


def _layout(rows: torch.Tensor) -> tuple[object, ...]:
    return rows.dtype, rows.is_cpu, rows.shape, rows.stride()


def _is_known(rows: torch.Tensor, runs: Runs) -> bool:
    return (
        rows.is_cpu
        and str(rows.dtype).removeprefix("torch.") in STORED
        and rows.stride(2) == 1
        and rows.shape[1] >= len(runs.factors)
        and runs.table.cos.shape[2] <= rows.shape[2]
    )


def _lanes(isa: Isa, head_dim: int, rotated: int) -> int:
    """How many numbers are handled together; 0: the shape is not one for registers."""
    lanes = lanes_for(isa.width, rotated // 2, head_dim - rotated)
    return lanes if lanes >= _LEAST else 0


@cache
def _compiled(isa: Isa, stored: str, head_dim: int, half: int) -> _Code:
    """The machine code of one shape, compiled at its first use."""
    text = offsets_module(stored, _lanes(isa, head_dim, 2 * half), head_dim, half)
    keep, add = compiled(text, isa, "keep", "add")
    # What is copied is little: who gave up Python's lock for it might wait for it longer than that takes.
    return _Code(ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(keep), ctypes.CFUNCTYPE(None, ctypes.c_void_p)(add), add)


def offsets_module(stored: str, lanes: int, head_dim: int, half: int) -> str:
    """LLVM IR of `void keep(job)` and `void add(job)`, the latter for any number of threads with the same job.

    Parameters
    ----------
    stored : the format of the rows.
    half : of the numbers that are rotated; those behind them are not.
    """
    floats = vector(lanes, "float")
    declarations = (
        "declare i64 @llvm.smin.i64(i64, i64)\n"
        "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)\n"
        f"declare float @llvm.vector.reduce.fadd.v{lanes}f32(float, {floats})\n"
    )
    return declarations + _keep(stored, head_dim) + _Add(stored, lanes, head_dim, half).text()


def _job(body: Body) -> dict[str, str]:
    return {
        name: body(f"load {kind}, ptr {body.at('i64', '%job', _AT[name])}, align 8")
        for name, kind in _FIELDS.items()
        if name != "next"
    }


def _keep(stored: str, head_dim: int) -> str:
    body, element = Body(), STORED[stored]
    job = _job(body)
    probes = job["probes"]
    behind = body(f"mul i64 {body(f'mul i64 {probes}, {head_dim}')}, {job['heads']}")
    head = Loop(body, job["heads"])
    sources = [body.at(element, job[side], body(f"mul i64 {head.index}, {job['head']}")) for side in ("keys", "values")]
    first = body(f"mul i64 {head.index}, {probes}")
    probe = Loop(body, probes)
    row = body(f"mul i64 {body.load('i64', job['places'], probe.index)}, {job['row']}")
    own = body.at(element, job["kept"], body(f"mul i64 {body(f'add i64 {first}, {probe.index}')}, {head_dim}"))
    size = head_dim * np.dtype({"i16": "i2", "half": "f2", "float": "f4"}[element]).itemsize
    for source, target in zip(sources, (own, body.at(element, own, behind)), strict=True):
        at = body.at(element, source, row)
        body.do(f"call void @llvm.memcpy.p0.p0.i64(ptr {target}, ptr {at}, i64 {size}, i1 false)")
    probe.close()
    head.close()
    return function("keep", body, "ptr %job")


class _Add:
    """Writes `add`: one head of one run after the other."""

    def __init__(self, stored: str, lanes: int, head_dim: int, half: int) -> None:
        self._body = Body()
        self._stored, self._lanes, self._head_dim, self._half = stored, lanes, head_dim, half
        self._element = STORED[stored]
        self._numbers, self._floats = vector(lanes, self._element), vector(lanes, "float")

    def text(self) -> str:
        body = self._body
        job = _job(body)
        shares = Shares(body, "1", job["units"])
        unit = shares.first
        run, head = body(f"udiv i64 {unit}, {job['heads']}"), body(f"urem i64 {unit}, {job['heads']}")
        place = body.at("i64", job["runs"], body(f"mul i64 {run}, 4"))
        first, rows, probe, probes = (body.load("i64", place, number) for number in range(4))
        start = body(f"mul i64 {head}, {job['head']}")
        sides = [body.at(self._element, job[side], start) for side in ("keys", "values")]
        keys, values, squares = self._means(job, sides, head, probe, probes)
        own = body.at("float", job["sums"], body(f"mul i64 {unit}, 2"))
        body.store("float", summed(body, self._lanes, squares), own)
        body.store("float", self._squares(values), own, 1)
        self._move(job, sides, (first, rows), (keys, values))
        shares.close()
        return function("add", body, "ptr %job")

    def _starts(self) -> range:
        return range(0, self._head_dim, self._lanes)

    def _op(self, operation: str, left: str, right: str) -> str:
        return self._body(f"{operation} {self._floats} {left}, {right}")

    def _load(self, row: str, start: int) -> str:
        value = self._body.load(self._numbers, row, start)
        return widened(self._body, self._stored, value, self._lanes)

    def _row(self, pointer: str, row: str, stride: str | int, element: str) -> str:
        return self._body.at(element, pointer, self._body(f"mul i64 {row}, {stride}"))

    def _means(
        self, job: dict[str, str], sides: list[str], head: str, first: str, probes: str
    ) -> tuple[dict[int, str], dict[int, str], str]:
        """The mean change of keys, positions taken off, and of values, by first column; the latter's squares."""
        body, starts = self._body, self._starts()
        zero = (self._floats, "zeroinitializer")
        loop = Loop(body, probes, [zero] * (2 * len(starts) + 1))
        probe = body(f"add i64 {first}, {loop.index}")
        row = body.load("i64", job["places"], probe)
        new = [self._row(side, row, job["row"], self._element) for side in sides]
        all_probes = job["probes"]
        kept = body(f"add i64 {body(f'mul i64 {head}, {all_probes}')}, {probe}")
        old = [self._row(job["kept"], kept, self._head_dim, self._element)]
        behind = body(f"mul i64 {job['heads']}, {all_probes}")
        old += [self._row(old[0], behind, self._head_dim, self._element)]
        back = [self._row(job[name], probe, job["back_row"], "float") for name in ("back_cos", "back_sin")]
        keys, values = (
            {start: self._op("fsub", self._load(now, start), self._load(before, start)) for start in starts}
            for now, before in zip(new, old, strict=True)
        )
        added = [*self._turned(keys, back).values(), *values.values()]
        sums = [self._op("fadd", *pair) for pair in zip(loop.values, added, strict=False)]
        squares = loop.values[-1]
        for value in values.values():
            squares = self._op("fadd", squares, self._op("fmul", value, value))
        *sums, squares = loop.close([*sums, squares])
        count = body(f"uitofp i64 {probes} to float")
        share = spread(body, self._lanes, body(f"fdiv float 1.0, {count}"))
        means = [self._op("fmul", value, share) for value in sums]
        return dict(zip(starts, means, strict=False)), dict(zip(starts, means[len(starts) :], strict=True)), squares

    def _squares(self, values: dict[int, str]) -> str:
        total = "zeroinitializer"
        for value in values.values():
            total = self._op("fadd", total, self._op("fmul", value, value))
        return summed(self._body, self._lanes, total)

    def _turned(self, numbers: dict[int, str], table: list[str]) -> dict[int, str]:
        """A row's numbers, by first column, rotated by halves."""
        body, turned = self._body, dict(numbers)
        for start in range(0, self._half, self._lanes):
            cos, sin = (body.load(self._floats, side, start) for side in table)
            low, high = numbers[start], numbers[start + self._half]
            turned[start] = self._op("fsub", self._op("fmul", low, cos), self._op("fmul", high, sin))
            turned[start + self._half] = self._op("fadd", self._op("fmul", high, cos), self._op("fmul", low, sin))
        return turned

    def _move(
        self,
        job: dict[str, str],
        sides: list[str],
        span: tuple[str, str],
        offsets: tuple[dict[int, str], dict[int, str]],
    ) -> None:
        """Add its share of the offsets to each row that takes some."""
        body = self._body
        loop = Loop(body, span[1], may_be_empty=True)
        row = body(f"add i64 {span[0]}, {loop.index}")
        factor = body.load("float", job["factors"], row)
        touched = body(f"fcmp une float {factor}, 0.0")
        once = Loop(body, body(f"select i1 {touched}, i64 1, i64 0"), may_be_empty=True)
        share = spread(body, self._lanes, factor)
        table = [self._row(job[name], row, job["table_row"], "float") for name in ("cos", "sin")]
        keys, values = ({at: self._op("fmul", share, value) for at, value in side.items()} for side in offsets)
        for side, more in zip(sides, (self._turned(keys, table), values), strict=True):
            target = self._row(side, row, job["row"], self._element)
            for start, value in more.items():
                new = self._op("fadd", self._load(target, start), value)
                body.store(self._numbers, narrowed(body, self._stored, new, self._lanes), target, start)
        once.close()
        loop.close()
