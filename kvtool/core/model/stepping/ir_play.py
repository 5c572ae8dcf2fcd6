"""The function that plays a tape, and all code of one model in a module."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.core.model.stepping import ir_attention, ir_heads, ir_rows
from kvtool.core.model.stepping.ir_heads import Heads
from kvtool.core.model.stepping.tape import CONTEXT, WORDS
from kvtool.core.native.builder import FunctionBuilder, Value
from kvtool.core.native.builder import module as text_of
from kvtool.core.native.isa import Isa


@dataclass(frozen=True, slots=True)
class Code:
    """What the code of one model is made for.

    Attributes
    ----------
    kinds : of its matrices.
    rotaries : how many numbers of a head are rotated, of every layer that differs in that.
    """

    heads: Heads
    kinds: frozenset[str]
    rotaries: frozenset[int]
    activation: str

    @property
    def names(self) -> tuple[str, ...]:
        """The functions of the module."""
        kinds = [f"multiply_{kind}" for kind in sorted(self.kinds)]
        turns = [f"{what}_{rotary}" for rotary in sorted(self.rotaries) for what in ("queries", "keys")]
        return ("team", "alone", "nothing", "norm", "blend", "gate", "attend", "combine", *kinds, *turns)


def module(isa: Isa, code: Code) -> str:
    """The LLVM IR of all that a model's tape for one sequence calls."""
    parts = [function for kind in sorted(code.kinds) for function in ir_rows.multiply(isa, kind)]
    parts += [ir_rows.norm(isa), ir_rows.blend(isa), ir_rows.gate(isa, code.activation)]
    for rotary in sorted(code.rotaries):
        parts += [ir_heads.queries(isa, code.heads, rotary), ir_heads.keys(isa, code.heads, rotary)]
    parts += [ir_attention.attend(isa, code.heads), ir_attention.combine(isa, code.heads)]
    return text_of(*parts, _play(isa), _team(isa), _alone(isa), FunctionBuilder("nothing", isa))


def products(isa: Isa, kind: str, height: int) -> str:
    """The LLVM IR of `multiply_KIND_HEIGHT`, which a tape for several sequences calls for its products."""
    return text_of(*ir_rows.multiply(isa, kind, height))


def _play(isa: Isa) -> FunctionBuilder:
    """Every operation in turn, by one of the threads."""
    k = FunctionBuilder("play", isa, "i64* context, i64 thread, i64 threads")
    have = CONTEXT.load(k, k.args.context)
    with k.loop(have.count) as index:
        operation = have.operations.at(index * WORDS)
        k.do(operation.of("ptr").load(), operation, k.args.context, k.args.thread, k.args.threads)
        with k.when(operation.load(1).ne(0)):
            k.do(have.barrier)
    return k


def _team(isa: Isa) -> FunctionBuilder:
    """What every thread of a team runs."""
    k = FunctionBuilder("team", isa, "i64* context")
    have = CONTEXT.load(k, k.args.context)
    number, threads = (k.call(function, "i32") for function in (have.number, have.threads))
    return _playing(k, number.to("i64"), threads.to("i64"))


def _alone(isa: Isa) -> FunctionBuilder:
    """The whole tape by one thread."""
    k = FunctionBuilder("alone", isa, "i64* context")
    return _playing(k, k.constant("i64"), k.constant("i64", 1))


def _playing(k: FunctionBuilder, number: Value, threads: Value) -> FunctionBuilder:
    k.do("play", k.args.context, number, threads)
    return k
