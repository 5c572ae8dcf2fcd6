"""Keys rotated on their way from one place to another, in machine code: read once, written once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from kvtool.core.model.flash.ir_moves import narrowed, widened
from kvtool.core.model.flash.tiling import STORED
from kvtool.core.native.compiling import compiled
from kvtool.core.native.ir import Body, Isa, Loop

_WIDTH = 8  # numbers handled together
_NUMBERS = "<8 x float>"
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


def rotate_halves(to: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, isa: Isa) -> None:
    """Write rotated keys to `to`, which may be `keys` itself: number i and its partner half a rotation further on.

    In float32, each product and sum rounded as torch rounds them one by one, and the result once: the same bits as
    x · cos + rotate_half(x) · sin.

    Parameters
    ----------
    to, keys : `[heads, rows, head_dim]`, of the same format.
    cos, sin : float32 `[rows, rotary_dim]`, of which the second half is like the first; the rest of a head stays.
    """
    if not fits(to, keys, cos) or cos.shape != sin.shape or cos.stride() != sin.stride():
        raise ValueError(f"no machine code rotates {tuple(keys.shape)} by {tuple(cos.shape)} into {tuple(to.shape)}")
    heads, rows, head_dim = keys.shape
    job = {
        "from": keys.data_ptr(),
        "from_head": keys.stride(0),
        "from_row": keys.stride(1),
        "to": to.data_ptr(),
        "to_head": to.stride(0),
        "to_row": to.stride(1),
        "cos": cos.data_ptr(),
        "sin": sin.data_ptr(),
        "table_row": cos.stride(0),
        "heads": heads,
        "rows": rows,
        "half": cos.shape[1] // 2,
        "rest": head_dim - cos.shape[1],
    }
    fields = (ctypes.c_int64 * len(_FIELDS))(*(job[name] for name in _FIELDS))
    _function(isa, str(keys.dtype).removeprefix("torch."))(ctypes.addressof(fields))


def fits(to: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor) -> bool:
    """Whether tensors of these shapes can be rotated by `rotate_halves`."""
    return (
        to.shape == keys.shape
        and to.dtype == keys.dtype
        and str(keys.dtype).removeprefix("torch.") in STORED
        and cos.dtype == torch.float32
        and len(cos) == keys.shape[1]
        and cos.shape[1] % (2 * _WIDTH) == 0 == (keys.shape[2] - cos.shape[1]) % _WIDTH
        and cos.shape[1] <= keys.shape[2]
        and to.stride(2) == keys.stride(2) == cos.stride(1) == 1
        and not keys.requires_grad
        and {to.device.type, keys.device.type, cos.device.type} == {"cpu"}
    )


@cache
def _function(isa: Isa, stored: str) -> Callable[[int], None]:
    """The machine code for one format, compiled at its first use (0.02 s)."""
    (address,) = compiled(rotation_module(stored), isa, "rotate")
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


def rotation_module(stored: str) -> str:
    """LLVM IR of `void rotate(job)`."""
    body, element = Body(), STORED[stored]
    job = {name: body.load(kind, body.at("i64", "%job", index)) for index, (name, kind) in enumerate(_FIELDS.items())}
    row = Loop(body, job["rows"], may_be_empty=True)
    table = body(f"mul i64 {row.index}, {job['table_row']}")
    cos, sin = (body.at("float", job[name], table) for name in ("cos", "sin"))
    head = Loop(body, job["heads"], may_be_empty=True)
    source, target = (_row_of(body, job, side, head.index, row.index, element) for side in ("from", "to"))
    _halves(body, stored, source, target, (cos, sin), job["half"])
    behind = body(f"mul i64 {job['half']}, 2")
    rest = Loop(body, body(f"udiv i64 {job['rest']}, {_WIDTH}"), may_be_empty=True)
    place = body(f"add i64 {behind}, {body(f'mul i64 {rest.index}, {_WIDTH}')}")
    body.store(f"<{_WIDTH} x {element}>", body.load(f"<{_WIDTH} x {element}>", source, place), target, place)
    rest.close()
    head.close()
    row.close()
    body.do("ret void")
    return f"define void @rotate(ptr %job) {{\n{body.text()}\n}}\n"


def _row_of(body: Body, job: dict[str, str], side: str, head: str, row: str, element: str) -> str:
    by_head, by_row = job[f"{side}_head"], job[f"{side}_row"]
    return body.at(
        element, job[side], body(f"add i64 {body(f'mul i64 {head}, {by_head}')}, {body(f'mul i64 {row}, {by_row}')}")
    )


def _halves(body: Body, stored: str, source: str, target: str, table: tuple[str, str], half: str) -> None:
    numbers = f"<{_WIDTH} x {STORED[stored]}>"
    each = Loop(body, body(f"udiv i64 {half}, {_WIDTH}"), may_be_empty=True)
    first = body(f"mul i64 {each.index}, {_WIDTH}")
    places = first, body(f"add i64 {first}, {half}")
    cos, sin = (body.load(_NUMBERS, side, first) for side in table)
    low, high = (widened(body, stored, body.load(numbers, source, place)) for place in places)
    straight = [body(f"fmul {_NUMBERS} {value}, {cos}") for value in (low, high)]
    crossed = [body(f"fmul {_NUMBERS} {value}, {sin}") for value in (high, low)]
    turned = (
        body(f"fsub {_NUMBERS} {straight[0]}, {crossed[0]}"),
        body(f"fadd {_NUMBERS} {straight[1]}, {crossed[1]}"),
    )
    for value, place in zip(turned, places, strict=True):
        body.store(numbers, narrowed(body, stored, value), target, place)
    each.close()
