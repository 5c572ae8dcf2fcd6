"""The softmax of a tile of scores, as LLVM IR: shifted by the largest so far, as keys come (online softmax)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from kvtool.core.model.flash.tiling import Tiling
from kvtool.core.native.ir import Body, Loop, splat

# 2^f for -.5 ≤ f ≤ .5 is 1 + f·(c₁ + f·(c₂ + …)), least squares of the relative error, weighted until it is even:
# 9e-8 with five, and 1e-4 with three, which is nothing beside bfloat16's 4e-3.
_EXACT = (0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
_BFLOAT16 = (0.6932829022407532, 0.2422109842300415, 0.055008936673402786)
_ROUNDING = 1.5 * 2**23  # a float32 that this is added to has its nearest integer in its low bits
_LEAST = -126.0  # the exponent of the least normal float32; below it the power is taken for 0


def number(value: float, kind: str = "float") -> str:
    """A float32 constant of one number in all lanes."""
    single = struct.unpack("<f", struct.pack("<f", value))[0]
    return f"splat ({kind} 0x{struct.unpack('<Q', struct.pack('<d', single))[0]:016X})"


def fma(body: Body, tiling: Tiling, one: str, other: str, more: str) -> str:
    """one · other + more."""
    floats = tiling.floats()
    return body(f"call {floats} @llvm.fmuladd.v{tiling.width}f32({floats} {one}, {floats} {other}, {floats} {more})")


def larger(body: Body, tiling: Tiling, one: str, other: str) -> str:
    """The larger of each; of a NaN and a number, `other`."""
    floats, width = tiling.floats(), tiling.width
    above = body(f"fcmp ogt {floats} {one}, {other}")
    return body(f"select <{width} x i1> {above}, {floats} {one}, {floats} {other}")


def _spread(body: Body, tiling: Tiling, single: str) -> str:
    """A float32 in all lanes."""
    floats = tiling.floats()
    lane = body(f"insertelement {floats} poison, float {single}, i32 0")
    return body(f"shufflevector {floats} {lane}, {floats} poison, <{tiling.width} x i32> zeroinitializer")


def cap_function(tiling: Tiling) -> str:
    """`void cap(scores, keys, before, largest, bend, top)`: scores s become top · tanh(s · scale / top).

    As sign(s) · (1 - e) / (1 + e) with e = 2^(bend · |s|). Sets `largest` to the largest of `before` and these.
    """
    body, floats, width = Body(), tiling.floats(), tiling.width
    bend, top, one = _spread(body, tiling, "%bend"), _spread(body, tiling, "%top"), number(1.0)

    def bent(at: int, score: str) -> str:
        size = body(f"call {floats} @llvm.fabs.v{width}f32({floats} {score})")
        power = _power(body, tiling, body(f"fmul {floats} {size}, {bend}"), _EXACT)
        less, more = body(f"fsub {floats} {one}, {power}"), body(f"fadd {floats} {one}, {power}")
        curve = body(f"fmul {floats} {body(f'fdiv {floats} {less}, {more}')}, {top}")
        return body(f"call {floats} @llvm.copysign.v{width}f32({floats} {curve}, {floats} {score})")

    _each_score(body, tiling, lambda index: bent)
    arguments = "ptr %scores, i64 %keys, ptr %before, ptr %largest, float %bend, float %top"
    return f"define internal void @cap({arguments}) {{\n{body.text()}\n}}\n"


def mask_function(tiling: Tiling) -> str:
    """`void mask(limits, begins, first key, keys, scores, before, largest)`: hides keys that a lane does not see.

    Sets `largest` to the largest of `before` and what is still seen.
    """
    body, floats = Body(), tiling.floats()
    ints = f"<{tiling.width} x i32>"
    some = [at * tiling.width for at in range(tiling.registers)]
    limits, begins = ([body.load(ints, side, lane) for lane in some] for side in ("%limits", "%begins"))

    def hidden(index: str) -> Callable[[int, str], str]:
        key = body(f"trunc i64 {body(f'add i64 %first, {index}')} to i32")
        lane = body(f"insertelement {ints} poison, i32 {key}, i32 0")
        key = body(f"shufflevector {ints} {lane}, {ints} poison, {ints} zeroinitializer")

        def hide(at: int, score: str) -> str:
            seen = body(f"icmp sle {ints} {key}, {limits[at]}")
            seen = body(f"and <{tiling.width} x i1> {seen}, {body(f'icmp sge {ints} {key}, {begins[at]}')}")
            return body(f"select <{tiling.width} x i1> {seen}, {floats} {score}, {floats} {number(float('-inf'))}")

        return hide

    _each_score(body, tiling, hidden)
    arguments = "ptr %limits, ptr %begins, i64 %first, i64 %keys, ptr %scores, ptr %before, ptr %largest"
    return f"define internal void @mask({arguments}) {{\n{body.text()}\n}}\n"


def _each_score(body: Body, tiling: Tiling, changing: Callable[[str], Callable[[int, str], str]]) -> None:
    """Change the scores of all keys in their place, and set `largest` to each lane's largest of them and of `before`.

    Parameters
    ----------
    changing : by a key's index, what makes a register's new scores of its number and its scores.
    """
    floats, some = tiling.floats(), [at * tiling.width for at in range(tiling.registers)]
    each = Loop(body, "%keys", [(floats, body.load(floats, "%before", lane)) for lane in some])
    change = changing(each.index)
    row, found = body(f"mul i64 {each.index}, {tiling.strip}"), []
    for at, (lane, value) in enumerate(zip(some, each.values, strict=True)):
        place = body(f"add i64 {row}, {lane}")
        score = change(at, body.load(floats, "%scores", place))
        body.store(floats, score, "%scores", place)
        found.append(larger(body, tiling, score, value))
    for lane, value in zip(some, each.close(found), strict=True):
        body.store(floats, value, "%largest", lane)
    body.do("ret void")


def weights_function(tiling: Tiling) -> str:
    """`void weights(scores, keys, before, largest, sums, shrink, scale)`: scores become 2^((score - largest) · scale).

    They are written over the scores: as float32, or two keys' in bfloat16 beside each other. `shrink` is what sums and
    results up to now are to be multiplied with, since they were shifted by `before`; `sums` are so and counted on.
    """
    body, floats = Body(), tiling.floats()
    scale = _spread(body, tiling, "%scale")
    minus = body(f"fneg {floats} {scale}")
    some = [at * tiling.width for at in range(tiling.registers)]
    shifts, sums = [], []
    for lane in some:
        largest = body.load(floats, "%largest", lane)
        shift = body(f"fmul {floats} {largest}, {minus}")
        # Of the difference: where the largest stays, this is exactly 1.
        less = body(f"fsub {floats} {body.load(floats, '%before', lane)}, {largest}")
        shrink = _power(body, tiling, body(f"fmul {floats} {less}, {scale}"), _EXACT)
        body.store(floats, shrink, "%shrink", lane)
        sums.append(body(f"fmul {floats} {body.load(floats, '%sums', lane)}, {shrink}"))
        shifts.append(shift)
    each = Loop(body, body("lshr i64 %keys, 1"), [(floats, value) for value in sums])
    row = body(f"mul i64 {each.index}, {2 * tiling.strip}")
    totals = []
    for lane, shift, total in zip(some, shifts, each.values, strict=True):
        places = [body(f"add i64 {row}, {lane + key * tiling.strip}") for key in range(2)]
        powers = [_weight(body, tiling, place, scale, shift) for place in places]
        for power in powers:
            total = body(f"fadd {floats} {total}, {power}")
        totals.append(total)
        _keep(body, tiling, powers, places, body(f"add i64 {body(f'lshr i64 {row}, 1')}, {lane}"))
    for lane, total in zip(some, each.close(totals), strict=True):
        body.store(floats, total, "%sums", lane)
    body.do("ret void")
    arguments = "ptr %scores, i64 %keys, ptr %before, ptr %largest, ptr %sums, ptr %shrink, float %scale"
    return f"define internal void @weights({arguments}) {{\n{body.text()}\n}}\n"


def _weight(body: Body, tiling: Tiling, place: str, scale: str, shift: str) -> str:
    score = body.load(tiling.floats(), "%scores", place)
    return _power(body, tiling, fma(body, tiling, score, scale, shift), _BFLOAT16 if tiling.pairs else _EXACT)


def _keep(body: Body, tiling: Tiling, powers: Sequence[str], places: Sequence[str], pair_place: str) -> None:
    if tiling.pairs:
        body.store(f"<{tiling.width} x i32>", _pair(body, tiling, powers), "%scores", pair_place)
        return
    for power, place in zip(powers, places, strict=True):
        body.store(tiling.floats(), power, "%scores", place)


def _pair(body: Body, tiling: Tiling, powers: Sequence[str]) -> str:
    """Two keys' weights of each lane in bfloat16, the first one low: i32."""
    low, high = powers
    both = body(
        f"call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512({tiling.floats()} {high}, {tiling.floats()} {low})"
    )
    order = ", ".join(f"i32 {lane + 16 * key}" for lane in range(16) for key in range(2))
    mixed = body(f"shufflevector <32 x bfloat> {both}, <32 x bfloat> poison, <32 x i32> <{order}>")
    return body(f"bitcast <32 x bfloat> {mixed} to <16 x i32>")


def _power(body: Body, tiling: Tiling, exponents: str, polynomial: Sequence[float]) -> str:
    """2^x for x ≤ 0; exactly 0 below 2^-126, and for -∞."""
    floats, width = tiling.floats(), tiling.width
    ints = f"<{width} x i32>"
    rounded = body(f"fadd {floats} {exponents}, {number(_ROUNDING)}")
    whole = body(f"fsub {floats} {rounded}, {number(_ROUNDING)}")
    rest = body(f"fsub {floats} {exponents}, {whole}")
    value = number(polynomial[-1])
    for factor in [*reversed(polynomial[:-1]), 1.0]:
        value = fma(body, tiling, value, rest, number(factor))
    up = body(f"shl {ints} {body(f'bitcast {floats} {rounded} to {ints}')}, {splat(23)}")
    bits = body(f"bitcast {floats} {value} to {ints}")
    power = body(f"bitcast {ints} {body(f'add {ints} {bits}, {up}')} to {floats}")
    small = body(f"fcmp olt {floats} {exponents}, {number(_LEAST)}")
    return body(f"select <{width} x i1> {small}, {floats} zeroinitializer, {floats} {power}")
