"""The softmax of a tile of scores, as LLVM IR: shifted by the largest so far, as keys come (online softmax)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtool.core.kernels.attention.flash.tiling import Tiling
from kvtool.core.native.builder import FunctionBuilder, Value
from kvtool.core.native.simd import MAGIC, fma, larger

# 2^f for -.5 ≤ f ≤ .5 is 1 + f·(c₁ + f·(c₂ + …)), least squares of the relative error, weighted until it is even:
# 9e-8 with five, and 1e-4 with three, which is nothing beside bfloat16's 4e-3.
_EXACT = (0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
_BFLOAT16 = (0.6932829022407532, 0.2422109842300415, 0.055008936673402786)
_LEAST = -126.0  # the exponent of the least normal float32; below it the power is taken for 0


def cap_function(tiling: Tiling) -> FunctionBuilder:
    """`void cap(scores, keys, before, largest, bend, top)`: scores s become top · tanh(s · scale / top).

    As sign(s) · (1 - e) / (1 + e) with e = 2^(bend · |s|). Sets `largest` to the largest of `before` and these.
    """
    k = tiling.function("cap", "float* scores, i64 keys, float* before, float* largest, float bend, float top")
    bend, top = (side.splat(k.width) for side in (k.args.bend, k.args.top))
    kind = f"v{k.width}f32"

    def bent(at: int, score: Value) -> Value:
        power = _power(k.call(f"llvm.fabs.{kind}", score.type, score) * bend, _EXACT)
        curve = (1.0 - power) / (power + 1.0) * top
        return k.call(f"llvm.copysign.{kind}", score.type, curve, score)

    _each_score(tiling, k, lambda index: bent)
    return k


def mask_function(tiling: Tiling) -> FunctionBuilder:
    """`void mask(limits, begins, first key, keys, scores, before, largest)`: hides keys that a lane does not see.

    Sets `largest` to the largest of `before` and what is still seen.
    """
    k = tiling.function(
        "mask", "i32* limits, i32* begins, i64 first, i64 keys, float* scores, float* before, float* largest"
    )
    args = k.args
    limits, begins = ([side.load(lane, k.width) for lane in tiling.starts] for side in (args.limits, args.begins))

    def hidden(index: Value) -> Callable[[int, Value], Value]:
        key = (args.first + index).to("i32").splat(k.width)

        def hide(at: int, score: Value) -> Value:
            seen = key.compare("sle", limits[at]) & key.compare("sge", begins[at])
            return seen.select(score, float("-inf"))

        return hide

    _each_score(tiling, k, hidden)
    return k


def _each_score(tiling: Tiling, k: FunctionBuilder, changing: Callable[[Value], Callable[[int, Value], Value]]) -> None:
    """Change the scores of all keys in their place, and set `largest` to each lane's largest of them and of `before`.

    Parameters
    ----------
    changing : by a key's index, what makes a register's new scores of its number and its scores.
    """
    args = k.args
    each = k.loop(args.keys, *(args.before.load(lane, k.width) for lane in tiling.starts))
    change = changing(each.index)
    row, found = each.index * tiling.strip, []
    for at, (lane, value) in enumerate(zip(tiling.starts, each.values, strict=True)):
        place = row + lane
        score = change(at, args.scores.load(place, k.width))
        args.scores.store(score, place)
        found.append(larger(score, value))
    for lane, value in zip(tiling.starts, each.close(*found), strict=True):
        args.largest.store(value, lane)


def weights_function(tiling: Tiling) -> FunctionBuilder:
    """`void weights(scores, keys, before, largest, sums, shrink, scale)`: scores become 2^((score - largest) · scale).

    They are written over the scores: as float32, or two keys' in bfloat16 beside each other. `shrink` is what sums and
    results up to now are to be multiplied with, since they were shifted by `before`; `sums` are so and counted on.
    """
    k = tiling.function(
        "weights",
        "float* scores, i64 keys, float* before, float* largest, float* sums, float* shrink, float scale",
    )
    args = k.args
    scale = args.scale.splat(k.width)
    minus = -scale
    shifts, sums = [], []
    for lane in tiling.starts:
        largest = args.largest.load(lane, k.width)
        shifts.append(largest * minus)
        # Of the difference: where the largest stays, this is exactly 1.
        shrink = _power((args.before.load(lane, k.width) - largest) * scale, _EXACT)
        args.shrink.store(shrink, lane)
        sums.append(args.sums.load(lane, k.width) * shrink)
    each = k.loop(args.keys >> 1, *sums)
    row = each.index * (2 * tiling.strip)
    totals = []
    for lane, shift, total in zip(tiling.starts, shifts, each.values, strict=True):
        places = [row + (lane + key * tiling.strip) for key in range(2)]
        exponents = [fma(args.scores.load(place, k.width), scale, shift) for place in places]
        low, high = (_power(exponent, _BFLOAT16 if tiling.pairs else _EXACT) for exponent in exponents)
        totals.append(total + low + high)
        if tiling.pairs:
            args.scores.of("i32").store(_pair(low, high), (row >> 1) + lane)
        else:
            for power, place in zip((low, high), places, strict=True):
                args.scores.store(power, place)
    for lane, total in zip(tiling.starts, each.close(*totals), strict=True):
        args.sums.store(total, lane)
    return k


def _pair(low: Value, high: Value) -> Value:
    """Two keys' weights of each lane in bfloat16, the first one low: i32."""
    both = low.k.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", "<32 x bfloat>", high, low)
    return both.shuffle([lane + 16 * key for lane in range(16) for key in range(2)]).bitcast("<16 x i32>")


def _power(exponents: Value, polynomial: Sequence[float]) -> Value:
    """2^x for x ≤ 0; exactly 0 below 2^-126, and for -∞."""
    shifted = exponents + MAGIC
    rest = exponents - (shifted - MAGIC)
    value = rest.like(polynomial[-1])
    for factor in [*reversed(polynomial[:-1]), 1.0]:
        value = fma(value, rest, factor)
    power = (value.bitcast("i32") + (shifted.bitcast("i32") << 23)).bitcast("float")
    return (exponents < _LEAST).select(rest.like(0.0), power)
