"""Queries, keys and values of one token: normed by head, rotated, and written where attention reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtool.core.model.stepping.ir_common import operation, share
from kvtool.core.native.builder import Fields, FunctionBuilder, Value
from kvtool.core.native.isa import Isa
from kvtool.core.native.simd import fma, inverse_rms, lanes_for

Write = Callable[[Value, int], None]


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


def queries(isa: Isa, heads: Heads, rotary: int) -> FunctionBuilder:
    """The operation `queries_ROTARY`: this thread's query heads, scaled for the softmax.

    rotary : how many numbers of a head, from the first, are rotated, in halves; even.
    """
    k, have = operation(isa, "queries", f"queries_{rotary}")
    row = _Row(k, have, heads, rotary)
    first, count = share(k, have.heads)
    with k.loop(count, may_be_empty=True) as index:
        at = (first + index) * heads.dim
        out = have.y.at(at)
        row.emit(have.x.at(at), lambda value, start: out.store(value * have.scale.splat(value.lanes), start))
    return k


def keys(isa: Isa, heads: Heads, rotary: int) -> FunctionBuilder:
    """The operation `keys_ROTARY`: this thread's heads of keys and values, into the cache's row of the token."""
    k, have = operation(isa, "keys", f"keys_{rotary}")
    row = _Row(k, have, heads, rotary)
    first, count = share(k, have.heads)
    with k.loop(count, may_be_empty=True) as index:
        head = first + index
        place = (head * have.capacity + have.row) * heads.dim
        at = head * heads.dim
        key, value = (side.of(heads.cache).at(place) for side in (have.key_cache, have.value_cache))
        row.emit(have.x.at(at), key.store)
        source, lanes = have["values"].at(at), lanes_for(k.width, heads.dim)
        for start in range(0, heads.dim, lanes):
            value.store(source.load(start, lanes), start)
    return k


class _Row:
    """One head's numbers on their way: normed, then rotated."""

    def __init__(self, k: FunctionBuilder, have: Fields, heads: Heads, rotary: int) -> None:
        self._k, self._have, self._heads, self._rotary = k, have, heads, rotary
        self._normed = k.alloca("float", heads.dim) if heads.normed else None

    def emit(self, source: Value, write: Write) -> None:
        """Emit all of it for the head at `source`; `write(value, index)` is handed the result."""
        if self._normed:
            self._norm(source, self._normed)
            source = self._normed
        rest = self._heads.dim - self._rotary
        lanes = lanes_for(self._k.width, self._rotary // 2)
        for start in range(0, self._rotary, lanes):
            write(self._rotated(lanes, source, start), start)
        lanes = lanes_for(self._k.width, rest, self._rotary)
        for start in range(self._rotary, self._heads.dim, lanes):
            write(source.load(start, lanes), start)

    def _norm(self, source: Value, normed: Value) -> None:
        lanes = lanes_for(self._k.width, self._heads.dim)
        factor = inverse_rms(source, self._heads.dim, self._have.epsilon).splat(lanes)
        for start in range(0, self._heads.dim, lanes):
            normed.store(source.load(start, lanes) * factor * self._have.weight.load(start, lanes), start)

    def _rotated(self, lanes: int, source: Value, start: int) -> Value:
        """x · cos + y · sin, y being the number half a rotation further: negative in the first half."""
        half = self._rotary // 2
        other = source.load(start + half if start < half else start - half, lanes)
        turned = (-other if start < half else other) * self._have.sin.load(start, lanes)
        return fma(source.load(start, lanes), self._have.cos.load(start, lanes), turned)
