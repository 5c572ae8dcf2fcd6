"""Machine code that moves runs of rows: what their probes hold is kept, what these change by added to the others."""

from __future__ import annotations

from kvtool.core.native.builder import Fields, FunctionBuilder, Value, WorkQueue, module
from kvtool.core.native.formats import SIZES
from kvtool.core.native.isa import Isa
from kvtool.core.native.job import Job
from kvtool.core.native.simd import rotate, total

# Strides in numbers. A unit is one head of one run.
JOB = Job(
    next="i64",  # the first unit that nobody has taken yet
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
    """LLVM IR of `void keep(job)` and `void add(job)`, the latter for any number of threads with the same job.

    Parameters
    ----------
    stored : the format of the rows.
    half : of the numbers that are rotated; those behind them are not.
    """
    return module(_keep(isa, stored, head_dim), _Add(isa, stored, lanes, head_dim, half).function())


def _keep(isa: Isa, stored: str, head_dim: int) -> FunctionBuilder:
    k = FunctionBuilder("keep", isa, "ptr job")
    job = JOB.load(k, k.args.job)
    behind = job.probes * head_dim * job.heads
    size = k.constant("i64", head_dim * SIZES[stored])
    with k.loop(job.heads) as head:
        sources = [side.of(stored).at(head * job.head) for side in (job.keys, job.values)]
        first = head * job.probes
        with k.loop(job.probes) as probe:
            row = job.places.load(probe) * job.row
            own = job.kept.of(stored).at((first + probe) * head_dim)
            for source, target in zip(sources, (own, own.at(behind)), strict=True):
                k.do("llvm.memcpy.p0.p0.i64", target, source.at(row), size, k.constant("i1"))
    return k


class _Add:
    """Writes `add`: one head of one run after the other."""

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
            own = job.sums.at(unit * 2)
            own.store(total(squares))
            own.store(total(self._squared(values, k.zeros(self._lanes))), 1)
            self._move(job, sides, (first, rows), (keys, values))
        return k

    def _load(self, row: Value) -> _Row:
        return {start: row.load(start, self._lanes) for start in range(0, self._head_dim, self._lanes)}

    def _means(
        self, job: Fields, sides: list[Value], head: Value, first: Value, probes: Value
    ) -> tuple[_Row, _Row, Value]:
        """The mean change of keys, positions taken off, and of values; the sum of the latter's squares."""
        k, starts = self._k, range(0, self._head_dim, self._lanes)
        loop = k.loop(probes, *[k.zeros(self._lanes)] * (2 * len(starts) + 1))
        *sums, squares = loop.values
        probe = first + loop.index
        row = job.places.load(probe)
        new = [side.at(row * job.row) for side in sides]
        kept = job.kept.of(self._stored).at((head * job.probes + probe) * self._head_dim)
        old = kept, kept.at(job.heads * job.probes * self._head_dim)
        back = [table.at(probe * job.back_row) for table in (job.back_cos, job.back_sin)]
        keys, values = (self._changes(*pair) for pair in zip(new, old, strict=True))
        added = [*self._rotated(keys, back).values(), *values.values()]
        sums = [one + more for one, more in zip(sums, added, strict=True)]
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
        """A row's numbers, rotated by halves."""
        rotated = dict(numbers)
        for start in range(0, self._half, self._lanes):
            cos, sin = (side.load(start, self._lanes) for side in table)
            high = start + self._half
            rotated[start], rotated[high] = rotate(numbers[start], numbers[high], cos, sin)
        return rotated

    def _move(self, job: Fields, sides: list[Value], span: tuple[Value, Value], offsets: tuple[_Row, _Row]) -> None:
        """Add its share of the offsets to each row that takes some."""
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
