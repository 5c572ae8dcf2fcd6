"""Number formats in memory: the only place that widens them to float32 and rounds float32 to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtool.core.native.builder import Value

# Formats and what LLVM calls them. Pointers to such load float32 numbers, and round these where they store them.
STORED = {"float32": "float", "bfloat16": "i16", "float16": "half"}
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_NAN = 0x7FC0  # of bfloat16
_HALF = 0x3F000000  # 0.5 in float32


def widen(value: Value, form: str) -> Value:
    """Float32 of numbers as a format stores them."""
    if form == "float32":
        return value
    if form == "bfloat16":
        return (value.to("i32") << 16).bitcast("float")
    return value.to("float") if value.k.isa.converts_float16 else _widen_float16(value.bitcast("i16").to("i32"))


def narrow(value: Value, form: str) -> Value:
    """Float32 as a format stores it, to the nearest, ties to even."""
    if form == "float32":
        return value
    if form == "float16":
        return value.to("half") if value.k.isa.converts_float16 else _narrow_float16(value).to("i16").bitcast("half")
    short = (_round_up(value) >> 16).to("i16")
    return value.compare("uno", 0.0).select(short.like(_NAN), short) if value.k.keeps_nan else short


def rounded(value: Value, form: str) -> Value:
    """The nearest numbers of a format, ties to even, as float32; of bfloat16 never NaN."""
    if form == "bfloat16":
        return (_round_up(value) & -0x10000).bitcast("float")
    return widen(narrow(value, form), form)


def _round_up(value: Value) -> Value:
    """Bits of which the upper half is the nearest bfloat16."""
    bits = value.bitcast("i32")
    return bits + (((bits >> 16) & 1) + 0x7FFF)


def _widen_float16(bits: Value) -> Value:
    """By integers and one product, for CPUs whose float16 LLVM calls a library for."""
    size = bits & 0x7FFF
    finite = ((size << 13).bitcast("float") * 2.0**112).bitcast("i32")  # the exponents begin elsewhere
    value = (size >= 0x7C00).select(finite | 0x7F800000, finite)
    return (value | ((bits & 0x8000) << 16)).bitcast("float")


def _narrow_float16(value: Value) -> Value:
    """By integers. Below 2^-14 the sum with 0.5 rounds to the spacing of the subnormal numbers, 2^-24."""
    bits = value.bitcast("i32")
    size = bits & 0x7FFFFFFF
    small = (size.bitcast("float") + 0.5).bitcast("i32") - _HALF
    odd = (size >> 13) & 1
    normal = ((size - (112 << 23)) + 0xFFF + odd) >> 13
    finite = (size < (113 << 23)).select(small, normal)
    whole = (size >= (143 << 23)).select(size.like(0x7C00), finite)
    return whole | ((bits >> 16) & 0x8000)
