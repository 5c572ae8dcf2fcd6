"""One offset for all rows of a chunk, added where they stand, in machine code: read once, written once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

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
class Offset:
    """Rows that take one offset, each as much of it as its factor says.

    Attributes
    ----------
    to : `[heads, rows, head_dim]`, changed in place.
    offset : float32 `[heads, head_dim]`; of keys the un-rotated one, which is rotated to each row's position.
    factors : float32 `[rows]`; a row whose factor is 0 is not touched.
    table : of the rows' positions; None: nothing is rotated.
    """

    to: torch.Tensor
    offset: torch.Tensor
    factors: torch.Tensor
    table: Table | None = None

    @property
    def fits(self) -> bool:
        """Whether there is machine code for it: it knows no bounds."""
        heads, rows, head_dim = self.to.shape
        rotated = 0 if self.table is None else self.table.cos.shape[2]
        return (
            self.to.is_cpu
            and str(self.to.dtype).removeprefix("torch.") in STORED
            and self.to.stride(2) == 1
            and self.offset.shape == (heads, head_dim)
            and self.offset.dtype == self.factors.dtype == torch.float32
            and self.offset.stride(1) == 1
            and self.factors.shape == (rows,)
            and self.factors.is_contiguous()
            and rotated <= head_dim
            and rotated % (2 * _WIDTH) == 0 == (head_dim - rotated) % _WIDTH
            and (self.table is None or _fits(self.table, rows))
        )

    def job(self) -> list[int]:
        """What machine code is told of it, in the order of its fields."""
        heads, rows, head_dim = self.to.shape
        table, rotated = [0, 0, 0], 0
        if self.table is not None:
            cos, sin = self.table.cos[0], self.table.sin[0]
            table, rotated = [cos.data_ptr(), sin.data_ptr(), cos.stride(0)], cos.shape[1]
        places = [self.to.data_ptr(), *self.to.stride()[:2], self.offset.data_ptr(), self.offset.stride(0)]
        return [*places, self.factors.data_ptr(), *table, heads, rows, rotated // 2, head_dim - rotated]


def _fits(table: Table, rows: int) -> bool:
    cos, sin = table.cos, table.sin
    return (
        cos.dtype == sin.dtype == torch.float32
        and cos.shape == sin.shape
        and cos.shape[:2] == (1, rows)
        and cos.stride() == sin.stride()
        and cos.stride(2) == 1
        and cos.is_cpu
    )


def add_offsets(offsets: Sequence[Offset], isa: Isa) -> bool:
    """Add all offsets in one call, by the calling thread alone; in float32, rounded once to the format of the rows.

    Returns
    -------
    False: there is no machine code for one of them, or they differ in format; then nothing was added.
    """
    if not offsets:
        return True
    dtype = offsets[0].to.dtype
    if not all(one.to.dtype == dtype and one.fits for one in offsets):
        return False
    jobs = np.array([one.job() for one in offsets], np.int64)
    _function(isa, str(dtype).removeprefix("torch."))(jobs.ctypes.data, len(jobs))
    return True


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
