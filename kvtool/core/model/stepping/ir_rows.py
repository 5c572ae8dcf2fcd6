"""Operations on one row of numbers: products, norms, sums, the gate of an MLP."""

from __future__ import annotations

from collections.abc import Callable

from kvtool.core.model.quantised.ir_codes import fma
from kvtool.core.model.stepping.ir_common import (
    arithmetic,
    each,
    fields,
    function,
    rows,
    sigmoid,
    splatted,
    spread,
    summed,
)
from kvtool.core.native.ir import Body, Isa, Loop, vector

_GELU = (0.7978845608028654, 0.044715)  # √(2/π)


def multiply_name(kind: str, height: int) -> str:
    """The name of an operation that `multiply` makes."""
    return f"multiply_{kind}" if height == 1 else f"multiply_{kind}_{height}"


def multiply(kind: str, height: int = 1) -> str:
    """The operation `multiply_KIND`: this thread's rows of a product; `multiply_KIND_HEIGHT` of that many inputs."""
    body = Body()
    have = fields(body, "product")
    first, count = rows(body, have["rows"])
    first = body(f"add i64 {have['first']}, {first}")
    last = body(f"add i64 {first}, {count}")
    arguments = [f"ptr {have[name]}" for name in ("data", "scales", "mins", "x", "y")]
    arguments += [f"i64 {number}" for number in (first, last, have["columns"])]
    if height > 1:
        arguments += [f"i64 {have[name]}" for name in ("inputs", "x_pitch", "y_pitch")]
    name = multiply_name(kind, height)
    body.do(f"call void @{name.replace('multiply', 'product')}({', '.join(arguments)})")
    return function(name, body)


def norm(isa: Isa) -> str:
    """The operation `norm`: root mean square layer normalisation, float32."""
    body = Body()
    have = fields(body, "norm")
    factor = inverse_rms(body, isa.width, have["x"], have["count"], have["epsilon"])

    def scale(lanes: int, index: str) -> None:
        kind = vector(lanes, "float")
        x, weight = body.load(kind, have["x"], index), body.load(kind, have["weight"], index)
        scaled = arithmetic(body, lanes, "fmul", x, spread(body, lanes, factor))
        body.store(kind, arithmetic(body, lanes, "fmul", scaled, weight), have["y"], index)

    each(body, isa.width, "0", have["count"], scale)
    return function("norm", body)


def inverse_rms(body: Body, width: int, x: str, count: str, epsilon: str) -> str:
    """1 / √(mean(x²) + ε) of `count` numbers, a float."""
    kind = vector(width, "float")
    whole = body(f"udiv i64 {count}, {width}")
    loop = Loop(body, whole, [(kind, "zeroinitializer")], may_be_empty=True)
    value = body.load(kind, x, body(f"mul i64 {loop.index}, {width}"))
    (squares,) = loop.close([fma(body, width, value, value, loop.values[0])])
    behind = body(f"mul i64 {whole}, {width}")
    loop = Loop(body, body(f"urem i64 {count}, {width}"), [("float", summed(body, width, squares))], may_be_empty=True)
    value = body.load("float", x, body(f"add i64 {behind}, {loop.index}"))
    (total,) = loop.close([body(f"fadd float {loop.values[0]}, {body(f'fmul float {value}, {value}')}")])
    mean = body(f"fdiv float {total}, {body(f'uitofp i64 {count} to float')}")
    root = body(f"call float @llvm.sqrt.f32(float {body(f'fadd float {mean}, {epsilon}')})")
    return body(f"fdiv float 1.0, {root}")


def blend(isa: Isa) -> str:
    """The operation `blend`: y = a · y + b · x, of this thread's rows."""
    body = Body()
    have = fields(body, "blend")

    def mix(lanes: int, index: str) -> None:
        kind = vector(lanes, "float")
        y = arithmetic(body, lanes, "fmul", body.load(kind, have["y"], index), spread(body, lanes, have["a"]))
        x = body.load(kind, have["x"], index)
        body.store(kind, fma(body, lanes, x, spread(body, lanes, have["b"]), y), have["y"], index)

    each(body, isa.width, *rows(body, have["count"]), mix)
    return function("blend", body)


def gate(isa: Isa, activation: str) -> str:
    """The operation `gate`: y = act(y) · x, of this thread's rows."""
    body = Body()
    have = fields(body, "gate")

    def work(lanes: int, index: str) -> None:
        kind = vector(lanes, "float")
        value = ACTIVATIONS[activation](body, lanes, body.load(kind, have["y"], index))
        product = arithmetic(body, lanes, "fmul", value, body.load(kind, have["x"], index))
        body.store(kind, product, have["y"], index)

    each(body, isa.width, *rows(body, have["count"]), work)
    return function("gate", body)


def _silu(body: Body, lanes: int, x: str) -> str:
    return arithmetic(body, lanes, "fmul", x, sigmoid(body, lanes, x))


def _gelu_tanh(body: Body, lanes: int, x: str) -> str:
    """(1 + tanh z) / 2 is the sigmoid of 2z."""
    square = arithmetic(body, lanes, "fmul", x, x)
    inner = fma(body, lanes, square, splatted(_GELU[1]), splatted(1.0))
    doubled = arithmetic(body, lanes, "fmul", arithmetic(body, lanes, "fmul", x, inner), splatted(2 * _GELU[0]))
    return arithmetic(body, lanes, "fmul", x, sigmoid(body, lanes, doubled))


ACTIVATIONS: dict[str, Callable[[Body, int, str], str]] = {"silu": _silu, "gelu_tanh": _gelu_tanh}
