"""Whether the files that an answer cites are still what was ingested."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtool.core.cache.environment import Closed
from kvtool.core.corpus.readers import file_of
from kvtool.core.errors import DamagedError
from kvtool.core.query.reply import ReplyChunk

if TYPE_CHECKING:
    from kvtool.core.cache.entries import FileEntry
    from kvtool.core.cache.store import Store

CHANGED, GONE = "changed", "gone"
_BELIEVED = 1 << 23  # bytes from which on size and time are enough: reading them is noticed


def with_changes(store: Store, chunks: Sequence[ReplyChunk]) -> list[ReplyChunk]:
    """Say of each chunk whether its file has changed since ingest, or has gone.

    A cited file is compared by its bytes, since tools keep size and time (`cp -p`, `touch -r`); of a large one they are
    believed. Where even the folder is not there, as in a store that came from another machine, nothing is said; nor
    where the store was closed while the answer was written, since another one stands in its place.
    """
    states = changes(store, [chunk.source for chunk in chunks])
    return [replace(chunk, since_ingest=states[chunk.source]) for chunk in chunks]


def changes(store: Store, sources: Iterable[str]) -> dict[str, str]:
    """Return by document whether its file has changed since ingest, as `with_changes` says it."""
    files = {source: file_of(source) for source in sources}
    states = {path: _state(store, path) for path in set(files.values())}
    return {source: states[path] for source, path in files.items()}


def _state(store: Store, path: str) -> str:
    with suppress(Closed, DamagedError, OSError, ValueError):
        known = store.file(path)
        if known is not None:
            return _compared(known)
    return ""


def _compared(known: FileEntry) -> str:
    try:
        status = os.stat(known.path)
    except (FileNotFoundError, NotADirectoryError):
        return GONE if os.path.isdir(os.path.dirname(known.path)) else ""
    if status.st_size != known.size:
        return CHANGED
    if status.st_mtime_ns == known.mtime_ns and status.st_size > _BELIEVED:
        return ""
    with open(known.path, "rb") as file:
        return "" if hashlib.file_digest(file, "sha256").hexdigest() == known.digest else CHANGED
