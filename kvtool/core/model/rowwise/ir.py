"""LLVM IR of what a decoder layer does to each row between its products, every result rounded as the model rounds it.

A model that computes in bfloat16 rounds after every operation of torch's. So does this, so that its numbers are the
model's own but for the order of a norm's sum and the last place of an exponential.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtool.core.model.quantised import ir_codes
from kvtool.core.model.quantised.ir_codes import fma
from kvtool.core.model.stepping import ir_common
from kvtool.core.model.stepping.ir_common import arithmetic, each, load_numbers, spread, store_numbers, summed
from kvtool.core.model.stepping.ir_rows import ACTIVATIONS
from kvtool.core.native.ir import Body, Isa, Loop, Shares, splat, vector

# A job's fields, 8 bytes each: `next` is the first row that nobody has taken yet, `share` how many are taken at a time.
_TAKING = {"next": "i64", "share": "i64", "rows": "i64"}
FIELDS = {
    # sum = x + more, where there is more; y = sum / √(mean(sum²) + ε), rounded, · weight
    "norm": {
        **_TAKING,
        **dict.fromkeys(("x", "more", "sum", "weight", "y"), "ptr"),
        **{"count": "i64", "epsilon": "float"},
    },
    # y = act(y) · x
    "gate": {**_TAKING, "x": "ptr", "y": "ptr", "count": "i64"},
    # heads of queries and of keys, `[rows, heads, head_dim]`, rotated by halves where they are
    "turn": {
        **_TAKING,
        **dict.fromkeys(("queries", "keys", "cos", "sin"), "ptr"),
        **dict.fromkeys(("heads", "kv_heads", "head_dim", "half"), "i64"),
    },
}


def module(isa: Isa, element: str, activation: str) -> str:
    """All functions `void NAME(ptr job)`: any number of threads may run one with the same job.

    Parameters
    ----------
    element : "float32" or "bfloat16": what the model computes in.
    activation : one of `ACTIVATIONS`.
    """
    parts = [ir_codes.declarations(), ir_common.declarations(), "declare i64 @llvm.smin.i64(i64, i64)\n"]
    parts += [_taking("norm", lambda body, have, row: _norm(body, isa, element, have, row))]
    parts += [_taking("gate", lambda body, have, row: _gate(body, isa, (element, activation), have, row))]
    parts += [_taking("turn", lambda body, have, row: _turn(body, isa, element, have, row))]
    return "".join(parts)


def _taking(name: str, work: Callable[[Body, dict[str, str], str], None]) -> str:
    """The function: takes some rows after the other until none is left."""
    body, have = Body(), {}
    for place, (field, kind) in enumerate(FIELDS[name].items()):
        have[field] = body(f"load {kind}, ptr {body.at('i64', '%job', place)}, align 8")
    shares = Shares(body, have["share"], have["rows"])
    loop = Loop(body, body(f"sub i64 {shares.last}, {shares.first}"))
    work(body, have, body(f"add i64 {shares.first}, {loop.index}"))
    loop.close()
    shares.close()
    return ir_common.function(name, body, "ptr %job")


def _rounded(body: Body, lanes: int, element: str, value: str) -> str:
    """Float32 numbers as the model's format holds them: to nearest, ties to even."""
    if element == "float32":
        return value
    floats, words = vector(lanes, "float"), vector(lanes, "i32")
    bits = body(f"bitcast {floats} {value} to {words}")
    odd = body(f"and {words} {body(f'lshr {words} {bits}, {splat(16)}')}, {splat(1)}")
    up = body(f"add {words} {body(f'add {words} {bits}, {splat(0x7FFF)}')}, {odd}")
    return body(f"bitcast {words} {body(f'and {words} {up}, {splat(-0x10000)}')} to {floats}")


def _row_of(body: Body, element: str, pointer: str, row: str, count: str) -> str:
    return body.at("float" if element == "float32" else "i16", pointer, body(f"mul i64 {row}, {count}"))


def _norm(body: Body, isa: Isa, element: str, have: dict[str, str], row: str) -> None:
    x, more, sum_, y = (_row_of(body, element, have[name], row, have["count"]) for name in ("x", "more", "sum", "y"))
    adding, plain, ready = body.new_block(), body.new_block(), body.new_block()
    some = body(f"icmp ne ptr {have['more']}, null")
    body.do(f"br i1 {some}, label %{adding}, label %{plain}")
    body.enter(adding)

    def add(lanes: int, index: str) -> None:
        both = [load_numbers(body, lanes, element, side, index) for side in (x, more)]
        store_numbers(body, lanes, element, arithmetic(body, lanes, "fadd", *both), sum_, index)

    each(body, isa.width, "0", have["count"], add)
    body.do(f"br label %{ready}")
    added = body.block
    body.enter(plain)
    body.do(f"br label %{ready}")
    body.enter(ready)
    source = body(f"phi ptr [{sum_}, %{added}], [{x}, %{plain}]")
    factor = _inverse_rms(body, isa, element, source, have)

    def scale(lanes: int, index: str) -> None:
        value = load_numbers(body, lanes, element, source, index)
        scaled = _rounded(body, lanes, element, arithmetic(body, lanes, "fmul", value, spread(body, lanes, factor)))
        weight = body.load(vector(lanes, "float"), have["weight"], index)
        store_numbers(body, lanes, element, arithmetic(body, lanes, "fmul", scaled, weight), y, index)

    each(body, isa.width, "0", have["count"], scale)


def _inverse_rms(body: Body, isa: Isa, element: str, source: str, have: dict[str, str]) -> str:
    """1 / √(mean(x²) + ε) of a row, a float; the width divides its length or the rest is summed one by one."""
    width = isa.width
    kind, whole = vector(width, "float"), body(f"udiv i64 {have['count']}, {width}")
    loop = Loop(body, whole, [(kind, "zeroinitializer")], may_be_empty=True)
    value = load_numbers(body, width, element, source, body(f"mul i64 {loop.index}, {width}"))
    (squares,) = loop.close([fma(body, width, value, value, loop.values[0])])
    behind = body(f"mul i64 {whole}, {width}")
    rest = body(f"urem i64 {have['count']}, {width}")
    loop = Loop(body, rest, [("float", summed(body, width, squares))], may_be_empty=True)
    value = load_numbers(body, 1, element, source, body(f"add i64 {behind}, {loop.index}"))
    single = body(f"extractelement <1 x float> {value}, i32 0")
    (total,) = loop.close([body(f"fadd float {loop.values[0]}, {body(f'fmul float {single}, {single}')}")])
    count = body(f"uitofp i64 {have['count']} to float")
    mean = body(f"fdiv float {total}, {count}")
    more = body(f"fadd float {mean}, {have['epsilon']}")
    root = body(f"call float @llvm.sqrt.f32(float {more})")
    return body(f"fdiv float 1.0, {root}")


def _gate(body: Body, isa: Isa, kinds: tuple[str, str], have: dict[str, str], row: str) -> None:
    element, activation = kinds
    x, y = (_row_of(body, element, have[name], row, have["count"]) for name in ("x", "y"))

    def work(lanes: int, index: str) -> None:
        value = ACTIVATIONS[activation](body, lanes, load_numbers(body, lanes, element, y, index))
        both = _rounded(body, lanes, element, value), load_numbers(body, lanes, element, x, index)
        store_numbers(body, lanes, element, arithmetic(body, lanes, "fmul", *both), y, index)

    each(body, isa.width, "0", have["count"], work)


def _turn(body: Body, isa: Isa, element: str, have: dict[str, str], row: str) -> None:
    width = body(f"mul i64 {have['half']}, 2")
    cos, sin = (_row_of(body, element, have[name], row, width) for name in ("cos", "sin"))
    for name, heads in (("queries", "heads"), ("keys", "kv_heads")):
        loop = Loop(body, have[heads])
        head = body(f"add i64 {body(f'mul i64 {row}, {have[heads]}')}, {loop.index}")
        low = _row_of(body, element, have[name], head, have["head_dim"])
        _halves(body, isa, element, (low, cos, sin), have["half"])
        loop.close()


def _halves(body: Body, isa: Isa, element: str, rows: tuple[str, str, str], half: str) -> None:
    """One head in its place: low · cos - high · sin, and high · cos + low · sin."""
    head, cos_row, sin_row = rows

    def work(lanes: int, index: str) -> None:
        beyond = body(f"add i64 {index}, {half}")
        values = [load_numbers(body, lanes, element, head, place) for place in (index, beyond)]
        cos, sin = (load_numbers(body, lanes, element, row, index) for row in (cos_row, sin_row))

        def product(left: str, right: str) -> str:
            return _rounded(body, lanes, element, arithmetic(body, lanes, "fmul", left, right))

        low = arithmetic(body, lanes, "fsub", product(values[0], cos), product(values[1], sin))
        high = arithmetic(body, lanes, "fadd", product(values[1], cos), product(values[0], sin))
        store_numbers(body, lanes, element, low, head, index)
        store_numbers(body, lanes, element, high, head, beyond)

    each(body, isa.width, "0", half, work)
