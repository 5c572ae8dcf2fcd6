"""Decoders as LLVM IR for any CPU: states in memory, one symbol after another, 32 columns at a time."""

from __future__ import annotations

from kvtool.core.codec.entropy.ir_decode import (
    FIELDS,
    REFINE,
    REPLACING,
    finish,
    first_slots,
    moved,
    parameters,
    place,
    reduction,
    words_at,
    write,
)
from kvtool.core.codec.entropy.ir_output import BLOCK, with_escapes
from kvtool.core.codec.entropy.reference import LANES, LEAST_STATE
from kvtool.core.codec.entropy.tables import SLOTS
from kvtool.core.native.ir import Body, Loop, fields, module, vector
from kvtool.core.native.isa import SCALAR

_UNROLLED = 4  # 8 and 16 are no faster and take longer to compile


def decode_module(form: str) -> str:
    """The kernel for a form of output, or for `refine`; as ir_decode.decode_module for the rest."""
    body, width = Body(), SCALAR.width
    ints = vector(width, "i32")
    kept, chosen = (body(f"alloca [{BLOCK} x i32], align 64") for _ in range(2))
    states = body(f"alloca [{LANES} x i32], align 64")
    jobs = Loop(body, "%number")
    job = fields(body, jobs.index, FIELDS)
    for lane in range(0, LANES, width):
        body.store(ints, body.load(ints, job["states"], lane, aligned=1), states, lane)
    rows = Loop(body, job["rows"], [("ptr", job["out"]), ("i64", "0"), ("i64", "0")])
    row, position, escapes = rows.values
    blocks = Loop(body, body(f"shl i64 {job['groups']}, 1"), [("i64", position), ("i64", escapes)])
    position, escapes = blocks.values

    column = body(f"mul i64 {blocks.index}, {BLOCK}")
    out = place(body, job, row, blocks.index)
    lanes = [(out, lane) for lane in range(0, BLOCK, width)]
    tables = body.at("i32", job["bases"], column)
    coarse = [""] * len(lanes)
    if form == REFINE:
        firsts, coarse = first_slots(body, width, form, tables, lanes)
        for lane, first in zip(range(0, BLOCK, width), firsts, strict=True):
            body.store(ints, first, chosen, lane)
        tables = chosen
    half = body(f"and i64 {column}, {BLOCK}")
    position = _block(body, job, tables, body.at("i32", states, half), position, kept)
    entries = [body.load(ints, kept, lane) for _, lane in lanes]
    write(body, SCALAR, form, parameters(body, job, column), list(zip(entries, coarse, lanes, strict=True)))

    if form in REPLACING:
        escapes = with_escapes(body, width, job, entries, [out], escapes)

    position, escapes = blocks.close([position, escapes])
    row, position, escapes = rows.close([body.at("i8", row, job["stride"]), position, escapes])
    finish(body, width, job, position, escapes, [body.load(ints, states, lane) for lane in range(0, LANES, width)])
    jobs.close()
    return module(body, reduction(width))


def _block(body: Body, job: dict[str, str], tables: str, states: str, position: str, kept: str) -> str:
    """Advance 32 states and leave their slot entries in `kept`; returns the next position."""
    begin = words_at(body, job, position)
    loop = Loop(body, BLOCK // _UNROLLED, [("ptr", begin)])
    (words,) = loop.values
    first = body(f"mul i64 {loop.index}, {_UNROLLED}")
    for unrolled in range(_UNROLLED):
        lane = body(f"add i64 {first}, {unrolled}")
        state = body.load("i32", states, lane)
        slot = body(f"add i32 {body.load('i32', tables, lane)}, {body(f'and i32 {state}, {SLOTS - 1}')}")
        entry = body.load("i32", job["slots"], body(f"zext i32 {slot} to i64"))
        body.store("i32", entry, kept, lane)
        state = moved(body, "i32", entry, state)
        empty = body(f"icmp ult i32 {state}, {LEAST_STATE}")
        word = body(f"zext i16 {body.load('i16', words, aligned=1)} to i32")
        filled = body(f"or i32 {body(f'shl i32 {state}, 16')}, {word}")
        body.store("i32", body(f"select i1 {empty}, i32 {filled}, i32 {state}"), states, lane)
        words = body.at("i16", words, body(f"zext i1 {empty} to i64"))
    (words,) = loop.close([words])
    taken = body(f"sub i64 {body(f'ptrtoint ptr {words} to i64')}, {body(f'ptrtoint ptr {begin} to i64')}")
    return body(f"add i64 {position}, {body(f'lshr i64 {taken}, 1')}")
