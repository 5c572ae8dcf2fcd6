"""Inventory of a store: documents from the least to the most used, chunks, bytes in pages, and counts of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvtool.core.cache import space, tables
from kvtool.core.cache.environment import PAGE_BYTES
from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.store import Store
from kvtool.core.cache.stretches import in_turn
from kvtool.core.cache.transaction import Snapshot
from kvtool.core.codec.levels import lossy, profiled
from kvtool.core.common.json_text import level_rows
from kvtool.core.errors import DamagedError
from kvtool.core.session.identity import MeasuredLosses, StoreIdentity

_NODE = 64  # bytes of a row besides its value: node, key, offset
_PAGE_HEADER = 16
_OWN_PAGES_FROM = PAGE_BYTES // 2  # longer values have pages of their own, which go with them


@dataclass(frozen=True, slots=True)
class ChunkHolding:
    chunk_id: bytes
    levels: Mapping[str, int]  # bytes that dropping each level frees
    used: int = 0  # seconds of its last use; when it came, where it was never used
    pinned: bool = False  # nothing of it may be dropped
    measured: frozenset[str] = frozenset()  # its lossy levels of which the loss is known
    warmth: float = 0.0  # how lately and how often it was used (`cache/access_log.py`)

    @property
    def turn(self) -> float:
        """Return the place in the eviction order: lower is evicted first. Being added counts as a use."""
        return max(self.used, self.warmth)


@dataclass(frozen=True, slots=True)
class DocumentHolding:
    source: str
    used: int  # seconds, of the chunk that was used or that came last
    added: int
    pinned: bool
    refs: tuple[bytes, ...]  # the chunks that it refers to
    size: int = 0  # bytes that are dropped with it besides KV


@dataclass(frozen=True, slots=True)
class Inventory:
    documents: tuple[DocumentHolding, ...]  # the least used first, by the most used of its chunks
    chunks: Mapping[bytes, ChunkHolding]
    loose: tuple[bytes, ...]  # chunks that no document refers to, but for the prompt's own beginning
    used: int  # bytes of the folder's files
    free: int  # bytes of them that a compaction would free now
    stretches: tuple[tuple[bytes, int, int], ...] = ()  # id, seconds of last use, bytes; in eviction order
    unfinished: tuple[bytes, ...] = ()  # chunks that only unfinished files refer to
    beginning: bytes = b""  # the chunk before every prompt's first, which stays
    profile: tuple[bytes, int] | None = None  # digest and bytes of the codec's current profile; None: none is stored
    old_profiles: tuple[tuple[bytes, int], ...] = ()  # of the profiles that no record names any more


def take_inventory(store: Store) -> Inventory:
    """Read what a plan needs to know; no KV is read. Raises DamagedError."""
    with store.snapshot() as snapshot:
        sizes: dict[bytes, dict[str, int]] = {chunk: {} for chunk in snapshot.keys(tables.CHUNKS)}
        sizes |= _level_sizes(snapshot)
        texts = {key: pages(size) for key, size in snapshot.sizes(tables.DOCUMENTS)}
        free = max(0, store.environment.allocated_bytes() - snapshot.live_bytes())
    refs = {document.source: [ref.chunk_id for ref in document.chunks] for document in store.documents()}
    used, warm, added = store.last_used(), store.warmth(), store.added()
    pins = store.pins()
    pinned_documents = set(pins["sources"])
    pinned = {bytes.fromhex(chunk) for chunk in pins["chunks"]}
    pinned |= {chunk for source in pinned_documents for chunk in refs.get(source, ())}
    losses = MeasuredLosses(store)
    chunks = {
        chunk: ChunkHolding(
            chunk,
            levels,
            max(used.get(chunk, 0), added.get(chunk, 0)),
            chunk in pinned,
            frozenset(losses.of(chunk, lossy(levels))),
            warm.get(chunk, 0.0),
        )
        for chunk, levels in sizes.items()
    }
    turned: list[tuple[float, str, DocumentHolding]] = []
    for source, ids in refs.items():
        held = [chunks[chunk] for chunk in ids if chunk in chunks]
        document = DocumentHolding(
            source,
            max((chunk.used for chunk in held), default=0),
            max((added.get(chunk, 0) for chunk in ids), default=0),
            source in pinned_documents or not pinned.isdisjoint(ids),
            tuple(dict.fromkeys(ids)),
            texts.get(tables.name_key(source), 0),
        )
        turned.append((max((chunk.turn for chunk in held), default=0), source, document))
    loose = set(chunks) - {chunk for chunk_ids in refs.values() for chunk in chunk_ids} - kept_always(store)
    unfinished = loose & store.unfinished_chunks()
    return Inventory(
        tuple(document for *_, document in sorted(turned)),
        chunks,
        tuple(sorted(loose - unfinished)),
        space.folder_bytes(store.path),
        free,
        _stretches(store, used),
        unfinished=tuple(sorted(unfinished)),
        beginning=_beginning(store),
        profile=next(iter(_profiles(store, [bytes.fromhex(str(store.codec_state().get("profile", "")))])), None),
        old_profiles=_profiles(store, old_profiles(store)),
    )


def _stretches(store: Store, used: Mapping[bytes, int]) -> tuple[tuple[bytes, int, int], ...]:
    sizes: dict[bytes, int] = {}
    with store.snapshot() as snapshot:
        for key, size in snapshot.sizes(tables.STRETCHES):
            sizes[key[:ID_BYTES]] = sizes.get(key[:ID_BYTES], 0) + pages(size)
    return tuple((one, used.get(one, 0), sizes.get(one, 0)) for one in in_turn(store.stretches(), used))


def _beginning(store: Store) -> bytes:
    identity = StoreIdentity.from_manifest(store.manifest())
    return identity.prefix_id if identity is not None else b""


def _profiles(store: Store, digests: Collection[bytes]) -> tuple[tuple[bytes, int], ...]:
    with store.snapshot() as snapshot:
        sizes = {digest: pages(size) for digest, size in snapshot.sizes(tables.PROFILES)}
    return tuple((digest, sizes[digest]) for digest in digests if digest in sizes)


def eviction_order(store: Store) -> dict[bytes, float]:
    found = store.warmth()
    for chunk, when in store.added().items():
        found[chunk] = max(found.get(chunk, 0.0), when)
    return found


def kept_always(store: Store) -> set[bytes]:
    """Chunks that stay though no document may have them: the prompt's own beginning, and those that are pinned."""
    pinned = {bytes.fromhex(chunk) for chunk in store.pins()["chunks"]}
    return pinned | ({beginning} if (beginning := _beginning(store)) else set())


def pinned_with_documents(store: Store) -> set[bytes]:
    """Chunks of the documents that are pinned; of one that is damaged it is unknown which."""
    chunk_ids: set[bytes] = set()
    for source in store.pins()["sources"]:
        with suppress(DamagedError):
            document = store.document(source)
            chunk_ids |= {ref.chunk_id for ref in document.chunks} if document is not None else set()
    return chunk_ids


def level_bytes(snapshot: Snapshot, chunk_id: bytes) -> dict[str, int]:
    return _level_sizes(snapshot, chunk_id).get(chunk_id, {})


def _level_sizes(snapshot: Snapshot, prefix: bytes = b"") -> dict[bytes, dict[str, int]]:
    sizes: dict[bytes, dict[str, int]] = {}
    for key, size in snapshot.sizes(tables.RECORDS, prefix):
        try:
            chunk, level, _ = tables.split_record_key(key)
        except DamagedError:  # found by verify
            continue
        levels = sizes.setdefault(chunk, {})
        levels[level] = levels.get(level, 0) + pages(size)
    return sizes


def pages(size: int) -> int:
    """Return the bytes that dropping a value frees at least: its own pages; half of a value that shares its page."""
    if size >= _OWN_PAGES_FROM:
        return -(-(size + _PAGE_HEADER) // PAGE_BYTES) * PAGE_BYTES
    return (size + _NODE) // 2


def sizes_of(store: Store) -> dict[str, Any]:
    """Count a store's chunks; the beginning and unfinished files' chunks are counted apart. Raises DamagedError."""
    sizes, identity = store.stats(), StoreIdentity.from_manifest(store.manifest())
    beginning = None if identity is None else _own_beginning(store, identity)
    if beginning is not None:
        sizes = sizes | {"chunks": sizes["chunks"] - 1, "tokens": sizes["tokens"] - beginning["tokens"]}
    unfinished = _unfinished(store)
    sizes = sizes | {name: sizes[name] - unfinished[name] for name in ("chunks", "tokens")}
    return sizes | {"prefix": beginning, "unfinished": unfinished}


def _unfinished(store: Store) -> dict[str, int]:
    found = {"files": len(store.unfinished()), "chunks": 0, "tokens": 0, "bytes": 0}
    with suppress(DamagedError):  # a document, whose references are then unknown, or such a chunk
        for chunk in store.unfinished_chunks():
            sizes, info = store.sizes_here(chunk), store.chunk_info(chunk)
            found["chunks"] += 1
            found["tokens"] += len(info.token_ids) if info is not None and sizes else 0
            found["bytes"] += sum(sizes.values())
    return found


def _own_beginning(store: Store, identity: StoreIdentity) -> dict[str, Any] | None:
    try:
        info = store.chunk_info(identity.prefix_id)
    except DamagedError:
        return None
    if info is None:
        return None
    levels = store.sizes_here(identity.prefix_id)
    tokens = len(info.token_ids) if levels else 0
    return {"id": identity.prefix_id.hex(), "tokens": tokens, "levels": level_rows(levels)}


def old_profiles(store: Store) -> list[bytes]:
    """Return the digests of profiles that no record was made with, and no new one would be. Raises DamagedError."""
    current = str(store.codec_state().get("profile", ""))
    candidates = [digest for digest in store.profile_digests() if digest.hex() != current]
    if not candidates:
        return []
    named = {store.made_with(chunk, level) for chunk in store.chunk_ids() for level in profiled(store.levels(chunk))}
    if None in named:  # a record whose profile is unknown: verify reports it
        return []
    return [digest for digest in candidates if digest.hex() not in named]
