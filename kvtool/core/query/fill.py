"""A hole that a query met is stored as its own clean record, so that the next query finds it."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.base import Profiles
from kvtool.core.codec.levels import RAW, exact
from kvtool.core.common.types import Warn
from kvtool.core.errors import DamagedError, KvtoolError
from kvtool.core.fusion.plan import Segment
from kvtool.core.model.decoder import Decoder
from kvtool.core.records.making import LeadIns, make
from kvtool.core.records.reading import read_chunk
from kvtool.core.records.wanted import WantedChunk
from kvtool.core.session.identity import NEIGHBOUR, StoreIdentity
from kvtool.core.session.lead_in import open_lead_ins
from kvtool.core.session.levels import ProfileShelf


def fill_holes(
    store: Store, decoder: Decoder, identity: StoreIdentity, holes: Sequence[Segment], wait: float, warn: Warn
) -> int:
    """Prefill holes behind the store's lead-in and store them; returns how many.

    A query is no writer: when the store is locked, full or read-only the holes stay, with a warning. A chunk of a
    `neighbour` store is left to the next ingest, which knows the chunk before it; one that is stored all the same
    (Candidate.stored) is not missing.
    """
    for segment in holes:
        warn(f"chunk {segment.source.chunk_id.hex()[:12]} was computed in place: {segment.reason}", "")
    wanted = [chunk for segment in holes if (chunk := _wanted(segment, identity)) is not None]
    if not wanted or store.read_only:
        return 0
    try:
        with store.writer(wait) as writer:
            for chunk in wanted:
                if _clean(store, writer, chunk, len(decoder.layers)):
                    continue  # only what was made of it was damaged
                is_prefix = chunk.chunk_id == identity.prefix_id
                lead_ins = LeadIns.nothing(decoder) if is_prefix else open_lead_ins(store, decoder, identity)
                (made,) = make(decoder, lead_ins, [chunk])
                writer.put_chunk(made.chunk_id, made.info, made.level, made.layers)
    except KvtoolError as error:
        warn(f"{len(wanted)} computed chunk(s) could not be stored: {error.message}", error.hint)
        return 0
    store.note_use([chunk.chunk_id for chunk in wanted])
    return len(wanted)


def _clean(store: Store, writer: Writer, chunk: WantedChunk, layers: int) -> bool:
    """Drop of a chunk what cannot be read, and nothing else; whether a level that loses nothing is left."""
    wanted = chunk.info(layers)
    try:
        info = store.chunk_info(chunk.chunk_id)
    except DamagedError:
        info = None
    if info is not None and (info.token_ids, info.lead_in, info.layers) != (chunk.ids, wanted.lead_in, layers):
        writer.drop_chunks([chunk.chunk_id])  # another chunk's
        return False
    profiles = ProfileShelf(store)
    here = store.sizes_here(chunk.chunk_id)
    sound = [level for level in here if _reads(store, chunk.chunk_id, level, layers, profiles)]
    for level in {*here, RAW} - {*sound}:  # raw: records that no row counts any more
        writer.drop_level([chunk.chunk_id], level)
    return info is not None and bool(exact(sound))


def _reads(store: Store, chunk_id: bytes, level: str, layers: int, profiles: Profiles) -> bool:
    try:
        read_chunk(store, chunk_id, level, layers, profiles)
    except DamagedError:
        return False
    return True


def stands_alone(segment: Segment, identity: StoreIdentity) -> bool:
    """Whether the segment's id is what its ids give behind the store's lead-in, whatever stood before them."""
    chunk_id = segment.source.chunk_id
    if chunk_id == identity.prefix_id:
        return True
    return identity.lead_in.mode != NEIGHBOUR and chunk_id == identity.chunk_id(segment.ids)


def _wanted(segment: Segment, identity: StoreIdentity) -> WantedChunk | None:
    """The record to make; None: there is one all the same, or the chunk before it is needed."""
    chunk_id = segment.source.chunk_id
    if segment.source.stored or not stands_alone(segment, identity):
        return None
    return identity.wanted_prefix if chunk_id == identity.prefix_id else identity.wanted(segment.ids)
