"""Chunks without KV, those that questions missed first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.cache.store import Store
from kvtool.core.errors import DamagedError
from kvtool.core.session.identity import NEIGHBOUR, StoreIdentity

_NONE_DUE = "seen/due.json"  # says for which revisions no chunk was due


@dataclass(frozen=True, slots=True)
class DueChunk:
    """A chunk without KV. `before`: id of the one before it in its document; b"": it is the first."""

    chunk_id: bytes
    tokens: int
    before: bytes


def due(store: Store, identity: StoreIdentity, without: Collection[str] = ()) -> list[DueChunk]:
    """List the chunks of the store's own documents that have no KV: those that questions missed by their LRFU score,
    then the others in the order of documents. Chunks that were made with another lead-in or model are not among them.
    `without`: paths of files that are left out. Further signs of what will be asked were measured, and do not pay:
    samples/results/first_question.md."""
    if identity.keeps_states or store.is_front:  # none is stored; all can be fetched
        return []
    settings = identity.settings_digest()
    marks = {"documents": store.documents_revision(), "dropped": store.dropped_revision(), "settings": settings}
    if store.read_side(_NONE_DUE, **marks):
        return []
    missing = {*store.chunk_ids()}.difference(store.ids_here())
    found: dict[bytes, DueChunk] = {}
    for entry in store.files() if missing else ():
        for source in () if entry.origin.is_foreign or entry.path in without else entry.documents:
            with suppress(DamagedError):  # `verify` reports it
                refs = document.chunks if (document := store.document(source)) is not None else ()
                befores = [b"", *(ref.chunk_id for ref in refs)]
                missed = [pair for pair in zip(refs, befores, strict=False) if pair[0].chunk_id in missing]
                chunks = [DueChunk(ref.chunk_id, ref.tokens, before) for ref, before in missed]
                if chunks and not entry.settings.startswith(settings):  # such as with another length of chunks
                    own = {spec.chunk_id for spec in specs_of(store, identity, chunks)}
                    chunks = [chunk for chunk in chunks if chunk.chunk_id in own]
                for chunk in chunks:
                    found.setdefault(chunk.chunk_id, chunk)
    if not found and not without:  # the names of all chunks take .3 s for 20,000
        store.write_side(_NONE_DUE, marks)
    warmth = store.warmth() if found else {}
    return sorted(found.values(), key=lambda chunk: -warmth.get(chunk.chunk_id, 0.0))


def specs_of(store: Store, identity: StoreIdentity, chunks: Iterable[DueChunk]) -> Iterator[ChunkSpec]:
    """Yield what to compute of chunks; none of those that were made with another lead-in or model."""
    follows = identity.lead_in.mode == NEIGHBOUR
    for chunk in chunks:
        with suppress(DamagedError):
            info, before = store.chunk_info(chunk.chunk_id), None
            if follows and chunk.before:
                before = store.chunk_info(chunk.before)
            if info is not None:
                spec = identity.wanted(info.token_ids, () if before is None else before.token_ids)
                if spec.chunk_id == chunk.chunk_id:
                    yield spec
