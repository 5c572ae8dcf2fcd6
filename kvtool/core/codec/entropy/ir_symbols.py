"""The way from numbers to symbols as LLVM IR, the same for every instruction set: LLVM splits its vectors."""

from __future__ import annotations

from kvtool.core.codec.entropy.ir_output import BLOCK
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
}


def symbols_module() -> str:
    """The kernel: 32 numbers at a time."""
    body = Body()
    shorts, chars, mask = (vector(BLOCK, kind) for kind in ("i16", "i8", "i1"))
    jobs = Loop(body, "%number")
    job = fields(body, jobs.index, FIELDS)
    rows = Loop(body, job["rows"], [("ptr", job["numbers"]), ("ptr", job["symbols"]), ("i64", "0")])
    row, *carried = rows.values
    blocks = Loop(body, job["blocks"], list(zip(("ptr", "i64"), carried, strict=True)))
    symbols, escapes = blocks.values

    place = body(f"zext i32 {body.load('i32', job['places'], blocks.index)} to i64")
    column = body(f"shl i64 {blocks.index}, 5")
    numbers = body.load(shorts, row, place)
    low, many = (body.load(shorts, body.at("i16", job[name], column)) for name in ("low", "many"))
    # One comparison for both ends: from the least on, whatever lies below it is huge without a sign.
    escape = body(f"icmp uge {shorts} {body(f'sub {shorts} {numbers}, {low}')}, {many}")
    symbol = body(f"add {chars} {body(f'trunc {shorts} {numbers} to {chars}')}, {splat(ZERO - 256, 'i8')}")
    symbol = body(f"select {mask} {escape}, {chars} {splat(ESCAPE - 256, 'i8')}, {chars} {symbol}")
    body.store(chars, symbol, symbols)
    bits = body(f"zext i{BLOCK} {body(f'bitcast {mask} {escape} to i{BLOCK}')} to i64")
    escapes = body(f"add i64 {escapes}, {body(f'call i64 @llvm.ctpop.i64(i64 {bits})')}")

    symbols, escapes = blocks.close([body.at("i8", symbols, BLOCK), escapes])
    row, symbols, escapes = rows.close([body.at("i8", row, job["stride"]), symbols, escapes])
    body.store("i64", escapes, job["escapes"])
    jobs.close()
    return module(body)
