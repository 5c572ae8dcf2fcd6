"""Compilation of Triton kernels at their first use."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

from kvtool.core.common.plugins import install_line
from kvtool.core.errors import KvtoolError


def has_triton() -> bool:
    """Return whether there is Triton; asked for at every layer, so looked for once."""
    return _found(importlib.util.find_spec)


@cache
def _found(find: Callable[[str], Any]) -> bool:
    return find("triton") is not None


def jit(kernel: Callable[..., None], *parts: Callable[..., Any], unspecialized: tuple[str, ...] = ()) -> Any:
    """Make a Triton kernel of a function whose module has `tl` only for type checkers, and of the functions it calls.

    Nothing imports triton before. Triton compiles one for each set of its constants; a caller keeps it. For 1 and
    multiples of 16 of `unspecialized` numbers no separate kernel is made. Raises KvtoolError: triton is missing.
    """
    try:
        import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
        import triton.language  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise KvtoolError("this kernel needs triton", install_line("triton")) from error
    names: dict[str, Any] = kernel.__globals__
    names["tl"] = triton.language
    for part in parts:
        names[part.__name__] = triton.jit(part)
    return triton.jit(do_not_specialize=list(unspecialized))(kernel)
