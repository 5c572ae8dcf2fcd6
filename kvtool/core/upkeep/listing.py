from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtool.core.common.json_text import level_rows
from kvtool.core.upkeep.selectors import named_documents

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store


@dataclass(slots=True)
class DocumentRow:
    """A document without its text, to list a million, its chunks and their sums; `modified` in seconds since 1970,
    other times of the chunk used last."""

    source: str
    kind: str
    characters: int
    origin: str
    modified: int | None
    chunks: list[ChunkRow] = field(default_factory=list)
    tokens: int = 0
    levels: dict[str, int] = field(default_factory=dict)
    last_used: int | None = None
    pinned: bool = False

    @property
    def bytes(self) -> int:
        return sum(self.levels.values())

    def add(self, row: ChunkRow) -> None:
        self.chunks.append(row)
        self.tokens += row.tokens
        for level, size in row.levels.items():
            self.levels[level] = self.levels.get(level, 0) + size
        self.last_used = max(filter(None, (self.last_used, row.last_used)), default=None)
        self.pinned = self.pinned or row.pinned

    def to_json(self) -> dict[str, Any]:
        names = ("source", "kind", "characters", "origin", "modified", "tokens", "bytes", "last_used", "pinned")
        return {name: getattr(self, name) for name in names} | {"chunks": [row.to_json() for row in self.chunks]}


@dataclass(frozen=True, slots=True)
class ChunkRow:
    id: str
    start: int
    end: int
    tokens: int
    levels: dict[str, int]
    last_used: int | None
    pinned: bool

    @property
    def bytes(self) -> int:
        return sum(self.levels.values())

    def to_json(self) -> dict[str, Any]:
        names = ("id", "start", "end", "tokens", "bytes", "last_used", "pinned")
        return {name: getattr(self, name) for name in names} | {"levels": level_rows(self.levels)}


def list_documents(store: Store, targets: Sequence[str] = ()) -> list[DocumentRow]:
    """The documents that the targets select by path, all without any. Raises UsageError: a target selects nothing;
    DamagedError."""
    documents: list[DocumentRow] = []
    with store.view():
        sources = {*named_documents(store, targets)} if targets else None
        files = {source: entry for entry in store.files() for source in entry.documents}
        used, pins = store.last_used(), {pin for rows in store.pins().values() for pin in rows}
        for document in (each for each in store.documents() if sources is None or each.source in sources):
            entry = files.get(document.source)
            origin, modified = (entry.origin.name, entry.mtime_ns // 10**9) if entry is not None else ("", 0)
            documents.append(DocumentRow(document.source, document.kind, len(document.text), origin, modified or None))
            for ref in document.chunks:
                key, last = ref.chunk_id.hex(), used.get(ref.chunk_id)
                pinned = not pins.isdisjoint((document.source, key))
                sizes = store.level_sizes(ref.chunk_id)
                documents[-1].add(ChunkRow(key, ref.start, ref.end, ref.tokens, sizes, last, pinned))
    return documents


def listed(documents: Iterable[DocumentRow]) -> dict[str, Any]:
    documents = [*documents]
    sizes = {row.id: row.bytes for document in documents for row in document.chunks}
    shown = [document.to_json() for document in documents]
    return {"documents": shown, "chunks": len(sizes), "bytes": sum(sizes.values())}
