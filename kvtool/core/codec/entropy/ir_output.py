"""What a decoder's kernel writes: numbers as they are, scaled and rounded, or merged into a coarser level."""

from __future__ import annotations

from kvtool.core.codec.entropy.tables import ESCAPE, PROBABILITY_BITS, ZERO
from kvtool.core.native.ir import Body, Loop, ones, splat, vector

MOST_CONTEXT = 2  # a coarser number's size, capped
BLOCK = 32  # columns that stay together


def numbers(body: Body, width: int, entries: str) -> str:
    """Symbols of slot entries as numbers, i32."""
    ints = vector(width, "i32")
    symbols = body(f"and {ints} {entries}, {splat(255)}")
    return body(f"sub {ints} {symbols}, {splat(ZERO)}")


def coarser(body: Body, width: int, out: str, column: int) -> str:
    """The coarser level's numbers, i32, as `out` holds them."""
    shorts = vector(width, "i16")
    return body(f"sext {shorts} {body.load(shorts, out, column)} to {vector(width, 'i32')}")


def with_context(body: Body, width: int, bases: str, coarse: str) -> str:
    """First slots of the tables that coarser numbers choose: min(|q|, 2) tables on."""
    ints = vector(width, "i32")
    negative = body(f"icmp slt {ints} {coarse}, zeroinitializer")
    minus = body(f"sub {ints} zeroinitializer, {coarse}")
    size = body(f"select <{width} x i1> {negative}, {ints} {minus}, {ints} {coarse}")
    large = body(f"icmp ugt {ints} {size}, {splat(MOST_CONTEXT)}")
    context = body(f"select <{width} x i1> {large}, {ints} {splat(MOST_CONTEXT)}, {ints} {size}")
    return body(f"add {ints} {bases}, {body(f'shl {ints} {context}, {splat(PROBABILITY_BITS)}')}")


def refined(body: Body, width: int, coarse: str, numbers: str) -> str:
    """3q + r away from zero, i32; all arithmetic wraps, so no number in `out` can be a wrong one."""
    ints = vector(width, "i32")
    negative = body(f"icmp slt {ints} {coarse}, zeroinitializer")
    minus = body(f"sub {ints} zeroinitializer, {numbers}")
    step = body(f"select <{width} x i1> {negative}, {ints} {minus}, {ints} {numbers}")
    return body(f"add {ints} {body(f'mul {ints} {coarse}, {splat(3)}')}, {step}")


def scaled(body: Body, width: int, numbers: str, scale: str, offset: str) -> str:
    """number * scale + offset in float32, rounded twice as numpy does."""
    floats = vector(width, "float")
    exact = body(f"sitofp {vector(width, 'i32')} {numbers} to {floats}")
    return body(f"fadd {floats} {body(f'fmul {floats} {exact}, {scale}')}, {offset}")


def exactly(body: Body, width: int, form: str, numbers: str, *, by_cpu: bool) -> str:
    """Bits of a form of numbers of 8 bits, which it holds without rounding; in i32."""
    ints, floats = vector(width, "i32"), vector(width, "float")
    exact = body(f"sitofp {ints} {numbers} to {floats}")
    if form == "bfloat16":
        return body(f"lshr {ints} {body(f'bitcast {floats} {exact} to {ints}')}, {splat(16)}")
    return rounded(body, width, form, exact, by_cpu=by_cpu)


def rounded(body: Body, width: int, form: str, values: str, *, by_cpu: bool) -> str:
    """Bits of a form, in i32; `by_cpu` where the CPU has an instruction for float16."""
    if form == "bfloat16":
        return _bfloat16(body, width, values)
    return _float16_by_cpu(body, width, values) if by_cpu else _float16(body, width, values)


def _bfloat16(body: Body, width: int, values: str) -> str:
    """Bits of the nearest bfloat16, ties to even, in i32; values are never NaN (scales and offsets are finite)."""
    ints = vector(width, "i32")
    bits = body(f"bitcast {vector(width, 'float')} {values} to {ints}")
    odd = body(f"and {ints} {body(f'lshr {ints} {bits}, {splat(16)}')}, {splat(1)}")
    up = body(f"add {ints} {bits}, {body(f'add {ints} {odd}, {splat(0x7FFF)}')}")
    return body(f"lshr {ints} {up}, {splat(16)}")


def _float16(body: Body, width: int, values: str) -> str:
    """Bits of the nearest float16, ties to even, in i32, by integers: for CPUs whose float16 LLVM calls a library for.

    Below 2^-14 the sum with 0.5 rounds to the spacing of the subnormal numbers, 2^-24.
    """
    ints, floats, mask = vector(width, "i32"), vector(width, "float"), f"<{width} x i1>"
    bits = body(f"bitcast {floats} {values} to {ints}")
    size = body(f"and {ints} {bits}, {splat(0x7FFFFFFF)}")
    half = body(f"bitcast {ints} {splat(0x3F000000)} to {floats}")
    sum_ = body(f"fadd {floats} {body(f'bitcast {ints} {size} to {floats}')}, {half}")
    small = body(f"sub {ints} {body(f'bitcast {floats} {sum_} to {ints}')}, {splat(0x3F000000)}")
    odd = body(f"and {ints} {body(f'lshr {ints} {size}, {splat(13)}')}, {splat(1)}")
    moved = body(f"add {ints} {body(f'sub {ints} {size}, {splat(112 << 23)}')}, {splat(0xFFF)}")
    normal = body(f"lshr {ints} {body(f'add {ints} {moved}, {odd}')}, {splat(13)}")
    is_small = body(f"icmp ult {ints} {size}, {splat(113 << 23)}")
    is_large = body(f"icmp uge {ints} {size}, {splat(143 << 23)}")
    finite = body(f"select {mask} {is_small}, {ints} {small}, {ints} {normal}")
    whole = body(f"select {mask} {is_large}, {ints} {splat(0x7C00)}, {ints} {finite}")
    sign = body(f"and {ints} {body(f'lshr {ints} {bits}, {splat(16)}')}, {splat(0x8000)}")
    return body(f"or {ints} {whole}, {sign}")


def _float16_by_cpu(body: Body, width: int, values: str) -> str:
    """Store bfloat16 numbers where the CPU itself converts to them."""
    halves = body(f"fptrunc {vector(width, 'float')} {values} to {vector(width, 'half')}")
    shorts = body(f"bitcast {vector(width, 'half')} {halves} to {vector(width, 'i16')}")
    return body(f"zext {vector(width, 'i16')} {shorts} to {vector(width, 'i32')}")


def write(body: Body, width: int, values: str, out: str, column: int) -> None:
    """Store the low 16 bits of every lane."""
    shorts = vector(width, "i16")
    body.store(shorts, body(f"trunc {vector(width, 'i32')} {values} to {shorts}"), out, column)


def with_escapes(body: Body, width: int, job: dict[str, str], entries: list[str], outs: list[str], escapes: str) -> str:
    """Write the next marked values where entries, of 32 columns for each of `outs`, are escapes; counts them on.

    Escapes are rare: one branch for all of the entries, then one lane after another.
    """
    ints, bits = vector(width, "i32"), "0"
    for place, entry in enumerate(entries):
        symbol = body(f"and {ints} {entry}, {splat(255)}")
        some, _ = ones(body, width, body(f"icmp eq {ints} {symbol}, {splat(ESCAPE)}"))
        bits = body(f"or i64 {bits}, {body(f'shl i64 {some}, {place * width}')}")
    bits = body(f"and i64 {bits}, {job['replace']}")
    before, marked, after = body.block, body.new_block(), body.new_block()
    body.do(f"br i1 {body(f'icmp ne i64 {bits}, 0')}, label %{marked}, label %{after}")
    body.enter(marked)
    lanes = Loop(body, body(f"call i64 @llvm.ctpop.i64(i64 {bits})"), [("i64", bits), ("i64", escapes)])
    left, number = lanes.values
    lane = body(f"call i64 @llvm.cttz.i64(i64 {left}, i1 true)")
    safe = body(f"call i64 @llvm.umin.i64(i64 {number}, i64 {job['last']})")
    out = outs[0]
    if len(outs) > 1:
        out = body(f"select i1 {body(f'icmp ult i64 {lane}, {BLOCK}')}, ptr {outs[0]}, ptr {outs[1]}")
    body.store("i16", body.load("i16", job["marked"], safe), out, body(f"and i64 {lane}, {BLOCK - 1}"))
    left = body(f"and i64 {left}, {body(f'sub i64 {left}, 1')}")
    _, number = lanes.close([left, body(f"add i64 {number}, 1")])
    end = body.block
    body.do(f"br label %{after}")
    body.enter(after)
    return body(f"phi i64 [{escapes}, %{before}], [{number}, %{end}]")
