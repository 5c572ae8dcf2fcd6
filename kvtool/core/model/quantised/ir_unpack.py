"""LLVM IR that unpacks weights into plain numbers, rounded to bfloat16 as those of a converted folder are."""

from __future__ import annotations

from kvtool.core.model.quantised.ir_codes import Factors, codes, fma, lane
from kvtool.core.model.quantised.matrix import CHUNK, LAYOUTS, SPAN, Layout
from kvtool.core.native.ir import Body, Isa, Loop, splat, vector


def unpack(isa: Isa, kind: str, to: str) -> str:
    """The function `void unpack_KIND_TO(ptr data, ptr scales, ptr mins, ptr out, i64 first, i64 last, i64 columns)`.

    It writes the numbers of the rows from `first` to before `last`, which is not less, row r to `out` + r · columns.
    Each is rounded to the nearest bfloat16, and written as `to` says: "float32" or "bfloat16". The kind is none of
    plain numbers.
    """
    body = Body()
    kernel = _Unpacking(body, isa, LAYOUTS[kind], to)
    each = Loop(body, body("sub i64 %last, %first"), may_be_empty=True)
    row = body(f"add i64 %first, {each.index}")
    kernel.row(row, body.at(kernel.element, "%out", body(f"mul i64 {row}, %columns")))
    each.close()
    body.do("ret void")
    arguments = "ptr %data, ptr %scales, ptr %mins, ptr %out, i64 %first, i64 %last, i64 %columns"
    return f"define void @unpack_{kind}_{to}({arguments}) {{\n{body.text()}\n}}\n"


class _Unpacking:
    """Unpacks rows of a matrix that a function has as %data, %scales, %mins and %columns."""

    def __init__(self, body: Body, isa: Isa, layout: Layout, to: str) -> None:
        self._body, self._isa, self._layout = body, isa, layout
        self.element = "float" if to == "float32" else "i16"
        self._factors = Factors(body, isa, layout)
        spans = body(f"udiv i64 %columns, {SPAN}")
        self._chunks = body(f"udiv i64 {spans}, {CHUNK}")
        self._rest = body(f"urem i64 {spans}, {CHUNK}")
        self._row_bytes = body(f"mul i64 {spans}, {4 * layout.bits}")

    def row(self, row: str, out: str) -> None:
        """Unpack one row to an address."""
        body = self._body
        data = body.at("i8", "%data", body(f"mul i64 {row}, {self._row_bytes}"))
        factors = self._factors.of_row(row)
        chunks = Loop(body, self._chunks, may_be_empty=True)
        self._spans(data, factors, body(f"mul i64 {chunks.index}, {CHUNK}"), CHUNK, out)
        chunks.close()
        if not self._layout.blocks:
            rest = Loop(body, self._rest, may_be_empty=True)
            behind = body(f"mul i64 {self._chunks}, {CHUNK}")
            self._spans(data, factors, body(f"add i64 {behind}, {rest.index}"), 1, out)
            rest.close()

    def _spans(self, data: str, factors: tuple[str, str], span: str, spans: int, out: str) -> None:
        body, width, each = self._body, self._isa.width, self._layout.group // self._isa.width
        scales, shifts, count = self._factors.load(factors, span, spans)
        for index in range(spans):
            own = body(f"add i64 {span}, {index}")
            place = body.at(self.element, out, body(f"mul i64 {own}, {SPAN}"))
            for part, code in enumerate(codes(body, self._isa, self._layout, data, own)):
                group = index * SPAN // self._layout.group + part // each
                scale = lane(body, scales, count, group, width)
                shift = lane(body, shifts, count, group, width) if shifts else ""
                self._store(self._weight(code, scale, shift), place, part * width)

    def _weight(self, code: str, scale: str, shift: str) -> str:
        kind = vector(self._isa.width, "float")
        if not shift:
            return self._body(f"fmul {kind} {code}, {scale}")
        return fma(self._body, self._isa.width, code, scale, shift)

    def _store(self, weights: str, place: str, at: int) -> None:
        body, width = self._body, self._isa.width
        if (
            self.element == "i16" and "avx512bf16" in self._isa.features
        ):  # which a module then declares: one instruction
            short = body(f"call <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float> {weights})")
            body.store("<16 x i16>", body(f"bitcast <16 x bfloat> {short} to <16 x i16>"), place, at)
            return
        words, floats = vector(width, "i32"), vector(width, "float")
        bits = body(f"bitcast {floats} {weights} to {words}")
        odd = body(f"and {words} {body(f'lshr {words} {bits}, {splat(16)}')}, {splat(1)}")  # ties go to even
        up = body(f"add {words} {body(f'add {words} {bits}, {odd}')}, {splat(0x7FFF)}")
        if self.element == "float":
            kept = body(f"and {words} {up}, {splat(-0x10000)}")
            body.store(floats, body(f"bitcast {words} {kept} to {floats}"), place, at)
        else:
            high = body(f"lshr {words} {up}, {splat(16)}")
            body.store(vector(width, "i16"), body(f"trunc {words} {high} to <{width} x i16>"), place, at)
