"""The transform of a group of channels there and back, as LLVM IR: rows are gathered as float32, multiplied, rounded.

Rows go through by the hundred at most, so that they stay in the cache. What a row becomes depends on it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.core.codec.sides import ir_forms
from kvtool.core.native.ir import Body, Loop, fields, module, splat, vector
from kvtool.core.native.ir_matmul import PAIRS, Tile, product, tile_of
from kvtool.core.native.ir_repeat import along
from kvtool.core.native.isa import Isa

MOST_ROWS = 96  # at once: a multiple of every tile's rows
FORWARD = {
    "source": "ptr",  # of the form: the group's first number
    "token": "i64",  # bytes from token to token
    "head": "i64",  # bytes from head to head
    "heads": "i64",  # of the group, at least 1
    "dim": "i64",  # numbers of a head, at least 1, side by side
    "means": "ptr",  # float [depth]
    "weights": "ptr",  # see ir_matmul.panels
    "panels": "i64",
    "depth": "i64",  # heads * dim
    "out": "ptr",  # i16 [rows, depth]
    "stride": "i64",  # bytes from row to row of `out`
    "rows": "i64",  # at least 1
    "a": "ptr",  # float [MOST_ROWS, pitch]
    "c": "ptr",  # float [MOST_ROWS, panels * columns of a tile]
    "odd": "ptr",  # i32: not 0 where a number of the source is not finite
}
BACKWARD = {
    "numbers": "ptr",  # i16 [rows, depth]
    "stride": "i64",  # bytes from row to row of `numbers`
    "depth": "i64",  # at least 1
    "weights": "ptr",
    "panels": "i64",
    "means": "ptr",  # float [size]
    "out": "ptr",  # of the form, [rows, size]
    "token": "i64",  # bytes from row to row of `out`
    "size": "i64",
    "rows": "i64",
    "a": "ptr",
    "c": "ptr",
}
_LEAST, _MOST = -32767, 32766  # payload.MOST_NUMBER
_MAGIC = 0x4B400000  # 1.5 * 2^23: added to a small float, it leaves the nearest whole number in the lowest bits


def pitch_of(depth: int) -> int:
    """Numbers from row to row where `depth` of them stand in each: not by 4,096 bytes, which would share few lines."""
    return -(-depth // 16) * 16 + 16


@dataclass(frozen=True, slots=True)
class Forward:
    """The kernel that makes whole numbers of sides of a form: `rint((side - mean) @ weights)`."""

    form: str
    pitch: int

    def text(self, isa: Isa) -> str:
        """LLVM IR, for an instruction set."""
        body, tile = Body(), tile_of(isa)
        odd = {lanes: body(f"alloca {vector(lanes, 'i32')}, align 64") for lanes in (isa.width, 1)}
        jobs = Loop(body, "%number")
        job = fields(body, jobs.index, FORWARD)
        for lanes, memory in odd.items():
            body.store(vector(lanes, "i32"), "zeroinitializer", memory)
        slabs = Loop(body, _slabs(body, job))
        first, count = _slab(body, job, slabs.index)
        self._gather(body, isa, job, first, count, odd)
        _multiply(body, tile, job, count)
        _number_all(body, isa, job, first, count)
        slabs.close()
        _leave_odd(body, isa.width, job, odd)
        jobs.close()
        reduce = f"declare i32 @llvm.vector.reduce.or.v{isa.width}i32({vector(isa.width, 'i32')})\n"
        return module(body, reduce + product(tile, self.pitch))

    def tile(self, isa: Isa) -> Tile:
        """The tile that its weights are laid out for."""
        return tile_of(isa)

    def _gather(self, body: Body, isa: Isa, job: dict[str, str], first: str, count: str, odd: dict[int, str]) -> None:
        """Rows of the source less their means, as float32; `odd` collects what is not finite."""
        rows = Loop(body, count)
        source = body.at("i8", job["source"], body(f"mul i64 {body(f'add i64 {first}, {rows.index}')}, {job['token']}"))
        a = body.at("float", job["a"], body(f"mul i64 {rows.index}, {self.pitch}"))
        heads = Loop(body, job["heads"])
        head = body.at("i8", source, body(f"mul i64 {heads.index}, {job['head']}"))
        column = body(f"mul i64 {heads.index}, {job['dim']}")
        out, means = body.at("float", a, column), body.at("float", job["means"], column)

        def step(width: int, index: str, carried: Sequence[str]) -> Sequence[str]:
            floats, ints = vector(width, "float"), vector(width, "i32")
            value = ir_forms.loaded(body, isa, self.form, width, head, index)
            body.store(floats, body(f"fsub {floats} {value}, {body.load(floats, means, index)}"), out, index)
            nothing = body(f"bitcast {floats} {body(f'fsub {floats} {value}, {value}')} to {ints}")
            body.store(ints, body(f"or {ints} {nothing}, {body.load(ints, odd[width])}"), odd[width])
            return carried

        along(body, job["dim"], isa.width, step)
        heads.close()
        rows.close()


@dataclass(frozen=True, slots=True)
class Backward:
    """The kernel that makes sides of a form of whole numbers: `numbers @ weights + mean`.

    Numbers are first rounded to the form, which holds the usual ones exactly: what multiplies in it gets the same.

    Attributes
    ----------
    pitch : places of 32 bits from row to row of `a`.
    pairs : bfloat16 is multiplied as such, two by two; depths are even.
    """

    form: str
    pitch: int
    pairs: bool = False

    def text(self, isa: Isa) -> str:
        """LLVM IR, for an instruction set."""
        body, tile = Body(), self.tile(isa)
        jobs = Loop(body, "%number")
        job = fields(body, jobs.index, BACKWARD)
        slabs = Loop(body, _slabs(body, job))
        first, count = _slab(body, job, slabs.index)
        self._gather(body, isa, job, first, count)
        _multiply(body, tile, job, count)
        self._scatter(body, isa, job, first, count)
        slabs.close()
        jobs.close()
        return module(body, product(tile, self.pitch), tile.features)

    def tile(self, isa: Isa) -> Tile:
        """The tile that its weights are laid out for."""
        return PAIRS if self.pairs else tile_of(isa)

    def _gather(self, body: Body, isa: Isa, job: dict[str, str], first: str, count: str) -> None:
        rows = Loop(body, count)
        row = body(f"add i64 {first}, {rows.index}")
        numbers = body.at("i8", job["numbers"], body(f"mul i64 {row}, {job['stride']}"))
        out = body.at("float", job["a"], body(f"mul i64 {rows.index}, {self.pitch}"))

        def step(width: int, index: str, carried: Sequence[str]) -> Sequence[str]:
            floats = vector(width, "float")
            whole = body.load(vector(width, "i16"), numbers, index)
            exact = body(f"sitofp {vector(width, 'i16')} {whole} to {floats}")
            if self.pairs:
                ir_forms.stored(body, isa, self.form, width, exact, out, index)
            else:
                body.store(floats, ir_forms.nearest(body, isa, self.form, width, exact), out, index)
            return carried

        along(body, job["depth"], isa.width, step)
        rows.close()

    def _scatter(self, body: Body, isa: Isa, job: dict[str, str], first: str, count: str) -> None:
        """Add the means, round once."""
        rows = Loop(body, count)
        row = body(f"mul i64 {body(f'add i64 {first}, {rows.index}')}, {job['token']}")
        out, c = body.at("i8", job["out"], row), _product_row(body, self.tile(isa), job, rows.index)

        def step(width: int, index: str, carried: Sequence[str]) -> Sequence[str]:
            floats = vector(width, "float")
            value = body(f"fadd {floats} {body.load(floats, c, index)}, {body.load(floats, job['means'], index)}")
            ir_forms.stored(body, isa, self.form, width, value, out, index)
            return carried

        along(body, job["size"], isa.width, step)
        rows.close()


def _slabs(body: Body, job: dict[str, str]) -> str:
    """How many times MOST_ROWS rows there are, the last ones rounded up."""
    more = body(f"add i64 {job['rows']}, {MOST_ROWS - 1}")
    return body(f"udiv i64 {more}, {MOST_ROWS}")


def _slab(body: Body, job: dict[str, str], number: str) -> tuple[str, str]:
    """First row of a slab, and how many it has."""
    first = body(f"mul i64 {number}, {MOST_ROWS}")
    left = body(f"sub i64 {job['rows']}, {first}")
    return first, body(f"call i64 @llvm.umin.i64(i64 {left}, i64 {MOST_ROWS})")


def _multiply(body: Body, tile: Tile, job: dict[str, str], count: str) -> None:
    """`c = a @ weights`; the rows that a tile has too many are computed and never read."""
    blocks = body(f"udiv i64 {body(f'add i64 {count}, {tile.rows - 1}')}, {tile.rows}")
    pointers = ", ".join(f"ptr {job[name]}" for name in ("a", "weights", "c"))
    steps = body(f"udiv i64 {job['depth']}, 2") if tile.pairs else job["depth"]
    body.do(f"call void @product({pointers}, i64 {blocks}, i64 {job['panels']}, i64 {steps})")


def _product_row(body: Body, tile: Tile, job: dict[str, str], row: str) -> str:
    """A row of the product."""
    pitch = body(f"mul i64 {job['panels']}, {tile.columns}")
    return body.at("float", job["c"], body(f"mul i64 {row}, {pitch}"))


def _number_all(body: Body, isa: Isa, job: dict[str, str], first: str, count: str) -> None:
    """The product's rows as the nearest whole numbers, ties to even, within `_LEAST` and `_MOST`."""
    rows = Loop(body, count)
    row = body(f"mul i64 {body(f'add i64 {first}, {rows.index}')}, {job['stride']}")
    out, c = body.at("i8", job["out"], row), _product_row(body, tile_of(isa), job, rows.index)

    def step(width: int, index: str, carried: Sequence[str]) -> Sequence[str]:
        floats, ints, short = (vector(width, kind) for kind in ("float", "i32", "i16"))
        value = body.load(floats, c, index)
        for bound, beyond in ((_LEAST, "olt"), (_MOST, "ogt")):
            limit = body(f"sitofp {ints} {splat(bound)} to {floats}")
            far = body(f"fcmp {beyond} {floats} {value}, {limit}")
            value = body(f"select <{width} x i1> {far}, {floats} {limit}, {floats} {value}")
        magic = body(f"bitcast {ints} {splat(_MAGIC)} to {floats}")
        bits = body(f"bitcast {floats} {body(f'fadd {floats} {value}, {magic}')} to {ints}")
        whole = body(f"trunc {ints} {body(f'sub {ints} {bits}, {splat(_MAGIC)}')} to {short}")
        body.store(short, whole, out, index)
        return carried

    along(body, job["depth"], isa.width, step)
    rows.close()


def _leave_odd(body: Body, width: int, job: dict[str, str], odd: dict[int, str]) -> None:
    ints = vector(width, "i32")
    some = body(f"call i32 @llvm.vector.reduce.or.v{width}i32({ints} {body.load(ints, odd[width])})")
    one = body(f"extractelement <1 x i32> {body.load('<1 x i32>', odd[1])}, i32 0")
    body.store("i32", body(f"or i32 {some}, {one}"), job["odd"])
