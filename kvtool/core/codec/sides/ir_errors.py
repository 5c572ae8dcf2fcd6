"""How far made keys or values are from the exact ones, as LLVM IR: sums of squares, in one pass over both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.core.codec.sides import ir_forms
from kvtool.core.native.ir import Body, Loop, fields, module, vector
from kvtool.core.native.ir_repeat import along
from kvtool.core.native.isa import Isa

FIELDS = {
    "made": "ptr",  # of the form
    "made_token": "i64",  # bytes from token to token
    "made_head": "i64",  # bytes from head to head
    "exact": "ptr",  # of the form
    "exact_token": "i64",
    "exact_head": "i64",
    "heads": "i64",  # at least 1
    "dim": "i64",  # at least 1; numbers of a head, side by side in both
    "rows": "i64",  # at least 1
    "sums": "ptr",  # double [2]: squares of made - exact, squares of exact
}


@dataclass(frozen=True, slots=True)
class Errors:
    """The kernel for a form: a row's sums are float32, those of all rows float64."""

    form: str

    def text(self, isa: Isa) -> str:
        """LLVM IR, for an instruction set."""
        body, width = Body(), isa.width
        jobs = Loop(body, "%number")
        job = fields(body, jobs.index, FIELDS)
        rows = Loop(body, job["rows"], [("double", "0.0"), ("double", "0.0")])
        made, exact = (_at(body, job[name], rows.index, job[f"{name}_token"]) for name in ("made", "exact"))
        sums = self._row(body, isa, job, made, exact)
        totals = rows.close(
            [
                body(f"fadd double {total}, {_summed(body, width, *pair)}")
                for total, pair in zip(rows.values, sums, strict=True)
            ]
        )
        for number, total in enumerate(totals):
            body.store("double", total, job["sums"], number)
        jobs.close()
        return module(body, f"declare float @llvm.vector.reduce.fadd.v{width}f32(float, {vector(width, 'float')})\n")

    def _row(self, body: Body, isa: Isa, job: dict[str, str], made: str, exact: str) -> list[tuple[str, str]]:
        """A row's two sums, each as lanes and the rest."""
        width = isa.width
        zeros = [(vector(lanes, "float"), "zeroinitializer") for lanes in (width, width, 1, 1)]
        heads = Loop(body, job["heads"], zeros)
        one, other = (
            _at(body, pointer, heads.index, job[f"{name}_head"]) for name, pointer in (("made", made), ("exact", exact))
        )

        def step(lanes: int, index: str, sums: Sequence[str]) -> Sequence[str]:
            floats = vector(lanes, "float")
            left, right = (ir_forms.loaded(body, isa, self.form, lanes, pointer, index) for pointer in (one, other))
            wrong = body(f"fsub {floats} {left}, {right}")
            squares = (body(f"fmul {floats} {value}, {value}") for value in (wrong, right))
            return [body(f"fadd {floats} {total}, {square}") for total, square in zip(sums, squares, strict=True)]

        kinds = [kind for kind, _ in zeros]
        carried = list(zip(kinds, heads.values, strict=True))
        lanes, rest = along(body, job["dim"], width, step, carried[:2], carried[2:])
        all_lanes = heads.close([*lanes, *rest])
        return list(zip(all_lanes[:2], all_lanes[2:], strict=True))


def _at(body: Body, pointer: str, index: str, stride: str) -> str:
    return body.at("i8", pointer, body(f"mul i64 {index}, {stride}"))


def _summed(body: Body, width: int, lanes: str, rest: str) -> str:
    """Lanes and the rest in one number, double."""
    one = body(f"extractelement <1 x float> {rest}, i32 0")
    call = f"call reassoc float @llvm.vector.reduce.fadd.v{width}f32(float {one}, {vector(width, 'float')} {lanes})"
    return body(f"fpext float {body(call)} to double")
