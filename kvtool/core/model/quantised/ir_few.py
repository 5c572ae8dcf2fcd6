"""LLVM IR of Y = X · Wᵀ for few rows of X and weights kept packed.

Some rows of W at a time are unpacked into memory that stays in a core's own cache, and multiplied there with all rows
of X: W is read from memory once and packed. Numbers of a row of X and of a row of W lie one after the other, so that a
register holds some of either, and sums are taken across its lanes at the end: nothing is laid out anew. A row comes
out the same whatever rows stand beside it.
"""

from __future__ import annotations

from kvtool.core.model.quantised.ir_codes import fma
from kvtool.core.model.quantised.matrix import LAYOUTS
from kvtool.core.native.ir import Body, Isa, Loop, Shares, splat, vector

OUTPUTS = 4  # rows of W in a tile; they come in multiples of it
# A job's fields, 8 bytes each: `next` is the first row of W that nobody has taken yet, `share` how many are taken at a
# time, `thread` how many threads have begun; each has `scratch_bytes` of scratch to itself.
FIELDS = (
    *("next", "thread", "share", "last", "columns", "data", "scales", "mins"),
    *("x", "rows", "out", "outputs", "bias", "scratch", "scratch_bytes"),
)
_POINTERS = ("data", "scales", "mins", "x", "out", "bias", "scratch")


def inputs(isa: Isa) -> int:
    """Rows of X in a tile: the least that there must be. A tile has a sum for each lane of a register."""
    return isa.width // OUTPUTS


def declarations(isa: Isa, element: str) -> str:
    """What a module declares for this beside what products and shares do."""
    text = "declare i64 @llvm.umin.i64(i64, i64)\n"
    if element == "bfloat16":
        floats = vector(isa.width, "float")
        pairs = vector(2 * isa.width, "bfloat")
        text += f"declare {floats} @llvm.x86.avx512bf16.dpbf16ps.512({floats}, {pairs}, {pairs})\n"
        text += f"declare <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512({floats})\n"
    return text


def few(isa: Isa, kind: str, element: str) -> str:
    """The function `void few_KIND_ELEMENT(ptr job)`: any number of threads may run it with the same job.

    It needs `unpack_KIND_ELEMENT` of the same module, unless the kind is of plain numbers; those are of the same
    format then.

    Parameters
    ----------
    element : "float32", or "bfloat16" where the CPU has AVX-512 BF16: of X, of Y and of the unpacked weights.
    """
    body = Body()
    have = {name: body.load("i64", body.at("i64", "%job", at)) for at, name in enumerate(FIELDS) if at > 1}
    have |= {name: body(f"inttoptr i64 {have[name]} to ptr") for name in _POINTERS}
    thread = body(f"atomicrmw add ptr {body.at('i64', '%job', 1)}, i64 1 monotonic")
    scratch = body.at("i8", have["scratch"], body(f"mul i64 {thread}, {have['scratch_bytes']}"))
    shares = Shares(body, have["share"], have["last"])
    weights = _unpacked(body, kind, element, have, (scratch, shares.first, shares.last))
    _Tiles(body, isa, element, have).multiply(weights, shares.first, body(f"sub i64 {shares.last}, {shares.first}"))
    shares.close()
    body.do("ret void")
    return f"define void @few_{kind}_{element}(ptr %job) {{\n{body.text()}\n}}\n"


def _unpacked(body: Body, kind: str, element: str, have: dict[str, str], taken: tuple[str, str, str]) -> str:
    """Where the rows `first` … of W lie as plain numbers."""
    scratch, first, last = taken
    name = "float" if element == "float32" else "i16"
    before = body(f"mul i64 {first}, {have['columns']}")
    if LAYOUTS[kind].dense:
        return body.at(name, have["data"], before)
    out = body.at(name, scratch, body(f"sub i64 0, {before}"))
    parts = ", ".join(f"ptr {have[part]}" for part in ("data", "scales", "mins"))
    rows = f"i64 {first}, i64 {last}, i64 {have['columns']}"
    body.do(f"call void @unpack_{kind}_{element}({parts}, ptr {out}, {rows})")
    return scratch


class _Tiles:
    """Multiplies rows of plain weights with all rows of X, a tile of sums at a time."""

    def __init__(self, body: Body, isa: Isa, element: str, have: dict[str, str]) -> None:
        self._body, self._isa, self._have = body, isa, have
        self._pairs = element == "bfloat16"
        self._element = "i16" if self._pairs else "float"
        self._step = isa.width * (2 if self._pairs else 1)
        self._floats = vector(isa.width, "float")

    def multiply(self, weights: str, first: str, count: str) -> None:
        """`count` rows of W from `weights` on, which are the outputs `first` …"""
        body, have, high = self._body, self._have, inputs(self._isa)
        across = Loop(body, body(f"udiv i64 {count}, {OUTPUTS}"))
        output = body(f"mul i64 {across.index}, {OUTPUTS}")
        own = body.at(self._element, weights, body(f"mul i64 {output}, {have['columns']}"))
        output = body(f"add i64 {first}, {output}")
        rows = have["rows"]
        down = Loop(body, body(f"udiv i64 {body(f'add i64 {rows}, {high - 1}')}, {high}"))
        # The last tile begins where it ends with the last row: what it computes again comes out the same.
        row = body(f"mul i64 {down.index}, {high}")
        row = body(f"call i64 @llvm.umin.i64(i64 {row}, i64 {body(f'sub i64 {rows}, {high}')})")
        x = body.at(self._element, have["x"], body(f"mul i64 {row}, {have['columns']}"))
        self._store(self._across(self._summed(own, x)), row, output)
        down.close()
        across.close()

    def _summed(self, weights: str, x: str) -> list[str]:
        """The tile's sums, row of X by row of X, each still in lanes."""
        body, columns = self._body, self._have["columns"]
        starts = {
            (side, number): body.at(self._element, side, body(f"mul i64 {columns}, {number}"))
            for side, count in ((weights, OUTPUTS), (x, inputs(self._isa)))
            for number in range(count)
        }
        sums = [(self._floats, "zeroinitializer")] * self._isa.width
        deep = Loop(body, body(f"udiv i64 {columns}, {self._step}"), sums)
        column = body(f"mul i64 {deep.index}, {self._step}")
        kind = vector(self._step, self._element)
        loaded = {place: body.load(kind, start, column) for place, start in starts.items()}
        grown = [
            self._product(loaded[x, number // OUTPUTS], loaded[weights, number % OUTPUTS], value)
            for number, value in enumerate(deep.values)
        ]
        return deep.close(grown)

    def _product(self, left: str, right: str, onto: str) -> str:
        body, width = self._body, self._isa.width
        if not self._pairs:
            return fma(body, width, left, right, onto)
        kind = vector(2 * width, "bfloat")
        pairs = [body(f"bitcast {vector(2 * width, 'i16')} {side} to {kind}") for side in (left, right)]
        return body(
            f"call {self._floats} @llvm.x86.avx512bf16.dpbf16ps.512("
            f"{self._floats} {onto}, {kind} {pairs[0]}, {kind} {pairs[1]})"
        )

    def _across(self, sums: list[str]) -> str:
        """One register: lane i is the sum of the i-th register's lanes. Two become one until one is left."""
        body, width = self._body, self._isa.width
        while len(sums) > 1:
            halves = []
            for one, other in zip(sums[::2], sums[1::2], strict=True):
                mixed = [
                    body(
                        f"shufflevector {self._floats} {one}, {self._floats} {other}, <{width} x i32> "
                        f"<{', '.join(f'i32 {lane}' for lane in range(odd, 2 * width, 2))}>"
                    )
                    for odd in range(2)
                ]
                halves.append(body(f"fadd {self._floats} {mixed[0]}, {mixed[1]}"))
            sums = halves
        return sums[0]

    def _store(self, value: str, row: str, output: str) -> None:
        """Add the bias, round, and write a tile."""
        body, have, width = self._body, self._have, self._isa.width
        bias = body.load(vector(OUTPUTS, "float"), have["bias"], output)
        order = ", ".join(f"i32 {lane % OUTPUTS}" for lane in range(width))
        kind = vector(OUTPUTS, "float")
        spread = body(f"shufflevector {kind} {bias}, {kind} poison, <{width} x i32> <{order}>")
        value = body(f"fadd {self._floats} {value}, {spread}")
        if self._pairs:
            value = self._rounded(value)
        whole = vector(width, self._element)
        for number in range(inputs(self._isa)):
            lanes = ", ".join(f"i32 {number * OUTPUTS + lane}" for lane in range(OUTPUTS))
            part = body(f"shufflevector {whole} {value}, {whole} poison, <{OUTPUTS} x i32> <{lanes}>")
            place = body(f"mul i64 {body(f'add i64 {row}, {number}')}, {have['outputs']}")
            body.store(vector(OUTPUTS, self._element), part, have["out"], body(f"add i64 {place}, {output}"))

    def _rounded(self, value: str) -> str:
        """To the nearest bfloat16, ties to even."""
        body, width = self._body, self._isa.width
        words = vector(width, "i32")
        bits = body(f"bitcast {self._floats} {value} to {words}")
        odd = body(f"and {words} {body(f'lshr {words} {bits}, {splat(16)}')}, {splat(1)}")
        up = body(f"add {words} {body(f'add {words} {bits}, {splat(0x7FFF)}')}, {odd}")
        return body(f"trunc {words} {body(f'lshr {words} {up}, {splat(16)}')} to {vector(width, 'i16')}")
