"""Chunks of changed documents, with token ids and chunk ids, and the new ones among them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from kvtool.core.cache.entries import ChunkRef, ChunkSpec, DocumentEntry, FileEntry
from kvtool.core.cache.store import Store
from kvtool.core.common.types import Ids
from kvtool.core.corpus.readers.document import Document
from kvtool.core.corpus.tables import split_document
from kvtool.core.ingest.survey import ChangedFile
from kvtool.core.model.prompt import chunk_tokens
from kvtool.core.model.tokens import count_tokens
from kvtool.core.session.identity import NEIGHBOUR, StoreIdentity


@dataclass(frozen=True, slots=True)
class PreparedFile:
    entry: FileEntry
    documents: tuple[DocumentEntry, ...]
    chunks: tuple[ChunkSpec, ...]
    is_new: bool

    @property
    def chunk_ids(self) -> tuple[bytes, ...]:
        return tuple(chunk.chunk_id for chunk in self.chunks)


def prepare(file: ChangedFile, identity: StoreIdentity, tokenizer: Any) -> PreparedFile:
    documents: list[DocumentEntry] = []
    chunks: list[ChunkSpec] = []
    for document in file.documents:
        cut, wanted = _cut(document, identity, tokenizer)
        documents.append(cut)
        chunks.extend(wanted)
    entry = FileEntry(
        path=file.found.name,
        size=file.found.size,
        mtime_ns=file.found.mtime_ns,
        digest=file.digest,
        settings=file.settings,
        documents=tuple(document.source for document in documents),
        notes=file.notes,
    )
    return PreparedFile(entry, tuple(documents), tuple(chunks), file.known is None)


def _cut(document: Document, identity: StoreIdentity, tokenizer: Any) -> tuple[DocumentEntry, list[ChunkSpec]]:
    document, spans = split_document(document, identity.split, count_tokens(tokenizer))
    ids = chunk_tokens(tokenizer, [document.text[span.start : span.end] for span in spans])
    befores: list[Ids] = [(), *ids[:-1]] if identity.lead_in.mode == NEIGHBOUR else [()] * len(ids)
    wanted = [identity.wanted(*pair) for pair in zip(ids, befores, strict=True)]
    refs = [
        ChunkRef(chunk.chunk_id, span.start, span.end, len(chunk.ids))
        for span, chunk in zip(spans, wanted, strict=True)
    ]
    return DocumentEntry(document.source, document.kind, document.text, tuple(refs), document.marks), wanted


class NewChunks:
    """Chunks that neither the store nor an earlier file of this run has; `reused` counts those that the store has."""

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self.seen: set[bytes] = set()
        self.reused = 0

    def of(self, file: PreparedFile) -> list[ChunkSpec]:
        first = {chunk.chunk_id: chunk for chunk in file.chunks if chunk.chunk_id not in self.seen}
        self.seen.update(first)
        new = [chunk for key, chunk in first.items() if self._store is None or not self._store.serves_own(key)]
        self.reused += len(first) - len(new)
        return new

    def orphaned(self, paths: Collection[str], keep: bytes) -> int:
        """Count the stored chunks that nothing but `keep` refers to once these files are gone. Raises DamagedError."""
        if self._store is None:
            return 0
        going = {source for entry in self._store.files() if entry.path in paths for source in entry.documents}
        staying = (document for document in self._store.documents() if document.source not in going)
        wanted = {ref.chunk_id for document in staying for ref in document.chunks} | self.seen | {keep}
        wanted |= {chunk for path, ids in self._store.unfinished().items() if path not in paths for chunk in ids}
        return sum(chunk_id not in wanted for chunk_id in self._store.chunk_ids())

    def take_back(self, new: Iterable[ChunkSpec]) -> None:
        """Forget new chunks that are not computed after all: in a later file they are new again."""
        self.seen.difference_update(chunk.chunk_id for chunk in new)
