"""Retrieval of a question's chunks, and staleness of their files: those that changed or vanished after their ingest.

It needs no torch: what cannot be found is reported before a model is loaded."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtool.core.cache.environment import Closed
from kvtool.core.common.files import open_regular
from kvtool.core.corpus.readers import file_of
from kvtool.core.errors import DamagedError
from kvtool.core.query.reply import ReplyChunk

if TYPE_CHECKING:
    from kvtool.core.cache.entries import FileEntry
    from kvtool.core.cache.store import Store

CHANGED, DELETED = "changed", "deleted"
_BELIEVED = 1 << 23  # bytes from which on size and time are enough: reading them is noticed
_PATIENCE = 2.0  # seconds for all files of an answer; of one that takes longer nothing is said
_MOST_LATE = 64  # looks that are still under way, each in a thread; from then on nothing is said of any file
_AT_ONCE = 1 << 20

_late: dict[str, threading.Thread] = {}  # path → a look at it that did not end in time, and may never end


def with_changes(store: Store, chunks: Sequence[ReplyChunk]) -> list[ReplyChunk]:
    """Say of each chunk whether its file has changed since ingest, or has gone.

    A cited file is compared by its bytes, since tools keep size and time (`cp -p`, `touch -r`); for a large one these
    are trusted. Where even the folder is not there, as in a store that came from another machine, nothing is said; nor
    where the store was closed while the answer was written, since another one may have its path.

    A store from elsewhere may name any path of this machine. So only regular files are read, each up to the size that
    was noted, and from threads of their own: a mount whose server is down never answers.
    """
    states = changes(store, [chunk.source for chunk in chunks])
    return [replace(chunk, staleness=states[chunk.source]) for chunk in chunks]


def changes(store: Store, sources: Iterable[str]) -> dict[str, str]:
    files = {source: file_of(source) for source in sources}
    known: dict[str, FileEntry] = {}
    for path in set(files.values()):
        with suppress(Closed, DamagedError, OSError, ValueError):
            if (entry := store.file(path)) is not None:
                known[path] = entry
    states = _looked_at(known)
    return {source: states.get(path, "") for source, path in files.items()}


def _looked_at(known: dict[str, FileEntry]) -> dict[str, str]:
    states: dict[str, str] = {}
    end = time.monotonic() + _PATIENCE

    def look(path: str) -> None:
        with suppress(OSError, ValueError):
            states[path] = _compared(known[path], end)

    for path in [path for path, thread in _late.copy().items() if not thread.is_alive()]:
        _late.pop(path, None)
    asked = [path for path in known if path not in _late] if len(_late) < _MOST_LATE else []
    looks = {path: threading.Thread(target=look, args=(path,), name="kvtool-since", daemon=True) for path in asked}
    for thread in looks.values():
        thread.start()
    for path, thread in looks.items():
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            _late[path] = thread
    return states.copy()


def _compared(known: FileEntry, end: float) -> str:
    try:
        status = os.stat(known.path)
    except (FileNotFoundError, NotADirectoryError):
        return DELETED if os.path.isdir(os.path.dirname(known.path)) else ""
    if status.st_size != known.size or not stat.S_ISREG(status.st_mode):
        return CHANGED
    if status.st_mtime_ns == known.mtime_ns and status.st_size > _BELIEVED:
        return ""
    digest, left = hashlib.sha256(), known.size + 1
    with open_regular(known.path) as file:
        while left and (part := file.read(min(left, _AT_ONCE))):
            digest.update(part)
            left -= len(part)
            if time.monotonic() > end:
                return ""
    return "" if digest.hexdigest() == known.digest else CHANGED
