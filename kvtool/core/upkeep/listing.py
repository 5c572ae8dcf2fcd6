from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from kvtool.core.codec.levels import LEVELS, known
from kvtool.core.common.json_text import level_rows
from kvtool.core.errors import UsageError, did_you_mean
from kvtool.core.upkeep.selectors import named_documents

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store

NEVER = math.inf  # age of what was never used


@dataclass(slots=True)
class DocumentRow:
    """A document without its text, to list a million, and the sums of its chunks; `modified` in seconds since 1970,
    other times of the chunk used last."""

    source: str
    kind: str
    characters: int
    origin: str
    modified: int | None
    chunks: int
    start: int = 0
    tokens: int = 0
    levels: dict[str, int] = field(default_factory=dict)
    last_used: int | None = None
    age: float = NEVER
    pinned: bool = False

    @property
    def document(self) -> DocumentRow:
        return self

    @property
    def bytes(self) -> int:
        return sum(self.levels.values())

    def add(self, row: Row) -> None:
        self.tokens += row.tokens
        for level, size in row.levels.items():
            self.levels[level] = self.levels.get(level, 0) + size
        if row.age < self.age:
            self.age, self.last_used = row.age, row.last_used
        self.pinned = self.pinned or row.pinned

    def to_json(self, rows: Iterable[Row]) -> dict[str, Any]:
        names = ("source", "kind", "characters", "origin", "modified", "tokens", "bytes", "last_used", "pinned")
        return {name: getattr(self, name) for name in names} | {"chunks": [row.to_json() for row in rows]}


@dataclass(frozen=True, slots=True)
class Row:
    """A document's chunk; `age` is in seconds."""

    document: DocumentRow
    id: str
    start: int
    end: int
    tokens: int
    levels: dict[str, int]
    last_used: int | None
    age: float
    pinned: bool

    @property
    def chunks(self) -> int:
        return self.document.chunks

    @property
    def bytes(self) -> int:
        return sum(self.levels.values())

    def to_json(self) -> dict[str, Any]:
        names = ("id", "start", "end", "tokens", "bytes", "last_used", "pinned")
        return {name: getattr(self, name) for name in names} | {"levels": level_rows(self.levels)}


AnyRow = TypeVar("AnyRow", Row, DocumentRow)


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
    in_order, documents, rows = parse_sort(sort), list[DocumentRow](), list[Row]()
    with store.view():
        sources = {*named_documents(store, targets)} if targets else None
        files = {source: entry for entry in store.files() for source in entry.documents}
        used, pins, now = store.last_used(), {pin for rows in store.pins().values() for pin in rows}, time.time()
        for document in (each for each in store.documents() if sources is None or each.source in sources):
            entry = files.get(document.source)
            origin, modified = (entry.origin.name, entry.mtime_ns // 10**9) if entry is not None else ("", 0)
            facts = document.kind, len(document.text), origin, modified or None, len(document.chunks)
            documents.append(DocumentRow(document.source, *facts))
            for ref in document.chunks:
                key, last = ref.chunk_id.hex(), used.get(ref.chunk_id)
                age = NEVER if last is None else max(0.0, now - last)
                pinned = not pins.isdisjoint((document.source, key))
                sizes = store.level_sizes(ref.chunk_id)
                rows.append(Row(documents[-1], key, ref.start, ref.end, ref.tokens, sizes, last, age, pinned))
                documents[-1].add(rows[-1])
    if not by_chunk:
        return in_order(documents), rows
    rows = in_order(rows)
    by_source = {row.document.source: row.document for row in rows}
    return [*(by_source | {document.source: document for document in documents}).values()], rows


def listed(documents: Iterable[DocumentRow], rows: Iterable[Row]) -> dict[str, Any]:
    by_source: dict[str, list[Row]] = {}
    sizes = {}
    for row in rows:
        by_source.setdefault(row.document.source, []).append(row)
        sizes[row.id] = row.bytes
    shown = [document.to_json(by_source.get(document.source, ())) for document in documents]
    return {"documents": shown, "chunks": len(sizes), "bytes": sum(sizes.values())}
