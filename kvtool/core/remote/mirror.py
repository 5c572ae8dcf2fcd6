"""What a store in front of a tier holds of a catalogue that is no longer in force."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import nested
from kvtool.core.errors import KvtoolError
from kvtool.core.remote import local
from kvtool.core.remote.catalogue import Catalogue, Chunk


def read_before(path: Path) -> Catalogue | None:
    """The catalogue that was taken over last; None where that is not known."""
    with suppress(OSError, KvtoolError):
        return Catalogue.unpack(path.read_bytes())
    return None


def drop_stale(store: Store, writer: Writer, there: Catalogue, before: Catalogue | None) -> None:
    """Drop lossy records that are others than the tier's by now: what is fetched may refine just those.

    Parameters
    ----------
    before : the catalogue of the last time: what is the same in both was looked at then.
    """
    doomed: dict[str, list[bytes]] = {}
    for chunk_id in store.chunk_ids():
        now = there.chunks.get(chunk_id.hex())
        then = before.chunks.get(chunk_id.hex()) if before is not None else None
        if now is not None and (then is None or then.levels != now.levels):
            for level in _stale(store, chunk_id, now):
                doomed.setdefault(level, []).append(chunk_id)
    for level in nested(doomed):  # the finer first: none is ever there without what it refines
        writer.drop_level(doomed[level], level)


def _stale(store: Store, chunk_id: bytes, now: Chunk) -> list[str]:
    here = [*reversed(nested(store.sizes_here(chunk_id)))]
    kept: list[str] = []
    for level in here:  # the coarser first
        if level in now.levels:
            sound = local.holds_level(store, chunk_id, now, level)
        else:
            base = local.stored_base(store, chunk_id, level)
            sound = base is None or base in kept
        if sound:
            kept.append(level)
    return [level for level in here if level not in kept]
