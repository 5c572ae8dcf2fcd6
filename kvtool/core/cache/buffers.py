"""Memory for values that are read: aligned, so that tensors can be made of it without a copy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

Room = Callable[[int], memoryview]  # memory for so many bytes: private, writable, on a 64-byte boundary

_ALIGN = 64


def aligned(size: int) -> memoryview:
    """A private writable buffer whose first byte stands on a 64-byte boundary."""
    block = bytearray(size + _ALIGN)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(block)) % _ALIGN
    return memoryview(block)[start : start + size]
