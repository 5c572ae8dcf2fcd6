"""Jobs of machine code: their fields are named once, for the code that reads them and the code that writes them."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtool.core.native.builder import Fields, FunctionBuilder, Scope, Value

LINE = 64  # bytes of a cache line
_WORD = 8  # bytes of a field
JOBS = "i64* jobs, i64 number"  # arguments of a function that does several
_own = threading.local()
Packed: TypeAlias = "ctypes.Array[ctypes.c_int64]"


class Job:
    """Arguments of machine code in memory, 8 bytes each: "i64", "float", "ptr", or `TYPE*`, a pointer to such."""

    def __init__(self, **fields: str) -> None:
        self.fields = fields
        self.places = {name: index for index, name in enumerate(fields)}
        self._words = struct.Struct("=" + "".join("f4x" if kind == "float" else "q" for kind in fields.values()))
        self._memory = ctypes.c_int64 * len(fields)

    def __len__(self) -> int:
        return len(self.fields)

    def load(self, k: FunctionBuilder, job: Value, first: int = 0) -> Fields:
        words = job.of("i64")
        items = enumerate(self.fields.items(), first)
        return Fields({name: words.at(index).of(kind).load(align=_WORD) for index, (name, kind) in items})

    @contextlib.contextmanager
    def each(self, k: FunctionBuilder) -> Iterator[Fields]:
        """Loop over the jobs of a function of `JOBS`, of which there is at least one."""
        with k.loop(k.args.number) as index:
            yield self.load(k, k.args.jobs.at(index * len(self)))

    def pack(self, **values: int | float) -> Packed:
        """Write one job to memory. Raises ValueError: a field is missing, or there is no such field."""
        if values.keys() != self.fields.keys():
            raise ValueError(f"a job has {', '.join(self.fields)}")
        packed = self._memory()
        self._words.pack_into(packed, 0, *[values[name] for name in self.fields])
        return packed


class WorkQueue(Scope):
    """Shares of a job's work, from `first` to before `last`; any number of threads take from one job."""

    def __init__(self, k: FunctionBuilder, taken: Value, share: Value | int, stop: Value):
        self._k, self._take, body, self._end = k, k.new_block(), k.new_block(), k.new_block()
        k.branch(self._take)
        k.begin_block(self._take)
        self.first = k.atomic_add(taken, share)
        k.branch(body, self.first.compare("slt", stop), self._end)
        k.begin_block(body)
        self.last = k.minimum(self.first + share, stop, signed=True)

    def close(self) -> None:
        self._k.branch(self._take)
        self._k.begin_block(self._end)

    def __enter__(self) -> WorkQueue:
        return self


class Jobs:
    """Several jobs of one kind in memory, field by field: each is set for all of them at once."""

    def __init__(self, job: Job, count: int) -> None:
        self._places = job.places
        self.words = np.zeros((count, len(job)), np.int64)

    def set(self, **values: Any) -> None:
        for name, value in values.items():
            self.words[:, self._places[name]] = value

    def keep(self, mask: npt.NDArray[np.bool_]) -> None:
        self.words = np.ascontiguousarray(self.words[mask])

    def run(self, kernel: Callable[[int, int], None]) -> None:
        if len(self.words):
            kernel(address(self.words), len(self.words))


def address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def aligned(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that begin with a line of the cache: a load across two lines takes twice as long."""
    element = np.dtype(dtype)
    whole = np.zeros(count * element.itemsize + LINE, np.uint8)
    first = -address(whole) % LINE
    return whole[first : first + count * element.itemsize].view(element)


def scratch(name: str, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """This thread's memory of that name, `[count]`, with any old content.

    To allocate it anew each time would take as long as what is computed in it.
    """
    element = np.dtype(dtype)
    memory: npt.NDArray[np.uint8] | None = getattr(_own, name, None)
    if memory is None or memory.nbytes < count * element.itemsize:
        memory = aligned(count * element.itemsize, np.uint8)
        setattr(_own, name, memory)
    return memory[: count * element.itemsize].view(element)
