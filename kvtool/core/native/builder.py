"""A typed emitter of LLVM IR: values know their types and have operators, so that a mistake is an error at its line."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from types import TracebackType
from typing import TypeAlias

from kvtool.core.native.formats import STORED, narrow, widen
from kvtool.core.native.isa import Isa

BYTES = {"i1": 1, "i8": 1, "half": 2, "bfloat": 2, "i16": 2, "i32": 4, "float": 4, "i64": 8, "double": 8, "ptr": 8}
_REAL = ("half", "bfloat", "float", "double")
_VECTOR = re.compile(r"<(\d+) x (\w+)>")


def vector(lanes: int, element: str) -> str:
    """Name the type of a vector; of no lanes: that of a number."""
    return f"<{lanes} x {element}>" if lanes else element


@cache
def _parts(kind: str) -> tuple[int, str]:
    """Lanes and element of a type; a number has no lanes."""
    match = _VECTOR.fullmatch(kind)
    return (int(match[1]), match[2]) if match else (0, kind)


def _literal(kind: str, number: int | float) -> str:
    lanes, element = _parts(kind)
    if lanes:
        return f"splat ({element} {_literal(element, number)})"
    if element not in _REAL:
        return str(bool(number)).lower() if element == "i1" else str(int(number))
    if element == "float":  # written as the bits of the same number in float64
        (number,) = struct.unpack("<f", struct.pack("<f", number))
    return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"


class Value:
    """A number, a vector or a pointer in a function; operators emit instructions.

    Whole numbers are without a sign in `//`, `%`, `>>`, comparisons and `to`, unless a method says otherwise.

    Attributes
    ----------
    k : of the function. type : LLVM's. name : how instructions name it.
    target : what a pointer points to: an LLVM type, or one of `STORED`.
    """

    __slots__ = ("k", "name", "target", "type")

    def __init__(self, k: FunctionBuilder, type_: str, name: str, target: str = "") -> None:
        self.k, self.type, self.name, self.target = k, type_, name, target
        if type_.endswith("*"):
            self.type, self.target = "ptr", type_[:-1]

    def __str__(self) -> str:
        return self.name

    @property
    def lanes(self) -> int:
        """Lanes of a vector; 0: it is a number."""
        return _parts(self.type)[0]

    @property
    def element(self) -> str:
        """Type of one lane."""
        return _parts(self.type)[1]

    @property
    def typed(self) -> str:
        """Type and name, as instructions have it."""
        return f"{self.type} {self.name}"

    def like(self, other: Operand) -> Value:
        """Check that a value has this one's type, or make a constant of that type."""
        if not isinstance(other, Value):
            return self.k.constant(self.type, other)
        if other.type != self.type:
            raise TypeError(f"{other.type} where {self.type} is needed")
        return other

    def _op(self, whole: str, real: str, other: Operand, swapped: bool = False) -> Value:
        operation = real if self.element in _REAL else whole
        if not operation or self.type == "ptr":
            raise TypeError(f"{whole or real} of {self.type}")
        first, second = (self.like(other), self) if swapped else (self, self.like(other))
        return self.k.emit_value(self.type, f"{operation} {first.typed}, {second}")

    def __add__(self, other: Operand) -> Value:
        return self._op("add", "fadd", other)

    def __sub__(self, other: Operand) -> Value:
        return self._op("sub", "fsub", other)

    def __rsub__(self, other: Operand) -> Value:
        return self._op("sub", "fsub", other, swapped=True)

    def __mul__(self, other: Operand) -> Value:
        return self._op("mul", "fmul", other)

    def __truediv__(self, other: Operand) -> Value:
        return self._op("", "fdiv", other)

    def __rtruediv__(self, other: Operand) -> Value:
        return self._op("", "fdiv", other, swapped=True)

    def __floordiv__(self, other: Operand) -> Value:
        return self._op("udiv", "", other)

    def __mod__(self, other: Operand) -> Value:
        return self._op("urem", "", other)

    def __and__(self, other: Operand) -> Value:
        return self._op("and", "", other)

    def __or__(self, other: Operand) -> Value:
        return self._op("or", "", other)

    def __xor__(self, other: Operand) -> Value:
        return self._op("xor", "", other)

    def __lshift__(self, other: Operand) -> Value:
        return self._op("shl", "", other)

    def __rshift__(self, other: Operand) -> Value:
        return self._op("lshr", "", other)

    def __neg__(self) -> Value:
        if self.element in _REAL:
            return self.k.emit_value(self.type, f"fneg {self.typed}")
        return 0 - self

    def compare(self, how: str, other: Operand) -> Value:
        """Compare by a predicate of LLVM's `icmp` or `fcmp`, such as "slt" or "uno": a mask."""
        kind = "fcmp" if self.element in _REAL else "icmp"
        return self.k.emit_value(vector(self.lanes, "i1"), f"{kind} {how} {self.typed}, {self.like(other)}")

    def _than(self, how: str, other: Operand) -> Value:
        return self.compare(f"{'o' if self.element in _REAL else 'u'}{how}", other)

    def __lt__(self, other: Operand) -> Value:
        return self._than("lt", other)

    def __le__(self, other: Operand) -> Value:
        return self._than("le", other)

    def __gt__(self, other: Operand) -> Value:
        return self._than("gt", other)

    def __ge__(self, other: Operand) -> Value:
        return self._than("ge", other)

    def eq(self, other: Operand) -> Value:
        """Compare whole numbers for being the same."""
        return self.compare("eq", other)

    def ne(self, other: Operand) -> Value:
        """Compare whole numbers or pointers for being different."""
        if self.type == "ptr":
            return self.k.emit_value("i1", f"icmp ne ptr {self}, null")
        return self.compare("ne", other)

    def select(self, value: Value, otherwise: Operand) -> Value:
        """Take `value` where this mask is set."""
        second = value.like(otherwise) if value.type != "ptr" else otherwise
        assert isinstance(second, Value)
        return self.k.emit_value(value.type, f"select {self.typed}, {value.typed}, {second.typed}", value.target)

    def to(self, element: str, signed: bool = False) -> Value:
        """Convert each lane; `signed`: whole numbers have a sign. Float32 is cut off to whole numbers."""
        wanted, own = vector(self.lanes, element), self.element
        if own == "ptr" or element == "ptr":
            how = "ptrtoint" if own == "ptr" else "inttoptr"
        elif own in _REAL and element in _REAL:
            how = "fpext" if BYTES[element] > BYTES[own] else "fptrunc"
        elif own in _REAL:
            how = "fptosi"
        elif element in _REAL:
            how = "sitofp" if signed else "uitofp"
        elif _bits(element) > _bits(own):
            how = "sext" if signed else "zext"
        else:
            how = "trunc"
        return self.k.emit_value(wanted, f"{how} {self.typed} to {wanted}")

    def bitcast(self, kind: str) -> Value:
        """Take the same bits as another type, or each lane's as another element."""
        wanted = vector(self.lanes, kind) if self.lanes and not kind.startswith("<") else kind
        return self.k.emit_value(wanted, f"bitcast {self.typed} to {wanted}")

    def splat(self, lanes: int) -> Value:
        """A vector with this number in every lane."""
        kind = vector(lanes, self.type)
        one = self.k.emit_value(kind, f"insertelement {kind} poison, {self.typed}, i32 0")
        return one.shuffle([0] * lanes)

    def shuffle(self, order: Sequence[int], other: Value | None = None) -> Value:
        """Lanes in an order; those of `other` are counted behind one's own."""
        kind, second = vector(len(order), self.element), other.name if other else "poison"
        lanes = "zeroinitializer" if not any(order) else f"<{', '.join(f'i32 {lane}' for lane in order)}>"
        if len(order) > 1 and order[0] and len(set(order)) == 1:
            lanes = f"splat (i32 {order[0]})"
        text = f"shufflevector {self.typed}, {self.type} {second}, <{len(order)} x i32> {lanes}"
        return self.k.emit_value(kind, text)

    def lane(self, index: int) -> Value:
        """One lane, as a number."""
        return self.k.emit_value(self.element, f"extractelement {self.typed}, i32 {index}")

    def with_lane(self, index: int, value: Value) -> Value:
        """The vector with another number in one lane."""
        return self.k.emit_value(self.type, f"insertelement {self.typed}, {value.typed}, i32 {index}")

    # ---- pointers ----

    def of(self, target: str) -> Value:
        """The same address, taken as that of something else."""
        return Value(self.k, "ptr", self.name, target)

    def at(self, index: Value | int) -> Value:
        """The address of the index-th element behind this one."""
        if self.type != "ptr" or not self.target:
            raise TypeError(f"no address behind {self.type} {self.target}")
        if isinstance(index, Value) and index.type != "i64":
            raise TypeError(f"an index is i64, not {index.type}")
        if isinstance(index, int) and not index:
            return self
        text = f"getelementptr {STORED.get(self.target, self.target)}, ptr {self}, i64 {index}"
        return self.k.emit_value("ptr", text, self.target)

    def skip(self, size: Value) -> Value:
        """The address so many bytes behind this one."""
        return self.of("i8").at(size).of(self.target)

    def load(self, index: Value | int = 0, lanes: int = 0, align: int = 0) -> Value:
        """Load a number, or a vector that begins at the index-th element; of a stored format as float32."""
        element = STORED.get(self.target, self.target.removesuffix("*"))
        target, element = (element, "ptr") if self.target.endswith("*") else ("", element)
        kind = vector(lanes, element)
        text = f"load {kind}, ptr {self.at(index)}, align {align or BYTES[_parts(element)[1]]}"
        value = self.k.emit_value(kind, text, target)
        return widen(value, self.target) if self.target in STORED else value

    def store(self, value: Operand, index: Value | int = 0) -> None:
        """Store a number, or a vector from the index-th element on; float32 rounded to a stored format."""
        element = STORED.get(self.target, "ptr" if self.target.endswith("*") else self.target)
        if not isinstance(value, Value):
            value = self.k.constant(element, value)
        if self.target in STORED and value.element == "float":
            value = narrow(value, self.target)
        if value.element != _parts(element)[1]:
            raise TypeError(f"{value.type} into {self.target}")
        self.k.emit(f"store {value.typed}, ptr {self.at(index)}, align {BYTES[value.element]}")


Operand: TypeAlias = Value | int | float


def _bits(element: str) -> int:
    return int(element[1:])


class Fields:
    """Values by name, as attributes: of a job, or a function's arguments."""

    def __init__(self, values: dict[str, Value]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Value:
        return self._values[name]

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the values, in their order."""
        return tuple(self._values)

    def __iter__(self) -> Iterator[Value]:
        return iter(self._values.values())


class FunctionBuilder:
    """The instructions of one function without a result.

    Parameters
    ----------
    isa : whose code is made of it.
    arguments : types and names, such as "i64* rows, i64 count": `TYPE*` is a pointer to such.
    features : as `Isa.extra`, where it takes more of the CPU than its instruction set.

    Attributes
    ----------
    args : the arguments. keeps_nan : whether numbers that are not one stay so where they are rounded.
    """

    def __init__(self, name: str, isa: Isa, arguments: str = "", *, internal: bool = False, features: str = ""):
        self.name, self.isa, self.block, self.keeps_nan = name, isa, "entry", False
        self.declarations: set[str] = set()
        pairs = [one.split() for one in arguments.split(",") if one]
        self.args = Fields({name: Value(self, kind, f"%{name}") for kind, name in pairs})
        self._internal, self._features = internal, features
        self._lines = ["entry:"]
        self._values = self._blocks = 0

    @property
    def width(self) -> int:
        """Float32 lanes of a register."""
        return self.isa.width

    def emit(self, statement: str) -> None:
        """Emit an instruction without a value."""
        self._lines.append(f"  {statement}")

    def emit_value(self, kind: str, operation: str, target: str = "") -> Value:
        """Emit an instruction; its value."""
        self._values += 1
        self._lines.append(f"  %v{self._values} = {operation}")
        return Value(self, kind, f"%v{self._values}", target)

    def constant(self, kind: str, number: int | float = 0) -> Value:
        """A constant; of a vector in every lane."""
        return Value(self, kind, "null" if kind == "ptr" else _literal(kind, number))

    def zeros(self, lanes: int, element: str = "float") -> Value:
        """A vector of zeros; of no lanes a number."""
        return self.constant(vector(lanes, element))

    def lanes(self, element: str, numbers: Iterable[int]) -> Value:
        """A constant vector."""
        texts = [f"{element} {number}" for number in numbers]
        return Value(self, vector(len(texts), element), f"<{', '.join(texts)}>")

    def poison(self, kind: str) -> Value:
        """A value that nobody reads."""
        return Value(self, kind, "poison")

    def alloca(self, kind: str, count: Value | int = 1) -> Value:
        """Memory of the function's own, in lines of the cache."""
        size = "" if count == 1 else f" i64 {count},"
        return self.emit_value("ptr", f"alloca {kind},{size} align 64", kind)

    def call(self, name: str | Value, result: str, *operands: Value, flags: str = "") -> Value:
        """Call a function: of LLVM's or of the module's by its name, or another by its address; its result."""
        text = self._call(name, result, operands)
        return self.emit_value(result, text if not flags else text.replace("call", f"call {flags}", 1))

    def call_void(self, name: str | Value, *operands: Value) -> None:
        """Call a function that has no result."""
        self.emit(self._call(name, "void", operands))

    def _call(self, name: str | Value, result: str, operands: Sequence[Value]) -> str:
        function = f"@{name}" if isinstance(name, str) else name.name
        if function.startswith("@llvm."):
            self.declarations.add(f"declare {result} {function}({', '.join(one.type for one in operands)})")
        return f"call {result} {function}({', '.join(one.typed for one in operands)})"

    def minimum(self, first: Value, second: Value | int, signed: bool = False) -> Value:
        """The smaller of two i64."""
        return self.call(f"llvm.{'s' if signed else 'u'}min.i64", "i64", first, first.like(second))

    def atomic_add(self, pointer: Value, number: Value | int, order: str = "monotonic") -> Value:
        """Add to an i64 that other threads add to as well; what it was."""
        return self.emit_value("i64", f"atomicrmw add ptr {pointer}, i64 {number} {order}")

    def atomic_load(self, pointer: Value) -> Value:
        """Load an i64 that other threads change, in one order for all threads."""
        return self.emit_value("i64", f"load atomic i64, ptr {pointer} seq_cst, align 8")

    def prefetch(self, pointer: Value) -> None:
        """Ask for the cache line at an address, into a core's second cache."""
        self.call_void("llvm.prefetch.p0", pointer, *(self.constant("i32", number) for number in (0, 2, 1)))

    # ---- blocks ----

    def new_block(self) -> str:
        """A label that no block has."""
        self._blocks += 1
        return f"b{self._blocks}"

    def begin_block(self, block: str) -> None:
        """Begin a block; the one before must have branched."""
        self._lines.append(f"{block}:")
        self.block = block

    def branch(self, block: str, condition: Value | None = None, otherwise: str = "") -> None:
        """End a block."""
        target = f"label %{block}"
        self.emit(f"br {target}" if condition is None else f"br {condition.typed}, {target}, label %{otherwise}")

    def phi(self, *values: tuple[Value, str]) -> Value:
        """The value that belongs to the block from which this one was entered."""
        first = values[0][0]
        return self.emit_value(
            first.type, f"phi {first.type} {', '.join(f'[{value}, %{block}]' for value, block in values)}", first.target
        )

    def loop(self, count: Value | int, *first: Value, may_be_empty: bool = False) -> Loop:
        """Begin a loop that runs `count` times and carries values."""
        return Loop(self, count, first, may_be_empty)

    def when(self, condition: Value, *otherwise: Value) -> When:
        """Begin what is only done where a condition holds, and changes values."""
        return When(self, condition, otherwise)

    def reserve(self) -> int:
        """Leave a line to be filled later: a phi names values that come after it."""
        self._lines.append("")
        return len(self._lines) - 1

    def fill(self, line: int, statement: str) -> None:
        """Write the line that was reserved."""
        self._lines[line] = f"  {statement}"

    def text(self) -> str:
        """The whole function, which ends here."""
        arguments = ", ".join(one.typed for one in self.args)
        features = f' "target-features"="{self._features}"' if self._features else ""
        head = f"define {'internal ' if self._internal else ''}void @{self.name}({arguments}){features} {{"
        return "\n".join([head, *self._lines, "  ret void", "}", ""])


class Loop:
    """A loop that runs `count` times and carries values; at least once, unless it `may_be_empty`.

    As a context it carries none, and is closed at its end.

    Attributes
    ----------
    index : the number of the round. values : those carried, in this round.
    """

    def __init__(self, k: FunctionBuilder, count: Value | int, first: Sequence[Value], may_be_empty: bool):
        self._k, self._count = k, k.constant("i64", count) if isinstance(count, int) else count
        self._first = [k.constant("i64"), *first]
        self._before, self._block, self._after = k.block, k.new_block(), k.new_block()
        self._may_be_empty = may_be_empty
        if may_be_empty:
            k.branch(self._block, self._count.ne(0), self._after)
        else:
            k.branch(self._block)
        k.begin_block(self._block)
        self._lines = [k.reserve() for _ in self._first]
        names = [f"%{self._block}.{place}" for place in range(len(self._first))]
        phis = [Value(k, one.type, name, one.target) for one, name in zip(self._first, names, strict=True)]
        self.index, *self.values = phis

    def close(self, *values: Value) -> list[Value]:
        """End the round with the values of the next one; returns those after the last."""
        k, later = self._k, [self.index + 1, *values]
        phis = [self.index, *self.values]
        for line, phi, first, value in zip(self._lines, phis, self._first, later, strict=True):
            first.like(value)
            k.fill(line, f"{phi} = phi {phi.type} [{first}, %{self._before}], [{value}, %{k.block}]")
        last = k.block
        k.branch(self._block, later[0] < self._count, self._after)
        k.begin_block(self._after)
        if not self._may_be_empty:
            return list(values)
        pairs = zip(self._first[1:], values, strict=True)
        return [k.phi((first, self._before), (value, last)) for first, value in pairs]

    def __enter__(self) -> Value:
        return self.index

    def __exit__(self, error: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if error is None:
            self.close()


class When:
    """What is only done where a condition holds; as a context it changes no values."""

    def __init__(self, k: FunctionBuilder, condition: Value, otherwise: Sequence[Value]):
        self._k, self._otherwise = k, otherwise
        self._before, then, self._after = k.block, k.new_block(), k.new_block()
        k.branch(then, condition, self._after)
        k.begin_block(then)

    def close(self, *values: Value) -> list[Value]:
        """End it; returns these values where the condition held, else those that it began with."""
        k, last = self._k, self._k.block
        k.branch(self._after)
        k.begin_block(self._after)
        pairs = zip(self._otherwise, values, strict=True)
        return [k.phi((first, self._before), (value, last)) for first, value in pairs]

    def __enter__(self) -> None:
        return None

    def __exit__(self, error: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if error is None:
            self.close()


class WorkQueue:
    """Shares of a job's work, one after the other until none is left; any number of threads take from one job.

    As a context it is closed at its end.

    Attributes
    ----------
    first, last : of the share, the latter not in it.
    """

    def __init__(self, k: FunctionBuilder, taken: Value, share: Value | int, stop: Value):
        self._k, self._take, some, self._end = k, k.new_block(), k.new_block(), k.new_block()
        k.branch(self._take)
        k.begin_block(self._take)
        self.first = k.atomic_add(taken, share)
        k.branch(some, self.first.compare("slt", stop), self._end)
        k.begin_block(some)
        self.last = k.minimum(self.first + share, stop, signed=True)

    def close(self) -> None:
        """End the share: the next one, or what comes after the work."""
        self._k.branch(self._take)
        self._k.begin_block(self._end)

    def __enter__(self) -> WorkQueue:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if error is None:
            self.close()


# What is done with some numbers from an index on: takes how many, and what is carried; gives that of the next round.
Step: TypeAlias = Callable[[int, Value, Sequence[Value]], Sequence[Value]]


def along(
    k: FunctionBuilder,
    count: Value | int,
    width: int,
    step: Step,
    wide: Sequence[Value] = (),
    single: Callable[[Sequence[Value]], Sequence[Value]] = lambda wide: (),
    first: Value | int = 0,
) -> list[Value]:
    """Go along `count` numbers from `first` on, `width` at a time, then one by one.

    Parameters
    ----------
    wide : carried by the steps of `width`. single: makes what those of one number carry of what these leave.

    Returns
    -------
    What the steps of one number leave.
    """
    count = k.constant("i64", count) if isinstance(count, int) else count
    vectors = count // width
    loop = k.loop(vectors, *wide, may_be_empty=True)
    left = loop.close(*step(width, loop.index * width + first, loop.values))
    done = vectors * width + first
    rest = k.loop(count % width, *single(left), may_be_empty=True)
    return rest.close(*step(1, rest.index + done, rest.values))


def each(
    k: FunctionBuilder, count: Value | int, work: Callable[[int, Value], None], first: Value | int = 0, width: int = 0
) -> None:
    """Do `work(lanes, index)` for `count` numbers: as many at a time as a register holds, then one by one."""

    def step(lanes: int, index: Value, carried: Sequence[Value]) -> Sequence[Value]:
        work(lanes, index)
        return ()

    along(k, count, width or k.width, step, first=first)


def module(*functions: FunctionBuilder, constants: str = "") -> str:
    """The text of a module, with what its functions call of LLVM's."""
    declared = sorted(set[str]().union(*(one.declarations for one in functions)))
    return "\n".join([*declared, constants, *(one.text() for one in functions)])
