"""What the code of all operations shares: its arguments, and its share of the work."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.core.model.stepping.tape import FIELDS, UNIT
from kvtool.core.native.builder import Fields, FunctionBuilder, Value
from kvtool.core.native.isa import Isa

ARGUMENTS = "i64* op, i64* context, i64 thread, i64 threads"


def operation(isa: Isa, kind: str, name: str = "") -> tuple[FunctionBuilder, Fields]:
    """Begin the function of an operation; its fields. A pointer with a stride is this thread's own."""
    k = FunctionBuilder(name or kind, isa, ARGUMENTS)
    loaded = FIELDS[kind].load(k, k.args.op, 2)
    found = dict(zip(loaded.names, loaded, strict=True))
    for field, value in found.items():
        if f"{field}_stride" in found:
            own = value.of("i8").at(k.args.thread * found[f"{field}_stride"])
            found[field] = own.of(value.target)
    return k, Fields(found)


def share(k: FunctionBuilder, count: Value, unit: int = 1) -> tuple[Value, Value]:
    """This thread's part of `count` things: the first, and how many; the threads differ by one unit at most."""
    units = count if unit == 1 else (count + (unit - 1)) // unit
    bounds = [units * number // k.args.threads for number in (k.args.thread, k.args.thread + 1)]
    if unit != 1:
        bounds = [k.minimum(bound * unit, count) for bound in bounds]
    return bounds[0], bounds[1] - bounds[0]


def rows(k: FunctionBuilder, count: Value) -> tuple[Value, Value]:
    """This thread's part of the rows of a product and of what follows it row by row."""
    return share(k, count, UNIT)


def tiles(count: int, most: int) -> Sequence[range]:
    """`count` things, at most so many at a time."""
    return [range(start, min(start + most, count)) for start in range(0, count, most)]
