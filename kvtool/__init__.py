"""kvtool: RAG over documents whose KV caches are computed once, stored, and fused at query time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtool.core.errors import KvtoolError, KvtoolWarning

if TYPE_CHECKING:
    from kvtool.core.api import open

__version__ = "0.1.0"
__all__ = ["KvtoolError", "KvtoolWarning", "__version__", "open"]


def __getattr__(name: str) -> Any:
    """Import `open`, and torch with it, only when it is asked for."""
    if name == "open":
        from kvtool.core import api

        return api.open
    raise AttributeError(f"module 'kvtool' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
