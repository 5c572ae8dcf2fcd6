"""Queries, keys and values of one token: normed by head, rotated, and written where attention reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtool.core.model.quantised.ir_codes import fma
from kvtool.core.model.stepping.ir_common import (
    arithmetic,
    fields,
    function,
    lanes_for,
    share,
    spread,
    store_numbers,
)
from kvtool.core.model.stepping.ir_rows import inverse_rms
from kvtool.core.native.ir import Body, Isa, Loop, vector

Write = Callable[[int, str, int], None]


@dataclass(frozen=True, slots=True)
class Heads:
    """What the code of heads is made for.

    Attributes
    ----------
    dim : numbers of a head; `group`: query heads that share a head of keys.
    normed : whether queries and keys are normed head by head.
    cache : "float32" or "bfloat16": how keys and values are kept.
    """

    dim: int
    group: int
    normed: bool
    cache: str


def queries(isa: Isa, heads: Heads, rotary: int) -> str:
    """The operation `queries_ROTARY`: this thread's query heads, scaled for the softmax.

    rotary : how many numbers of a head, from the first, are rotated, in halves; even.
    """
    body = Body()
    have = fields(body, "queries")
    row = _Row(body, isa, heads, rotary)
    first, count = share(body, have["heads"])
    loop = Loop(body, count, may_be_empty=True)
    at = body(f"mul i64 {body(f'add i64 {first}, {loop.index}')}, {heads.dim}")
    out = body.at("float", have["y"], at)

    def write(lanes: int, value: str, index: int) -> None:
        scaled = arithmetic(body, lanes, "fmul", value, spread(body, lanes, have["scale"]))
        body.store(vector(lanes, "float"), scaled, out, index)

    row.emit(body.at("float", have["x"], at), have, write)
    loop.close()
    return function(f"queries_{rotary}", body)


def keys(isa: Isa, heads: Heads, rotary: int) -> str:
    """The operation `keys_ROTARY`: this thread's heads of keys and values, into the cache's row of the token."""
    body = Body()
    have = fields(body, "keys")
    row = _Row(body, isa, heads, rotary)
    first, count = share(body, have["heads"])
    loop = Loop(body, count, may_be_empty=True)
    head = body(f"add i64 {first}, {loop.index}")
    first_row = body(f"mul i64 {head}, {have['capacity']}")
    own_row = body(f"add i64 {first_row}, {have['row']}")
    place = body(f"mul i64 {own_row}, {heads.dim}")
    at = body(f"mul i64 {head}, {heads.dim}")
    element = "float" if heads.cache == "float32" else "i16"
    key, value = (body.at(element, have[name], place) for name in ("key_cache", "value_cache"))
    row.emit(
        body.at("float", have["x"], at),
        have,
        lambda lanes, number, index: store_numbers(body, lanes, heads.cache, number, key, index),
    )
    source, lanes = body.at("float", have["values"], at), lanes_for(isa.width, heads.dim)
    for start in range(0, heads.dim, lanes):
        store_numbers(body, lanes, heads.cache, body.load(vector(lanes, "float"), source, start), value, start)
    loop.close()
    return function(f"keys_{rotary}", body)


class _Row:
    """One head's numbers on their way: normed, then rotated."""

    def __init__(self, body: Body, isa: Isa, heads: Heads, rotary: int) -> None:
        self._body, self._isa, self._heads, self._rotary = body, isa, heads, rotary
        self._normed = body(f"alloca float, i64 {heads.dim}, align 64") if heads.normed else ""

    def emit(self, source: str, have: dict[str, str], write: Write) -> None:
        """Emit all of it for the head at `source`; `write(lanes, value, index)` is handed the result."""
        if self._heads.normed:
            self._norm(source, have)
            source = self._normed
        half, rest = self._rotary // 2, self._heads.dim - self._rotary
        lanes = lanes_for(self._isa.width, half)
        for start in range(0, self._rotary, lanes):
            write(lanes, self._rotated(lanes, source, start, half, have), start)
        lanes = lanes_for(self._isa.width, rest, self._rotary)
        for start in range(self._rotary, self._heads.dim, lanes):
            write(lanes, self._body.load(vector(lanes, "float"), source, start), start)

    def _norm(self, source: str, have: dict[str, str]) -> None:
        body, dim = self._body, self._heads.dim
        lanes = lanes_for(self._isa.width, dim)
        factor = spread(body, lanes, inverse_rms(body, self._isa.width, source, str(dim), have["epsilon"]))
        kind = vector(lanes, "float")
        for start in range(0, dim, lanes):
            scaled = arithmetic(body, lanes, "fmul", body.load(kind, source, start), factor)
            weight = body.load(kind, have["weight"], start)
            body.store(kind, arithmetic(body, lanes, "fmul", scaled, weight), self._normed, start)

    def _rotated(self, lanes: int, source: str, start: int, half: int, have: dict[str, str]) -> str:
        """x · cos + y · sin, y being the number half a rotation further: negative in the first half."""
        body, kind = self._body, vector(lanes, "float")
        other = body.load(kind, source, start + half if start < half else start - half)
        if start < half:
            other = body(f"fneg {kind} {other}")
        turned = arithmetic(body, lanes, "fmul", other, body.load(kind, have["sin"], start))
        return fma(body, lanes, body.load(kind, source, start), body.load(kind, have["cos"], start), turned)
