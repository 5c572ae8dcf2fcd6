"""List documents or chunks in an order (`kvtool help upkeep`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from kvtool.core.codec.levels import LEVELS, known
from kvtool.core.common.json_text import level_rows
from kvtool.core.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from kvtool.core.cache.entries import ChunkRef, DocumentEntry
    from kvtool.core.cache.store import Store

NEVER = math.inf  # age of what was never used


@dataclass(frozen=True, slots=True)
class Listed:
    """A document without its text: a list of a million chunks would hold all texts else.

    Attributes
    ----------
    origin : the pack, store or signer that it came from; "" for one that was ingested here.
    modified : when its file was changed last before it was ingested, in seconds since 1970; None: not known.
    """

    source: str
    kind: str
    characters: int
    origin: str
    modified: int | None

    @classmethod
    def of(cls, document: DocumentEntry, files: Mapping[str, tuple[str, int]]) -> Listed:
        """Return a document's entry in the listing; `files` as of :func:`files_of`."""
        origin, modified = files.get(document.source, ("", 0))
        return cls(document.source, document.kind, len(document.text), origin, modified or None)


def files_of(store: Store) -> dict[str, tuple[str, int]]:
    """Map documents to where their files came from, and when those were changed last. Raises DamagedError."""
    return {
        source: (entry.origin.name, entry.mtime_ns // 10**9) for entry in store.files() for source in entry.documents
    }


@dataclass(frozen=True, slots=True)
class Row:
    """A document's chunk.

    Attributes
    ----------
    chunks : that its document has.
    levels : bytes by level that is stored whole.
    last_used : seconds since 1970; None: never.
    age : seconds since then; NEVER.
    """

    document: Listed
    ref: ChunkRef
    chunks: int
    levels: dict[str, int]
    last_used: int | None
    age: float
    pinned: bool

    @property
    def start(self) -> int:
        """The character of its document at which it begins."""
        return self.ref.start

    @property
    def tokens(self) -> int:
        """Return the number of tokens."""
        return self.ref.tokens

    @property
    def bytes(self) -> int:
        """Return the bytes of all its records."""
        return sum(self.levels.values())

    def to_json(self) -> dict[str, Any]:
        """The chunk without its document."""
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
    """A document with what those of its chunks come to that are listed; the fields are those of a `Row`.

    Attributes
    ----------
    last_used, age : of the chunk that was used last.
    pinned : all of it, or a chunk.
    """

    document: Listed
    start: int = 0
    chunks: int = 0
    tokens: int = 0
    levels: dict[str, int] = field(default_factory=dict)
    last_used: int | None = None
    age: float = NEVER
    pinned: bool = False

    def add(self, row: Row) -> None:
        """Count a chunk of the document in."""
        self.chunks += 1
        self.tokens += row.tokens
        for level, size in row.levels.items():
            self.levels[level] = self.levels.get(level, 0) + size
        if row.age < self.age:
            self.age, self.last_used = row.age, row.last_used
        self.pinned = self.pinned or row.pinned

    @property
    def bytes(self) -> int:
        """Return the bytes of all records of these chunks."""
        return sum(self.levels.values())

    def to_json(self, chunks: Iterable[Row]) -> dict[str, Any]:
        """The document with these chunks."""
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
    """A field, ascending, or with a minus before it descending: `used`: latest first; `level`: finest first.

    Raises
    ------
    UsageError : there is no such field.
    """
    field = text.removeprefix("-")
    if field not in _KEYS:
        hint = did_you_mean(field, _KEYS) or f"known: {', '.join(_KEYS)}, each with a minus before it for the reverse"
        raise UsageError(f"--sort: there is no field {field!r}", hint)
    return lambda rows: sorted(rows, key=_KEYS[field], reverse=text.startswith("-"))


# ---- documents ---------------------------------------------------------------------------------------------------


def documents_of(rows: Iterable[Row]) -> list[DocumentRow]:
    """Documents in the order of their first row, with what their rows come to."""
    by_source: dict[str, DocumentRow] = {}
    for row in rows:
        by_source.setdefault(row.document.source, DocumentRow(row.document)).add(row)
    return list(by_source.values())


def without_chunks(store: Store) -> list[DocumentRow]:
    """Documents that gave no chunk, which no row is of. Raises DamagedError."""
    files = files_of(store)
    return [DocumentRow(Listed.of(document, files)) for document in store.documents() if not document.chunks]


def listed(documents: Iterable[DocumentRow], rows: Iterable[Row]) -> dict[str, Any]:
    """Give documents, each with its rows, as JSON; chunks that several have count once."""
    by_source: dict[str, list[Row]] = {}
    sizes = {}
    for row in rows:
        by_source.setdefault(row.document.source, []).append(row)
        sizes[row.ref.chunk_id] = row.bytes
    shown = [document.to_json(by_source.get(document.document.source, ())) for document in documents]
    return {"documents": shown, "chunks": len(sizes), "bytes": sum(sizes.values())}
