"""Linear transform of sides to whole numbers and back in machine code, and errors: one call for all layers given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtool.core.codec.base import NAMES
from kvtool.core.codec.profile import SIDES, Layout, Profile
from kvtool.core.native.builder import Fields, FunctionBuilder, Value, module, rounded
from kvtool.core.native.isa import Isa
from kvtool.core.native.jit import JOBS, Job, Jobs, address, kernel, kernel_for, scratch
from kvtool.core.native.simd import MAGIC, PAIRS, Tile, along, any_bits, each, gemm, panels, tile_of, total_onto

F32 = npt.NDArray[np.float32]
I16 = npt.NDArray[np.int16]
I64 = npt.NDArray[np.int64]
Sums = npt.NDArray[np.float64]
_LEAST_RMS = 1e-30  # of an RMS that is divided by
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
_LEAST, _MOST = -32767, 32766
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
        k, tile = FunctionBuilder("run", isa, JOBS), tile_of(isa)
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

    def _gather(self, job: Fields, first: Value, count: Value, odd: dict[int, Value]) -> None:
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
    """

    form: str
    pitch: int  # places of 32 bits from row to row of `a`
    pairs: bool = False  # bfloat16 is multiplied as such, two by two; depths are even

    def __call__(self, isa: Isa) -> str:
        tile = self.tile(isa)
        k = FunctionBuilder("run", isa, JOBS, features=tile.features)
        with BACKWARD.each(k) as job, k.loop(_slabs(job.rows)) as slab:
            first, count = _slab(job.rows, slab)
            self._gather(job, first, count)
            _multiply(tile, job, count)
            self._scatter(tile, job, first, count)
        return module(gemm(isa, tile, self.pitch), k)

    def tile(self, isa: Isa) -> Tile:
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
    return (rows + (MOST_ROWS - 1)) // MOST_ROWS


def _slab(rows: Value, number: Value) -> tuple[Value, Value]:
    first = number * MOST_ROWS
    return first, rows.k.minimum(rows - first, MOST_ROWS)


def _multiply(tile: Tile, job: Fields, count: Value) -> None:
    """`c = a @ weights`; the rows that a tile has too many are never read."""
    steps = job.depth // 2 if tile.pairs else job.depth
    count.k.call_void("gemm", job.a, job.weights, job.c, (count + (tile.rows - 1)) // tile.rows, job.panels, steps)


def _product_row(tile: Tile, job: Fields, row: Value) -> Value:
    return job.c.at(row * (job.panels * tile.columns))


def _number_all(tile: Tile, job: Fields, first: Value, count: Value) -> None:
    with count.k.loop(count) as row:
        out, c = job.out.skip((first + row) * job.stride), _product_row(tile, job, row)

        def work(lanes: int, index: Value) -> None:
            value = c.load(index, lanes)
            for bound, beyond in ((_LEAST, "olt"), (_MOST, "ogt")):
                limit = value.like(float(bound))
                value = value.compare(beyond, limit).select(limit, value)
            out.store(((value + MAGIC).bitcast("i32") - _MAGIC_BITS).to("i16"), index)

        each(count.k, job.depth, work)


@dataclass(frozen=True, eq=False, slots=True)
class Weights:
    """The matrices of a layer's groups, K's first, laid out for a kernel."""

    panels: tuple[F32, ...]  # of each group
    means: F32  # float32 `[2 * groups, size]`
    addresses: I64  # of both, int64 `[2 * groups, 2]`

    @classmethod
    def of(cls, matrices: Sequence[torch.Tensor], means: torch.Tensor, tile: Tile) -> Weights:
        laid = tuple(panels(matrix.float().numpy(), tile) for matrix in matrices)
        middle = np.ascontiguousarray(means.float().numpy())
        size = middle.strides[0]
        places = [(address(part), address(middle) + at * size) for at, part in enumerate(laid)]
        return cls(laid, middle, np.array(places, np.int64))

    @classmethod
    def forward(cls, profile: Profile, layer: int, tile: Tile) -> Weights:
        def make() -> Weights:
            means = profile.means[layer].reshape(-1, profile.layout.size)
            return cls.of(list(profile.forward(layer).flatten(0, 1)), means, tile)

        return profile.memo(("forward weights", layer, tile), make)

    @classmethod
    def backward(cls, profile: Profile, layer: int, level: str, dtype: torch.dtype, tile: Tile) -> Weights:
        def make() -> Weights:
            bases, means = (part.flatten(0, 1) for part in profile.backward(layer, level, dtype))
            widths = profile.coded(level, layer).widths
            return cls.of([basis[:width] for basis, width in zip(bases, widths, strict=True)], means, tile)

        return profile.memo(("backward weights", layer, level, dtype, tile), make)


@dataclass(frozen=True, slots=True)
class _Places:
    """Addresses of sides `[kv_heads, tokens, head_dim]`, with a head's numbers next to each other: `[sides]` each."""

    first: I64  # address of the first number
    head: I64  # bytes from head to head
    token: I64  # bytes from token to token
    heads: I64
    rows: I64
    dim: I64
    sides: Sequence[torch.Tensor]  # what a caller keeps while a kernel reads it

    @classmethod
    def of(cls, sides: Sequence[torch.Tensor]) -> _Places:
        sides = [side if side.stride(2) == 1 or side.shape[2] == 1 else side.contiguous() for side in sides]
        sizes = [side.element_size() for side in sides]
        rows = [
            (side.data_ptr(), side.stride(0) * size, side.stride(1) * size, *side.shape)
            for side, size in zip(sides, sizes, strict=True)
        ]
        first, head, token, heads, tokens, dim = np.array(rows, np.int64).reshape(-1, 6).T
        return cls(first, head, token, heads, tokens, dim, sides)


def numbers_of(isa: Isa, layout: Layout, weights: Sequence[Weights], sides: Sequence[torch.Tensor], out: I16) -> bool:
    """Make numbers of the finest level, int16 `[layers, tokens, stride]`, of layers' sides, K and V in turn.

    Sides are `[kv_heads, tokens, head_dim]`. Returns whether all of their numbers are finite.
    """
    if not out.size:
        return True
    kind, groups, places = Forward(NAMES[sides[0].dtype], pitch_of(layout.size)), layout.groups, _Places.of(sides)
    heads = places.heads // groups
    if layout.size != layout.padded:
        out[:] = 0
    odd = np.zeros(len(sides) * groups, np.int32)
    jobs = Jobs(FORWARD, len(odd))
    jobs.set(
        source=(places.first[:, None] + np.arange(groups) * (heads * places.head)[:, None]).reshape(-1),
        token=np.repeat(places.token, groups),
        head=np.repeat(places.head, groups),
        heads=np.repeat(heads, groups),
        dim=np.repeat(places.dim, groups),
        out=_groups_of(layout, out),
        stride=out.strides[1],
        rows=out.shape[1],
        depth=layout.size,
        odd=address(odd) + np.arange(len(odd)) * odd.itemsize,
        **_laid(weights, layout.size, layout.size, tile_of(isa)),
    )
    jobs.run(kernel_for(isa, kind))
    return not odd.any()


def sides_of(
    isa: Isa,
    layout: Layout,
    weights: Sequence[Weights],
    widths: Sequence[Sequence[int]],
    numbers: I16,
    out: torch.Tensor,
    pairs: bool,
) -> None:
    """Make sides `[layers, 2, tokens, groups, size]` of the coded columns of numbers `[layers, tokens, stride]`."""
    kind = backward_kernel(layout, out.dtype, pairs)
    depth = np.array(widths, np.int64).reshape(-1)
    jobs = Jobs(BACKWARD, len(depth))
    size = out.element_size()
    at = np.arange(len(widths))[:, None, None] * out.stride(0) + np.arange(SIDES)[:, None] * out.stride(1)
    jobs.set(
        numbers=_groups_of(layout, numbers),
        stride=numbers.strides[1],
        depth=depth,
        out=out.data_ptr() + ((at + np.arange(layout.groups) * out.stride(3)) * size).reshape(-1),
        token=out.stride(2) * size,
        size=layout.size,
        rows=numbers.shape[1],
        **_laid(weights, layout.padded, layout.size, kind.tile(isa)),
    )
    for number in np.flatnonzero(depth == 0).tolist():
        layer, rest = divmod(number, SIDES * layout.groups)
        side, group = divmod(rest, layout.groups)
        out[layer, side, :, group] = torch.from_numpy(weights[layer].means[rest]).to(out.dtype)
    jobs.keep(depth > 0)
    jobs.run(kernel_for(isa, kind))


def backward_kernel(layout: Layout, dtype: torch.dtype, pairs: bool) -> Backward:
    return Backward(NAMES[dtype], pitch_of(layout.padded // 2 if pairs else layout.padded), pairs)


def _groups_of(layout: Layout, numbers: I16) -> I64:
    layers = address(numbers) + np.arange(len(numbers))[:, None] * numbers.strides[0]
    groups = np.arange(SIDES * layout.groups) * (layout.padded * numbers.itemsize)
    return np.asarray((layers + groups).reshape(-1), np.int64)


def _laid(weights: Sequence[Weights], depth: int, size: int, tile: Tile) -> dict[str, Any]:
    addresses = np.concatenate([part.addresses for part in weights])
    count = -(-size // tile.columns)
    return {
        "weights": addresses[:, 0],
        "means": addresses[:, 1],
        "panels": count,
        "a": address(scratch("rows", MOST_ROWS * pitch_of(depth), np.float32)),
        "c": address(scratch("product", MOST_ROWS * count * tile.columns, np.float32)),
    }


def errors_of(made: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> list[float]:
    """Each side's RMS of the difference over RMS of the exact numbers.

    Sides are `[kv_heads, tokens, head_dim]`, all of one format. Raises ValueError: shapes or formats do not fit.
    """
    counts = np.array([max(1, side.numel()) for side in made], np.int64)
    wrong, size = np.sqrt(squares_of(made, exact) / counts[:, None]).T
    errors: list[float] = (wrong / np.maximum(size, _LEAST_RMS)).tolist()
    return errors


def squares_of(made: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> Sums:
    """Sum the squares of made less exact, and of exact: float64 `[sides, 2]`; takes and raises as `errors_of`."""
    formats = {side.dtype for side in (*made, *exact)}
    if len(formats) > 1 or [side.shape for side in made] != [side.shape for side in exact]:
        raise ValueError("sides of different shapes or formats cannot be compared")
    sums = np.zeros((len(made), 2))
    jobs = Jobs(ERRORS, len(sums))
    left, right = _Places.of(made), _Places.of(exact)
    for name, sides in (("made", left), ("exact", right)):
        jobs.set(**{name: sides.first, f"{name}_token": sides.token, f"{name}_head": sides.head})
    places = address(sums) + np.arange(len(sums)) * sums.strides[0]
    jobs.set(heads=left.heads, dim=left.dim, rows=left.rows, sums=places)
    jobs.keep(left.heads * left.dim * left.rows > 0)  # a kernel's loops run once at least
    for dtype in formats:
        jobs.run(kernel(Errors(NAMES[dtype])))
    return sums
