"""One offset for all rows of a chunk, added where they stand, in machine code: read once, written once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from kvtool.core.model.flash.ir_moves import narrowed, widened
from kvtool.core.model.flash.tiling import STORED
from kvtool.core.model.rotary import Table
from kvtool.core.model.rotation import row_of
from kvtool.core.model.stepping.ir_common import spread
from kvtool.core.native.compiling import compiled
from kvtool.core.native.ir import Body, Isa, Loop, fields, vector

_WIDTH = 8  # numbers handled together
_FLOATS = vector(_WIDTH, "float")
_FIELDS = {
    "to": "ptr",
    "to_head": "i64",
    "to_row": "i64",
    "offset": "ptr",
    "offset_head": "i64",
    "factors": "ptr",
    "cos": "ptr",
    "sin": "ptr",
    "table_row": "i64",
    "heads": "i64",
    "rows": "i64",
    "half": "i64",  # of the numbers that are rotated
    "rest": "i64",  # numbers behind them, which are not
}


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of rows, each of which takes an offset of its own, every row as much of it as its factor says.

    Attributes
    ----------
    spans : int64 `[runs, 2]`, the first row of each and the one behind its last.
    factors : float32 `[rows]`, of all rows; one whose factor is 0 is not touched.
    table : of all rows' positions.
    """

    spans: np.ndarray[Any, np.dtype[np.int64]]
    factors: torch.Tensor
    table: Table

    @property
    def fits(self) -> bool:
        """Whether there is machine code for them: it knows no bounds."""
        cos, sin, count = self.table.cos, self.table.sin, len(self.factors)
        return (
            self.factors.dtype == cos.dtype == sin.dtype == torch.float32
            and self.factors.is_contiguous()
            and self.factors.is_cpu
            and cos.is_cpu
            and cos.shape == sin.shape
            and cos.shape[:2] == (1, count)
            and cos.stride() == sin.stride()
            and cos.stride(2) == 1
            and cos.shape[2] % (2 * _WIDTH) == 0
            and self.spans.shape[1:] == (2,)
            and bool((self.spans[:, 0] >= 0).all() and (self.spans[:, 1] <= count).all())
            and bool((self.spans[:, 0] <= self.spans[:, 1]).all())
        )


Side = tuple[torch.Tensor, torch.Tensor, bool]  # rows, offsets, whether these are turned: see `add_offsets`


def add_offsets(sides: Sequence[Side], runs: Runs, isa: Isa) -> bool:
    """Add each run's offset to its rows in one call, by the calling thread alone; in float32, rounded once.

    Parameters
    ----------
    sides : rows `[heads, rows, head_dim]`, changed in place and of one format; offsets, float32 `[heads, runs,
        head_dim]`; and whether these are rotated to each row's position, as those of un-rotated keys are.
    runs : ones that fit.

    Returns
    -------
    False: there is no machine code for these; then nothing was added.
    """
    width = runs.table.cos.shape[2]
    turns = [width if turned else 0 for *_, turned in sides]
    if not all(_fit(rows, offsets, runs, turn) for (rows, offsets, _), turn in zip(sides, turns, strict=True)):
        return False
    dtype = sides[0][0].dtype
    if any(rows.dtype != dtype for rows, *_ in sides):
        return False
    jobs = np.concatenate(
        [_jobs(rows, offsets, runs, turn) for (rows, offsets, _), turn in zip(sides, turns, strict=True)]
    )
    _function(isa, str(dtype).removeprefix("torch."))(jobs.ctypes.data, len(jobs))
    return True


def _fit(rows: torch.Tensor, offsets: torch.Tensor, runs: Runs, rotated: int) -> bool:
    heads, count, head_dim = rows.shape
    return (
        rows.is_cpu
        and str(rows.dtype).removeprefix("torch.") in STORED
        and rows.stride(2) == 1
        and count >= len(runs.factors)
        and offsets.is_cpu
        and offsets.dtype == torch.float32
        and offsets.shape == (heads, len(runs.spans), head_dim)
        and offsets.stride(2) == 1
        and rotated <= head_dim
        and (head_dim - rotated) % _WIDTH == 0
        and len(runs.spans) > 0
    )


def _jobs(rows: torch.Tensor, offsets: torch.Tensor, runs: Runs, rotated: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What machine code is told of each run, in the order of its fields."""
    first, behind = runs.spans[:, 0], runs.spans[:, 1]
    cos, sin = runs.table.cos, runs.table.sin
    columns: dict[str, Any] = {
        "to": rows.data_ptr() + first * rows.stride(1) * rows.itemsize,
        "to_head": rows.stride(0),
        "to_row": rows.stride(1),
        "offset": offsets.data_ptr() + np.arange(len(first)) * offsets.stride(1) * offsets.itemsize,
        "offset_head": offsets.stride(0),
        "factors": runs.factors.data_ptr() + first * runs.factors.itemsize,
        "cos": cos.data_ptr() + first * cos.stride(1) * cos.itemsize,
        "sin": sin.data_ptr() + first * sin.stride(1) * sin.itemsize,
        "table_row": cos.stride(1),
        "heads": rows.shape[0],
        "rows": behind - first,
        "half": rotated // 2,
        "rest": rows.shape[2] - rotated,
    }
    jobs = np.empty((len(first), len(_FIELDS)), np.int64)
    for number, name in enumerate(_FIELDS):
        jobs[:, number] = columns[name]
    return jobs


@cache
def _function(isa: Isa, stored: str) -> Callable[[int, int], None]:
    (address,) = compiled(offsets_module(stored), isa, "add")
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(address)


def offsets_module(stored: str) -> str:
    """LLVM IR of `void add(jobs, number)` over rows that are stored in one format."""
    body = Body()
    each = Loop(body, "%number")
    job = fields(body, each.index, _FIELDS)
    row = Loop(body, job["rows"], may_be_empty=True)
    factor = body.load("float", job["factors"], row.index)
    touched = body(f"fcmp une float {factor}, 0.0")
    factors = spread(body, _WIDTH, factor)
    table = body(f"mul i64 {row.index}, {job['table_row']}")
    cos, sin = (body.at("float", job[name], table) for name in ("cos", "sin"))
    head = Loop(body, body(f"select i1 {touched}, i64 {job['heads']}, i64 0"), may_be_empty=True)
    offset = body.at("float", job["offset"], body(f"mul i64 {head.index}, {job['offset_head']}"))
    target = row_of(body, job, "to", head.index, row.index, STORED[stored])
    _rotated(body, stored, target, (offset, cos, sin), factors, job["half"])
    rest = Loop(body, body(f"udiv i64 {job['rest']}, {_WIDTH}"), may_be_empty=True)
    turned = body(f"mul i64 {job['half']}, 2")
    place = body(f"add i64 {turned}, {body(f'mul i64 {rest.index}, {_WIDTH}')}")
    _add(body, stored, target, place, body(f"fmul {_FLOATS} {factors}, {body.load(_FLOATS, offset, place)}"))
    for loop in (rest, head, row, each):
        loop.close()
    body.do("ret void")
    return f"define void @add(ptr %jobs, i64 %number) {{\n{body.text()}\n}}\n"


def _rotated(body: Body, stored: str, target: str, sources: tuple[str, str, str], factors: str, half: str) -> None:
    """Both halves of a row, with the offset rotated to it."""
    offset, cos, sin = sources
    each = Loop(body, body(f"udiv i64 {half}, {_WIDTH}"), may_be_empty=True)
    first = body(f"mul i64 {each.index}, {_WIDTH}")
    second = body(f"add i64 {first}, {half}")
    low, high = (body(f"fmul {_FLOATS} {factors}, {body.load(_FLOATS, offset, at)}") for at in (first, second))
    along, across = (body.load(_FLOATS, side, first) for side in (cos, sin))
    products = [
        body(f"fmul {_FLOATS} {a}, {b}") for a, b in ((low, along), (high, across), (high, along), (low, across))
    ]
    _add(body, stored, target, first, body(f"fsub {_FLOATS} {products[0]}, {products[1]}"))
    _add(body, stored, target, second, body(f"fadd {_FLOATS} {products[2]}, {products[3]}"))
    each.close()


def _add(body: Body, stored: str, target: str, place: str, more: str) -> None:
    kind = vector(_WIDTH, STORED[stored])
    value = widened(body, stored, body.load(kind, target, place))
    body.store(kind, narrowed(body, stored, body(f"fadd {_FLOATS} {value}, {more}")), target, place)
