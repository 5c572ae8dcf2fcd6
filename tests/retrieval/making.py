"""Stores of texts for retrieval, without a model: a chunk a paragraph."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtool.core.cache.entries import ChunkRef, DocumentEntry, FileEntry
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.retrieval.index import Index
from kvtool.core.retrieval.passages import Passage, RetrievalOptions, found_by
from kvtool.core.retrieval.search import Search
from kvtool.core.retrieval.segment import IndexSegment, MarkedDocument
from tests.stores import id_of, put


def entry_of(source: str, text: str) -> DocumentEntry:
    """Paragraphs are chunks; equal paragraphs are equal chunks."""
    refs, at = [], 0
    for part in text.split("\n\n"):
        refs.append(ChunkRef(id_of(part), at, at + len(part), 8))
        at += len(part) + 2
    return DocumentEntry(source, "text", text, tuple(refs))


def ingest(writer: Writer, files: Mapping[str, Mapping[str, str]]) -> None:
    for path, documents in files.items():
        entries = [entry_of(source, text) for source, text in documents.items()]
        for text in documents.values():
            for part in text.split("\n\n"):
                put(writer, part)
        digest = hashlib.sha256(repr(sorted(documents.items())).encode()).hexdigest()
        writer.commit_file(FileEntry(path, 1, 2, digest, "settings", tuple(documents)), entries)


def store_of(path: Path, texts: Mapping[str, str]) -> Store:
    store = Store.create_or_open(path)
    with store.writer() as writer:
        writer.set_manifest({"model": "tiny"})
        ingest(writer, {source: {source: text} for source, text in texts.items()})
    return store


def index_of_texts(texts: Mapping[str, str]) -> Index:
    index = Index.empty()
    marked = [MarkedDocument(bytes(20), bytes(16), entry_of(source, text)) for source, text in texts.items()]
    index.segments = [IndexSegment.build(marked)] if marked else []
    return index


def search_in(index: Index, texts: Mapping[str, str]) -> Search:
    def text(passage: Passage) -> str:
        return found_by(entry_of(passage.source, texts[passage.source]))[passage.index]

    return Search(index, text)


def retrieval(retriever: str = "auto", embedder: Path | None = None, **more: Any) -> RetrievalOptions:
    return RetrievalOptions.of({"retriever": retriever, "embedder": embedder, "min_score": 0.0, **more})
