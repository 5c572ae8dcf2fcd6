"""Worker process: its actor, and the object in it that does the work."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import kvtool
from kvtool.core.crew.parcel import Parcel, opened
from kvtool.core.errors import KvtoolError


class Worker:
    """Holds what does the work, made when something is first asked of it: what goes wrong there is then told as the
    answer, where Ray would only say that the worker died.

    Parameters
    ----------
    version : of the kvtool that asks. What it sends is only opened by one of the same.
    make : a function, and the recipe of which it makes what does the work.
    threads : of a CPU that one process takes; 0: as many as there are.
    """

    def __init__(self, version: str, make: Parcel, threads: int) -> None:
        self._own_version, self._make, self._threads = version, make, threads

    def do(self, what: str, given: Parcel) -> Any:
        """Have one of its methods called with what is packed.

        Raises
        ------
        KvtoolError : another version of kvtool asks; or what making it, or the method, raises.
        """
        method = getattr(self._made, what)
        return method(*opened(given))

    @cached_property
    def _made(self) -> Any:
        if kvtool.__version__ != self._own_version:
            raise KvtoolError(
                f"Ray's workers have kvtool {kvtool.__version__}, and this is {self._own_version}",
                "install the same version on all machines of the cluster",
            )
        if self._threads:
            import torch

            torch.set_num_threads(self._threads)
        make, recipe = opened(self._make)
        return make(recipe)
