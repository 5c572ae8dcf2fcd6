"""Attention of one row over the cache, in blocks of keys that every thread can take any of.

A block's result is its largest score, the sum of e to the power of every score less that, and the values weighed so:
blocks are then joined by their largest scores (log-sum-exp). Which thread took a block changes no bit of it.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtool.core.model.quantised.ir_codes import fma
from kvtool.core.model.stepping.ir_common import (
    arithmetic,
    constant,
    exp,
    fields,
    function,
    lanes_for,
    larger,
    largest,
    load_numbers,
    share,
    splatted,
    spread,
    summed,
    tiles,
)
from kvtool.core.model.stepping.ir_heads import Heads
from kvtool.core.model.stepping.tape import BLOCK, HEADROOM
from kvtool.core.native.ir import Body, Isa, Loop, vector

_LOW = -1e30  # below every score
_ROW = BLOCK + 16  # room for the scores of one query head
_TOGETHER = 4  # query heads at a time: their sums stay in registers
_COLUMNS = 2  # vectors of values at a time


def attend(isa: Isa, heads: Heads) -> str:
    """The operation `attend`: this thread's blocks of keys, each for all query heads that share them."""
    body = Body()
    have = fields(body, "attend")
    scores = body(f"alloca float, i64 {heads.group * _ROW}, align 64")
    length = have["seen"]
    blocks = body(f"udiv i64 {body(f'add i64 {length}, {BLOCK - 1}')}, {BLOCK}")
    first, count = share(body, body(f"mul i64 {blocks}, {have['heads']}"))
    loop = Loop(body, count, may_be_empty=True)
    task = body(f"add i64 {first}, {loop.index}")
    head, block = body(f"udiv i64 {task}, {blocks}"), body(f"urem i64 {task}, {blocks}")
    _Block(body, isa, heads, have, scores, (head, block, length)).emit()
    loop.close()
    return function("attend", body)


class _Block:
    """One block of keys of one head."""

    def __init__(
        self, body: Body, isa: Isa, heads: Heads, have: dict[str, str], scores: str, place: tuple[str, str, str]
    ) -> None:
        (head, block, length), capacity = place, have["capacity"]
        self._body, self._isa, self._heads, self._scores = body, isa, heads, scores
        self._lanes = lanes_for(isa.width, heads.dim)
        start = body(f"mul i64 {block}, {BLOCK}")
        left = body(f"sub i64 {length}, {start}")
        self._count = body(f"call i64 @llvm.umin.i64(i64 {left}, i64 {BLOCK})")
        row = body(f"add i64 {body(f'mul i64 {head}, {capacity}')}, {start}")
        at = body(f"mul i64 {row}, {heads.dim}")
        self._element = "float" if heads.cache == "float32" else "i16"
        self._keys, self._values = (body.at(self._element, have[name], at) for name in ("key_cache", "value_cache"))
        first = body(f"mul i64 {head}, {heads.group}")
        self._queries = body.at("float", have["x"], body(f"mul i64 {first}, {heads.dim}"))
        self._slot = body(f"mul i64 {have['blocks']}, {HEADROOM + heads.dim}")  # floats from one head's to the next's
        slots = body.at("float", have["parts"], body(f"mul i64 {first}, {self._slot}"))
        self._parts = body.at("float", slots, body(f"mul i64 {block}, {HEADROOM + heads.dim}"))

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
        body, width = self._body, self._isa.width
        behind = body(f"mul i64 {body(f'udiv i64 {self._count}, {width}')}, {width}")
        for head in range(self._heads.group):
            row = body.at("float", self._scores, head * _ROW)
            body.store(vector(width, "float"), splatted(_LOW), row, behind)

    def _score(self, tile: range) -> None:
        """The scores of some query heads: every key is read once for all of them."""
        body, lanes, dim = self._body, self._lanes, self._heads.dim
        loop = Loop(body, self._count)
        key = body.at(self._element, self._keys, body(f"mul i64 {loop.index}, {dim}"))
        sums = ["zeroinitializer"] * len(tile)
        for start in range(0, dim, lanes):
            numbers = load_numbers(body, lanes, self._heads.cache, key, start)
            for place, head in enumerate(tile):
                query = body.load(vector(lanes, "float"), self._queries, head * dim + start)
                sums[place] = fma(body, lanes, query, numbers, sums[place])
        for head, value in zip(tile, sums, strict=True):
            row = body.at("float", self._scores, head * _ROW)
            body.store("float", summed(body, lanes, value), row, loop.index)
        loop.close()

    def _weigh(self) -> None:
        """Scores to weights; the largest score and the sum of the weights go into the head's slot."""
        body, width = self._body, self._isa.width
        kind = vector(width, "float")
        steps = body(f"udiv i64 {body(f'add i64 {self._count}, {width - 1}')}, {width}")
        heads = Loop(body, self._heads.group)
        row = body.at("float", self._scores, body(f"mul i64 {heads.index}, {_ROW}"))
        loop = Loop(body, steps, [(kind, splatted(_LOW))])
        score = body.load(kind, row, body(f"mul i64 {loop.index}, {width}"))
        (most,) = loop.close([larger(body, width, score, loop.values[0])])
        top = largest(body, width, most)
        loop = Loop(body, steps, [(kind, "zeroinitializer")])
        at = body(f"mul i64 {loop.index}, {width}")
        score = body.load(kind, row, at)
        weight = self._weight(score, spread(body, width, top))
        body.store(kind, weight, row, at)
        (total,) = loop.close([arithmetic(body, width, "fadd", loop.values[0], weight)])
        slot = body.at("float", self._parts, body(f"mul i64 {heads.index}, {self._slot}"))
        body.store("float", top, slot, 0)
        body.store("float", summed(body, width, total), slot, 1)
        heads.close()

    def _weight(self, score: str, top: str) -> str:
        """e to the power of a score less the largest; nothing for a key that is not there."""
        body, width = self._body, self._isa.width
        kind = vector(width, "float")
        weight = exp(body, width, arithmetic(body, width, "fsub", score, top))
        there = body(f"fcmp ogt {kind} {score}, {splatted(_LOW)}")
        return body(f"select <{width} x i1> {there}, {kind} {weight}, {kind} zeroinitializer")

    def _sum(self, tile: range, columns: range) -> None:
        """Some columns of the values, weighed for some query heads."""
        body, lanes, dim = self._body, self._lanes, self._heads.dim
        kind = vector(lanes, "float")
        places = [(head, column) for head in tile for column in columns]
        loop = Loop(body, self._count, [(kind, "zeroinitializer")] * len(places))
        value = body.at(self._element, self._values, body(f"mul i64 {loop.index}, {dim}"))
        numbers = {c: load_numbers(body, lanes, self._heads.cache, value, c * lanes) for c in columns}
        weights = {
            head: spread(body, lanes, body.load("float", body.at("float", self._scores, head * _ROW), loop.index))
            for head in tile
        }
        sums = loop.close(
            [
                fma(body, lanes, weights[head], numbers[column], before)
                for (head, column), before in zip(places, loop.values, strict=True)
            ]
        )
        for (head, column), total in zip(places, sums, strict=True):
            slot = body.at("float", self._parts, body(f"mul i64 {head}, {self._slot}"))
            body.store(kind, total, slot, HEADROOM + column * lanes)


def combine(isa: Isa, heads: Heads) -> str:
    """The operation `combine`: the blocks of this thread's query heads together."""
    body = Body()
    have = fields(body, "combine")
    more = body(f"add i64 {have['seen']}, {BLOCK - 1}")
    blocks = body(f"udiv i64 {more}, {BLOCK}")
    first, count = share(body, have["heads"])
    loop = Loop(body, count, may_be_empty=True)
    head = body(f"add i64 {first}, {loop.index}")
    each, room = HEADROOM + heads.dim, have["blocks"]
    slots = body.at("float", have["parts"], body(f"mul i64 {body(f'mul i64 {head}, {room}')}, {each}"))
    out = body.at("float", have["y"], body(f"mul i64 {head}, {heads.dim}"))

    def slot(index: str) -> str:
        return body.at("float", slots, body(f"mul i64 {index}, {each}"))

    top = _most(body, blocks, slot)
    _join(body, lanes_for(isa.width, heads.dim), heads.dim, blocks, slot, top, out)
    loop.close()
    return function("combine", body)


def _most(body: Body, blocks: str, slot: Callable[[str], str]) -> str:
    """The largest score of all blocks."""
    loop = Loop(body, blocks, [("float", constant(_LOW))])
    score = body.load("float", slot(loop.index))
    more = body(f"fcmp ogt float {score}, {loop.values[0]}")
    (top,) = loop.close([body(f"select i1 {more}, float {score}, float {loop.values[0]}")])
    return top


def _join(body: Body, lanes: int, dim: int, blocks: str, slot: Callable[[str], str], top: str, out: str) -> None:
    kind, places = vector(lanes, "float"), range(0, dim, lanes)
    loop = Loop(body, blocks, [("float", "0.0"), *[(kind, "zeroinitializer")] * len(places)])
    here = slot(loop.index)
    less = body(f"fsub float {body.load('float', here)}, {top}")
    power = exp(body, 1, body(f"insertelement <1 x float> poison, float {less}, i32 0"))
    weight = body(f"extractelement <1 x float> {power}, i32 0")
    block_total = body.load("float", here, 1)
    total = body(f"fadd float {loop.values[0]}, {body(f'fmul float {weight}, {block_total}')}")
    wide = spread(body, lanes, weight)
    sums = [
        fma(body, lanes, wide, body.load(kind, here, HEADROOM + start), before)
        for start, before in zip(places, loop.values[1:], strict=True)
    ]
    total, *sums = loop.close([total, *sums])
    inverse = spread(body, lanes, body(f"fdiv float 1.0, {total}"))
    for start, value in zip(places, sums, strict=True):
        body.store(kind, arithmetic(body, lanes, "fmul", value, inverse), out, start)
