"""What the code of all operations shares: its arguments, its share of the work, vectors, and exp."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from kvtool.core.model.quantised.ir_codes import fma
from kvtool.core.model.stepping.tape import CONTEXT, FIELDS, UNIT
from kvtool.core.native.ir import Body, Loop, splat, vector

ARGUMENTS = "ptr %op, ptr %context, i64 %thread, i64 %threads"
MAGIC = 12582912.0  # 1.5 · 2²³: adding it to a float32 leaves a whole number
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOWEST, _HIGHEST = -87.0, 88.0


def declarations() -> str:
    """What a module with any of the operations declares beside what products do."""
    lines = ["declare i64 @llvm.umin.i64(i64, i64)", "declare float @llvm.sqrt.f32(float)"]
    for width in (1, 2, 4, 8, 16):
        kind = vector(width, "float")
        if width not in (8, 16):  # those products declare
            lines += [f"declare {kind} @llvm.fmuladd.v{width}f32({kind}, {kind}, {kind})"]
            lines += [f"declare float @llvm.vector.reduce.fadd.v{width}f32(float, {kind})"]
        lines += [f"declare float @llvm.vector.reduce.fmax.v{width}f32({kind})"]
    return "\n".join([*lines, ""])


def function(name: str, body: Body, arguments: str = ARGUMENTS) -> str:
    """The text of a function without a value."""
    body.do("ret void")
    return f"define void @{name}({arguments}) {{\n{body.text()}\n}}\n"


def fields(body: Body, kind: str) -> dict[str, str]:
    """The fields of an operation of this kind, loaded; a pointer with a stride is this thread's own."""
    types = FIELDS[kind]
    found = {name: _load(body, "%op", 2 + place, types[name]) for place, name in enumerate(types)}
    for name in [name for name in types if f"{name}_stride" in types]:
        own = body(f"mul i64 %thread, {found[f'{name}_stride']}")
        found[name] = body.at("i8", found[name], own)
    return found


def context(body: Body, name: str) -> str:
    """A field of what the tape is played with, loaded."""
    return _load(body, "%context", list(CONTEXT).index(name), CONTEXT[name])


def _load(body: Body, pointer: str, place: int, kind: str) -> str:
    return body(f"load {kind}, ptr {body.at('i64', pointer, place)}, align 8")


def share(body: Body, count: str, unit: int = 1) -> tuple[str, str]:
    """This thread's part of `count` things: the first, and how many; the threads differ by one unit at most."""
    units = count if unit == 1 else body(f"udiv i64 {body(f'add i64 {count}, {unit - 1}')}, {unit}")
    after = body("add i64 %thread, 1")
    bounds = [body(f"udiv i64 {body(f'mul i64 {units}, {number}')}, %threads") for number in ("%thread", after)]
    if unit != 1:
        scaled = [body(f"mul i64 {bound}, {unit}") for bound in bounds]
        bounds = [body(f"call i64 @llvm.umin.i64(i64 {bound}, i64 {count})") for bound in scaled]
    return bounds[0], body(f"sub i64 {bounds[1]}, {bounds[0]}")


def rows(body: Body, count: str) -> tuple[str, str]:
    """This thread's part of the rows of a product and of what follows it row by row."""
    return share(body, count, UNIT)


def each(body: Body, width: int, first: str, count: str, work: Callable[[int, str], None]) -> None:
    """Emit `work(lanes, index)` for `count` numbers from `first` on: vectors, then the rest one by one."""
    whole = body(f"udiv i64 {count}, {width}")
    loop = Loop(body, whole, may_be_empty=True)
    work(width, body(f"add i64 {first}, {body(f'mul i64 {loop.index}, {width}')}"))
    loop.close()
    behind = body(f"add i64 {first}, {body(f'mul i64 {whole}, {width}')}")
    loop = Loop(body, body(f"urem i64 {count}, {width}"), may_be_empty=True)
    work(1, body(f"add i64 {behind}, {loop.index}"))
    loop.close()


def constant(value: float) -> str:
    """A float32 number as LLVM writes it: the bits of the same number in float64."""
    (single,) = struct.unpack("<f", struct.pack("<f", value))
    return f"0x{struct.unpack('<Q', struct.pack('<d', single))[0]:016X}"


def splatted(value: float) -> str:
    """A constant vector of one float32 number."""
    return f"splat (float {constant(value)})"


def spread(body: Body, lanes: int, value: str) -> str:
    """A vector with a float in all its lanes."""
    kind = vector(lanes, "float")
    one = body(f"insertelement {kind} poison, float {value}, i32 0")
    return body(f"shufflevector {kind} {one}, {kind} poison, <{lanes} x i32> zeroinitializer")


def arithmetic(body: Body, lanes: int, operation: str, left: str, right: str) -> str:
    """`fadd`, `fmul` and the like, lane by lane."""
    return body(f"{operation} {vector(lanes, 'float')} {left}, {right}")


def summed(body: Body, lanes: int, value: str) -> str:
    """The sum of a vector's lanes."""
    kind = vector(lanes, "float")
    return body(f"call reassoc float @llvm.vector.reduce.fadd.v{lanes}f32(float -0.0, {kind} {value})")


def largest(body: Body, lanes: int, value: str) -> str:
    """The largest of a vector's lanes."""
    return body(f"call nnan float @llvm.vector.reduce.fmax.v{lanes}f32({vector(lanes, 'float')} {value})")


def larger(body: Body, lanes: int, left: str, right: str) -> str:
    """The larger of two, lane by lane."""
    kind = vector(lanes, "float")
    more = body(f"fcmp ogt {kind} {left}, {right}")
    return body(f"select <{lanes} x i1> {more}, {kind} {left}, {kind} {right}")


def exp(body: Body, lanes: int, value: str) -> str:
    """e to the power of each lane, within 2 units of its last place; from -87 and to 88 it stays what it is there.

    x = n · ln 2 + r: 2ⁿ is written into a float's exponent, e to the power of r a polynomial (that of Cephes' expf).
    """
    floats, words = vector(lanes, "float"), vector(lanes, "i32")
    low = larger(body, lanes, value, splatted(_LOWEST))
    less = body(f"fcmp olt {floats} {low}, {splatted(_HIGHEST)}")
    x = body(f"select <{lanes} x i1> {less}, {floats} {low}, {floats} {splatted(_HIGHEST)}")
    near = arithmetic(body, lanes, "fadd", arithmetic(body, lanes, "fmul", x, splatted(1.44269504088896341)),
                      splatted(MAGIC))  # fmt: skip
    power = arithmetic(body, lanes, "fsub", near, splatted(MAGIC))
    rest = fma(body, lanes, power, splatted(-0.693359375), x)
    rest = fma(body, lanes, power, splatted(2.12194440e-4), rest)
    sum_ = splatted(_EXP[0])
    for factor in _EXP[1:]:
        sum_ = fma(body, lanes, sum_, rest, splatted(factor))
    square = arithmetic(body, lanes, "fmul", rest, rest)
    sum_ = arithmetic(body, lanes, "fadd", fma(body, lanes, sum_, square, rest), splatted(1.0))
    whole = body(f"fptosi {floats} {power} to {words}")
    bits = body(f"shl {words} {body(f'add {words} {whole}, {splat(127)}')}, {splat(23)}")
    return arithmetic(body, lanes, "fmul", sum_, body(f"bitcast {words} {bits} to {floats}"))


def sigmoid(body: Body, lanes: int, value: str) -> str:
    """1 / (1 + e to the power of -x)."""
    negated = body(f"fneg {vector(lanes, 'float')} {value}")
    below = arithmetic(body, lanes, "fadd", exp(body, lanes, negated), splatted(1.0))
    return arithmetic(body, lanes, "fdiv", splatted(1.0), below)


def load_numbers(body: Body, lanes: int, element: str, pointer: str, index: str | int) -> str:
    """Some numbers of a row in float32; `element`: "float32" or "bfloat16"."""
    if element == "float32":
        return body.load(vector(lanes, "float"), pointer, index)
    words = vector(lanes, "i32")
    bits = body.load(vector(lanes, "i16"), pointer, index)
    wide = body(f"zext {vector(lanes, 'i16')} {bits} to {words}")
    high = body(f"shl {words} {wide}, {splat(16)}")
    return body(f"bitcast {words} {high} to {vector(lanes, 'float')}")


def store_numbers(body: Body, lanes: int, element: str, value: str, pointer: str, index: str | int) -> None:
    """Write float32 numbers into a row, rounded to nearest, ties to even, where that is bfloat16."""
    floats, words = vector(lanes, "float"), vector(lanes, "i32")
    if element == "float32":
        body.store(floats, value, pointer, index)
        return
    bits = body(f"bitcast {floats} {value} to {words}")
    odd = body(f"and {words} {body(f'lshr {words} {bits}, {splat(16)}')}, {splat(1)}")
    up = body(f"add {words} {body(f'add {words} {bits}, {splat(0x7FFF)}')}, {odd}")
    short = body(f"trunc {words} {body(f'lshr {words} {up}, {splat(16)}')} to {vector(lanes, 'i16')}")
    body.store(vector(lanes, "i16"), short, pointer, index)


def lanes_for(width: int, *counts: int) -> int:
    """The most lanes, up to `width`, of which all the counts are multiples."""
    return next(lanes for lanes in (16, 8, 4, 2, 1) if lanes <= width and not any(count % lanes for count in counts))


def tiles(count: int, most: int) -> Sequence[range]:
    """`count` things, at most so many at a time."""
    return [range(start, min(start + most, count)) for start in range(0, count, most)]
