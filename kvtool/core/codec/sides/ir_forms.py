"""Numbers of a model's formats in LLVM IR: loaded as float32, rounded once where they are stored."""

from __future__ import annotations

from kvtool.core.codec.entropy import ir_output
from kvtool.core.native.ir import Body, splat, vector
from kvtool.core.native.isa import SCALAR, Isa

FORMS = ("bfloat16", "float16", "float32")
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ELEMENT = {"bfloat16": "i16", "float16": "i16", "float32": "float"}
_HALF_EXPONENT = 0x7C00


def loaded(body: Body, isa: Isa, form: str, width: int, pointer: str, index: str) -> str:
    """Numbers of a form as float32."""
    if form == "float32":
        return body.load(vector(width, "float"), pointer, index)
    ints = vector(width, "i32")
    bits = body(f"zext {vector(width, 'i16')} {body.load(vector(width, 'i16'), pointer, index)} to {ints}")
    return widened(body, isa, form, width, bits)


def widened(body: Body, isa: Isa, form: str, width: int, bits: str) -> str:
    """float32 of a narrow form's bits, i32."""
    ints, floats = vector(width, "i32"), vector(width, "float")
    if form == "bfloat16":
        return body(f"bitcast {ints} {body(f'shl {ints} {bits}, {splat(16)}')} to {floats}")
    if isa is not SCALAR:
        short, half = vector(width, "i16"), vector(width, "half")
        halves = body(f"bitcast {short} {body(f'trunc {ints} {bits} to {short}')} to {half}")
        return body(f"fpext {half} {halves} to {floats}")
    return _widened_half(body, width, bits)


def _widened_half(body: Body, width: int, bits: str) -> str:
    """float32 of float16 by integers and one product, for CPUs whose float16 LLVM calls a library for."""
    ints, floats = vector(width, "i32"), vector(width, "float")
    size = body(f"and {ints} {bits}, {splat(0x7FFF)}")
    moved = body(f"bitcast {ints} {body(f'shl {ints} {size}, {splat(13)}')} to {floats}")
    up = body(f"bitcast {ints} {splat((127 + 112) << 23)} to {floats}")  # 2^112: the exponents begin elsewhere
    finite = body(f"bitcast {floats} {body(f'fmul {floats} {moved}, {up}')} to {ints}")
    endless = body(f"icmp uge {ints} {size}, {splat(_HALF_EXPONENT)}")
    top = body(f"or {ints} {finite}, {splat(0x7F800000)}")
    value = body(f"select <{width} x i1> {endless}, {ints} {top}, {ints} {finite}")
    sign = body(f"shl {ints} {body(f'and {ints} {bits}, {splat(0x8000)}')}, {splat(16)}")
    return body(f"bitcast {ints} {body(f'or {ints} {value}, {sign}')} to {floats}")


def stored(body: Body, isa: Isa, form: str, width: int, values: str, pointer: str, index: str) -> None:
    """Store float32 as a form, each rounded to the nearest, ties to even."""
    if form == "float32":
        body.store(vector(width, "float"), values, pointer, index)
        return
    bits = ir_output.rounded(body, width, form, values, by_cpu=isa is not SCALAR)
    short = vector(width, "i16")
    body.store(short, body(f"trunc {vector(width, 'i32')} {bits} to {short}"), pointer, index)


def nearest(body: Body, isa: Isa, form: str, width: int, values: str) -> str:
    """The form's nearest numbers, as float32."""
    if form == "float32":
        return values
    return widened(body, isa, form, width, ir_output.rounded(body, width, form, values, by_cpu=isa is not SCALAR))
