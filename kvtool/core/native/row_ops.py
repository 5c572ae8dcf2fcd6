"""RMSNorm and the gated activation of an MLP, over rows of numbers in any stored format."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.core.native.builder import Value, along, each
from kvtool.core.native.formats import rounded
from kvtool.core.native.simd import ACTIVATIONS, fma, total


def inverse_rms(x: Value, count: Value | int, epsilon: Value) -> Value:
    """1 / √(mean(x²) + ε) of `count` numbers."""
    k = x.k
    count = k.constant("i64", count) if isinstance(count, int) else count

    def step(lanes: int, index: Value, sums: Sequence[Value]) -> Sequence[Value]:
        value = x.load(index, lanes)
        if lanes > 1:
            return [fma(value, value, sums[0])]
        single = value.lane(0)
        return [sums[0] + single * single]

    (squares,) = along(k, count, k.width, step, [k.zeros(k.width)], lambda wide: [total(*wide)])
    return 1.0 / k.call("llvm.sqrt.f32", "float", squares / count.to("float") + epsilon)


def rms_norm(x: Value, weight: Value, y: Value, count: Value, epsilon: Value, rounds_first: bool = True) -> None:
    """y = x / √(mean(x²) + ε), `rounds_first`: rounded as x is stored, · weight."""
    factor = inverse_rms(x, count, epsilon)

    def scale(lanes: int, index: Value) -> None:
        normed = x.load(index, lanes) * factor.splat(lanes)
        y.store((rounded(normed, x.target) if rounds_first else normed) * weight.load(index, lanes), index)

    each(x.k, count, scale)


def gate(y: Value, x: Value, count: Value, activation: str, first: Value | int = 0) -> None:
    """y = act(y), rounded as y is stored, · x."""

    def work(lanes: int, index: Value) -> None:
        value = rounded(ACTIVATIONS[activation](y.load(index, lanes)), y.target)
        y.store(value * x.load(index, lanes), index)

    each(y.k, count, work, first)
