"""What stands in a worker's process, and makes there what does the work."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cached_property
from typing import Any

import kvtool
from kvtool.core.errors import KvtoolError


def packed(make: Callable[[Any], Any], recipe: Any) -> bytes:
    """Bytes of which a worker makes what does its work: `make(recipe)`."""
    return pickle.dumps((make, recipe))


class Worker:
    """Holds what does the work, made when something is first asked of it: what goes wrong there is then told as the
    answer, where Ray would only say that the worker died.

    Parameters
    ----------
    version : of the kvtool that asks. What it sends is only opened by one of the same.
    make : as of :func:`packed`.
    threads : of a CPU that one process takes; 0: as many as there are.
    """

    def __init__(self, version: str, make: bytes, threads: int) -> None:
        self._version, self._make, self._threads = version, make, threads

    def do(self, what: str, *given: Any) -> Any:
        """Have one of its methods called.

        Raises
        ------
        KvtoolError : another version of kvtool asks; or what making it, or the method, raises.
        """
        return getattr(self._made, what)(*given)

    @cached_property
    def _made(self) -> Any:
        if kvtool.__version__ != self._version:
            raise KvtoolError(
                f"Ray's workers have kvtool {kvtool.__version__}, and this is {self._version}",
                "install the same version on all machines of the cluster",
            )
        if self._threads:
            import torch

            torch.set_num_threads(self._threads)
        make, recipe = pickle.loads(self._make)
        return make(recipe)
