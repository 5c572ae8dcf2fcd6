"""Keys rotated on their way from one place to another, in machine code: read once, written once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from kvtool.core.model.flash.ir_moves import narrowed, widened
from kvtool.core.model.flash.tiling import STORED
from kvtool.core.native.compiling import compiled
from kvtool.core.native.ir import Body, Isa, Loop, fields, vector

_WIDTH = 8  # numbers handled together
_FLOATS = vector(_WIDTH, "float")
_FORMATS = frozenset(
    (getattr(torch, stored), kept) for stored in STORED for kept in (getattr(torch, stored), torch.float32)
)
_FIELDS = {
    "from": "ptr",
    "from_head": "i64",
    "from_row": "i64",
    "to": "ptr",
    "to_head": "i64",
    "to_row": "i64",
    "cos": "ptr",
    "sin": "ptr",
    "table_row": "i64",
    "heads": "i64",
    "rows": "i64",
    "half": "i64",  # of the numbers that are rotated
    "rest": "i64",  # numbers behind them, which are not
}


@dataclass(frozen=True, slots=True)
class Move:
    """Numbers that go from one place to another, rotated on their way or as they are.

    Attributes
    ----------
    to, numbers : `[heads, rows, head_dim]`; of the same format, or `to` is the wider one.
    cos, sin : float32 `[rows, rotary_dim]`, of which the second half is like the first; the rest of a head stays.
        None: all of it does.
    """

    to: torch.Tensor
    numbers: torch.Tensor
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None

    @property
    def formats(self) -> tuple[torch.dtype, torch.dtype]:
        """From which number format to which."""
        return self.numbers.dtype, self.to.dtype

    @property
    def fits(self) -> bool:
        """Whether there is machine code for it: it knows no bounds."""
        to, numbers = self.to, self.numbers
        return (
            to.shape == numbers.shape
            and to.dim() == 3
            and self.formats in _FORMATS
            and to.stride(2) == numbers.stride(2) == 1
            and to.is_cpu
            and numbers.is_cpu
            and not numbers.requires_grad
            and (self._turns_fit() if self.cos is not None else numbers.shape[2] % _WIDTH == 0)
        )

    def _turns_fit(self) -> bool:
        cos, sin, (_, rows, head_dim) = self.cos, self.sin, self.numbers.shape
        assert cos is not None
        return (
            sin is not None
            and cos.dtype == sin.dtype == torch.float32
            and cos.shape == sin.shape
            and cos.stride() == sin.stride()
            and cos.stride(1) == 1
            and len(cos) == rows
            and cos.shape[1] % (2 * _WIDTH) == 0 == (head_dim - cos.shape[1]) % _WIDTH
            and cos.shape[1] <= head_dim
            and cos.is_cpu
            and sin.is_cpu
        )

    def job(self) -> list[int]:
        """What machine code is told of it, in the order of its fields."""
        to, numbers = self.to, self.numbers
        heads, rows, head_dim = numbers.shape
        table, turned = [0, 0, 0], 0
        if self.cos is not None and self.sin is not None:
            table, turned = [self.cos.data_ptr(), self.sin.data_ptr(), self.cos.stride(0)], self.cos.shape[1]
        places = [numbers.data_ptr(), *numbers.stride()[:2], to.data_ptr(), *to.stride()[:2]]
        return [*places, *table, heads, rows, turned // 2, head_dim - turned]


def rotate_halves(to: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, isa: Isa) -> None:
    """Write rotated keys to `to`, which may be `keys` itself: number i and its partner half a rotation further on.

    In float32, each product and sum rounded as torch rounds them one by one, and the result once: the same bits as
    x · cos + rotate_half(x) · sin.

    Parameters
    ----------
    to, keys, cos, sin : as a `Move` has them.

    Raises
    ------
    ValueError : there is no machine code for these.
    """
    if not move_all([Move(to, keys, cos, sin)], isa):
        raise ValueError(f"no machine code rotates {tuple(keys.shape)} by {tuple(cos.shape)} into {tuple(to.shape)}")


def move_all(moves: Sequence[Move], isa: Isa) -> bool:
    """Make all moves in one call, by the calling thread alone and without Python's lock.

    Returns
    -------
    False: there is no machine code for one of them, or they differ in formats; then nothing was moved.
    """
    if not moves:
        return True
    formats = moves[0].formats
    if not all(move.formats == formats and move.fits for move in moves):
        return False
    stored, kept = (str(dtype).removeprefix("torch.") for dtype in formats)
    jobs = np.array([move.job() for move in moves], np.int64)
    _function(isa, stored, kept)(jobs.ctypes.data, len(jobs))
    return True


@cache
def _function(isa: Isa, stored: str, kept: str) -> Callable[[int, int], None]:
    """The machine code from one format to one, compiled at its first use (0.02 s)."""
    (address,) = compiled(rotation_module(stored, kept), isa, "rotate")
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(address)


def rotation_module(stored: str, kept: str) -> str:
    """LLVM IR of `void rotate(jobs, number)`: numbers stored in one format go to places of the same or a wider one."""
    body = Body()
    each = Loop(body, "%number")
    job = fields(body, each.index, _FIELDS)
    row = Loop(body, job["rows"], may_be_empty=True)
    table = body(f"mul i64 {row.index}, {job['table_row']}")
    cos, sin = (body.at("float", job[name], table) for name in ("cos", "sin"))
    head = Loop(body, job["heads"], may_be_empty=True)
    source = row_of(body, job, "from", head.index, row.index, STORED[stored])
    target = row_of(body, job, "to", head.index, row.index, STORED[kept])
    _halves(body, (stored, kept), (source, target), (cos, sin), job["half"])
    behind = body(f"mul i64 {job['half']}, 2")
    rest = Loop(body, body(f"udiv i64 {job['rest']}, {_WIDTH}"), may_be_empty=True)
    place = body(f"add i64 {behind}, {body(f'mul i64 {rest.index}, {_WIDTH}')}")
    value = body.load(_numbers(stored), source, place)
    if stored != kept:
        value = widened(body, stored, value)
    body.store(_numbers(kept), value, target, place)
    rest.close()
    head.close()
    row.close()
    each.close()
    body.do("ret void")
    return f"define void @rotate(ptr %jobs, i64 %number) {{\n{body.text()}\n}}\n"


def _numbers(stored: str) -> str:
    return vector(_WIDTH, STORED[stored])


def row_of(body: Body, job: dict[str, str], side: str, head: str, row: str, element: str) -> str:
    """The address of a head's row on one side of a job, whose fields tell how far apart heads and rows are."""
    by_head, by_row = job[f"{side}_head"], job[f"{side}_row"]
    return body.at(
        element, job[side], body(f"add i64 {body(f'mul i64 {head}, {by_head}')}, {body(f'mul i64 {row}, {by_row}')}")
    )


def _halves(body: Body, formats: tuple[str, str], rows: tuple[str, str], table: tuple[str, str], half: str) -> None:
    """Both halves of a row, from one place to another."""
    (stored, kept), (source, target) = formats, rows
    each = Loop(body, body(f"udiv i64 {half}, {_WIDTH}"), may_be_empty=True)
    first = body(f"mul i64 {each.index}, {_WIDTH}")
    places = first, body(f"add i64 {first}, {half}")
    cos, sin = (body.load(_FLOATS, side, first) for side in table)
    low, high = (widened(body, stored, body.load(_numbers(stored), source, place)) for place in places)
    straight = [body(f"fmul {_FLOATS} {value}, {cos}") for value in (low, high)]
    crossed = [body(f"fmul {_FLOATS} {value}, {sin}") for value in (high, low)]
    turned = (
        body(f"fsub {_FLOATS} {straight[0]}, {crossed[0]}"),
        body(f"fadd {_FLOATS} {straight[1]}, {crossed[1]}"),
    )
    for value, place in zip(turned, places, strict=True):
        body.store(_numbers(kept), narrowed(body, kept, value), target, place)
    each.close()
