"""Encoders as LLVM IR: one module for each instruction set, with contexts and without (the bytes: reference.py).

An encoder goes from the last step to the first and from lane 63 to 0, and gives its words in the order it makes them.
So inside, lane `i` is the stream's lane `63 - i`, and `bases`, `words` and `states` are the caller's backwards.
"""

from __future__ import annotations

from kvtool.core.codec.entropy.reference import LANES
from kvtool.core.codec.entropy.tables import ALPHABET, PROBABILITY_BITS, SLOTS
from kvtool.core.native.ir import Body, Loop, fields, look_up, module, ones, permutations, permuted, splat, vector
from kvtool.core.native.isa import AVX512, SCALAR, Isa

FIELDS = {
    "symbols": "ptr",  # u8 [rows, columns]: its end
    "contexts": "ptr",  # u8 [rows, columns]: its end; any address where there are none
    "bases": "ptr",  # u32 [columns]: first entry of the column's table, last column first
    "entries": "ptr",  # u32 [tables * 256]: frequency | cumulative << 12 | MISSING
    "states": "ptr",  # u32 [64]
    "words": "ptr",  # u16, room for rows * columns + 16
    "rows": "i64",  # at least 1
    "groups": "i64",  # columns / 64, at least 1
    "written": "ptr",  # i64: words
    "missing": "ptr",  # i32: negative where a symbol had no frequency
}
CUMULATIVE_AT = 12
MISSING = 1 << 31 | 1  # with a frequency, so that no kernel divides by 0

_UNROLLED = 4
_COMPRESS = "declare <16 x i16> @llvm.x86.avx512.mask.compress.v16i16(<16 x i16>, <16 x i16>, <16 x i1>)\n"


def encode_module(isa: Isa, contexts: bool) -> str:
    """The kernel that encodes with or without contexts."""
    return _scalar(contexts) if isa is SCALAR else _vectors(isa, contexts)


def _vectors(isa: Isa, contexts: bool) -> str:
    """64 states in registers."""
    body, width = Body(), isa.width
    ints = vector(width, "i32")
    jobs = Loop(body, "%number")
    job = fields(body, jobs.index, FIELDS)
    starts = [(ints, body.load(ints, job["states"], lane)) for lane in range(0, LANES, width)]
    first = [("ptr", job["words"]), ("i64", "0"), (ints, "zeroinitializer"), *starts]
    rows = Loop(body, job["rows"], first)
    steps = Loop(body, job["groups"], [(kind, value) for (kind, _), value in zip(first, rows.values, strict=True)])
    words, end, missing, *states = steps.values

    end = body(f"sub i64 {end}, {LANES}")
    bases = body.at("i32", job["bases"], body(f"shl i64 {steps.index}, 6"))
    entries = []
    for lane in range(0, LANES, width):
        at = body(f"add i64 {end}, {LANES - width - lane}")
        index = body(f"add {ints} {body.load(ints, bases, lane)}, {_backwards(body, width, job['symbols'], at)}")
        if contexts:
            above = body(f"mul {ints} {_backwards(body, width, job['contexts'], at)}, {splat(ALPHABET)}")
            index = body(f"add {ints} {index}, {above}")
        entries.append(look_up(body, width, job["entries"], index))
    for place, entry in enumerate(entries):
        missing = body(f"or {ints} {missing}, {entry}")
        words, states[place] = _put(body, isa, words, entry, states[place])

    carried = steps.close([words, end, missing, *states])
    words, _, missing, *states = rows.close(carried)
    _finish(body, job, words, body(f"call i32 @llvm.vector.reduce.or.v{width}i32({ints} {missing})"))
    for lane, state in zip(range(0, LANES, width), states, strict=True):
        body.store(ints, state, job["states"], lane)
    jobs.close()
    head = f"declare i32 @llvm.vector.reduce.or.v{width}i32({ints})\n"
    return module(body, head + (_COMPRESS if isa is AVX512 else permutations("compress", _compressions())))


def _backwards(body: Body, width: int, pointer: str, index: str) -> str:
    """Bytes from an index on, the last first, as i32."""
    kind = vector(width, "i8")
    order = ", ".join(f"i32 {lane}" for lane in reversed(range(width)))
    loaded = body.load(kind, pointer, index)
    turned = body(f"shufflevector {kind} {loaded}, {kind} poison, {vector(width, 'i32')} <{order}>")
    return body(f"zext {kind} {turned} to {vector(width, 'i32')}")


def _put(body: Body, isa: Isa, words: str, entry: str, state: str) -> tuple[str, str]:
    """Encode one symbol a lane: full states give a word first. Returns the next place for words, and the states."""
    width, ints = isa.width, vector(isa.width, "i32")
    frequency = body(f"and {ints} {entry}, {splat(2 * SLOTS - 1)}")
    shifted = body(f"lshr {ints} {entry}, {splat(CUMULATIVE_AT)}")
    cumulative = body(f"and {ints} {shifted}, {splat(SLOTS - 1)}")
    # state >= frequency << 21, which would not fit for a frequency of 2048
    full = body(f"icmp uge {ints} {body(f'lshr {ints} {state}, {splat(32 - PROBABILITY_BITS)}')}, {frequency}")
    bits, count = ones(body, width, full)
    body.store(vector(width, "i16"), _compressed(body, isa, state, full, bits), words)
    less = body(f"lshr {ints} {state}, {splat(16)}")
    state = body(f"select <{width} x i1> {full}, {ints} {less}, {ints} {state}")
    return body.at("i16", words, count), next_state(body, width, state, frequency, cumulative)


def next_state(body: Body, width: int, state: str, frequency: str, cumulative: str) -> str:
    """(state // frequency << 11) + state % frequency + cumulative, for 32 * frequency <= state < frequency << 21.

    The quotient is below 2^21, so rounding the state and then the ratio to float32 moves it by hardly more than
    2^21 * (2^-24 + 2^-24) = 1/4. Half is taken off: cutting the fraction gives the quotient or one less, and the
    remainder tells which.
    """
    ints, floats = vector(width, "i32"), vector(width, "float")
    above, below = (body(f"uitofp {ints} {value} to {floats}") for value in (state, frequency))
    half = body(f"bitcast {ints} {splat(0x3F000000)} to {floats}")
    ratio = body(f"fsub {floats} {body(f'fdiv {floats} {above}, {below}')}, {half}")
    quotient = body(f"fptosi {floats} {ratio} to {ints}")
    rest = body(f"sub {ints} {state}, {body(f'mul {ints} {quotient}, {frequency}')}")
    one_less = body(f"icmp uge {ints} {rest}, {frequency}")
    # One more in the quotient: 2048 more for it, a frequency less in the remainder.
    missing = body(f"sub {ints} {splat(SLOTS)}, {frequency}")
    correction = body(f"select <{width} x i1> {one_less}, {ints} {missing}, {ints} zeroinitializer")
    whole = body(f"add {ints} {body(f'shl {ints} {quotient}, {splat(PROBABILITY_BITS)}')}, {rest}")
    return body(f"add {ints} {whole}, {body(f'add {ints} {correction}, {cumulative}')}")


def _compressed(body: Body, isa: Isa, state: str, mask: str, bits: str) -> str:
    """The low halves of the mask's lanes, first lane first; behind them anything, which the next words overwrite."""
    shorts, ints = vector(isa.width, "i16"), vector(isa.width, "i32")
    if isa is AVX512:
        low = body(f"trunc {ints} {state} to {shorts}")
        compress = f"call {shorts} @llvm.x86.avx512.mask.compress.v16i16"
        return body(f"{compress}({shorts} {low}, {shorts} zeroinitializer, <16 x i1> {mask})")
    return body(f"trunc {ints} {permuted(body, 'compress', bits, state)} to {shorts}")


def _compressions() -> list[list[int]]:
    """For every mask of eight lanes: its lanes, then zeros."""
    lanes = [[lane for lane in range(8) if mask >> lane & 1] for mask in range(256)]
    return [row + [0] * (8 - len(row)) for row in lanes]


def _finish(body: Body, job: dict[str, str], words: str, missing: str) -> None:
    begin, end = (body(f"ptrtoint ptr {pointer} to i64") for pointer in (job["words"], words))
    body.store("i64", body(f"lshr i64 {body(f'sub i64 {end}, {begin}')}, 1"), job["written"])
    body.store("i32", missing, job["missing"])


def _scalar(contexts: bool) -> str:
    """States in memory, for any CPU."""
    body = Body()
    jobs = Loop(body, "%number")
    job = fields(body, jobs.index, FIELDS)
    first = [("ptr", job["words"]), ("i64", "0"), ("i32", "0")]
    rows = Loop(body, job["rows"], first)
    steps = Loop(body, job["groups"], [(kind, value) for (kind, _), value in zip(first, rows.values, strict=True)])
    words, end, missing = steps.values
    bases = body.at("i32", job["bases"], body(f"shl i64 {steps.index}, 6"))
    lanes = Loop(body, LANES // _UNROLLED, [("ptr", words), ("i64", end), ("i32", missing)])
    words, end, missing = lanes.values
    start = body(f"mul i64 {lanes.index}, {_UNROLLED}")
    for unrolled in range(_UNROLLED):
        lane, end = body(f"add i64 {start}, {unrolled}"), body(f"sub i64 {end}, 1")
        index = body(f"add i32 {body.load('i32', bases, lane)}, {_byte(body, job['symbols'], end)}")
        if contexts:
            context = _byte(body, job["contexts"], end)
            index = body(f"add i32 {index}, {body(f'mul i32 {context}, {ALPHABET}')}")
        entry = body.load("i32", job["entries"], body(f"zext i32 {index} to i64"))
        missing = body(f"or i32 {missing}, {entry}")
        words, state = _put_one(body, words, entry, body.load("i32", job["states"], lane))
        body.store("i32", state, job["states"], lane)
    words, _, missing = rows.close(steps.close(lanes.close([words, end, missing])))
    _finish(body, job, words, missing)
    jobs.close()
    return module(body)


def _byte(body: Body, pointer: str, index: str) -> str:
    return body(f"zext i8 {body.load('i8', pointer, index)} to i32")


def _put_one(body: Body, words: str, entry: str, state: str) -> tuple[str, str]:
    """Encode one symbol: as _put, without lanes."""
    frequency = body(f"and i32 {entry}, {2 * SLOTS - 1}")
    cumulative = body(f"and i32 {body(f'lshr i32 {entry}, {CUMULATIVE_AT}')}, {SLOTS - 1}")
    full = body(f"icmp uge i32 {body(f'lshr i32 {state}, {32 - PROBABILITY_BITS}')}, {frequency}")
    body.store("i16", body(f"trunc i32 {state} to i16"), words)
    words = body.at("i16", words, body(f"zext i1 {full} to i64"))
    state = body(f"select i1 {full}, i32 {body(f'lshr i32 {state}, 16')}, i32 {state}")
    quotient = body(f"udiv i32 {state}, {frequency}")
    # quotient * 2048 + (state - quotient * frequency)
    more = body(f"mul i32 {quotient}, {body(f'sub i32 {SLOTS}, {frequency}')}")
    return words, body(f"add i32 {body(f'add i32 {state}, {more}')}, {cumulative}")
