"""Chunks where they stand in their documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtool.core.cache.entries import DocumentEntry
    from kvtool.core.cache.store import Store


@dataclass(frozen=True, slots=True)
class Passage:
    """A chunk of a document: characters `start` … `end` of `source`, chunk number `index` of it."""

    chunk_id: bytes
    source: str
    start: int
    end: int
    index: int

    def to_json(self) -> list[Any]:
        return [self.chunk_id.hex(), self.source, self.start, self.end, self.index]

    @classmethod
    def from_json(cls, row: list[Any]) -> Passage:
        chunk, source, start, end, index = row
        return cls(bytes.fromhex(chunk), source, start, end, index)


def passages_in(document: DocumentEntry) -> list[Passage]:
    """The passages of one document, in order."""
    return [Passage(c.chunk_id, document.source, c.start, c.end, index) for index, c in enumerate(document.chunks)]


def passages_of(store: Store) -> Iterator[tuple[Passage, str]]:
    """Every passage of a store with the text it is found by: its document's title, and its own."""
    for source in sorted(store.sources()):
        document = store.document(source)
        if document is None:
            continue
        title = title_of(document.text)
        for passage in passages_in(document):
            text = document.text[passage.start : passage.end]
            yield passage, text if passage.index == 0 else f"{title}\n{text}"


def title_of(text: str) -> str:
    """A document's first line that says something, without heading marks; "" when it is too long for a title."""
    line = next((line for line in text.splitlines() if line.strip()), "").strip().lstrip("#").strip()
    return line if len(line) <= 120 else ""
