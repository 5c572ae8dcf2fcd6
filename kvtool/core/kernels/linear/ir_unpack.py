"""LLVM IR that unpacks weights into plain numbers, rounded to bfloat16 as those of a converted folder are."""

from __future__ import annotations

from kvtool.core.kernels.linear.ir_codes import PackedRows, codes
from kvtool.core.kernels.linear.qtensor import CHUNK, LAYOUTS, SPAN
from kvtool.core.native.builder import FunctionBuilder, Value
from kvtool.core.native.formats import rounded
from kvtool.core.native.isa import Isa
from kvtool.core.native.simd import fma

_ARGUMENTS = "ptr data, ptr scales, ptr mins, ptr out, i64 first, i64 last, i64 columns"


def unpack(isa: Isa, kind: str, to: str) -> FunctionBuilder:
    """The function `void unpack_KIND_TO(ptr data, ptr scales, ptr mins, ptr out, i64 first, i64 last, i64 columns)`.

    It writes the numbers of the rows from `first` to before `last`, which is not less, row r to `out` + r · columns.
    Each is rounded to the nearest bfloat16, and written as `to` says: "float32" or "bfloat16". The kind is none of
    plain numbers.
    """
    k = FunctionBuilder(f"unpack_{kind}_{to}", isa, _ARGUMENTS)
    args, rows = k.args, PackedRows(k, LAYOUTS[kind])
    with k.loop(args.last - args.first, may_be_empty=True) as index:
        number = args.first + index
        row = rows.row(number)
        out = args.out.of(to).at(number * args.columns)
        with k.loop(rows.chunks, may_be_empty=True) as chunk:
            _unpack_spans(rows, row, chunk * CHUNK, CHUNK, out)
        if not LAYOUTS[kind].blocks:
            with k.loop(rows.rest, may_be_empty=True) as behind:
                _unpack_spans(rows, row, rows.chunks * CHUNK + behind, 1, out)
    return k


def _unpack_spans(rows: PackedRows, row: tuple[Value, Value, Value], span: Value, spans: int, out: Value) -> None:
    width, group = out.k.width, rows.layout.group
    scales, shifts, _ = rows.factors(row, span, spans)
    for index in range(spans):
        own = span + index
        place = out.at(own * SPAN)
        for part, code in enumerate(codes(rows.layout, row[0], own)):
            lanes = [index * SPAN // group + part // (group // width)] * width
            scale = scales.shuffle(lanes)
            weight = code * scale if shifts is None else fma(code, scale, shifts.shuffle(lanes))
            _store(weight, place, part * width)


def _store(weights: Value, place: Value, at: int) -> None:
    k = weights.k
    if place.target == "bfloat16" and "avx512bf16" in k.isa.features:  # one instruction
        short = k.call("llvm.x86.avx512bf16.cvtneps2bf16.512", "<16 x bfloat>", weights)
        place.of("i16").store(short.bitcast("i16"), at)
    else:
        place.store(rounded(weights, "bfloat16") if place.target == "float32" else weights, at)
