"""Machine code that moves runs of rows: what their probes hold is kept, what these change by added to the others."""

from __future__ import annotations

import numpy as np

from kvtool.core.model.flash.ir_moves import narrowed, widened
from kvtool.core.model.flash.tiling import STORED
from kvtool.core.model.stepping.ir_common import function, spread, summed
from kvtool.core.native.ir import Body, Loop, Shares, vector

# A job's fields, 8 bytes each; strides in numbers. A unit is one head of one run.
FIELDS = {
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
AT = {name: place for place, name in enumerate(FIELDS)}


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
        name: body(f"load {kind}, ptr {body.at('i64', '%job', AT[name])}, align 8")
        for name, kind in FIELDS.items()
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
