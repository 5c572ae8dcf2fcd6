"""LLVM IR of Y = X · Wᵀ for few rows of X in bfloat16, over weights as oneDNN has laid them out.

W lies in panels of 64 outputs, each `[columns / 2, 64, 2]`: pairs of columns beside each other, as AVX-512 BF16
multiplies them. oneDNN's own products of 32 rows wait for each panel to come from memory; here the next one is asked
for while this one is multiplied.
"""

from __future__ import annotations

from kvtool.core.native.ir import Body, Loop, Shares, splat, vector

OUTPUTS = 64  # of a panel
ROWS = 8  # of X in a tile: the least that there must be
_WIDTH = 16
_VECTORS = 2  # of outputs in a tile: sixteen sums, and few loads of weights, which come from a second cache
_LINES = OUTPUTS // _WIDTH  # of a pair of columns
_FLOATS, _PAIRS, _WORDS = vector(_WIDTH, "float"), vector(2 * _WIDTH, "bfloat"), vector(_WIDTH, "i32")
# A job's fields, 8 bytes each: `next` is the first panel that nobody has taken yet, `share` how many are taken at once.
FIELDS = ("next", "share", "panels", "weights", "columns", "x", "rows", "out", "bias")
_POINTERS = ("weights", "x", "out", "bias")
_DECLARATIONS = (
    f"declare {_FLOATS} @llvm.x86.avx512bf16.dpbf16ps.512({_FLOATS}, {_PAIRS}, {_PAIRS})\n"
    "declare i64 @llvm.smin.i64(i64, i64)\n"
    "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)\n"
)


def module() -> str:
    """The function `void panels(ptr job)`: any number of threads may run it with the same job."""
    body = Body()
    have = {name: body.load("i64", body.at("i64", "%job", at)) for at, name in enumerate(FIELDS) if at}
    have |= {name: body(f"inttoptr i64 {have[name]} to ptr") for name in _POINTERS}
    shares = Shares(body, have["share"], have["panels"])
    each = Loop(body, body(f"sub i64 {shares.last}, {shares.first}"))
    _panel(body, have, body(f"add i64 {shares.first}, {each.index}"))
    each.close()
    shares.close()
    body.do("ret void")
    return f"{_DECLARATIONS}define void @panels(ptr %job) {{\n{body.text()}\n}}\n"


def _panel(body: Body, have: dict[str, str], panel: str) -> None:
    """All rows of X by one panel, a tile after the other; the last begins where it ends with the last row."""
    size = body(f"mul i64 {have['columns']}, {OUTPUTS}")
    weights = body.at("i16", have["weights"], body(f"mul i64 {panel}, {size}"))
    behind = body.at("i16", weights, size)
    output = body(f"mul i64 {panel}, {OUTPUTS}")
    rows = have["rows"]
    tiles = _LINES // _VECTORS
    high = body(f"udiv i64 {body(f'add i64 {rows}, {ROWS - 1}')}, {ROWS}")
    down = Loop(body, body(f"mul i64 {high}, {tiles}"))
    row = body(f"mul i64 {body(f'udiv i64 {down.index}, {tiles}')}, {ROWS}")
    row = body(f"call i64 @llvm.smin.i64(i64 {row}, i64 {body(f'sub i64 {rows}, {ROWS}')})")
    across = body(f"mul i64 {body(f'urem i64 {down.index}, {tiles}')}, {_VECTORS * _WIDTH}")
    line = body(f"mul i64 {body(f'and i64 {down.index}, {_LINES - 1}')}, {2 * _WIDTH}")
    x = body.at("i16", have["x"], body(f"mul i64 {row}, {have['columns']}"))
    own = body.at("i32", weights, across)
    sums = _summed(body, have["columns"], x, own, body.at("i16", behind, line))
    _store(body, have, sums, row, body(f"add i64 {output}, {across}"))
    down.close()


def _summed(body: Body, columns: str, x: str, weights: str, ahead: str) -> list[str]:
    """The tile's sums; every step asks for a line of the next panel, each tile of four for another one."""
    rows = [body.at("i16", x, body(f"mul i64 {columns}, {number}")) for number in range(ROWS)]
    deep = Loop(body, body(f"udiv i64 {columns}, 2"), [(_FLOATS, "zeroinitializer")] * (ROWS * _VECTORS))
    place = body(f"mul i64 {deep.index}, {2 * OUTPUTS}")
    body.do(f"call void @llvm.prefetch.p0(ptr {body.at('i16', ahead, place)}, i32 0, i32 2, i32 1)")
    own = body.at("i16", weights, place)
    loaded = [
        body(f"bitcast {_WORDS} {body.load(_WORDS, body.at('i32', own, number * _WIDTH))} to {_PAIRS}")
        for number in range(_VECTORS)
    ]
    grown = []
    for number, row in enumerate(rows):
        pair = body.load("i32", body.at("i32", row, deep.index))
        one = body(f"insertelement {_WORDS} poison, i32 {pair}, i32 0")
        spread = body(f"shufflevector {_WORDS} {one}, {_WORDS} poison, <{_WIDTH} x i32> zeroinitializer")
        left = body(f"bitcast {_WORDS} {spread} to {_PAIRS}")
        for place_, right in enumerate(loaded):
            onto = deep.values[number * _VECTORS + place_]
            operands = f"{_FLOATS} {onto}, {_PAIRS} {left}, {_PAIRS} {right}"
            grown.append(body(f"call {_FLOATS} @llvm.x86.avx512bf16.dpbf16ps.512({operands})"))
    return deep.close(grown)


def _store(body: Body, have: dict[str, str], sums: list[str], row: str, output: str) -> None:
    """Add the bias, round to bfloat16, and write a tile."""
    width = body(f"mul i64 {have['panels']}, {OUTPUTS}")
    for vector_ in range(_VECTORS):
        place = body(f"add i64 {output}, {vector_ * _WIDTH}")
        bias = body.load(_FLOATS, have["bias"], place)
        for number in range(ROWS):
            value = _rounded(body, body(f"fadd {_FLOATS} {sums[number * _VECTORS + vector_]}, {bias}"))
            at = body(f"mul i64 {body(f'add i64 {row}, {number}')}, {width}")
            body.store(vector(_WIDTH, "i16"), value, have["out"], body(f"add i64 {at}, {place}"))


def _rounded(body: Body, value: str) -> str:
    """To the nearest bfloat16, ties to even."""
    bits = body(f"bitcast {_FLOATS} {value} to {_WORDS}")
    odd = body(f"and {_WORDS} {body(f'lshr {_WORDS} {bits}, {splat(16)}')}, {splat(1)}")
    up = body(f"add {_WORDS} {body(f'add {_WORDS} {bits}, {splat(0x7FFF)}')}, {odd}")
    return body(f"trunc {_WORDS} {body(f'lshr {_WORDS} {up}, {splat(16)}')} to {vector(_WIDTH, 'i16')}")
