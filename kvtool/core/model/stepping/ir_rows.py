"""Operations on one row of numbers: products, norms, sums, the gate of an MLP."""

from __future__ import annotations

from kvtool.core.kernels.linear.gemv_ir import product
from kvtool.core.model.stepping.ir_common import operation, rows
from kvtool.core.native import simd
from kvtool.core.native.builder import FunctionBuilder, Value, each
from kvtool.core.native.isa import Isa
from kvtool.core.native.simd import fma


def multiply_name(kind: str, height: int) -> str:
    """The name of an operation that `multiply` makes."""
    return f"multiply_{kind}" if height == 1 else f"multiply_{kind}_{height}"


def multiply(isa: Isa, kind: str, height: int = 1) -> list[FunctionBuilder]:
    """The operation `multiply_KIND`, this thread's rows of a product, and what it calls; of `height` inputs."""
    function = product(isa, kind, height)
    k, have = operation(isa, "product", multiply_name(kind, height))
    first, count = rows(k, have.rows)
    first = have.first + first
    given = {"first": first, "last": first + count, "out": have.y}
    k.do(function.name, *(given[name] if name in given else have[name] for name in function.args.names))
    return [function, k]


def norm(isa: Isa) -> FunctionBuilder:
    """The operation `norm`: root mean square layer normalisation, float32."""
    k, have = operation(isa, "norm")
    simd.rms_norm(have.x, have.weight, have.y, have.count, have.epsilon)
    return k


def blend(isa: Isa) -> FunctionBuilder:
    """The operation `blend`: y = a · y + b · x, of this thread's rows."""
    k, have = operation(isa, "blend")

    def mix(lanes: int, index: Value) -> None:
        y = have.y.load(index, lanes) * have.a.splat(lanes)
        have.y.store(fma(have.x.load(index, lanes), have.b.splat(lanes), y), index)

    first, count = rows(k, have.count)
    each(k, count, mix, first)
    return k


def gate(isa: Isa, activation: str) -> FunctionBuilder:
    """The operation `gate`: y = act(y) · x, of this thread's rows."""
    k, have = operation(isa, "gate")
    first, count = rows(k, have.count)
    simd.gate(have.y, have.x, count, activation, first)
    return k
