"""The way from numbers to symbols as LLVM IR, the same for every instruction set: LLVM splits its vectors."""

from __future__ import annotations

from kvtool.core.codec.entropy.ir_output import BLOCK, MOST_CONTEXT
from kvtool.core.codec.entropy.tables import ESCAPE, ZERO
from kvtool.core.native.ir import Body, Loop, fields, module, splat, vector

FIELDS = {
    "numbers": "ptr",  # i16 [rows, stride]
    "stride": "i64",  # bytes from row to row of `numbers`
    "places": "ptr",  # i32 [columns / 32]
    "low": "ptr",  # i16 [columns]: least number of the column's table
    "many": "ptr",  # i16 [columns]: how many it has from there on
    "symbols": "ptr",  # u8 [rows, columns]
    "rows": "i64",  # at least 1
    "blocks": "i64",  # columns / 32, at least 1
    "escapes": "ptr",  # i64: how many symbols are escapes
    "marked": "ptr",  # i16: the numbers that these stand for, row by row; room for one a symbol
}
FINER = {
    "numbers": "ptr",  # i16 [rows, stride]
    "coarse": "ptr",  # i16 [rows, stride]: those of the coarser level
    "stride": "i64",  # of both
    "places": "ptr",
    "symbols": "ptr",
    "contexts": "ptr",  # u8 [rows, columns]
    "rows": "i64",
    "blocks": "i64",
}
WIDER = {
    "numbers": "ptr",  # i16 [32 * blocks], from -32767 to 32766
    "out": "ptr",  # i16: the coarser level's
    "blocks": "i64",  # at least 1
}
STRAY = {
    "numbers": "ptr",
    "stride": "i64",
    "places": "ptr",  # of the blocks that are not coded
    "rows": "i64",
    "blocks": "i64",  # at least 1
    "some": "ptr",  # i64: not 0 where a number in one of these blocks is not 0
}
_SHORTS, _CHARS, _MASK = (vector(BLOCK, kind) for kind in ("i16", "i8", "i1"))
_OFFSET = 32766  # a multiple of 3 that leaves nothing below 0


def symbols_module() -> str:
    """The kernel: 32 numbers at a time."""
    body = Body()
    jobs = Loop(body, "%number")
    job = fields(body, jobs.index, FIELDS)
    rows = Loop(body, job["rows"], [("ptr", job["numbers"]), ("ptr", job["symbols"]), ("i64", "0")])
    row, *carried = rows.values
    blocks = Loop(body, job["blocks"], list(zip(("ptr", "i64"), carried, strict=True)))
    symbols, escapes = blocks.values

    begin = body.at("i16", row, _place(body, job, blocks.index))
    column = body(f"shl i64 {blocks.index}, 5")
    numbers = body.load(_SHORTS, begin)
    low, many = (body.load(_SHORTS, body.at("i16", job[name], column)) for name in ("low", "many"))
    # One comparison for both ends: from the least on, whatever lies below it is huge without a sign.
    escape = body(f"icmp uge {_SHORTS} {body(f'sub {_SHORTS} {numbers}, {low}')}, {many}")
    symbol = body(f"add {_CHARS} {body(f'trunc {_SHORTS} {numbers} to {_CHARS}')}, {splat(ZERO - 256, 'i8')}")
    symbol = body(f"select {_MASK} {escape}, {_CHARS} {splat(ESCAPE - 256, 'i8')}, {_CHARS} {symbol}")
    body.store(_CHARS, symbol, symbols)
    bits = body(f"zext i{BLOCK} {body(f'bitcast {_MASK} {escape} to i{BLOCK}')} to i64")
    escapes = _marked(body, job, begin, bits, escapes)

    symbols, escapes = blocks.close([body.at("i8", symbols, BLOCK), escapes])
    row, symbols, escapes = rows.close([body.at("i8", row, job["stride"]), symbols, escapes])
    body.store("i64", escapes, job["escapes"])
    jobs.close()
    return module(body)


def _place(body: Body, job: dict[str, str], block: str) -> str:
    """The column at which a block begins."""
    return body(f"zext i32 {body.load('i32', job['places'], block)} to i64")


def _marked(body: Body, job: dict[str, str], begin: str, bits: str, escapes: str) -> str:
    """Keep the numbers of a block's escapes; returns how many there are now. They are rare: one branch for all."""
    before, some, after = body.block, body.new_block(), body.new_block()
    body.do(f"br i1 {body(f'icmp ne i64 {bits}, 0')}, label %{some}, label %{after}")
    body.enter(some)
    count = body(f"call i64 @llvm.ctpop.i64(i64 {bits})")
    lanes = Loop(body, count, [("i64", bits), ("i64", escapes)])
    left, number = lanes.values
    lane = body(f"call i64 @llvm.cttz.i64(i64 {left}, i1 true)")
    body.store("i16", body.load("i16", begin, lane), job["marked"], number)
    left = body(f"and i64 {left}, {body(f'sub i64 {left}, 1')}")
    _, number = lanes.close([left, body(f"add i64 {number}, 1")])
    end = body.block
    body.do(f"br label %{after}")
    body.enter(after)
    return body(f"phi i64 [{escapes}, %{before}], [{number}, %{end}]")


def finer_module() -> str:
    """The kernel that makes symbols and contexts of what leads from coarser numbers to finer ones (integers.py)."""
    body = Body()
    jobs = Loop(body, "%number")
    job = fields(body, jobs.index, FINER)
    rows = Loop(body, job["rows"], [("i64", "0"), ("i64", "0")])
    row, at = rows.values
    blocks = Loop(body, job["blocks"], [("i64", at)])
    (at,) = blocks.values
    place = _place(body, job, blocks.index)
    fine, coarse = (body.load(_SHORTS, body.at("i8", job[name], row), place) for name in ("numbers", "coarse"))
    three = splat(3, "i16")
    rest = body(f"sub {_SHORTS} {fine}, {body(f'mul {_SHORTS} {coarse}, {three}')}")
    negative = body(f"icmp slt {_SHORTS} {coarse}, zeroinitializer")
    rest, size = (_turned(body, negative, value) for value in (rest, coarse))
    most = splat(MOST_CONTEXT, "i16")
    context = body(f"select {_MASK} {body(f'icmp ugt {_SHORTS} {size}, {most}')}, {_SHORTS} {most}, {_SHORTS} {size}")
    symbol = body(f"add {_CHARS} {body(f'trunc {_SHORTS} {rest} to {_CHARS}')}, {splat(ZERO - 256, 'i8')}")
    body.store(_CHARS, symbol, job["symbols"], at)
    body.store(_CHARS, body(f"trunc {_SHORTS} {context} to {_CHARS}"), job["contexts"], at)
    (at,) = blocks.close([body(f"add i64 {at}, {BLOCK}")])
    rows.close([body(f"add i64 {row}, {job['stride']}"), at])
    jobs.close()
    return module(body)


def _turned(body: Body, negative: str, values: str) -> str:
    """The values, negated where the mask is set."""
    minus = body(f"sub {_SHORTS} zeroinitializer, {values}")
    return body(f"select {_MASK} {negative}, {_SHORTS} {minus}, {_SHORTS} {values}")


def wider_module() -> str:
    """The kernel that makes a level's numbers of those of the next finer one: floor((number + 1) / 3)."""
    body = Body()
    jobs = Loop(body, "%number")
    job = fields(body, jobs.index, WIDER)
    blocks = Loop(body, job["blocks"])
    at = body(f"shl i64 {blocks.index}, 5")
    moved = body(f"add {_SHORTS} {body.load(_SHORTS, job['numbers'], at)}, {splat(_OFFSET + 1, 'i16')}")
    third = body(f"udiv {_SHORTS} {moved}, {splat(3, 'i16')}")
    body.store(_SHORTS, body(f"sub {_SHORTS} {third}, {splat(_OFFSET // 3, 'i16')}"), job["out"], at)
    blocks.close()
    jobs.close()
    return module(body)


def stray_module() -> str:
    """The kernel that looks for numbers other than 0 where none are coded."""
    body = Body()
    jobs = Loop(body, "%number")
    job = fields(body, jobs.index, STRAY)
    rows = Loop(body, job["rows"], [("ptr", job["numbers"]), (_SHORTS, "zeroinitializer")])
    row, some = rows.values
    blocks = Loop(body, job["blocks"], [(_SHORTS, some)])
    (some,) = blocks.values
    numbers = body.load(_SHORTS, row, _place(body, job, blocks.index))
    (some,) = blocks.close([body(f"or {_SHORTS} {some}, {numbers}")])
    _, some = rows.close([body.at("i8", row, job["stride"]), some])
    mask = body(f"bitcast {_MASK} {body(f'icmp ne {_SHORTS} {some}, zeroinitializer')} to i{BLOCK}")
    body.store("i64", body(f"zext i{BLOCK} {mask} to i64"), job["some"])
    jobs.close()
    return module(body)
