"""LLVM IR as text: an emitter small enough to read, and what the kernels of both directions share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_ALIGNMENT = {"i8": 1, "half": 2, "i16": 2, "i32": 4, "float": 4, "i64": 8, "double": 8, "ptr": 8}


class Body:
    """The instructions of one function; every value is named by a number."""

    def __init__(self) -> None:
        self.block = "entry"
        self._lines = ["entry:"]
        self._values = 0
        self._blocks = 0

    def __call__(self, operation: str) -> str:
        """Emit `operation` and return the name of its value."""
        self._values += 1
        name = f"%v{self._values}"
        self._lines.append(f"  {name} = {operation}")
        return name

    def do(self, statement: str) -> None:
        """Emit an instruction without a value."""
        self._lines.append(f"  {statement}")

    def new_block(self) -> str:
        """A label nobody has."""
        self._blocks += 1
        return f"b{self._blocks}"

    def enter(self, block: str) -> None:
        """Begin a block; the one before must have branched."""
        self._lines.append(f"{block}:")
        self.block = block

    def reserve(self) -> int:
        """A line to be filled later: a phi names values that come after it."""
        self._lines.append("")
        return len(self._lines) - 1

    def fill(self, line: int, statement: str) -> None:
        """Write the line that was reserved."""
        self._lines[line] = f"  {statement}"

    def at(self, element: str, pointer: str, index: str | int) -> str:
        """The address of the index-th element behind a pointer."""
        return self(f"getelementptr {element}, ptr {pointer}, i64 {index}")

    def load(self, kind: str, pointer: str, index: str | int = 0, aligned: int = 0) -> str:
        """Load a number, or a vector that begins at the index-th element; aligned as an element is, if not said."""
        element = _element(kind)
        return self(f"load {kind}, ptr {self.at(element, pointer, index)}, align {aligned or _ALIGNMENT[element]}")

    def store(self, kind: str, value: str, pointer: str, index: str | int = 0) -> None:
        """Store a number, or a vector from the index-th element on."""
        element = _element(kind)
        self.do(f"store {kind} {value}, ptr {self.at(element, pointer, index)}, align {_ALIGNMENT[element]}")

    def text(self) -> str:
        """The lines written so far, as one text."""
        return "\n".join(self._lines)


class Loop:
    """A loop that runs `count` times, at least once, and carries values: `(type, initial value)` each."""

    def __init__(self, body: Body, count: str | int, carried: Sequence[tuple[str, str]] = ()) -> None:
        self._body, self._count = body, count
        self._carried = [("i64", "0"), *carried]
        self._before, self._block = body.block, body.new_block()
        self._after = body.new_block()
        body.do(f"br label %{self._block}")
        body.enter(self._block)
        self._lines = [body.reserve() for _ in self._carried]
        self.index, *self.values = [f"%{self._block}.{place}" for place in range(len(self._carried))]

    def close(self, values: Sequence[str] = ()) -> list[str]:
        """End the loop: the carried values of the next round; returns those after the last."""
        body = self._body
        index = body(f"add i64 {self.index}, 1")
        names = [self.index, *self.values]
        for line, name, (kind, first), later in zip(self._lines, names, self._carried, [index, *values], strict=True):
            body.fill(line, f"{name} = phi {kind} [{first}, %{self._before}], [{later}, %{body.block}]")
        again = body(f"icmp ult i64 {index}, {self._count}")
        body.do(f"br i1 {again}, label %{self._block}, label %{self._after}")
        body.enter(self._after)
        return list(values)


def vector(width: int, element: str) -> str:
    """A vector type."""
    return f"<{width} x {element}>"


def splat(number: int, element: str = "i32") -> str:
    """A constant vector of one number."""
    return f"splat ({element} {number})"


def fields(body: Body, job: str, names: Mapping[str, str]) -> dict[str, str]:
    """A job's fields, 8 bytes each: name to type, in their order; `job` counts from the function's first argument."""
    first = body(f"mul i64 {job}, {len(names)}")
    place = body.at("i64", "%jobs", first)
    return {name: body.load(kind, body.at("i64", place, index)) for index, (name, kind) in enumerate(names.items())}


def look_up(body: Body, width: int, table: str, indices: str) -> str:
    """One u32 a lane: `table[indices]`, loaded one by one: no slower than a gather, and much faster on some CPUs."""
    kind, entries = vector(width, "i32"), "poison"
    for lane in range(width):
        index = body(f"zext i32 {body(f'extractelement {kind} {indices}, i32 {lane}')} to i64")
        entries = body(f"insertelement {kind} {entries}, i32 {body.load('i32', table, index)}, i32 {lane}")
    return entries


def look_up_by_memory(body: Body, width: int, table: str, indices: str, memory: str) -> str:
    """Look up as `look_up` does, the indices by way of memory: loads cost less than taking lanes out of registers.

    Volatile, as LLVM would otherwise see through it.
    """
    kind, entries = vector(width, "i32"), "poison"
    body.do(f"store volatile {kind} {indices}, ptr {memory}, align 64")
    for lane in range(width):
        index = body(f"load volatile i32, ptr {body.at('i32', memory, lane)}, align 4")
        entry = body.load("i32", table, body(f"zext i32 {index} to i64"))
        entries = body(f"insertelement {kind} {entries}, i32 {entry}, i32 {lane}")
    return entries


def ones(body: Body, width: int, mask: str) -> tuple[str, str]:
    """A mask as i64, and how many of its lanes are set."""
    bits = body(f"zext i{width} {body(f'bitcast <{width} x i1> {mask} to i{width}')} to i64")
    return bits, body(f"call i64 @llvm.ctpop.i64(i64 {bits})")


def module(body: Body, declarations: str = "", features: str = "") -> str:
    """The module of one function, `run(jobs, number of jobs)`: both at least 1.

    Parameters
    ----------
    features : as `Isa.extra`, of a function that takes more of the CPU than its instruction set; see `allowed`.
    """
    body.do("ret void")
    head = "declare i64 @llvm.ctpop.i64(i64)\ndeclare i64 @llvm.umin.i64(i64, i64)\n"
    head += "declare i64 @llvm.cttz.i64(i64, i1)\n"
    return f"{declarations}{head}define void @run(ptr %jobs, i64 %number) {allowed(features)}{{\n{body.text()}\n}}\n"


def allowed(features: str) -> str:
    """What stands behind a function's arguments so that it may take these features of the CPU."""
    return f'"target-features"="{features}" ' if features else ""


def permutations(name: str, rows: Sequence[Sequence[int]]) -> str:
    """A constant `[256][8]` of lane numbers: what to permute eight lanes by, for every mask of eight."""
    texts = ("<8 x i8> <" + ", ".join(f"i8 {lane}" for lane in row) + ">" for row in rows)
    return (
        f"@{name} = private constant [256 x <8 x i8>] [{', '.join(texts)}], align 64\n"
        "declare <8 x i32> @llvm.x86.avx2.permd(<8 x i32>, <8 x i32>)\n"
    )


def permuted(body: Body, name: str, bits: str, lanes: str) -> str:
    """Eight i32 lanes, permuted by row `bits` of a constant."""
    row = body(f"load <8 x i8>, ptr {body.at('<8 x i8>', f'@{name}', bits)}, align 8")
    order = body(f"zext <8 x i8> {row} to <8 x i32>")
    return body(f"call <8 x i32> @llvm.x86.avx2.permd(<8 x i32> {lanes}, <8 x i32> {order})")


def _element(kind: str) -> str:
    return kind.strip("<>").rpartition(" ")[2]
