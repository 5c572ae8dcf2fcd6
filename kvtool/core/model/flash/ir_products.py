"""The two products of a tile, as LLVM IR: keys · queries, and values · weights; lanes stand in registers."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.core.model.flash.ir_softmax import fma, larger
from kvtool.core.model.flash.tiling import Tiling
from kvtool.core.native.ir import Body, Loop

_UNROLLED = 2  # steps of a sum: rows are a multiple of it


def scores_function(tiling: Tiling) -> str:
    """`void scores(queries, keys, steps, groups, scores, before, largest)`: scores of one strip and a tile of keys.

    queries `[steps, strip]`, keys `[groups · keys_once, steps]`, in numbers (or pairs) of 32 bits. `largest` is the
    larger of `before` and what a lane finds.
    """
    body, floats = Body(), tiling.floats()
    some = [at * tiling.width for at in range(tiling.registers)]
    first = [body.load(floats, "%before", lane) for lane in some]
    group = Loop(body, "%groups", [(floats, value) for value in first])
    row = body(f"mul i64 {group.index}, {tiling.keys_once}")
    rows = [
        body.at("i32", "%keys", body(f"mul i64 {body(f'add i64 {row}, {key}')}, %steps"))
        for key in range(tiling.keys_once)
    ]
    sums = _product(body, tiling, "%queries", rows, [1] * len(rows), "%steps", None)
    largest = list(group.values)
    for key in range(tiling.keys_once):
        start = body(f"mul i64 {body(f'add i64 {row}, {key}')}, {tiling.strip}")
        for at, lane in enumerate(some):
            value = sums[key * tiling.registers + at]
            body.store(floats, value, "%scores", body(f"add i64 {start}, {lane}"))
            largest[at] = larger(body, tiling, value, largest[at])
    for lane, value in zip(some, group.close(largest), strict=True):
        body.store(floats, value, "%largest", lane)
    body.do("ret void")
    arguments = "ptr %queries, ptr %keys, i64 %steps, i64 %groups, ptr %scores, ptr %before, ptr %largest"
    return f"define internal void @scores({arguments}) {{\n{body.text()}\n}}\n"


def sum_function(tiling: Tiling) -> str:
    """`void sum(weights, values, steps, groups, shrink, results)`: results · shrink + values · weights of one strip.

    weights `[steps, strip]`, values `[steps, groups · keys_once]`, in numbers (or pairs of keys) of 32 bits; results
    float32 `[groups · keys_once, strip]`.
    """
    body, floats = Body(), tiling.floats()
    some = [at * tiling.width for at in range(tiling.registers)]
    shrink = [body.load(floats, "%shrink", lane) for lane in some]
    columns = body(f"mul i64 %groups, {tiling.keys_once}")
    group = Loop(body, "%groups")
    column = body(f"mul i64 {group.index}, {tiling.keys_once}")
    places, first = [], []
    for at in range(tiling.keys_once):
        start = body(f"mul i64 {body(f'add i64 {column}, {at}')}, {tiling.strip}")
        for lane, factor in zip(some, shrink, strict=True):
            places.append(body(f"add i64 {start}, {lane}"))
            first.append(body(f"fmul {floats} {body.load(floats, '%results', places[-1])}, {factor}"))
    values = [body.at("i32", "%values", body(f"add i64 {column}, {at}")) for at in range(tiling.keys_once)]
    sums = _product(body, tiling, "%weights", values, [columns] * len(values), "%steps", first)
    for place, value in zip(places, sums, strict=True):
        body.store(floats, value, "%results", place)
    group.close()
    body.do("ret void")
    arguments = "ptr %weights, ptr %values, i64 %steps, i64 %groups, ptr %shrink, ptr %results"
    return f"define internal void @sum({arguments}) {{\n{body.text()}\n}}\n"


def _product(
    body: Body,
    tiling: Tiling,
    lanes: str,
    rows: Sequence[str],
    strides: Sequence[str | int],
    steps: str,
    first: Sequence[str] | None,
) -> list[str]:
    """Sums over `steps` of lanes `[steps, strip]` · a number of each row; row by row, then by register of lanes.

    A row's numbers are its stride apart.
    """
    floats = tiling.floats()
    begin = first or ["zeroinitializer"] * (len(rows) * tiling.registers)
    each = Loop(body, body(f"udiv i64 {steps}, {_UNROLLED}"), [(floats, value) for value in begin])
    sums = list(each.values)
    for part in range(_UNROLLED):
        step = body(f"add i64 {body(f'mul i64 {each.index}, {_UNROLLED}')}, {part}")
        start = body(f"mul i64 {step}, {tiling.strip}")
        held = [
            body.load(floats, lanes, body(f"add i64 {start}, {at * tiling.width}")) for at in range(tiling.registers)
        ]
        for row, (pointer, stride) in enumerate(zip(rows, strides, strict=True)):
            place = step if stride == 1 else body(f"mul i64 {step}, {stride}")
            one = _everywhere(body, tiling, body.load("float", pointer, place))
            for at, other in enumerate(held):
                where = row * tiling.registers + at
                sums[where] = _add(body, tiling, one, other, sums[where])
    return each.close(sums)


def _everywhere(body: Body, tiling: Tiling, value: str) -> str:
    floats = tiling.floats()
    one = body(f"insertelement {floats} poison, float {value}, i32 0")
    return body(f"shufflevector {floats} {one}, {floats} poison, <{tiling.width} x i32> zeroinitializer")


def _add(body: Body, tiling: Tiling, one: str, other: str, more: str) -> str:
    if not tiling.pairs:
        return fma(body, tiling, one, other, more)
    pairs = [body(f"bitcast {tiling.floats()} {side} to <32 x bfloat>") for side in (one, other)]
    return body(
        f"call {tiling.floats()} @llvm.x86.avx512bf16.dpbf16ps.512("
        f"{tiling.floats()} {more}, <32 x bfloat> {pairs[0]}, <32 x bfloat> {pairs[1]})"
    )
