from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from kvtool.core.codec.levels import LEVELS, known
from kvtool.core.common.json_text import level_rows
from kvtool.core.errors import UsageError, did_you_mean
from kvtool.core.upkeep.selectors import named_documents

if TYPE_CHECKING:
    from kvtool.core.cache.entries import ChunkRef, DocumentEntry
    from kvtool.core.cache.store import Store

NEVER = math.inf  # age of what was never used


@dataclass(frozen=True, slots=True)
class Listed:
    """A document without its text, to list a million; `modified` in seconds since 1970."""

    source: str
    kind: str
    characters: int
    origin: str
    modified: int | None

    @classmethod
    def of(cls, document: DocumentEntry, files: Mapping[str, tuple[str, int]]) -> Listed:
        origin, modified = files.get(document.source, ("", 0))
        return cls(document.source, document.kind, len(document.text), origin, modified or None)


def files_of(store: Store) -> dict[str, tuple[str, int]]:
    """Map documents to where their files came from, and when those were changed last. Raises DamagedError."""
    return {
        source: (entry.origin.name, entry.mtime_ns // 10**9) for entry in store.files() for source in entry.documents
    }


@dataclass(frozen=True, slots=True)
class Row:
    """A document's chunk; `chunks` are those of its document, `age` is in seconds."""

    document: Listed
    ref: ChunkRef
    chunks: int
    levels: dict[str, int]
    last_used: int | None
    age: float
    pinned: bool

    @property
    def start(self) -> int:
        return self.ref.start

    @property
    def tokens(self) -> int:
        return self.ref.tokens

    @property
    def bytes(self) -> int:
        return sum(self.levels.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.ref.chunk_id.hex(),
            "start": self.start,
            "end": self.ref.end,
            "tokens": self.tokens,
            "levels": level_rows(self.levels),
            "bytes": self.bytes,
            "last_used": self.last_used,
            "pinned": self.pinned,
        }


@dataclass(slots=True)
class DocumentRow:
    """A document and its listed chunks; the fields are those of a `Row`, times of the chunk used last."""

    document: Listed
    start: int = 0
    chunks: int = 0
    tokens: int = 0
    levels: dict[str, int] = field(default_factory=dict)
    last_used: int | None = None
    age: float = NEVER
    pinned: bool = False

    def add(self, row: Row) -> None:
        self.chunks += 1
        self.tokens += row.tokens
        for level, size in row.levels.items():
            self.levels[level] = self.levels.get(level, 0) + size
        if row.age < self.age:
            self.age, self.last_used = row.age, row.last_used
        self.pinned = self.pinned or row.pinned

    @property
    def bytes(self) -> int:
        return sum(self.levels.values())

    def to_json(self, chunks: Iterable[Row]) -> dict[str, Any]:
        own = {name: getattr(self.document, name) for name in ("source", "kind", "characters", "origin", "modified")}
        summed = {name: getattr(self, name) for name in ("tokens", "bytes", "last_used", "pinned")}
        return own | summed | {"chunks": [row.to_json() for row in chunks]}


AnyRow = TypeVar("AnyRow", Row, DocumentRow)


def rows_of(store: Store) -> Iterator[Row]:
    """All chunks of all documents, in the documents' order. Raises DamagedError."""
    used, pins, now = store.last_used(), store.pins(), time.time()
    sources, chunks, files = set(pins["sources"]), set(pins["chunks"]), files_of(store)
    for document in store.documents():
        listed = Listed.of(document, files)
        for ref in document.chunks:
            last = used.get(ref.chunk_id)
            age = NEVER if last is None else max(0.0, now - last)
            pinned = document.source in sources or ref.chunk_id.hex() in chunks
            sizes = store.level_sizes(ref.chunk_id)
            yield Row(listed, ref, len(document.chunks), sizes, last, age, pinned)


# ---- order -------------------------------------------------------------------------------------------------------

_KEYS: dict[str, Callable[[Row | DocumentRow], Any]] = {
    "source": lambda row: (row.document.source, row.start),
    "kind": lambda row: row.document.kind,
    "tokens": lambda row: row.tokens,
    "chunks": lambda row: row.chunks,
    "used": lambda row: row.age,
    "level": lambda row: min(map([*LEVELS].index, known(row.levels)), default=len(LEVELS)),
    "bytes": lambda row: row.bytes,
    "pinned": lambda row: not row.pinned,
}


def parse_sort(text: str) -> Callable[[Iterable[AnyRow]], list[AnyRow]]:
    """Parse a field, ascending, or with a minus descending: `used`: latest first; `level`: finest first."""
    field = text.removeprefix("-")
    if field not in _KEYS:
        hint = did_you_mean(field, _KEYS) or f"known: {', '.join(_KEYS)}, each with a minus before it for the reverse"
        raise UsageError(f"--sort: there is no field {field!r}", hint)
    return lambda rows: sorted(rows, key=_KEYS[field], reverse=text.startswith("-"))


# ---- documents ---------------------------------------------------------------------------------------------------


def list_documents(
    store: Store, targets: Sequence[str] = (), sort: str = "source", by_chunk: bool = False
) -> tuple[list[DocumentRow], list[Row]]:
    """The documents that the targets select, all without any, and their chunks. `sort`: see `parse_sort`; it orders
    documents, or chunks if `by_chunk`. Raises UsageError: a target selects nothing; DamagedError."""
    in_order = parse_sort(sort)
    with store.view():
        sources, files = {*named_documents(store, targets)} if targets else None, files_of(store)
        chosen = [document for document in store.documents() if sources is None or document.source in sources]
        documents = {document.source: DocumentRow(Listed.of(document, files)) for document in chosen}
        rows = [row for row in rows_of(store) if row.document.source in documents]
    rows = in_order(rows) if by_chunk else rows
    for row in rows:
        documents[row.document.source].add(row)
    if not by_chunk:
        return in_order(documents.values()), rows
    return [documents[source] for source in dict.fromkeys([*(row.document.source for row in rows), *documents])], rows


def listed(documents: Iterable[DocumentRow], rows: Iterable[Row]) -> dict[str, Any]:
    by_source: dict[str, list[Row]] = {}
    sizes = {}
    for row in rows:
        by_source.setdefault(row.document.source, []).append(row)
        sizes[row.ref.chunk_id] = row.bytes
    shown = [document.to_json(by_source.get(document.document.source, ())) for document in documents]
    return {"documents": shown, "chunks": len(sizes), "bytes": sum(sizes.values())}
