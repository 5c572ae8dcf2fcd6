"""What kernels are told: fields of jobs, and memory that each thread keeps."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtool.core.codec.entropy.columns import address
from kvtool.core.codec.entropy.native import Kernel
from kvtool.core.native.ir_matmul import aligned

_own = threading.local()


class Jobs:
    """Fields of some jobs, column by column: each is set for all of them at once."""

    def __init__(self, names: Iterable[str], count: int) -> None:
        self._columns = {name: number for number, name in enumerate(names)}
        self.fields = np.zeros((count, len(self._columns)), np.int64)

    def set(self, values: Mapping[str, Any]) -> None:
        """Set fields; a value is one for all jobs, or one for each."""
        for name, value in values.items():
            self.fields[:, self._columns[name]] = value

    def run(self, kernel: Kernel) -> None:
        """Run all of them in one call, in which other threads have Python to themselves."""
        if len(self.fields):
            kernel(address(self.fields), len(self.fields))


def memory(name: str, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """This thread's memory of that name, `[count]`: asked of the system anew each time, it would take as long as what
    is computed in it. What stood there before may still."""
    wanted = np.dtype(dtype)
    held: npt.NDArray[np.uint8] | None = getattr(_own, name, None)
    if held is None or held.nbytes < count * wanted.itemsize:
        held = aligned(count * wanted.itemsize, np.uint8)
        setattr(_own, name, held)
    return held[: count * wanted.itemsize].view(wanted)
