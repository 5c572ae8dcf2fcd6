"""LLVM IR that brings codes and scales of packed weights into registers, as float32."""

from __future__ import annotations

from collections.abc import Iterable

from kvtool.core.model.quantised.matrix import CHUNK, SPAN, Layout
from kvtool.core.native.ir import Body, Isa, splat, vector

_TWO_TO_112 = "0x46F0000000000000"


def declarations() -> str:
    """What a module declares, once, that has any of the functions of this folder."""
    lines = []
    for width in (8, 16):
        kind = vector(width, "float")
        lines += [
            f"declare float @llvm.vector.reduce.fadd.v{width}f32(float, {kind})",
            f"declare {kind} @llvm.fmuladd.v{width}f32({kind}, {kind}, {kind})",
        ]
    return "\n".join([*lines, "declare float @llvm.fmuladd.f32(float, float, float)", ""])


def codes(body: Body, isa: Isa, layout: Layout, data: str, span: str) -> list[str]:
    """The codes of 32 columns as float32 vectors of `isa.width` lanes, in the order of the columns.

    Parameters
    ----------
    data : address of the row's first byte.
    span : which 32 columns.
    """
    kind = vector(isa.width, "i32")
    first = body.at("i8", data, body(f"mul i64 {span}, {4 * layout.bits}"))
    parts: list[str] = []
    at = done = 0
    for width in layout.planes:
        fields = _FIELDS[width](body, isa.width, first, at)
        if parts:
            fields = [body(f"shl {kind} {field}, {splat(done)}") for field in fields]
            parts = [body(f"or {kind} {low}, {high}") for low, high in zip(parts, fields, strict=True)]
        else:
            parts = fields
        at, done = at + 4 * width, done + width
    return [body(f"sitofp {kind} {part} to {vector(isa.width, 'float')}") for part in parts]


def _eights(body: Body, lanes: int, data: str, at: int) -> list[str]:
    return [_widened(body, lanes, data, at + start, "sext") for start in range(0, SPAN, lanes)]


def _fours(body: Body, lanes: int, data: str, at: int) -> list[str]:
    kind = vector(lanes, "i32")
    pairs = [_widened(body, lanes, data, at + start) for start in range(0, SPAN // 2, lanes)]
    low = [body(f"and {kind} {pair}, {splat(15)}") for pair in pairs]
    return low + [body(f"lshr {kind} {pair}, {splat(4)}") for pair in pairs]


def _twos(body: Body, lanes: int, data: str, at: int) -> list[str]:
    """Eight bytes, which hold four columns each: with 16 lanes every byte stands in two of them."""
    kind, each = vector(lanes, "i32"), range(lanes)
    loaded = body.load("<8 x i8>", data, at)
    order = ", ".join(f"i32 {lane % 8}" for lane in each)
    all_lanes = body(f"shufflevector <8 x i8> {loaded}, <8 x i8> poison, <{lanes} x i32> <{order}>")
    wide = body(f"zext <{lanes} x i8> {all_lanes} to {kind}")
    starts = range(0, SPAN, lanes)
    shifted = [body(f"lshr {kind} {wide}, {_constant(2 * ((first + lane) // 8) for lane in each)}") for first in starts]
    return [body(f"and {kind} {field}, {splat(3)}") for field in shifted]


def _ones(body: Body, lanes: int, data: str, at: int) -> list[str]:
    """A bit for every column."""
    kind, each = vector(lanes, "i32"), range(lanes)
    word = body.load("i32", body.at("i8", data, at), 0, 1)
    alone = body(f"insertelement {kind} poison, i32 {word}, i32 0")
    all_lanes = body(f"shufflevector {kind} {alone}, {kind} poison, {kind} zeroinitializer")
    starts = range(0, SPAN, lanes)
    shifted = [body(f"lshr {kind} {all_lanes}, {_constant(first + lane for lane in each)}") for first in starts]
    return [body(f"and {kind} {field}, {splat(1)}") for field in shifted]


_FIELDS = {8: _eights, 4: _fours, 2: _twos, 1: _ones}


def _widened(body: Body, lanes: int, data: str, at: int, how: str = "zext") -> str:
    loaded = body.load(vector(lanes, "i8"), data, at)
    return body(f"{how} <{lanes} x i8> {loaded} to <{lanes} x i32>")


def _constant(numbers: Iterable[int]) -> str:
    return "<" + ", ".join(f"i32 {number}" for number in numbers) + ">"


class Factors:
    """Scales and mins of a row, some groups at a time."""

    def __init__(self, body: Body, isa: Isa, layout: Layout) -> None:
        self._body, self._isa, self._layout = body, isa, layout
        self.shifted = layout.mins or layout.centre != 0
        if layout.blocks:
            blocks = body(f"udiv i64 %columns, {SPAN * CHUNK}")
            self._row = body(f"mul i64 {blocks}, {layout.block_bytes}")
        else:
            self._row = body(f"udiv i64 %columns, {layout.group}")

    def of_row(self, row: str) -> tuple[str, str]:
        """Addresses of a row's scales and mins."""
        first = self._body(f"mul i64 {row}, {self._row}")
        kind = "i8" if self._layout.blocks else "half"
        return self._body.at(kind, "%scales", first), self._body.at("half", "%mins", first)

    def load(self, row: tuple[str, str], span: str, spans: int) -> tuple[str, str, int]:
        """Scales of some spans, what is added to scale · code (a min, or what the centre comes to), and how many."""
        if self._layout.blocks:
            return self._block(row[0], span)
        scales = self._halves(row[0], span, spans)
        shift = ""
        if self._layout.mins:
            shift = self._halves(row[1], span, spans)
        elif self.shifted:
            shift = self._centred(scales, spans)
        return scales, shift, spans

    def _block(self, scales: str, span: str) -> tuple[str, str, int]:
        body, layout = self._body, self._layout
        block = body(f"udiv i64 {span}, {CHUNK}")
        first = body.at("i8", scales, body(f"mul i64 {block}, {layout.block_bytes}"))
        count, kinds = SPAN * CHUNK // layout.group, 1 + layout.mins
        factors = [self._product(first, 2 * kind, 2 * kinds + kind * count, count) for kind in range(kinds)]
        scales, *mins = factors
        shift = body(f"fneg <{count} x float> {mins[0]}") if mins else self._centred(scales, count)
        return scales, shift, count

    def _product(self, block: str, whole: int, each: int, count: int) -> str:
        """A block's float16 times an int8 for each group."""
        body, kind = self._body, vector(count, "float")
        bits = body.load("<1 x i16>", body.at("i8", block, whole), 0, 1)
        factor = of_float16(body, self._isa, 1, bits)
        same = body(f"shufflevector <1 x float> {factor}, <1 x float> poison, <{count} x i32> zeroinitializer")
        numbers = body(f"sitofp <{count} x i8> {body.load(vector(count, 'i8'), block, each)} to {kind}")
        return body(f"fmul {kind} {same}, {numbers}")

    def _halves(self, pointer: str, span: str, count: int) -> str:
        return of_float16(self._body, self._isa, count, self._body.load(f"<{count} x i16>", pointer, span))

    def _centred(self, scales: str, count: int) -> str:
        return self._body(f"fmul <{count} x float> {scales}, splat (float -{self._layout.centre}.0)")


def lane(body: Body, factors: str, count: int, index: int, width: int) -> str:
    """One of some factors, in every lane."""
    kind = vector(count, "float")
    return body(f"shufflevector {kind} {factors}, {kind} poison, <{width} x i32> {splat(index)}")


def of_float16(body: Body, isa: Isa, width: int, bits: str) -> str:
    """Finite float16 numbers, given as `<width x i16>`, in float32: by the CPU, or by shifting their bits."""
    words, floats, halves = vector(width, "i32"), vector(width, "float"), vector(width, "half")
    if "f16c" in isa.features:
        return body(f"fpext {halves} {body(f'bitcast <{width} x i16> {bits} to {halves}')} to {floats}")
    wide = body(f"zext <{width} x i16> {bits} to {words}")
    size = body(f"shl {words} {body(f'and {words} {wide}, {splat(0x7FFF)}')}, {splat(13)}")
    exact = body(f"fmul {floats} {body(f'bitcast {words} {size} to {floats}')}, splat (float {_TWO_TO_112})")
    sign = body(f"shl {words} {body(f'and {words} {wide}, {splat(0x8000)}')}, {splat(16)}")
    both = body(f"or {words} {body(f'bitcast {floats} {exact} to {words}')}, {sign}")
    return body(f"bitcast {words} {both} to {floats}")


def of_bfloat16(body: Body, width: int, bits: str) -> str:
    """bfloat16 numbers, given as `<width x i16>`, in float32."""
    words = vector(width, "i32")
    high = body(f"shl {words} {body(f'zext <{width} x i16> {bits} to {words}')}, {splat(16)}")
    return body(f"bitcast {words} {high} to {vector(width, 'float')}")


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
        odd = vectors[-1:] if len(vectors) % 2 else []
        pairs = zip(vectors[::2], vectors[1::2], strict=False)
        vectors = [body(f"fadd {kind} {left}, {right}") for left, right in pairs] + odd
    return body(f"call reassoc float @llvm.vector.reduce.fadd.v{width}f32(float -0.0, {kind} {vectors[0]})")
