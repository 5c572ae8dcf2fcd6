"""Numbers on their way in and out, as LLVM IR: formats changed, rows turned into lanes and back."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.core.model.flash.tiling import STORED, Tiling
from kvtool.core.native.ir import Body, Loop, splat

_SIDE = 8  # of the squares that are turned
_NAN = 0x7FC0  # of bfloat16


def rows_function(tiling: Tiling) -> str:
    """`void rows(lead, lead stride, leads, own, own stride, first, last, count, columns, to)`: a tile's rows in order.

    Row i is row first + i of `leads` lead rows and those of `own` behind them; from `last` on the last one again.
    Strides in numbers; `to` `[count, columns]` in the tile's format.
    """
    body = Body()
    stored, kept = STORED[tiling.stored], tiling.kept
    each = Loop(body, "%count")
    row = body(f"call i64 @llvm.umin.i64(i64 {body(f'add i64 %first, {each.index}')}, i64 %last)")
    leading = body(f"icmp ult i64 {row}, %leads")
    lead = body.at(stored, "%lead", body(f"mul i64 {row}, %lead_stride"))
    own = body.at(stored, "%own", body(f"mul i64 {body(f'sub i64 {row}, %leads')}, %own_stride"))
    source = body(f"select i1 {leading}, ptr {lead}, ptr {own}")
    target = body.at(kept, "%to", body(f"mul i64 {each.index}, %columns"))
    part = Loop(body, body(f"udiv i64 %columns, {2 * _SIDE}"))
    column = body(f"mul i64 {part.index}, {2 * _SIDE}")
    for half in range(2):
        place = body(f"add i64 {column}, {half * _SIDE}")
        value = body.load(f"<{_SIDE} x {stored}>", source, place)
        if not tiling.pairs:
            value = widened(body, tiling.stored, value)
        body.store(f"<{_SIDE} x {kept}>", value, target, place)
    part.close()
    each.close()
    body.do("ret void")
    arguments = (
        "ptr %lead, i64 %lead_stride, i64 %leads, ptr %own, i64 %own_stride, i64 %first, i64 %last, i64 %count, "
        "i64 %columns, ptr %to"
    )
    return f"define internal void @rows({arguments}) {{\n{body.text()}\n}}\n"


def pairs_function() -> str:
    """`void pairs(from, rows, columns, to)`: i16 `[rows, columns]` → `[rows / 2, columns, 2]`."""
    body, side = Body(), 2 * _SIDE
    each = Loop(body, body("lshr i64 %rows, 1"))
    start = body(f"mul i64 {body(f'mul i64 {each.index}, 2')}, %columns")
    low, high = body.at("i16", "%from", start), body.at("i16", "%from", body(f"add i64 {start}, %columns"))
    target = body.at("i16", "%to", start)
    part = Loop(body, body(f"udiv i64 %columns, {side}"))
    column = body(f"mul i64 {part.index}, {side}")
    both = [body.load(f"<{side} x i16>", row, column) for row in (low, high)]
    order = ", ".join(f"i32 {lane + side * row}" for lane in range(side) for row in range(2))
    mixed = body(f"shufflevector <{side} x i16> {both[0]}, <{side} x i16> {both[1]}, <{2 * side} x i32> <{order}>")
    body.store(f"<{2 * side} x i16>", mixed, target, body(f"mul i64 {column}, 2"))
    part.close()
    each.close()
    body.do("ret void")
    return f"define internal void @pairs(ptr %from, i64 %rows, i64 %columns, ptr %to) {{\n{body.text()}\n}}\n"


def queries_function(tiling: Tiling) -> str:
    """`void queries(addresses, steps, to)`: rows of one strip become lanes, `[steps, strip]` of 32 bits."""
    body = Body()
    lanes = Loop(body, str(tiling.strip // _SIDE))
    lane = body(f"mul i64 {lanes.index}, {_SIDE}")
    rows = [body.load("ptr", "%addresses", body(f"add i64 {lane}, {at}")) for at in range(_SIDE)]
    part = Loop(body, body(f"udiv i64 %steps, {_SIDE}"))
    step = body(f"mul i64 {part.index}, {_SIDE}")
    turned = _turned(body, [_eight(body, tiling, row, step) for row in rows])
    for at, value in enumerate(turned):
        place = body(f"mul i64 {body(f'add i64 {step}, {at}')}, {tiling.strip}")
        body.store(f"<{_SIDE} x float>", value, "%to", body(f"add i64 {place}, {lane}"))
    part.close()
    lanes.close()
    body.do("ret void")
    return f"define internal void @queries(ptr %addresses, i64 %steps, ptr %to) {{\n{body.text()}\n}}\n"


def _eight(body: Body, tiling: Tiling, row: str, step: str) -> str:
    if tiling.pairs:
        return body.load(f"<{_SIDE} x float>", row, step)
    return widened(body, tiling.stored, body.load(f"<{_SIDE} x {STORED[tiling.stored]}>", row, step))


def results_function(tiling: Tiling) -> str:
    """`void results(from, sums, columns, addresses)`: lanes of one strip, over their sums, become rows as stored."""
    body, eight = Body(), f"<{_SIDE} x float>"
    lanes = Loop(body, str(tiling.strip // _SIDE))
    lane = body(f"mul i64 {lanes.index}, {_SIDE}")
    sums = body.load(eight, "%sums", lane)
    rows = [body.load("ptr", "%addresses", body(f"add i64 {lane}, {at}")) for at in range(_SIDE)]
    part = Loop(body, body(f"udiv i64 %columns, {_SIDE}"))
    column = body(f"mul i64 {part.index}, {_SIDE}")
    values = []
    for at in range(_SIDE):
        place = body(f"mul i64 {body(f'add i64 {column}, {at}')}, {tiling.strip}")
        value = body.load(eight, "%from", body(f"add i64 {place}, {lane}"))
        values.append(body(f"fdiv {eight} {value}, {sums}"))
    stored = f"<{_SIDE} x {STORED[tiling.stored]}>"
    for row, value in zip(rows, _turned(body, values), strict=True):
        body.store(stored, narrowed(body, tiling.stored, value), row, column)
    part.close()
    lanes.close()
    body.do("ret void")
    return f"define internal void @results(ptr %from, ptr %sums, i64 %columns, ptr %addresses) {{\n{body.text()}\n}}\n"


def _turned(body: Body, rows: Sequence[str]) -> list[str]:
    """Transpose a square of float32: at each step the numbers off the diagonal of 2 × 2 blocks change places."""
    size, step = len(rows), 1
    floats, turned = f"<{size} x float>", list(rows)
    while step < size:
        for low in (row for row in range(size) if not row & step):
            pair = turned[low], turned[low + step]
            orders = (
                [lane if not lane & step else size + lane - step for lane in range(size)],
                [lane + step if not lane & step else size + lane for lane in range(size)],
            )
            for row, order in zip((low, low + step), orders, strict=True):
                lanes = ", ".join(f"i32 {lane}" for lane in order)
                turned[row] = body(f"shufflevector {floats} {pair[0]}, {floats} {pair[1]}, <{size} x i32> <{lanes}>")
        step *= 2
    return turned


def widened(body: Body, stored: str, value: str, lanes: int = _SIDE) -> str:
    """Some numbers as stored in float32."""
    if stored == "float32":
        return value
    if stored == "float16":
        return body(f"fpext <{lanes} x half> {value} to <{lanes} x float>")
    ints = f"<{lanes} x i32>"
    bits = body(f"shl {ints} {body(f'zext <{lanes} x i16> {value} to {ints}')}, {splat(16)}")
    return body(f"bitcast {ints} {bits} to <{lanes} x float>")


def narrowed(body: Body, stored: str, value: str, lanes: int = _SIDE) -> str:
    """Some float32 in the format that is stored, to the nearest, ties to even."""
    if stored == "float32":
        return value
    if stored == "float16":
        return body(f"fptrunc <{lanes} x float> {value} to <{lanes} x half>")
    ints, shorts = f"<{lanes} x i32>", f"<{lanes} x i16>"
    bits = body(f"bitcast <{lanes} x float> {value} to {ints}")
    odd = body(f"and {ints} {body(f'lshr {ints} {bits}, {splat(16)}')}, {splat(1)}")
    up = body(f"add {ints} {bits}, {body(f'add {ints} {odd}, {splat(0x7FFF)}')}")
    short = body(f"trunc {ints} {body(f'lshr {ints} {up}, {splat(16)}')} to {shorts}")
    none = body(f"fcmp uno <{lanes} x float> {value}, zeroinitializer")
    return body(f"select <{lanes} x i1> {none}, {shorts} {splat(_NAN, 'i16')}, {shorts} {short}")
