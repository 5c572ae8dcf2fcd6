"""Decoders as LLVM IR: one module for each instruction set and form of output (the bytes: reference.py).

A kernel checks nothing but its own reading: at every step it reads from no later than the end of the words, and never
more than 64 words on, so 128 bytes behind them must be readable. It counts the words a stream asks for, and the caller
compares that number with theirs; it compares the states that are left with what the encoder began with.
"""

from __future__ import annotations

from itertools import repeat

from kvtool.core.codec.entropy import ir_output as output
from kvtool.core.codec.entropy.reference import LANES, LEAST_STATE
from kvtool.core.codec.entropy.tables import PROBABILITY_BITS, SLOTS
from kvtool.core.native.ir import (
    Body,
    Loop,
    fields,
    look_up_by_memory,
    module,
    ones,
    permutations,
    permuted,
    splat,
    vector,
)
from kvtool.core.native.isa import AVX512, SCALAR, Isa

FORMS = ("int16", "bfloat16", "float16")
REFINE = "refine"


def whole(form: str) -> str:
    """Name of the kernel that gives numbers as they are in a float form."""
    return f"whole {form}"


REPLACING = ("int16", *(whole(form) for form in FORMS[1:]))  # escapes by what they stand for
KINDS = (*FORMS, *REPLACING[1:], REFINE)
FIELDS = {
    "words": "ptr",  # u16
    "count": "i64",  # of words
    "states": "ptr",  # u32 [64]
    "bases": "ptr",  # u32 [columns]: first slot of the column's table
    "slots": "ptr",  # u32 [tables * 2048]
    "places": "ptr",  # i32 [columns / 32]
    "out": "ptr",
    "stride": "i64",  # bytes from row to row of `out`
    "rows": "i64",  # at least 1
    "groups": "i64",  # columns / 64, at least 1
    "scale": "ptr",  # float [columns]; of the scaled forms only
    "offset": "ptr",
    "marked": "ptr",  # u16 [last + 1]: what takes the escapes' places, one after another; of the unscaled forms only
    "last": "i64",
    "replace": "i64",  # all bits where escapes are replaced, else 0
    "escapes": "ptr",  # i64: how many were
    "read": "ptr",  # i64: words the stream asked for; their complement: its states do not end right
}
_EXPAND = "declare <16 x i16> @llvm.x86.avx512.mask.expand.v16i16(<16 x i16>, <16 x i16>, <16 x i1>)\n"


def decode_module(isa: Isa, form: str) -> str:
    """The kernel for a form of output, or for `refine`: 64 lanes in registers.

    All of a step's lookups come before its words, which depend on one another.
    """
    body, width = Body(), isa.width
    ints = vector(width, "i32")
    memory = [body(f"alloca {ints}, align 64") for _ in range(LANES // width)]
    jobs = Loop(body, "%number")
    job = fields(body, jobs.index, FIELDS)
    starts = [(ints, body.load(ints, job["states"], lane, aligned=1)) for lane in range(0, LANES, width)]
    rows = Loop(body, job["rows"], [("ptr", job["out"]), ("i64", "0"), ("i64", "0"), *starts])
    row, position, escapes, *states = rows.values
    carried = [("i64", position), ("i64", escapes), *zip(repeat(ints), states, strict=False)]
    steps = Loop(body, job["groups"], carried)
    position, escapes, *states = steps.values

    column = body(f"shl i64 {steps.index}, 6")
    block = body(f"shl i64 {steps.index}, 1")
    outs = [place(body, job, row, body(f"add i64 {block}, {half}")) for half in range(2)]
    lanes = [(outs[lane // output.BLOCK], lane % output.BLOCK) for lane in range(0, LANES, width)]
    firsts, coarse = first_slots(body, width, form, body.at("i32", job["bases"], column), lanes)
    entries = [_entry(body, width, job, *part) for part in zip(firsts, states, memory, strict=True)]
    states = [moved(body, ints, *pair) for pair in zip(entries, states, strict=True)]
    position, states = _filled(body, isa, job, position, states)
    write(body, isa, form, parameters(body, job, column), list(zip(entries, coarse, lanes, strict=True)))
    if form in REPLACING:
        escapes = output.with_escapes(body, width, job, entries, outs, escapes)

    position, escapes, *states = steps.close([position, escapes, *states])
    row = body.at("i8", row, job["stride"])
    row, position, escapes, *states = rows.close([row, position, escapes, *states])
    finish(body, width, job, position, escapes, states)
    jobs.close()
    head = _EXPAND if isa is AVX512 else permutations("expand", _expansions())
    return module(body, head + reduction(width))


def place(body: Body, job: dict[str, str], row: str, block: str) -> str:
    """Where a block of 32 columns goes in a row of `out`."""
    return body.at("i16", row, body(f"zext i32 {body.load('i32', job['places'], block)} to i64"))


def first_slots(
    body: Body, width: int, form: str, bases: str, lanes: list[tuple[str, int]]
) -> tuple[list[str], list[str]]:
    """First slots of every vector's tables; and the coarser numbers, empty names where there are none."""
    first = [body.load(vector(width, "i32"), bases, index * width) for index in range(len(lanes))]
    if form != REFINE:
        return first, [""] * len(lanes)
    coarse = [output.coarser(body, width, *place) for place in lanes]
    return [output.with_context(body, width, *pair) for pair in zip(first, coarse, strict=True)], coarse


def finish(body: Body, width: int, job: dict[str, str], position: str, escapes: str, states: list[str]) -> None:
    """Leave how many words were asked for, or that number's complement, which is negative; and how many escapes."""
    body.store("i64", escapes, job["escapes"])
    ints, wrong = vector(width, "i32"), "zeroinitializer"
    for state in states:
        wrong = body(f"or {ints} {wrong}, {body(f'xor {ints} {state}, {splat(LEAST_STATE)}')}")
    any_ = body(f"icmp ne i32 {body(f'call i32 @llvm.vector.reduce.or.v{width}i32({ints} {wrong})')}, 0")
    flipped = body(f"xor i64 {position}, -1")
    body.store("i64", body(f"select i1 {any_}, i64 {flipped}, i64 {position}"), job["read"])


def reduction(width: int) -> str:
    """What `finish` calls."""
    return f"declare i32 @llvm.vector.reduce.or.v{width}i32({vector(width, 'i32')})\n"


def _entry(body: Body, width: int, job: dict[str, str], base: str, state: str, memory: str) -> str:
    ints = vector(width, "i32")
    slot = body(f"and {ints} {state}, {splat(SLOTS - 1)}")
    return look_up_by_memory(body, width, job["slots"], body(f"add {ints} {base}, {slot}"), memory)


def moved(body: Body, kind: str, entry: str, state: str) -> str:
    """frequency * (state >> 11) + bias; `kind` is i32 or a vector of it."""
    eight, most, rest, up = (str(n) if kind == "i32" else splat(n) for n in (8, 4095, 20, PROBABILITY_BITS))
    frequency = body(f"and {kind} {body(f'lshr {kind} {entry}, {eight}')}, {most}")
    product = body(f"mul {kind} {frequency}, {body(f'lshr {kind} {state}, {up}')}")
    return body(f"add {kind} {product}, {body(f'lshr {kind} {entry}, {rest}')}")


def words_at(body: Body, job: dict[str, str], position: str) -> str:
    """The next words, or the end where a damaged stream asks for more than there are."""
    safe = body(f"call i64 @llvm.umin.i64(i64 {position}, i64 {job['count']})")
    return body.at("i16", job["words"], safe)


def _filled(body: Body, isa: Isa, job: dict[str, str], position: str, states: list[str]) -> tuple[str, list[str]]:
    """Every state below 2^16 takes a word; the next position, and the states."""
    width, ints = isa.width, vector(isa.width, "i32")
    words, filled = words_at(body, job, position), []
    for state in states:
        empty = body(f"icmp ult {ints} {state}, {splat(LEAST_STATE)}")
        bits, count = ones(body, width, empty)
        word = _expanded(body, isa, words, empty, bits)
        more = body(f"or {ints} {body(f'shl {ints} {state}, {splat(16)}')}, {word}")
        filled.append(body(f"select <{width} x i1> {empty}, {ints} {more}, {ints} {state}"))
        words, position = body.at("i16", words, count), body(f"add i64 {position}, {count}")
    return position, filled


def _expanded(body: Body, isa: Isa, words: str, mask: str, bits: str) -> str:
    """The next words, one to each lane of the mask, as i32; what other lanes get does not matter."""
    shorts, ints = vector(isa.width, "i16"), vector(isa.width, "i32")
    loaded = body.load(shorts, words, aligned=1)
    if isa is AVX512:
        # From a register: the instruction that expands from memory is slow on Zen 4.
        expand = f"call {shorts} @llvm.x86.avx512.mask.expand.v16i16"
        loaded = body(f"{expand}({shorts} {loaded}, {shorts} zeroinitializer, <16 x i1> {mask})")
        return body(f"zext {shorts} {loaded} to {ints}")
    return permuted(body, "expand", bits, body(f"zext {shorts} {loaded} to {ints}"))


def _expansions() -> list[list[int]]:
    """For every mask of eight lanes: which word a lane takes, the number of lower lanes in the mask."""
    return [[(mask & ((1 << lane) - 1)).bit_count() for lane in range(8)] for mask in range(256)]


def parameters(body: Body, job: dict[str, str], column: str) -> tuple[str, str]:
    """Where scales and offsets from a column on are."""
    return body.at("float", job["scale"], column), body.at("float", job["offset"], column)


def write(
    body: Body, isa: Isa, form: str, scaling: tuple[str, str], vectors: list[tuple[str, str, tuple[str, int]]]
) -> None:
    """Write vectors one after another: slot entries, coarser numbers, and the place of each."""
    width = isa.width
    for index, (entry, coarse, (out, at)) in enumerate(vectors):
        values = output.numbers(body, width, entry)
        if form == REFINE:
            values = output.refined(body, width, coarse, values)
        elif form in FORMS[1:]:
            scale, offset = (body.load(vector(width, "float"), part, index * width) for part in scaling)
            values = output.scaled(body, width, values, scale, offset)
            values = output.rounded(body, width, form, values, by_cpu=isa is not SCALAR)
        elif form != "int16":
            values = output.exactly(body, width, form.removeprefix(whole("")), values, by_cpu=isa is not SCALAR)
        output.write(body, width, values, out, at)
