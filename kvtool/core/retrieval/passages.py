"""Chunks at their places in documents."""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvtool.core.common.marks import Place
from kvtool.core.errors import DamagedError

if TYPE_CHECKING:
    from kvtool.core.cache.entries import DocumentEntry
    from kvtool.core.cache.store import Store


@dataclass(frozen=True, slots=True)
class Passage:
    chunk_id: bytes
    source: str
    start: int
    end: int
    index: int


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage and how well it matches; higher is better, 1 is the best match by words only."""

    passage: Passage
    score: float


class Found(NamedTuple):
    """Hits, best first, the number of others that were cut, and unknown words (`from`) with those searched for
    (`to`)."""

    hits: list[Hit]
    cut: int = 0
    corrections: Sequence[dict[str, str]] = ()


def recent_first(hits: Sequence[Hit], recent: Container[bytes]) -> list[Hit]:
    """Sort hits, best first; recently used chunks first among equal scores."""
    return sorted(hits, key=lambda hit: (-hit.score, hit.passage.chunk_id not in recent))


def passages_in(document: DocumentEntry) -> list[Passage]:
    return [Passage(c.chunk_id, document.source, c.start, c.end, index) for index, c in enumerate(document.chunks)]


def holds_passage(document: DocumentEntry, passage: Passage) -> bool:
    if not 0 <= passage.index < len(document.chunks):
        return False
    ref = document.chunks[passage.index]
    return (ref.chunk_id, ref.start, ref.end) == (passage.chunk_id, passage.start, passage.end)


def found_by(document: DocumentEntry) -> list[str]:
    """A passage's text after its document's title, so that "the institute" is found by the institute's name."""
    title = title_of(document.text)
    texts = [document.text[ref.start : ref.end] for ref in document.chunks]
    return [text if number == 0 else f"{title}\n{text}" for number, text in enumerate(texts)]


def title_of(text: str) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "").strip().lstrip("#").strip()
    return line if len(line) <= 120 else ""


def place_and_text(store: Store, passage: Passage) -> tuple[Place, str]:
    with suppress(DamagedError):
        document = store.document(passage.source)
        if document is not None:
            place = document.place(passage.start, passage.end)
            return place, document.text[passage.start : passage.end]
    return Place(), ""
