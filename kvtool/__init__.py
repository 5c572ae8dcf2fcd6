"""kvtool: RAG over documents whose KV caches are computed once, stored, and fused at query time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvtool.core import __version__
from kvtool.core.errors import KvtoolError, KvtoolWarning

if TYPE_CHECKING:
    from kvtool.core.api import Cache, open
    from kvtool.core.compress.options import CompressOptions
    from kvtool.core.ingest.options import IngestOptions
    from kvtool.core.model.options import ModelOptions
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.query.reply import Reply
    from kvtool.core.upkeep.options import PruneOptions

__all__ = [
    "Cache",
    "CompressOptions",
    "IngestOptions",
    "KvtoolError",
    "KvtoolWarning",
    "ModelOptions",
    "PruneOptions",
    "QueryOptions",
    "Reply",
    "__version__",
    "open",
]
_WHERE = {
    "open": "api",
    "Cache": "api",
    "Reply": "query.reply",
    "QueryOptions": "query.options",
    "IngestOptions": "ingest.options",
    "CompressOptions": "compress.options",
    "ModelOptions": "model.options",
    "PruneOptions": "upkeep.options",
}


def __getattr__(name: str) -> Any:
    """Import what is exported only when it is asked for, since importing kvtool is to be quick."""
    if name in _WHERE:
        return getattr(importlib.import_module(f"kvtool.core.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'kvtool' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
