"""Chunks at their places in documents, and the options of how they are found."""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvtool.core.common.marks import Place
from kvtool.core.errors import DamagedError
from kvtool.core.model.options import NetworkOptions, embedder_option
from kvtool.core.options.option import option

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


CHUNKS = "Chunks"  # the heading in the commands' help


@dataclass(frozen=True, kw_only=True)
class RetrievalOptions(NetworkOptions, sections=("query",), group=CHUNKS):
    """Options of how chunks are found. `retriever` auto: by both where the store has vectors. `min_score`: vectors
    alone drop nothing, since cosines of helpful and other chunks differ too little."""

    top_k: int = option(5, "Maximum chunks (passages) to retrieve.", lowest=1)
    min_score: float = option(
        0.7,
        "Drop chunks that score below this share of the best and match no further word of the question; 0 drops none.",
        parameter="search.min_score",
        lowest=0,
        highest=1,
    )
    source: tuple[str, ...] = option(
        (),
        "Search only documents whose path matches.",
        flag="--source",
        parameter="search.source",
        setting=False,
        metavar="GLOB",
    )
    retriever: str = option(
        "auto",
        "Search by words (bm25), by meaning (dense) or by both; auto uses what the store has.",
        choices=("auto", "bm25", "dense", "hybrid"),
    )
    embedder: str | None = embedder_option(CHUNKS)
    order: str = option(
        "best-last",
        "Order of the retrieved chunks in the prompt; with --defer, of each round.",
        parameter="search.order",
        choices=("relevance", "best-last", "document"),
    )
