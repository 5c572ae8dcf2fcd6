"""Retrieval of a question's chunks, and staleness of their files: those that changed or vanished after their ingest.

It needs no torch: what cannot be found is reported before a model is loaded."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvtool.core.cache.environment import Closed
from kvtool.core.cache.store import Store
from kvtool.core.common.files import open_regular
from kvtool.core.common.types import Timeline, add_span
from kvtool.core.corpus.readers import file_of
from kvtool.core.errors import DamagedError, UsageError
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import ReplyChunk, Request
from kvtool.core.retrieval.finder import Finder
from kvtool.core.retrieval.passages import Found, Hit, RetrievalOptions

if TYPE_CHECKING:
    from kvtool.core.cache.entries import FileEntry


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Chunks of a request in the order of its prompt, and the revision of the documents they are from."""

    result: Found
    revision: int
    milliseconds: float


def retrieve(
    store: Store,
    finder: Finder,
    request: Request,
    options: QueryOptions,
    prefer: Container[bytes] | None = None,
    timeline: Timeline | None = None,
) -> Retrieved:
    """Find the chunks of a request in one revision of the store. Raises as `find_chunks`."""
    started = time.perf_counter()
    with store.view():
        result, revision = find_chunks(finder, request, options, prefer), store.documents_revision()
    return Retrieved(result, revision, add_span(timeline, "retrieve", started) * 1e3)


def find_chunks(
    finder: Finder, request: Request, options: QueryOptions, prefer: Container[bytes] | None = None
) -> Found:
    """Find the chunks for a request, or look up those it names, in the order of the prompt. `prefer`: ids that win
    ties. Raises UsageError: a named chunk is missing; KvtoolError: nothing was found."""
    if not request.question.strip():
        raise UsageError("the question is empty", "ask something")
    if request.chunks or request.documents:
        return Found(finder.named(request.chunks, request.documents))
    text = request.search or request.question
    finding = replace(options, min_score=0.0) if options.defer else options  # the answer decides how many it needs
    result = finder.find(text, finding, prefer=prefer, is_asked=True)
    rounds = options.rounds(len(result.hits)) if options.defer else [(0, len(result.hits))]
    hits = [hit for start, stop in rounds for hit in in_order(result.hits[start:stop], options.order)]
    return result._replace(hits=hits)


def in_order(hits: Sequence[Hit], order: str) -> list[Hit]:
    """Put hits, given best first, in the order of the prompt; `document`: that with the best hit first."""
    if order == "best-last":
        return list(reversed(hits))
    if order == "document":
        ranks: dict[str, int] = {}
        for hit in hits:
            ranks.setdefault(hit.passage.source, len(ranks))
        return sorted(hits, key=lambda hit: (ranks[hit.passage.source], hit.passage.start))
    return list(hits)


@dataclass(frozen=True, slots=True)
class SearchReport:
    """The passages that match a question, best first; `chunks_omitted`: others, below `min_score`. `corrections`:
    unknown words (`from`) with those searched for (`to`)."""

    question: str
    chunks: list[ReplyChunk]
    chunks_omitted: int = 0
    corrections: Sequence[dict[str, str]] = ()

    def to_json(self) -> dict[str, Any]:
        chunks = [chunk.found() for chunk in self.chunks]
        facts = {"question": self.question, "chunks": chunks, "chunks_omitted": self.chunks_omitted}
        return facts | ({"corrections": [*self.corrections]} if self.corrections else {})


def search(store: Store, finder: Finder, question: str, options: RetrievalOptions) -> SearchReport:
    """Find the passages that a question would be answered from. Raises UsageError: the question is empty, or no
    document matches `source`; NothingFoundError."""
    if not question.strip():
        raise UsageError("the question is empty", "search for something")
    hits, omitted, corrections = finder.find(question, options)
    chunks = with_changes(store, [ReplyChunk.of(store, hit) for hit in hits])
    return SearchReport(question, chunks, omitted, corrections)


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
