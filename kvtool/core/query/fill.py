"""Chunks that a question lacks, computed as ingest would: stored so that the next question finds them, or made while
others are on their way."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING

from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import RAW, exact
from kvtool.core.errors import DamagedError, KvtoolError
from kvtool.core.fusion.plan import Segment
from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, PrefillStopped, prefill_chunks
from kvtool.core.records.encode import LeadIns, make
from kvtool.core.records.read import read_chunk
from kvtool.core.session.identity import NEIGHBOUR, StoreIdentity, lead_ins_of

if TYPE_CHECKING:
    from kvtool.core.session.session import Session


def fill_holes(session: Session, holes: Sequence[Segment]) -> int:
    """Prefill holes behind the store's lead-in and store them; returns how many.

    A query is no writer: when the store is locked, full or read-only the holes stay, with a warning. A chunk of a
    `neighbour` store is left to the next ingest, which knows the chunk before it; one that is stored all the same
    (Candidate.stored) is not missing.
    """
    wanted = [chunk for segment in holes if (chunk := _wanted(segment, session.identity)) is not None]
    stored = _store(session, wanted) if wanted and not session.store.read_only else 0
    _tell(session, holes, {chunk.chunk_id for chunk in wanted} if stored else set())
    return stored


def _tell(session: Session, holes: Sequence[Segment], stored: Container[bytes] = ()) -> None:
    """Say what was computed in place and why, and what has it stored: `stored` now, or an ingest."""
    for segment in holes:
        chunk_id = segment.source.chunk_id  # an instruction of one's own has none
        name = f"chunk {chunk_id.hex()[:12]}" if chunk_id else "the prompt's beginning"
        hint = "it is stored now, for the next question" if chunk_id in stored else ""
        if not hint and chunk_id and not segment.source.stored:
            hint = "an ingest of its document stores it"
        session.warn(f"{name} was computed in place: {segment.reason}", hint)


def _store(session: Session, wanted: Sequence[ChunkSpec]) -> int:
    """Store what was computed; how many, none with a warning where that cannot be."""
    store, decoder, identity, warn = session.store, session.decoder, session.identity, session.warn
    try:
        with store.writer() as writer:
            of_chunks: LeadIns | None = None  # computed once for all
            for chunk in wanted:
                if _clean(session, writer, chunk):
                    continue  # only what was made of it was damaged
                if chunk.chunk_id == identity.prefix_id:
                    lead_ins = LeadIns.nothing(decoder)
                else:
                    lead_ins = of_chunks = of_chunks or lead_ins_of(identity, decoder)
                (made,) = make(decoder, lead_ins, [chunk])
                writer.put_chunk(made.chunk_id, made.info, made.level, made.layers)
    except KvtoolError as error:
        warn(f"{len(wanted)} computed chunk(s) could not be stored: {error.message}", error.hint)
        return 0
    store.note_use([chunk.chunk_id for chunk in wanted])
    return len(wanted)


def _clean(session: Session, writer: Writer, chunk: ChunkSpec) -> bool:
    """Drop of a chunk what cannot be read, and nothing else; whether a level that loses nothing is left."""
    store, layers = session.store, session.layers
    wanted = chunk.info(layers)
    try:
        info = store.chunk_info(chunk.chunk_id)
    except DamagedError:
        info = None
    if info is not None and (info.token_ids, info.lead_in, info.layers) != (chunk.ids, wanted.lead_in, layers):
        writer.drop_chunks([chunk.chunk_id])  # another chunk's
        return False
    here = store.sizes_here(chunk.chunk_id)
    sound = [level for level in here if _reads(session, chunk.chunk_id, level)]
    for level in {*here, RAW} - {*sound}:  # raw: records that no row counts any more
        writer.drop_level([chunk.chunk_id], level)
    return info is not None and bool(exact(sound))


def _reads(session: Session, chunk_id: bytes, level: str) -> bool:
    try:
        read_chunk(session.store, chunk_id, level, session.layers, session.profiles)
    except DamagedError:
        return False
    return True


def compute_alone(session: Session, segment: Segment, going: Callable[[], bool]) -> ChunkKV | None:
    """A segment's KV behind the store's lead-in, as ingest would store it: on the CPU the same bits.

    Returns
    -------
    None : it needs the chunk before it, or `going` said to stop.
    """
    if not stands_alone(segment, session.identity):
        return None
    is_prefix = segment.source.chunk_id == session.identity.prefix_id
    lead_in = LeadIn(session.decoder, ()) if is_prefix else session.lead_in
    try:
        return prefill_chunks(session.decoder, lead_in, [PrefillItem(segment.ids)], going=going)[0]
    except PrefillStopped:
        return None


def stands_alone(segment: Segment, identity: StoreIdentity) -> bool:
    """Return True if the segment's id follows from its ids and the store's lead-in, whatever came before them."""
    chunk_id = segment.source.chunk_id
    if chunk_id == identity.prefix_id:
        return True
    return identity.lead_in.mode != NEIGHBOUR and chunk_id == identity.chunk_id(segment.ids)


def _wanted(segment: Segment, identity: StoreIdentity) -> ChunkSpec | None:
    """The record to make; None: there is one all the same, or the chunk before it is needed."""
    chunk_id = segment.source.chunk_id
    if segment.source.stored or not stands_alone(segment, identity):
        return None
    return identity.wanted_prefix if chunk_id == identity.prefix_id else identity.wanted(segment.ids)
