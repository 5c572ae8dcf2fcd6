"""The function that plays a tape, and all code of one model in a module."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.core.model.quantised import ir_codes
from kvtool.core.model.quantised.ir_matvec import product
from kvtool.core.model.stepping import ir_attention, ir_common, ir_heads, ir_rows
from kvtool.core.model.stepping.ir_common import context, function
from kvtool.core.model.stepping.ir_heads import Heads
from kvtool.core.model.stepping.tape import WORDS
from kvtool.core.native.ir import Body, Isa, Loop


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
    parts = [ir_codes.declarations(), ir_common.declarations()]
    parts += [product(isa, kind) + ir_rows.multiply(kind) for kind in sorted(code.kinds)]
    parts += [ir_rows.norm(isa), ir_rows.blend(isa), ir_rows.gate(isa, code.activation)]
    for rotary in sorted(code.rotaries):
        parts += [ir_heads.queries(isa, code.heads, rotary), ir_heads.keys(isa, code.heads, rotary)]
    parts += [ir_attention.attend(isa, code.heads), ir_attention.combine(isa, code.heads)]
    return "".join([*parts, _play(), _team(), _alone(), function("nothing", Body(), "")])


def products(isa: Isa, kind: str, height: int) -> str:
    """The LLVM IR of `multiply_KIND_HEIGHT`, which a tape for several sequences calls for its products."""
    declared = ir_codes.declarations() + ir_common.declarations()
    return declared + product(isa, kind, height) + ir_rows.multiply(kind, height)


def _play() -> str:
    """Every operation in turn, by one of the threads."""
    body = Body()
    operations, barrier = context(body, "operations"), context(body, "barrier")
    loop = Loop(body, context(body, "count"))
    operation = body.at("i64", operations, body(f"mul i64 {loop.index}, {WORDS}"))
    code = body.load("ptr", operation)
    body.do(f"call void {code}(ptr {operation}, ptr %context, i64 %thread, i64 %threads)")
    wait, on = body.new_block(), body.new_block()
    waits = body(f"icmp ne i64 {body.load('i64', operation, 1)}, 0")
    body.do(f"br i1 {waits}, label %{wait}, label %{on}")
    body.enter(wait)
    body.do(f"call void {barrier}()")
    body.do(f"br label %{on}")
    body.enter(on)
    loop.close()
    return function("play", body, "ptr %context, i64 %thread, i64 %threads")


def _team() -> str:
    """What every thread of a team runs."""
    body = Body()
    number, threads = (body(f"call i32 {context(body, name)}()") for name in ("number", "threads"))
    number, threads = (body(f"zext i32 {value} to i64") for value in (number, threads))
    body.do(f"call void @play(ptr %context, i64 {number}, i64 {threads})")
    return function("team", body, "ptr %context")


def _alone() -> str:
    """The whole tape by one thread."""
    body = Body()
    body.do("call void @play(ptr %context, i64 0, i64 1)")
    return function("alone", body, "ptr %context")
