"""Chunks without KV, those that questions missed first."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress

from kvtool.core.cache.entries import ChunkSpec, DocumentEntry
from kvtool.core.cache.store import Store
from kvtool.core.common.types import Ids
from kvtool.core.errors import DamagedError
from kvtool.core.session.identity import NEIGHBOUR, StoreIdentity


def due(store: Store, identity: StoreIdentity, without: Collection[str] = ()) -> list[ChunkSpec]:
    """List the chunks of the store's own documents that have no KV: those that questions missed by their LRFU score,
    then the others in the order of documents. `without`: paths of files that are left out. Chunks that were made with
    another lead-in or model are not among them. Further signs of what will be asked were measured, and do not pay:
    samples/results/first_question.md."""
    if not {*store.chunk_ids()}.difference(store.ids_here()):
        return []
    missing: dict[bytes, ChunkSpec] = {}
    for entry in store.files():
        for source in () if entry.origin.is_foreign or entry.path in without else entry.documents:
            with suppress(DamagedError):  # `verify` reports it
                if (document := store.document(source)) is not None:
                    missing |= {chunk.chunk_id: chunk for chunk in _missing(store, identity, document)}
    warmth = store.warmth()
    return sorted(missing.values(), key=lambda chunk: -warmth.get(chunk.chunk_id, 0.0))


def _missing(store: Store, identity: StoreIdentity, document: DocumentEntry) -> Iterator[ChunkSpec]:
    before: Ids = ()
    for ref in document.chunks:
        is_missing = not store.has_chunk(ref.chunk_id)
        if not is_missing and identity.lead_in.mode != NEIGHBOUR:
            continue
        info = store.chunk_info(ref.chunk_id)
        ids = () if info is None else info.token_ids
        chunk = identity.wanted(ids, before if identity.lead_in.mode == NEIGHBOUR else ())
        if is_missing and chunk.chunk_id == ref.chunk_id:
            yield chunk
        before = ids
