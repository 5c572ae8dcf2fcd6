"""Look for Triton, which GPU kernels are compiled by."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any


def has_triton() -> bool:
    """Return whether there is Triton; asked for at every layer, so looked for once."""
    return _found(importlib.util.find_spec)


@functools.cache
def _found(find: Callable[[str], Any]) -> bool:
    return find("triton") is not None
