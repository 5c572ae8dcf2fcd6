"""The tables of chunks as they are read."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvtool.core.cache import tables
from kvtool.core.cache.backend import KVRead, RemoteBackend
from kvtool.core.cache.entries import ChunkInfo
from kvtool.core.cache.environment import StoreConnection
from kvtool.core.cache.identity import FEWEST_DIGITS, ID_BYTES, Origin, chunks_named, is_id
from kvtool.core.cache.record import DIGEST_BYTES, HEADER_BYTES, Allocator, Kind, aligned, payload_part
from kvtool.core.cache.tables import origin_in
from kvtool.core.cache.tree import Snapshot, value_or_damage
from kvtool.core.codec.levels import MAKER, level_of
from kvtool.core.common.machine import Arithmetic
from kvtool.core.errors import DamagedError, KvtoolError

_SAMPLED = 10_000  # chunks that `arithmetics` looks at


class ChunkReader(StoreConnection):
    """Reads the tables of chunks. `link`: remote backend with more of the store's KV. `more`: another store whose
    chunks are read as if they were in this one."""

    link: RemoteBackend | None = None
    more: ChunkReader | None = None

    def chunk_ids(self) -> list[bytes]:
        with self.snapshot() as snapshot:
            return list(snapshot.keys(tables.CHUNKS))

    def ids_here(self) -> list[bytes]:
        with self.snapshot() as snapshot:
            return list(dict.fromkeys(key[:ID_BYTES] for key in snapshot.keys(tables.LEVELS)))

    def chunks_named(self, text: str) -> list[bytes]:
        digits = text.strip().lower()
        if not is_id(digits) or not FEWEST_DIGITS <= len(digits) <= 2 * ID_BYTES:
            return []
        with self.snapshot() as snapshot:
            return chunks_named(digits, [*snapshot.keys(tables.CHUNKS, bytes.fromhex(digits[: len(digits) // 2 * 2]))])

    def chunk_info(self, chunk_id: bytes) -> ChunkInfo | None:
        """Read token ids, lead-in and side data. Raises DamagedError."""
        with self.snapshot() as snapshot:
            info = _info_of(snapshot, chunk_id)
        return self.more.chunk_info(chunk_id) if info is None and self.more is not None else info

    def arithmetics(self, chunk_ids: Iterable[bytes] | None = None) -> dict[Arithmetic | None, int]:
        """Count chunks by the arithmetic that computed them; None: not noted, damaged or missing. Without ids count all
        chunks, of a large store the first 10,000 by id: ids are digests, so that is a fair sample."""
        counts: Counter[Arithmetic | None] = Counter()
        with self.snapshot() as snapshot:
            for chunk_id in islice(snapshot.keys(tables.CHUNKS) if chunk_ids is None else chunk_ids, _SAMPLED):
                info = None
                with contextlib.suppress(DamagedError):
                    info = _info_of(snapshot, chunk_id)
                counts[None if info is None else info.arithmetic] += 1
        return dict(counts)

    def has_chunk(self, chunk_id: bytes) -> bool:
        """True if a level of the chunk is offered by the link, or stored with an intact description. A chunk without
        layers, of which nothing is stored by design, only needs an intact description."""
        if self.link is not None and self.link.offers(chunk_id):
            return True
        with self.snapshot() as snapshot:
            try:
                info = _info_of(snapshot, chunk_id)
                return info is not None and (not info.layers or bool(_sizes_of(snapshot, chunk_id)))
            except DamagedError:
                return False

    def origin(self, chunk_id: bytes) -> Origin:
        with self.snapshot() as snapshot:
            return origin_in(snapshot, chunk_id)

    def has_level_row(self, chunk_id: bytes) -> bool:
        """True if a row says that the chunk is stored at some level, though the row may be damaged."""
        with self.snapshot() as snapshot:
            return next(iter(snapshot.keys(tables.LEVELS, chunk_id)), None) is not None

    def describes_own(self, chunk_id: bytes) -> bool:
        """True if an intact description is stored that was not made elsewhere; its KV may be missing."""
        with self.snapshot() as snapshot:
            try:
                return _info_of(snapshot, chunk_id) is not None and not origin_in(snapshot, chunk_id).is_foreign
            except DamagedError:
                return False

    def serves_own(self, chunk_id: bytes) -> bool:
        return self.has_chunk(chunk_id) and not self.origin(chunk_id).is_foreign

    def foreign_chunks(self) -> set[bytes]:
        with self.snapshot() as snapshot:
            return {key for key in snapshot.keys(tables.ORIGINS) if origin_in(snapshot, key).is_foreign}

    def levels(self, chunk_id: bytes) -> list[str]:
        return list(self.level_sizes(chunk_id))

    def level_sizes(self, chunk_id: bytes) -> dict[str, int]:
        """Bytes of each level whose layers are all stored or offered by the link, sorted by level."""
        here = self.sizes_here(chunk_id)
        if not here and self.more is not None:
            here = self.more.level_sizes(chunk_id)
        if self.link is None:
            return here
        offered = {level: offer.size for level, offer in self.link.offers(chunk_id).items()}
        return dict(sorted((offered | here).items()))

    def sizes_here(self, chunk_id: bytes) -> dict[str, int]:
        with self.snapshot() as snapshot:
            return _sizes_of(snapshot, chunk_id)

    def made_with(self, chunk_id: bytes, level: str) -> str | None:
        """Digest, in hex, of the profile that a level's first record names, unchecked; None: no records, or unknown."""
        if not level_of(level).profiled:
            return None
        data = None
        with contextlib.suppress(DamagedError), self.snapshot() as snapshot:
            key = tables.record_key(chunk_id, level, 0)
            data = snapshot.get(tables.RECORDS, key, HEADER_BYTES + MAKER.stop)
        if data is not None:
            return payload_part(data, MAKER).hex()
        offer = self.link.offers(chunk_id).get(level) if self.link is not None else None
        return offer.maker if offer is not None else None

    def record_mark(self, chunk_id: bytes, level: str, layer: int = 0) -> bytes | None:
        """Identify a chunk's record of a level and layer by its digest, and by whether it is foreign: a foreign record
        can be forged to have the digest of another. None: no such record."""
        with self.snapshot() as snapshot:
            mark = snapshot.ending(tables.RECORDS, tables.record_key(chunk_id, level, layer), DIGEST_BYTES)
            return mark and mark + bytes([origin_in(snapshot, chunk_id).is_foreign])

    def read_kv(self, chunk_id: bytes, level: str, layer: int) -> KVRead | None:
        """Read a single layer of a chunk; None if it is not stored. Raises DamagedError."""
        read = self.read_layer([chunk_id], level, layer)[0]
        if isinstance(read, KvtoolError):
            raise read
        return read

    def read_layer(
        self,
        chunk_ids: Sequence[bytes],
        level: str,
        layer: int,
        before: Callable[[int], None] = lambda number: None,
        allocate: Allocator = aligned,
    ) -> list[KVRead | KvtoolError | None]:
        """Read one layer of many chunks in one transaction; missing records are fetched if the link offers them.
        Returns header and payload of each, None if it is not stored, or its error. Payloads are private, writable and
        64-byte aligned, in memory of `allocate`, which no other code may write to. `before` is called with each chunk's
        number before its record is read."""
        names = [(chunk_id, level, layer) for chunk_id in chunk_ids]
        keys = [tables.record_key(*name) for name in names]
        with self.snapshot() as snapshot:  # each is checked while it is in the core's cache
            copies = snapshot.copies(tables.RECORDS, keys, before, allocate)
            reads = [read_record(*name, data) for name, data in zip(names, copies, strict=True)]
        if self.link is not None:
            self.link.complete(reads, chunk_ids, level, layer, before)
        if self.more is not None and (lacking := [number for number, read in enumerate(reads) if read is None]):
            records = self.more.read_layer([chunk_ids[number] for number in lacking], level, layer, allocate=allocate)
            for number, read in zip(lacking, records, strict=True):
                reads[number] = read
        return reads


def read_record(
    chunk_id: bytes, level: str, layer: int, data: memoryview | DamagedError | None
) -> KVRead | KvtoolError | None:
    if data is None or isinstance(data, DamagedError):
        return data
    return value_or_damage(tables.open_record, chunk_id, level, layer, data)


def _info_of(snapshot: Snapshot, chunk_id: bytes) -> ChunkInfo | None:
    payload = snapshot.payload(tables.CHUNKS, tables.check_chunk_id(chunk_id), Kind.CHUNK, "a chunk")
    return None if payload is None else ChunkInfo.from_bytes(payload)


def _sizes_of(snapshot: Snapshot, chunk_id: bytes) -> dict[str, int]:
    sizes = {}
    for key, data in snapshot.items(tables.LEVELS, tables.check_chunk_id(chunk_id)):
        with contextlib.suppress(DamagedError):  # as good as missing: its records are computed again
            sizes[key[ID_BYTES:].decode("ascii")] = tables.LevelRow.unseal(key, data).size
    return sizes
