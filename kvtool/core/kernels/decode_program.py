"""Program of a decoding step: a list of operations over buffers that one compiled function runs from end to end.

All threads run the same program side by side. An operation deals its rows out among them by their number; a barrier
stands behind it where a later one reads what other threads wrote. What every thread computes for itself (a norm, whose
sum is shorter than a barrier is long) lies in memory of its own, `stride` bytes behind that of the thread before.

A step takes one token, or one of each of several sequences: those go through a product together, which reads its
weights once for all of them, and through every other operation one by one.

An operation is 16 words of 8 bytes: the address of its code, whether a barrier stands behind it, then its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvtool.core.native.jit import Function
from kvtool.core.native.job import Job

WORDS = 16
BLOCK = 128  # keys that one thread attends to at a time, for all heads that share them
UNIT = 16  # rows that are not dealt out to different threads: their results share a cache line
HEADROOM = 16  # floats before the sums of one block: its largest score, and the sum of its weights

# What an operation is told, in the order of its words. Strides are bytes from one thread's memory to the next one's.
FIELDS = {
    # y[r] = Σ w[r, c] · x[c], for `rows` rows from `first` on, and each of so many inputs, `pitch` numbers apart
    "product": Job(
        **dict.fromkeys(("data", "scales", "group_mins"), "ptr"),
        **{"x": "float32*", "x_stride": "i64", "y": "float32*", "first": "i64", "rows": "i64", "columns": "i64"},
        **dict.fromkeys(("inputs", "x_pitch", "y_pitch"), "i64"),
    ),
    # y = x / √(mean(x²) + ε) · weight, by every thread
    "norm": Job(
        **{"x": "float32*", "x_stride": "i64", "weight": "float*", "y": "float32*", "y_stride": "i64"},
        **{"count": "i64", "epsilon": "float"},
    ),
    # y = a · y + b · x
    "axpby": Job(x="float32*", x_stride="i64", y="float32*", count="i64", a="float", b="float"),
    # y = act(y) · x
    "gate": Job(x="float32*", y="float32*", count="i64"),
    # y = scaled, rotated, normed x for each head
    "queries": Job(
        **{"x": "float32*", "x_stride": "i64", "weight": "float*", "epsilon": "float", "y": "float32*"},
        **{"heads": "i64", "scale": "float", "cos": "float*", "sin": "float*"},
    ),
    # the same of the keys, and the values, into one row of the cache
    "keys": Job(
        **{"x": "float32*", "x_stride": "i64", "weight": "float*", "epsilon": "float", "values": "float32*"},
        **{"heads": "i64", "key_cache": "ptr", "value_cache": "ptr", "capacity": "i64", "row": "i64"},
        **{"cos": "float*", "sin": "float*"},
    ),
    # the sums of each block of keys, and of each head
    "attend": Job(
        **{"x": "float*", "key_cache": "ptr", "value_cache": "ptr", "capacity": "i64", "heads": "i64"},
        **{"parts": "float*", "blocks": "i64", "seen": "i64"},
    ),
    # y = those of all blocks together
    "combine": Job(parts="float*", blocks="i64", seen="i64", y="float*", heads="i64"),
}
# What the program is run with.
CONTEXT = Job(operations="i64*", count="i64", threads="i64", taken="i64*", barrier="i64*")


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation.

    Attributes
    ----------
    code : name of the compiled function. `kind`: whose fields it takes, one of FIELDS.
    barrier : whether the threads wait for each other behind it.
    values : by field; pointers as addresses.
    """

    code: str
    kind: str
    values: Mapping[str, int | float]
    barrier: bool = False


def encode(operations: list[Operation], codes: Mapping[str, Function]) -> np.ndarray:
    """Write a program as int64 `[operations, WORDS]`; `codes`: each compiled function by its name."""
    program = np.zeros((len(operations), WORDS), np.int64)
    for row, operation in zip(program, operations, strict=True):
        row[0], row[1] = codes[operation.code].address, operation.barrier
        fields = FIELDS[operation.kind].row(operation.values)
        row[2 : 2 + len(fields)] = fields
    return program


def word(kind: str, field: str) -> int:
    """The place of a field among its operation's words."""
    return 2 + FIELDS[kind].places[field]
