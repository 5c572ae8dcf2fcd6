"""What kernels are told: the fields of their jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kvtool.core.codec.entropy.columns import address
from kvtool.core.codec.entropy.native import Kernel


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
