"""Attention of one row over the cache, in blocks of keys that every thread can take any of.

A block's result is its largest score, the sum of e to the power of every score less that, and the values weighed so:
blocks are then joined by their largest scores (log-sum-exp). Which thread took a block changes no bit of it.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtool.core.model.stepping.ir_common import operation, share, tiles
from kvtool.core.model.stepping.ir_heads import Heads
from kvtool.core.model.stepping.tape import BLOCK, HEADROOM
from kvtool.core.native.builder import Fields, FunctionBuilder, Value
from kvtool.core.native.isa import Isa
from kvtool.core.native.simd import exp, fma, lanes_for, larger, largest, total

_LOW = -1e30  # below every score
_ROW = BLOCK + 16  # room for the scores of one query head
_TOGETHER = 4  # query heads at a time: their sums stay in registers
_COLUMNS = 2  # vectors of values at a time


def attend(isa: Isa, heads: Heads) -> FunctionBuilder:
    """The operation `attend`: this thread's blocks of keys, each for all query heads that share them."""
    k, have = operation(isa, "attend")
    scores = k.alloca("float", heads.group * _ROW)
    blocks = (have.seen + (BLOCK - 1)) // BLOCK
    first, count = share(k, blocks * have.heads)
    with k.loop(count, may_be_empty=True) as index:
        task = first + index
        _Block(k, heads, have, scores, task // blocks, task % blocks).emit()
    return k


class _Block:
    """One block of keys of one head."""

    def __init__(
        self, k: FunctionBuilder, heads: Heads, have: Fields, scores: Value, head: Value, block: Value
    ) -> None:
        self._k, self._heads, self._scores = k, heads, scores
        self._lanes = lanes_for(k.width, heads.dim)
        start = block * BLOCK
        self._count = k.minimum(have.seen - start, BLOCK)
        at = (head * have.capacity + start) * heads.dim
        self._keys, self._values = (side.of(heads.cache).at(at) for side in (have.key_cache, have.value_cache))
        first = head * heads.group
        self._queries = have.x.at(first * heads.dim)
        self._slot = have.blocks * (HEADROOM + heads.dim)  # floats from one head's to the next's
        self._parts = have.parts.at(first * self._slot).at(block * (HEADROOM + heads.dim))

    def emit(self) -> None:
        """Emit scores, weights and sums of the block."""
        self._hide_the_rest()
        for tile in tiles(self._heads.group, _TOGETHER):
            self._score(tile)
        self._weigh()
        for tile in tiles(self._heads.group, _TOGETHER):
            for columns in tiles(self._heads.dim // self._lanes, _COLUMNS):
                self._sum(tile, columns)

    def _hide_the_rest(self) -> None:
        """Lowest scores from the last whole vector on: those of keys that are there are written over them."""
        width = self._k.width
        behind = self._count // width * width
        low = self._k.zeros(width).like(_LOW)
        for head in range(self._heads.group):
            self._scores.at(head * _ROW).store(low, behind)

    def _score(self, tile: range) -> None:
        """The scores of some query heads: every key is read once for all of them."""
        k, lanes, dim = self._k, self._lanes, self._heads.dim
        with k.loop(self._count) as index:
            key = self._keys.at(index * dim)
            sums = [k.zeros(lanes)] * len(tile)
            for start in range(0, dim, lanes):
                numbers = key.load(start, lanes)
                queries = [self._queries.load(head * dim + start, lanes) for head in tile]
                sums = [fma(query, numbers, before) for query, before in zip(queries, sums, strict=True)]
            for head, value in zip(tile, sums, strict=True):
                self._scores.at(head * _ROW).store(total(value), index)

    def _weigh(self) -> None:
        """Scores to weights; the largest score and the sum of the weights go into the head's slot."""
        k, width = self._k, self._k.width
        steps = (self._count + (width - 1)) // width
        with k.loop(self._heads.group) as head:
            row = self._scores.at(head * _ROW)
            loop = k.loop(steps, k.zeros(width).like(_LOW))
            (most,) = loop.close(larger(row.load(loop.index * width, width), loop.values[0]))
            top = largest(most)
            loop = k.loop(steps, k.zeros(width))
            at = loop.index * width
            score = row.load(at, width)
            weight = exp(score - top.splat(width))
            weight = (score > _LOW).select(weight, 0.0)  # nothing for a key that is not there
            row.store(weight, at)
            (sums,) = loop.close(loop.values[0] + weight)
            slot = self._parts.at(head * self._slot)
            slot.store(top)
            slot.store(total(sums), 1)

    def _sum(self, tile: range, columns: range) -> None:
        """Some columns of the values, weighed for some query heads."""
        k, lanes, dim = self._k, self._lanes, self._heads.dim
        places = [(head, column) for head in tile for column in columns]
        loop = k.loop(self._count, *[k.zeros(lanes)] * len(places))
        value = self._values.at(loop.index * dim)
        numbers = {column: value.load(column * lanes, lanes) for column in columns}
        weights = {head: self._scores.at(head * _ROW).load(loop.index).splat(lanes) for head in tile}
        sums = loop.close(
            *(
                fma(weights[head], numbers[column], before)
                for (head, column), before in zip(places, loop.values, strict=True)
            )
        )
        for (head, column), value in zip(places, sums, strict=True):
            self._parts.at(self._slot * head).store(value, HEADROOM + column * lanes)


def combine(isa: Isa, heads: Heads) -> FunctionBuilder:
    """The operation `combine`: the blocks of this thread's query heads together."""
    k, have = operation(isa, "combine")
    blocks, each = (have.seen + (BLOCK - 1)) // BLOCK, HEADROOM + heads.dim
    first, count = share(k, have.heads)
    with k.loop(count, may_be_empty=True) as index:
        head = first + index
        slots = have.parts.at(head * have.blocks * each)
        out = have.y.at(head * heads.dim)
        _join(k, heads.dim, blocks, lambda block: slots.at(block * each), out)
    return k


def _join(k: FunctionBuilder, dim: int, blocks: Value, slot: Callable[[Value], Value], out: Value) -> None:
    loop = k.loop(blocks, k.constant("float", _LOW))
    (top,) = loop.close(larger(slot(loop.index).load(), loop.values[0]))
    lanes = lanes_for(k.width, dim)
    places = range(0, dim, lanes)
    loop = k.loop(blocks, k.constant("float"), *[k.zeros(lanes)] * len(places))
    here, (whole, *sums) = slot(loop.index), loop.values
    less = here.load() - top
    weight = exp(k.poison("<1 x float>").with_lane(0, less)).lane(0)
    whole = whole + weight * here.load(1)
    wide = weight.splat(lanes)
    sums = [fma(wide, here.load(HEADROOM + start, lanes), before) for start, before in zip(places, sums, strict=True)]
    whole, *sums = loop.close(whole, *sums)
    inverse = (1.0 / whole).splat(lanes)
    for start, value in zip(places, sums, strict=True):
        out.store(value * inverse, start)
