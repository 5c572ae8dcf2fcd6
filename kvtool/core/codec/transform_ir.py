"""Linear transform of a group of channels and back, and its errors, in LLVM IR.

Rows are gathered as float32, multiplied, and rounded once, at most a hundred at a time, so that they stay in the cache.
A row's result does not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.core.native.builder import Fields, FunctionBuilder, Value, module, rounded
from kvtool.core.native.gemm import PAIRS, Tile, gemm, tile_of
from kvtool.core.native.isa import Isa
from kvtool.core.native.job import JOBS, Job
from kvtool.core.native.simd import MAGIC, along, any_bits, each, total_onto

MOST_ROWS = 96  # at once: a multiple of every tile's rows
FORWARD = Job(
    source="ptr",  # of the form: the group's first number
    token="i64",  # bytes from token to token
    head="i64",  # bytes from head to head
    heads="i64",  # of the group, at least 1
    dim="i64",  # numbers of a head, at least 1, side by side
    means="float*",  # [depth]
    weights="float*",  # see gemm.panels
    panels="i64",
    depth="i64",  # heads * dim
    out="i16*",  # [rows, depth]
    stride="i64",  # bytes from row to row of `out`
    rows="i64",  # at least 1
    a="float*",  # [MOST_ROWS, pitch]
    c="float*",  # [MOST_ROWS, panels * columns of a tile]
    odd="i32*",  # not 0 where a number of the source is not finite
)
BACKWARD = Job(
    numbers="i16*",  # [rows, depth]
    stride="i64",  # bytes from row to row of `numbers`
    depth="i64",  # at least 1
    weights="float*",
    panels="i64",
    means="float*",  # [size]
    out="ptr",  # of the form, [rows, size]
    token="i64",  # bytes from row to row of `out`
    size="i64",
    rows="i64",
    a="float*",
    c="float*",
)
ERRORS = Job(
    made="ptr",  # of the form
    made_token="i64",  # bytes from token to token
    made_head="i64",  # bytes from head to head
    exact="ptr",  # of the form
    exact_token="i64",
    exact_head="i64",
    heads="i64",  # at least 1
    dim="i64",  # at least 1; numbers of a head, side by side in both
    rows="i64",  # at least 1
    sums="double*",  # [2]: squares of made - exact, squares of exact
)
_LEAST, _MOST = -32767, 32766  # encode.MOST_NUMBER
_MAGIC_BITS = 0x4B400000


def pitch_of(depth: int) -> int:
    """Return the numbers from row to row of so many each: not 4,096 bytes, which would share few cache lines."""
    return -(-depth // 16) * 16 + 16


@dataclass(frozen=True, slots=True)
class Forward:
    """The kernel that makes whole numbers of sides of a form: `rint((side - mean) @ weights)`."""

    form: str
    pitch: int

    def __call__(self, isa: Isa) -> str:
        """Return LLVM IR, for an instruction set."""
        k, tile = FunctionBuilder("run", isa, JOBS), self.tile(isa)
        odd = {lanes: k.alloca(f"<{lanes} x i32>").of("i32") for lanes in (isa.width, 1)}
        with FORWARD.each(k) as job:
            for lanes, memory in odd.items():
                memory.store(k.zeros(lanes, "i32"))
            with k.loop(_slabs(job.rows)) as slab:
                first, count = _slab(job.rows, slab)
                self._gather(job, first, count, odd)
                _multiply(tile, job, count)
                _number_all(tile, job, first, count)
            job.odd.store(any_bits(odd[isa.width].load(0, isa.width)) | odd[1].load(0, 1).lane(0))
        return module(gemm(isa, tile, self.pitch), k)

    def tile(self, isa: Isa) -> Tile:
        """Return the tile that its weights are laid out for."""
        return tile_of(isa)

    def _gather(self, job: Fields, first: Value, count: Value, odd: dict[int, Value]) -> None:
        """Gather rows of the source less their means, as float32; `odd` collects what is not finite."""
        k = count.k
        with k.loop(count) as row, k.loop(job.heads) as number:
            head = job.source.of(self.form).skip((first + row) * job.token).skip(number * job.head)
            out, means = (at.at(number * job.dim) for at in (job.a.at(row * self.pitch), job.means))

            def work(lanes: int, index: Value) -> None:
                value = head.load(index, lanes)
                out.store(value - means.load(index, lanes), index)
                nothing = (value - value).bitcast("i32")
                odd[lanes].store(nothing | odd[lanes].load(0, lanes))

            each(k, job.dim, work)


@dataclass(frozen=True, slots=True)
class Backward:
    """The kernel that makes sides of a form of whole numbers: `numbers @ weights + mean`.

    Numbers are first rounded to the form, which holds the usual ones exactly: what multiplies in it gets the same.

    Attributes
    ----------
    pitch : places of 32 bits from row to row of `a`.
    pairs : bfloat16 is multiplied as such, two by two; depths are even.
    """

    form: str
    pitch: int
    pairs: bool = False

    def __call__(self, isa: Isa) -> str:
        """Return LLVM IR, for an instruction set."""
        tile = self.tile(isa)
        k = FunctionBuilder("run", isa, JOBS, features=tile.features)
        with BACKWARD.each(k) as job, k.loop(_slabs(job.rows)) as slab:
            first, count = _slab(job.rows, slab)
            self._gather(job, first, count)
            _multiply(tile, job, count)
            self._scatter(tile, job, first, count)
        return module(gemm(isa, tile, self.pitch), k)

    def tile(self, isa: Isa) -> Tile:
        """Return the tile that its weights are laid out for."""
        return PAIRS if self.pairs else tile_of(isa)

    def _gather(self, job: Fields, first: Value, count: Value) -> None:
        with count.k.loop(count) as row:
            numbers = job.numbers.skip((first + row) * job.stride)
            out = job.a.at(row * self.pitch)

            def work(lanes: int, index: Value) -> None:
                exact = numbers.load(index, lanes).to("float", signed=True)
                if self.pairs:
                    out.of(self.form).store(exact, index)
                else:
                    out.store(rounded(exact, self.form), index)

            each(count.k, job.depth, work)

    def _scatter(self, tile: Tile, job: Fields, first: Value, count: Value) -> None:
        """Add the means, round once."""
        with count.k.loop(count) as row:
            out, c = job.out.of(self.form).skip((first + row) * job.token), _product_row(tile, job, row)
            each(
                count.k,
                job.size,
                lambda lanes, index: out.store(c.load(index, lanes) + job.means.load(index, lanes), index),
            )


@dataclass(frozen=True, slots=True)
class Errors:
    """The kernel that sums squares of errors and of what is exact: a row's sums in float32, those of all in float64."""

    form: str

    def __call__(self, isa: Isa) -> str:
        """Return LLVM IR, for an instruction set."""
        k = FunctionBuilder("run", isa, JOBS)
        with ERRORS.each(k) as job:
            zero = k.constant("double", 0.0)
            rows = k.loop(job.rows, zero, zero)
            sums = [total_onto(rest.lane(0), lanes).to("double") for lanes, rest in self._row(job, rows.index)]
            totals = rows.close(*(total + more for total, more in zip(rows.values, sums, strict=True)))
            for number, total in enumerate(totals):
                job.sums.store(total, number)
        return module(k)

    def _row(self, job: Fields, row: Value) -> list[tuple[Value, Value]]:
        """Compute a row's two sums, each as lanes and the rest."""
        k = row.k
        heads = k.loop(job.heads, *[k.zeros(k.width)] * 2, *[k.zeros(1)] * 2)
        made, exact = (
            job[name].of(self.form).skip(row * job[f"{name}_token"]).skip(heads.index * job[f"{name}_head"])
            for name in ("made", "exact")
        )

        def step(lanes: int, index: Value, sums: Sequence[Value]) -> Sequence[Value]:
            left, right = made.load(index, lanes), exact.load(index, lanes)
            wrong = left - right
            own = slice(0, 2) if lanes > 1 else slice(2, 4)
            added = [total + square for total, square in zip(sums[own], (wrong * wrong, right * right), strict=True)]
            return [*added, *sums[2:]] if lanes > 1 else [*sums[:2], *added]

        sums = heads.close(*along(k, job.dim, k.width, step, heads.values, lambda wide: wide))
        return list(zip(sums[:2], sums[2:], strict=True))


def _slabs(rows: Value) -> Value:
    """Count the slabs of MOST_ROWS rows, the last one included."""
    return (rows + (MOST_ROWS - 1)) // MOST_ROWS


def _slab(rows: Value, number: Value) -> tuple[Value, Value]:
    """Return the first row of a slab, and the number of its rows."""
    first = number * MOST_ROWS
    return first, rows.k.minimum(rows - first, MOST_ROWS)


def _multiply(tile: Tile, job: Fields, count: Value) -> None:
    """Compute `c = a @ weights`; the rows that a tile has too many are never read."""
    steps = job.depth // 2 if tile.pairs else job.depth
    count.k.call_void("gemm", job.a, job.weights, job.c, (count + (tile.rows - 1)) // tile.rows, job.panels, steps)


def _product_row(tile: Tile, job: Fields, row: Value) -> Value:
    """Return a row of the product."""
    return job.c.at(row * (job.panels * tile.columns))


def _number_all(tile: Tile, job: Fields, first: Value, count: Value) -> None:
    """Round the product's rows to the nearest whole numbers, ties to even, within `_LEAST` and `_MOST`."""
    with count.k.loop(count) as row:
        out, c = job.out.skip((first + row) * job.stride), _product_row(tile, job, row)

        def work(lanes: int, index: Value) -> None:
            value = c.load(index, lanes)
            for bound, beyond in ((_LEAST, "olt"), (_MOST, "ogt")):
                limit = value.like(float(bound))
                value = value.compare(beyond, limit).select(limit, value)
            out.store(((value + MAGIC).bitcast("i32") - _MAGIC_BITS).to("i16"), index)

        each(count.k, job.depth, work)
