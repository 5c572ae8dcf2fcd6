"""LLVM IR of y = W·x for weights kept packed: they are unpacked in registers, on their way to the multiplication.

What it takes is mostly reading W once. For one group of 32 columns of four bits with AVX2: 2 loads that widen bytes to
32 bits, 4 operations that take halves of them apart, 4 conversions to float32, 4 multiplications onto a sum, and one of
that sum by the group's scale. x stays float32, so nothing is lost but the order of the sum.
"""

from __future__ import annotations

from kvtool.core.model.quantised.matrix import LAYOUTS, Layout
from kvtool.core.native.ir import Body, Isa, Loop, splat, vector

CHUNK = 8  # groups whose scales are read together


def declarations() -> str:
    """What a module that has any of the functions of `product` declares, once."""
    lines = [f"declare float @llvm.vector.reduce.fadd.v{width}f32(float, <{width} x float>)" for width in (8, 16)]
    lines += [
        f"declare <{width} x float> @llvm.fmuladd.v{width}f32({', '.join([f'<{width} x float>'] * 3)})"
        for width in (8, 16)
    ]
    return "\n".join([*lines, "declare float @llvm.fmuladd.f32(float, float, float)", ""])


def product(isa: Isa, kind: str) -> str:
    """The function `void product_KIND(ptr data, ptr scales, ptr mins, ptr x, ptr y, i64 first, i64 last, i64 columns)`.

    It sets y[r] = Σ w[r, c] · x[c] for rows r from `first` to before `last`, which is not less; x and y float32, y
    counted from row 0; data, scales and mins those of a `Matrix`. Calls for different rows may run side by side.
    """
    layout = LAYOUTS[kind]
    body = Body()
    kernel = _Dense(body, isa, layout) if layout.dense else _Packed(body, isa, layout)
    each = Loop(body, body("sub i64 %last, %first"), may_be_empty=True)
    row = body(f"add i64 %first, {each.index}")
    body.store("float", kernel.row(row), "%y", row)
    each.close()
    body.do("ret void")
    arguments = "ptr %data, ptr %scales, ptr %mins, ptr %x, ptr %y, i64 %first, i64 %last, i64 %columns"
    return f"define void @product_{kind}({arguments}) {{\n{body.text()}\n}}\n"


class _Dense:
    """A row of plain numbers."""

    def __init__(self, body: Body, isa: Isa, layout: Layout) -> None:
        self._body, self._width, self._layout = body, isa.width, layout
        self._floats = vector(isa.width, "float")
        self._step = 4 * isa.width  # columns, with a sum for each of the four
        self._steps = body(f"udiv i64 %columns, {self._step}")
        self._rest = body(f"urem i64 %columns, {self._step}")

    def row(self, row: str) -> str:
        """The product of one row."""
        body, element = self._body, "float" if self._layout.bits == 32 else "i16"
        data = body.at(element, "%data", body(f"mul i64 {row}, %columns"))
        each = Loop(body, self._steps, [(self._floats, "zeroinitializer")] * 4, may_be_empty=True)
        first = body(f"mul i64 {each.index}, {self._step}")
        sums = [self._add(data, first, part, value) for part, value in enumerate(each.values)]
        sums = each.close(sums)
        return self._tail(data, total(body, self._width, sums))

    def _add(self, data: str, first: str, part: int, value: str) -> str:
        body, column = self._body, self._body(f"add i64 {first}, {part * self._width}")
        x = body.load(self._floats, "%x", column)
        return fma(body, self._width, self._numbers(data, column), x, value)

    def _numbers(self, data: str, column: str) -> str:
        body, width = self._body, self._width
        if self._layout.bits == 32:
            return body.load(self._floats, data, column)
        return _of_bfloat16(body, body.load(vector(width, "i16"), data, column), f"<{width} x ", ">", width)

    def _tail(self, data: str, value: str) -> str:
        """The columns behind the last whole step, one by one."""
        body = self._body
        first = body(f"mul i64 {self._steps}, {self._step}")
        each = Loop(body, self._rest, [("float", value)], may_be_empty=True)
        column = body(f"add i64 {first}, {each.index}")
        if self._layout.bits == 32:
            weight = body.load("float", data, column)
        else:
            weight = _of_bfloat16(body, body.load("i16", data, column), "", "", 0)
        x = body.load("float", "%x", column)
        (value,) = each.close(
            [body(f"call float @llvm.fmuladd.f32(float {weight}, float {x}, float {each.values[0]})")]
        )
        return value


def _of_bfloat16(body: Body, bits: str, before: str, after: str, width: int) -> str:
    wide = body(f"zext {before}i16{after} {bits} to {before}i32{after}")
    high = body(f"shl {before}i32{after} {wide}, {splat(16) if width else 16}")
    return body(f"bitcast {before}i32{after} {high} to {before}float{after}")


class _Packed:
    """A row of groups of codes."""

    def __init__(self, body: Body, isa: Isa, layout: Layout) -> None:
        self._body, self._isa, self._layout = body, isa, layout
        self._floats = vector(isa.width, "float")
        self._groups = body(f"udiv i64 %columns, {layout.group}")
        self._chunks = body(f"udiv i64 {self._groups}, {CHUNK}")
        self._rest = body(f"urem i64 {self._groups}, {CHUNK}")
        self._row_bytes = body(f"udiv i64 {body(f'mul i64 %columns, {layout.bits}')}, 8")
        self._shifted = layout.mins or layout.centre != 0
        self._sums = self._group_sums() if self._shifted else ""

    def _group_sums(self) -> str:
        """Σ x over each group of columns: what a min, or a centre, is multiplied by."""
        body, width = self._body, self._isa.width
        sums = body(f"alloca float, i64 {self._groups}, align 64")
        each = Loop(body, self._groups)
        first = body(f"mul i64 {each.index}, {self._layout.group}")
        x = body.at("float", "%x", first)
        parts = [body.load(self._floats, x, start) for start in range(0, self._layout.group, width)]
        body.store("float", total(body, width, parts), sums, each.index)
        each.close()
        return sums

    def row(self, row: str) -> str:
        """The product of one row."""
        body = self._body
        data = body.at("i8", "%data", body(f"mul i64 {row}, {self._row_bytes}"))
        first = body(f"mul i64 {row}, {self._groups}")
        zero = "zeroinitializer"
        carried = [(self._floats, zero), (self._floats, zero), (vector(CHUNK, "float"), zero)]
        chunks = Loop(body, self._chunks, carried, may_be_empty=True)
        group = body(f"mul i64 {chunks.index}, {CHUNK}")
        even, odd, shift = chunks.close(self._chunk(data, first, group, CHUNK, chunks.values))
        behind = body(f"mul i64 {self._chunks}, {CHUNK}")
        carried = [(self._floats, even), (self._floats, odd), ("<1 x float>", zero)]
        rest = Loop(body, self._rest, carried, may_be_empty=True)
        group = body(f"add i64 {behind}, {rest.index}")
        even, odd, last = rest.close(self._chunk(data, first, group, 1, rest.values))
        value = total(body, self._isa.width, [even, odd])
        if not self._shifted:
            return value
        value = body(f"fadd float {value}, {total(body, CHUNK, [shift])}")
        return body(f"fadd float {value}, {body(f'extractelement <1 x float> {last}, i32 0')}")

    def _chunk(self, data: str, first: str, group: str, count: int, values: list[str]) -> list[str]:
        """Some groups of a row: the sums grown by them."""
        body, width = self._body, self._isa.width
        even, odd, shift = values
        place = body(f"add i64 {first}, {group}")
        scales = self._halves("%scales", place, count)
        for index in range(count):
            own = body(f"add i64 {group}, {index}")
            value = self._group(data, own)
            scale = body(
                f"shufflevector <{count} x float> {scales}, <{count} x float> poison, <{width} x i32> {splat(index)}"
            )
            even, odd = odd, fma(body, width, value, scale, even)
        if self._shifted:
            mins = self._halves("%mins", place, count) if self._layout.mins else self._centres(scales, count)
            sums = body.load(f"<{count} x float>", self._sums, group)
            shift = fma(body, count, mins, sums, shift)
        return [even, odd, shift]

    def _centres(self, scales: str, count: int) -> str:
        constant = f"splat (float -{self._layout.centre}.0)"
        return self._body(f"fmul <{count} x float> {scales}, {constant}")

    def _halves(self, pointer: str, place: str, count: int) -> str:
        bits = self._body.load(f"<{count} x i16>", pointer, place)
        return of_float16(self._body, self._isa, count, bits)

    def _group(self, data: str, group: str) -> str:
        """Σ code · x over one group, in as many lanes as there are."""
        body, width = self._body, self._isa.width
        first = body(f"mul i64 {group}, {self._layout.group}")
        value = ""
        for part, code in enumerate(codes(body, self._isa, self._layout, data, group)):
            x = body.load(self._floats, body.at("float", "%x", first), part * width)
            value = fma(body, width, code, x, value) if value else body(f"fmul {self._floats} {code}, {x}")
        return value


def codes(body: Body, isa: Isa, layout: Layout, data: str, group: str) -> list[str]:
    """The codes of one group as float32 vectors of `isa.width` lanes, in the order of their columns.

    Parameters
    ----------
    data : address of the row's first byte.
    """
    width = isa.width
    first = body.at("i8", data, body(f"mul i64 {group}, {layout.group * layout.bits // 8}"))
    if layout.bits == 8:
        parts = [body.load(vector(width, "i8"), first, start) for start in range(0, layout.group, width)]
        whole = [body(f"sext <{width} x i8> {part} to <{width} x i32>") for part in parts]
    else:
        loaded = [body.load(vector(width, "i8"), first, start) for start in range(0, layout.group // 2, width)]
        pairs = [body(f"zext <{width} x i8> {part} to <{width} x i32>") for part in loaded]
        whole = [body(f"and <{width} x i32> {pair}, {splat(15)}") for pair in pairs]
        whole += [body(f"lshr <{width} x i32> {pair}, {splat(4)}") for pair in pairs]
    return [body(f"sitofp <{width} x i32> {part} to <{width} x float>") for part in whole]


def of_float16(body: Body, isa: Isa, width: int, bits: str) -> str:
    """Finite float16 numbers, given as `<width x i16>`, in float32: by the CPU, or by shifting their bits."""
    if "f16c" in isa.features:
        return body(f"fpext <{width} x half> {body(f'bitcast <{width} x i16> {bits} to <{width} x half>')} "
                    f"to <{width} x float>")  # fmt: skip
    words, floats = vector(width, "i32"), vector(width, "float")
    wide = body(f"zext <{width} x i16> {bits} to {words}")
    size = body(f"shl {words} {body(f'and {words} {wide}, {splat(0x7FFF)}')}, {splat(13)}")
    exact = body(f"fmul {floats} {body(f'bitcast {words} {size} to {floats}')}, splat (float 0x46F0000000000000)")
    sign = body(f"shl {words} {body(f'and {words} {wide}, {splat(0x8000)}')}, {splat(16)}")
    both = body(f"or {words} {body(f'bitcast {floats} {exact} to {words}')}, {sign}")
    return body(f"bitcast {words} {both} to {floats}")


def fma(body: Body, width: int, left: str, right: str, onto: str) -> str:
    """left · right + onto, lane by lane; rounded once where the CPU can."""
    kind = vector(width, "float")
    if width == 1:
        return body(f"fadd {kind} {body(f'fmul {kind} {left}, {right}')}, {onto}")
    return body(f"call {kind} @llvm.fmuladd.v{width}f32({kind} {left}, {kind} {right}, {kind} {onto})")


def total(body: Body, width: int, vectors: list[str]) -> str:
    """The sum of all lanes of some vectors; the order is the same at every call."""
    kind = vector(width, "float")
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=False)
        odd = vectors[-1:] if len(vectors) % 2 else []
        vectors = [body(f"fadd {kind} {left}, {right}") for left, right in pairs] + odd
    return body(f"call reassoc float @llvm.vector.reduce.fadd.v{width}f32(float -0.0, {kind} {vectors[0]})")
