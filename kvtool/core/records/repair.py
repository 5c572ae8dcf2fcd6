"""Repair of chunks of which some records cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvtool.core.codec.levels import RAW, exact
from kvtool.core.errors import DamagedError
from kvtool.core.records.encode import LeadIns, make
from kvtool.core.records.read import read_chunk, stored_shape

if TYPE_CHECKING:
    from kvtool.core.cache.entries import ChunkSpec
    from kvtool.core.cache.store import Store
    from kvtool.core.cache.writer import Writer
    from kvtool.core.codec.base import Profiles
    from kvtool.core.model.decoder import Decoder


def repair_chunks(
    store: Store,
    decoder: Decoder,
    profiles: Profiles,
    lead_ins: Callable[[ChunkSpec], LeadIns],
    chunks: Sequence[ChunkSpec],
) -> None:
    """Drop the records of some chunks that cannot be read; prefill and store those chunks of which no lossless level is
    left. `lead_ins`: what a chunk is prefilled after. Raises KvtoolError: the store is locked, full or read-only."""
    with store.writer() as writer:
        for chunk in chunks:
            if not _drop_unreadable(store, writer, decoder, profiles, chunk):
                (records,) = make(decoder, lead_ins(chunk), [chunk])
                writer.put_chunk(records.chunk_id, records.info, records.level, records.layers)


def _drop_unreadable(store: Store, writer: Writer, decoder: Decoder, profiles: Profiles, chunk: ChunkSpec) -> bool:
    """Drop only what cannot be read of a chunk; return whether a lossless level is left."""
    try:
        info = store.chunk_info(chunk.chunk_id)
    except DamagedError:
        info = None
    if info is not None and (info.token_ids, info.lead_in, info.layers) != (
        chunk.ids,
        chunk.lead_in,
        decoder.stored_layers,
    ):
        writer.drop_chunks([chunk.chunk_id])  # another chunk's
        return False
    stored = store.sizes_here(chunk.chunk_id)
    sound = [level for level in stored if _is_readable(store, decoder, profiles, chunk, level)]
    for level in {*stored, RAW} - {*sound}:  # raw: records that no row counts any longer
        writer.drop_level([chunk.chunk_id], level)
    return info is not None and bool(exact(sound))


def _is_readable(store: Store, decoder: Decoder, profiles: Profiles, chunk: ChunkSpec, level: str) -> bool:
    shapes = [stored_shape(shape, len(chunk.ids)) for shape in decoder.shapes]
    try:
        read_chunk(store, chunk.chunk_id, level, decoder.stored_layers, profiles, shapes)
    except DamagedError:
        return False
    return True
