"""Typed emitter of LLVM IR: values know their types and have operators, so that a mistake is an error at its line."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from types import TracebackType
from typing import TypeAlias

from kvtool.core.native.isa import Isa

BYTES = {"i1": 1, "i8": 1, "half": 2, "bfloat": 2, "i16": 2, "i32": 4, "float": 4, "i64": 8, "double": 8, "ptr": 8}
# Formats in memory and what LLVM calls them. Pointers to such load float32, and round float32 where they store it.
STORED = {"float32": "float", "bfloat16": "i16", "float16": "half"}
_REAL = ("half", "bfloat", "float", "double")
_VECTOR = re.compile(r"<(\d+) x (\w+)>")


def vector(lanes: int, element: str) -> str:
    return f"<{lanes} x {element}>" if lanes else element


@cache
def _parts(kind: str) -> tuple[int, str]:
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


def _operator(whole: str, real: str = "", swapped: bool = False) -> Callable[[Value, Operand], Value]:
    return lambda value, other: value._operated(whole, real, other, swapped)


def _comparison(whole: str, real: str) -> Callable[[Value, Operand], Value]:
    return lambda value, other: value.compare(real if value.element in _REAL else whole, other)


class Value:
    """A number, a vector or a pointer in a function; operators emit instructions.

    Whole numbers are without a sign in `//`, `%`, `>>`, comparisons and `to`, unless a method says otherwise. `target`
    is what a pointer points to: an LLVM type, or one of `STORED`.
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
        return _parts(self.type)[0]

    @property
    def element(self) -> str:
        return _parts(self.type)[1]

    @property
    def typed(self) -> str:
        return f"{self.type} {self.name}"

    def like(self, other: Operand) -> Value:
        if not isinstance(other, Value):
            return self.k.constant(self.type, other)
        if other.type != self.type:
            raise TypeError(f"{other.type} where {self.type} is needed")
        return other

    def _operated(self, whole: str, real: str, other: Operand, swapped: bool) -> Value:
        operation = real if self.element in _REAL else whole
        if not operation or self.type == "ptr":
            raise TypeError(f"{whole or real} of {self.type}")
        first, second = (self.like(other), self) if swapped else (self, self.like(other))
        return self.k.emit_value(self.type, f"{operation} {first.typed}, {second}")

    __add__ = _operator("add", "fadd")
    __sub__ = _operator("sub", "fsub")
    __rsub__ = _operator("sub", "fsub", swapped=True)
    __mul__ = _operator("mul", "fmul")
    __truediv__ = _operator("", "fdiv")
    __rtruediv__ = _operator("", "fdiv", swapped=True)
    __floordiv__ = _operator("udiv")
    __mod__ = _operator("urem")
    __and__ = _operator("and")
    __or__ = _operator("or")
    __xor__ = _operator("xor")
    __lshift__ = _operator("shl")
    __rshift__ = _operator("lshr")
    __lt__ = _comparison("ult", "olt")
    __le__ = _comparison("ule", "ole")
    __gt__ = _comparison("ugt", "ogt")
    __ge__ = _comparison("uge", "oge")
    eq = _comparison("eq", "oeq")
    ne = _comparison("ne", "une")

    def __neg__(self) -> Value:
        return self.k.emit_value(self.type, f"fneg {self.typed}") if self.element in _REAL else 0 - self

    def compare(self, how: str, other: Operand) -> Value:
        kind = "fcmp" if self.element in _REAL else "icmp"
        return self.k.emit_value(vector(self.lanes, "i1"), f"{kind} {how} {self.typed}, {self.like(other)}")

    def select(self, value: Value, otherwise: Operand) -> Value:
        second = value.like(otherwise)
        return self.k.emit_value(value.type, f"select {self.typed}, {value.typed}, {second.typed}", value.target)

    def to(self, element: str, signed: bool = False) -> Value:
        """Convert each lane; `signed`: whole numbers have a sign. Float32 is cut off to whole numbers."""
        result, source = vector(self.lanes, element), self.element
        if source == "ptr" or element == "ptr":
            how = "ptrtoint" if source == "ptr" else "inttoptr"
        elif source in _REAL and element in _REAL:
            how = "fpext" if BYTES[element] > BYTES[source] else "fptrunc"
        elif source in _REAL:
            how = "fptosi"
        elif element in _REAL:
            how = "sitofp" if signed else "uitofp"
        elif int(element[1:]) > int(source[1:]):
            how = "sext" if signed else "zext"
        else:
            how = "trunc"
        return self.k.emit_value(result, f"{how} {self.typed} to {result}")

    def bitcast(self, kind: str) -> Value:
        result = vector(self.lanes, kind) if self.lanes and not kind.startswith("<") else kind
        return self.k.emit_value(result, f"bitcast {self.typed} to {result}")

    def splat(self, lanes: int) -> Value:
        kind = vector(lanes, self.type)
        seed = self.k.emit_value(kind, f"insertelement {kind} poison, {self.typed}, i32 0")
        return seed.shuffle([0] * lanes)

    def shuffle(self, order: Sequence[int], other: Value | None = None) -> Value:
        """Take lanes in an order; those of `other` are counted after one's own."""
        kind, second = vector(len(order), self.element), other.name if other else "poison"
        lanes = "zeroinitializer" if not any(order) else f"<{', '.join(f'i32 {lane}' for lane in order)}>"
        if len(order) > 1 and order[0] and len(set(order)) == 1:
            lanes = f"splat (i32 {order[0]})"
        text = f"shufflevector {self.typed}, {self.type} {second}, <{len(order)} x i32> {lanes}"
        return self.k.emit_value(kind, text)

    def lane(self, index: int) -> Value:
        return self.k.emit_value(self.element, f"extractelement {self.typed}, i32 {index}")

    def with_lane(self, index: int, value: Value) -> Value:
        return self.k.emit_value(self.type, f"insertelement {self.typed}, {value.typed}, i32 {index}")

    def of(self, target: str) -> Value:
        return Value(self.k, "ptr", self.name, target)

    def at(self, index: Value | int) -> Value:
        if self.type != "ptr" or not self.target:
            raise TypeError(f"no address after {self.type} {self.target}")
        if isinstance(index, Value) and index.type != "i64":
            raise TypeError(f"an index is i64, not {index.type}")
        if isinstance(index, int) and not index:
            return self
        text = f"getelementptr {STORED.get(self.target, self.target)}, ptr {self}, i64 {index}"
        return self.k.emit_value("ptr", text, self.target)

    def skip(self, size: Value) -> Value:
        return self.of("i8").at(size).of(self.target)

    def load(self, index: Value | int = 0, lanes: int = 0, align: int = 0) -> Value:
        element = STORED.get(self.target, self.target.removesuffix("*"))
        target, element = (element, "ptr") if self.target.endswith("*") else ("", element)
        kind = vector(lanes, element)
        text = f"load {kind}, ptr {self.at(index)}, align {align or BYTES[_parts(element)[1]]}"
        value = self.k.emit_value(kind, text, target)
        return widen(value, self.target) if self.target in STORED else value

    def store(self, value: Operand, index: Value | int = 0) -> None:
        element = STORED.get(self.target, "ptr" if self.target.endswith("*") else self.target)
        if not isinstance(value, Value):
            value = self.k.constant(element, value)
        if self.target in STORED and value.element == "float":
            value = narrow(value, self.target)
        if value.element != _parts(element)[1]:
            raise TypeError(f"{value.type} into {self.target}")
        self.k.emit(f"store {value.typed}, ptr {self.at(index)}, align {BYTES[value.element]}")


Operand: TypeAlias = Value | int | float


# ---- number formats in memory: the only place that widens them to float32 and rounds float32 to them ---------------


def widen(value: Value, form: str) -> Value:
    if form == "float32":
        return value
    if form == "bfloat16":
        return (value.to("i32") << 16).bitcast("float")
    return value.to("float") if value.k.isa.converts_float16 else _widen_float16(value.bitcast("i16").to("i32"))


def narrow(value: Value, form: str) -> Value:
    if form == "float32":
        return value
    is_half = form == "float16"
    if is_half and value.k.isa.converts_float16:
        return value.to("half")
    short = (_narrow_float16(value) if is_half else _round_up(value) >> 16).to("i16")
    if value.k.keeps_nan:
        short = value.compare("uno", 0.0).select(short.like(0x7E00 if is_half else 0x7FC0), short)
    return short.bitcast("half") if is_half else short


def rounded(value: Value, form: str) -> Value:
    """Round to the nearest numbers of a format, ties to even, as float32; to bfloat16 never NaN."""
    if form == "bfloat16":
        return (_round_up(value) & -0x10000).bitcast("float")
    return widen(narrow(value, form), form)


def _round_up(value: Value) -> Value:
    bits = value.bitcast("i32")
    return bits + (((bits >> 16) & 1) + 0x7FFF)


def _widen_float16(bits: Value) -> Value:
    size = bits & 0x7FFF
    finite = ((size << 13).bitcast("float") * 2.0**112).bitcast("i32")  # the exponents begin elsewhere
    value = (size >= 0x7C00).select(finite | 0x7F800000, finite)
    return (value | ((bits & 0x8000) << 16)).bitcast("float")


def _narrow_float16(value: Value) -> Value:
    """Round by integers. Below 2^-14 the sum with 0.5 rounds to the spacing of the subnormal numbers, 2^-24."""
    bits = value.bitcast("i32")
    size = bits & 0x7FFFFFFF
    small = (size.bitcast("float") + 0.5).bitcast("i32") - 0x3F000000  # 0.5 in float32
    odd = (size >> 13) & 1
    normal = ((size - (112 << 23)) + 0xFFF + odd) >> 13
    finite = (size < (113 << 23)).select(small, normal)
    whole = (size >= (143 << 23)).select(size.like(0x7C00), finite)
    return whole | ((bits >> 16) & 0x8000)


class Fields:
    def __init__(self, values: dict[str, Value]) -> None:
        self._values, self.names = values, tuple(values)

    def __getattr__(self, name: str) -> Value:
        return self._values[name]

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[Value]:
        return iter(self._values.values())


class FunctionBuilder:
    """Instructions of a function without a result.

    Arguments are types and names, such as "i64* rows, i64 count": `TYPE*` is a pointer to such. `features` are as
    `Isa.extra`, where the function takes more of the CPU than its instruction set. With `keeps_nan` NaN stays NaN where
    numbers are rounded.
    """

    def __init__(self, name: str, isa: Isa, arguments: str = "", *, internal: bool = False, features: str = ""):
        self.name, self.isa, self.block, self.keeps_nan = name, isa, "entry", False
        self.declarations: set[str] = set()
        pairs = [argument.split() for argument in arguments.split(",") if argument]
        self.args = Fields({name: Value(self, kind, f"%{name}") for kind, name in pairs})
        self._internal, self._features = internal, features
        self._lines = ["entry:"]
        self._values = self._blocks = 0

    @property
    def width(self) -> int:
        return self.isa.width

    def emit(self, statement: str) -> None:
        self._lines.append(f"  {statement}")

    def emit_value(self, kind: str, operation: str, target: str = "") -> Value:
        self._values += 1
        self._lines.append(f"  %v{self._values} = {operation}")
        return Value(self, kind, f"%v{self._values}", target)

    def constant(self, kind: str, number: int | float = 0) -> Value:
        return Value(self, kind, "null" if kind == "ptr" else _literal(kind, number))

    def zeros(self, lanes: int, element: str = "float") -> Value:
        return self.constant(vector(lanes, element))

    def lanes(self, element: str, numbers: Iterable[int]) -> Value:
        texts = [f"{element} {number}" for number in numbers]
        return Value(self, vector(len(texts), element), f"<{', '.join(texts)}>")

    def poison(self, kind: str) -> Value:
        return Value(self, kind, "poison")

    def alloca(self, kind: str, count: Value | int = 1) -> Value:
        size = "" if count == 1 else f" i64 {count},"
        return self.emit_value("ptr", f"alloca {kind},{size} align 64", kind)

    def call(self, name: str | Value, result: str, *operands: Value, flags: str = "") -> Value:
        text = self._call(name, result, operands)
        return self.emit_value(result, text if not flags else text.replace("call", f"call {flags}", 1))

    def call_void(self, name: str | Value, *operands: Value) -> None:
        self.emit(self._call(name, "void", operands))

    def _call(self, name: str | Value, result: str, operands: Sequence[Value]) -> str:
        function = f"@{name}" if isinstance(name, str) else name.name
        if function.startswith("@llvm."):
            self.declarations.add(f"declare {result} {function}({', '.join(operand.type for operand in operands)})")
        return f"call {result} {function}({', '.join(operand.typed for operand in operands)})"

    def minimum(self, first: Value, second: Value | int, signed: bool = False) -> Value:
        return self.call(f"llvm.{'s' if signed else 'u'}min.i64", "i64", first, first.like(second))

    def atomic_add(self, pointer: Value, number: Value | int, order: str = "monotonic") -> Value:
        return self.emit_value("i64", f"atomicrmw add ptr {pointer}, i64 {number} {order}")

    # ---- blocks ----

    def new_block(self) -> str:
        self._blocks += 1
        return f"b{self._blocks}"

    def begin_block(self, block: str) -> None:
        self._lines.append(f"{block}:")
        self.block = block

    def branch(self, block: str, condition: Value | None = None, otherwise: str = "") -> None:
        target = f"label %{block}"
        self.emit(f"br {target}" if condition is None else f"br {condition.typed}, {target}, label %{otherwise}")

    def phi(self, *values: tuple[Value, str]) -> Value:
        """Take the value that belongs to the block from which this one was entered."""
        first, sources = values[0][0], ", ".join(f"[{value}, %{block}]" for value, block in values)
        return self.emit_value(first.type, f"phi {first.type} {sources}", first.target)

    def loop(self, count: Value | int, *first: Value, may_be_empty: bool = False) -> Loop:
        return Loop(self, count, first, may_be_empty)

    def when(self, condition: Value, *otherwise: Value) -> When:
        return When(self, condition, otherwise)

    def reserve(self) -> int:
        """Leave a line to be filled later: a phi names values that come after it."""
        self._lines.append("")
        return len(self._lines) - 1

    def fill(self, line: int, statement: str) -> None:
        self._lines[line] = f"  {statement}"

    def text(self) -> str:
        arguments = ", ".join(argument.typed for argument in self.args)
        features = f' "target-features"="{self._features}"' if self._features else ""
        head = f"define {'internal ' if self._internal else ''}void @{self.name}({arguments}){features} {{"
        return "\n".join([head, *self._lines, "  ret void", "}", ""])


class Scope:
    close: Callable[..., object]

    def __enter__(self) -> object:
        return None

    def __exit__(self, error: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if error is None:
            self.close()


class Loop(Scope):
    """Carries `values` from round to round, at least one unless it `may_be_empty`; `index` is the round's number."""

    def __init__(self, k: FunctionBuilder, count: Value | int, first: Sequence[Value], may_be_empty: bool):
        self._k, self._count = k, k.constant("i64", count) if isinstance(count, int) else count
        self._first = [k.constant("i64"), *first]
        self._before, self._block, self._after = k.block, k.new_block(), k.new_block()
        self._may_be_empty = may_be_empty
        k.branch(self._block, self._count.ne(0) if may_be_empty else None, self._after)
        k.begin_block(self._block)
        self._lines = [k.reserve() for _ in self._first]
        names = [f"%{self._block}.{number}" for number in range(len(self._first))]
        phis = [Value(k, value.type, name, value.target) for value, name in zip(self._first, names, strict=True)]
        self.index, *self.values = phis

    def __enter__(self) -> Value:
        return self.index

    def close(self, *values: Value) -> list[Value]:
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


class When(Scope):
    """Instructions that run only where a condition holds; as a context they change no values."""

    def __init__(self, k: FunctionBuilder, condition: Value, otherwise: Sequence[Value]):
        self._k, self._otherwise = k, otherwise
        self._before, then, self._after = k.block, k.new_block(), k.new_block()
        k.branch(then, condition, self._after)
        k.begin_block(then)

    def close(self, *values: Value) -> list[Value]:
        k, last = self._k, self._k.block
        k.branch(self._after)
        k.begin_block(self._after)
        pairs = zip(self._otherwise, values, strict=True)
        return [k.phi((first, self._before), (value, last)) for first, value in pairs]


def module(*functions: FunctionBuilder, constants: str = "") -> str:
    declared = sorted(set[str]().union(*(function.declarations for function in functions)))
    return "\n".join([*declared, constants, *(function.text() for function in functions)])
