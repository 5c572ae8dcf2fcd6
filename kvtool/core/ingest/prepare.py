"""Changed documents → chunks with token ids and chunk ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtool.core.cache.entries import ChunkRef, ChunkSpec, DocumentEntry, FileEntry
from kvtool.core.common.types import Ids
from kvtool.core.corpus.readers.document import Document
from kvtool.core.corpus.split import split
from kvtool.core.ingest.survey import ChangedFile
from kvtool.core.model.prompt import chunk_tokens
from kvtool.core.model.tokens import count_tokens
from kvtool.core.session.identity import NEIGHBOUR, StoreIdentity


@dataclass(frozen=True, slots=True)
class PreparedFile:
    """Holds a changed file with its documents cut; `chunks` stand in order, a chunk as often as it occurs."""

    entry: FileEntry
    documents: tuple[DocumentEntry, ...]
    chunks: tuple[ChunkSpec, ...]
    is_new: bool

    @property
    def chunk_ids(self) -> tuple[bytes, ...]:
        """Ids of its chunks, in order."""
        return tuple(chunk.chunk_id for chunk in self.chunks)


def prepare(file: ChangedFile, identity: StoreIdentity, tokenizer: Any) -> PreparedFile:
    """Split and tokenise one file's documents."""
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
    spans = split(document.text, identity.split, count_tokens(tokenizer), document.kind)
    ids = chunk_tokens(tokenizer, [document.text[span.start : span.end] for span in spans])
    wanted = _wanted(ids, identity)
    refs = [
        ChunkRef(chunk.chunk_id, span.start, span.end, len(chunk.ids))
        for span, chunk in zip(spans, wanted, strict=True)
    ]
    return DocumentEntry(document.source, document.kind, document.text, tuple(refs), document.marks), wanted


def _wanted(ids: Sequence[Ids], identity: StoreIdentity) -> list[ChunkSpec]:
    befores: list[Ids] = [()] * len(ids)
    if identity.lead_in.mode == NEIGHBOUR:
        befores = [(), *ids[:-1]]
    return [identity.wanted(*pair) for pair in zip(ids, befores, strict=True)]
