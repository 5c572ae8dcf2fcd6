"""The function that plays a tape, and all code of one model in a module."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.core.model.stepping import ir_attention, ir_heads, ir_rows
from kvtool.core.model.stepping.ir_heads import Heads
from kvtool.core.model.stepping.tape import CONTEXT, WORDS
from kvtool.core.native.builder import FunctionBuilder
from kvtool.core.native.builder import module as text_of
from kvtool.core.native.isa import Isa
from kvtool.core.native.threads import barrier


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
        return ("run_program", "norm", "blend", "gate", "attend", "combine", *kinds, *turns)


def module(isa: Isa, code: Code) -> str:
    """The LLVM IR of all that a model's tape for one sequence calls."""
    parts = [function for kind in sorted(code.kinds) for function in ir_rows.multiply(isa, kind)]
    parts += [ir_rows.norm(isa), ir_rows.blend(isa), ir_rows.gate(isa, code.activation)]
    for rotary in sorted(code.rotaries):
        parts += [ir_heads.queries(isa, code.heads, rotary), ir_heads.keys(isa, code.heads, rotary)]
    parts += [ir_attention.attend(isa, code.heads), ir_attention.combine(isa, code.heads)]
    return text_of(*parts, barrier(isa), _run_program(isa))


def products(isa: Isa, kind: str, height: int) -> str:
    """The LLVM IR of `multiply_KIND_HEIGHT`, which a tape for several sequences calls for its products."""
    return text_of(*ir_rows.multiply(isa, kind, height))


def _run_program(isa: Isa) -> FunctionBuilder:
    """Every operation in turn, by one of the threads, of which all have to come."""
    k = FunctionBuilder("run_program", isa, "i64* context")
    have = CONTEXT.load(k, k.args.context)
    thread = k.atomic_add(have.taken, 1)
    with k.loop(have.count) as index:
        operation = have.operations.at(index * WORDS)
        k.do(operation.of("ptr").load(), operation, k.args.context, thread, have.threads)
        with k.when(operation.load(1).ne(0)):
            k.do("barrier", have.barrier, have.threads)
    k.do("barrier", have.barrier, have.threads)
    return k
