"""Tables of a store: their keys, and their rows as a writer puts them.

One byte before every key names its table: named databases would need a write transaction, and its wait, just to be
opened. LMDB keys end at 511 bytes, so names of any length are stored as digests.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from kvtool.core.cache.entries import ChunkInfo, DocumentEntry, FileEntry, dump_json, load_json, reading
from kvtool.core.cache.identity import HERE, ID_BYTES, UNKNOWN, Origin, seal_origin, unseal_origin
from kvtool.core.cache.record import Bytes, Kind, KVHeader, check_level, decode_record, header_of, seal, unseal
from kvtool.core.cache.tree import Snapshot
from kvtool.core.common.machine import DEVICE_KINDS, NUMBER_FORMATS, Arithmetic
from kvtool.core.errors import DamagedError

META, FILES, DOCUMENTS, CHUNKS, LEVELS, RECORDS, USED, PROFILES, ADDED, STRETCHES, WARM, ORIGINS = TABLES = tuple(
    bytes([letter]) for letter in b"mfdclrupaswo"
)
_NAMES = "meta files documents chunks levels records used profiles added checkpoints warm origins".split()
TABLE_NAMES = dict(zip(TABLES, _NAMES, strict=True))
CHUNK_TABLES, TIMES = (CHUNKS, LEVELS, RECORDS), (USED, WARM, ADDED)
BY_CHUNK = (*CHUNK_TABLES, *TIMES, ORIGINS)
Row = tuple[bytes, bytes, Bytes]  # table, key, value
RowKey = tuple[bytes, bytes]  # table, key

STORE_KEY, MANIFEST_KEY, REVISION_KEY, CODEC_KEY = b"store", b"manifest", b"revision", b"codec"
BUDGET_KEY, PINS_KEY = b"budget", b"pins"
COLLECTED_KEY = b"collected"  # the revision of documents at which unreferenced chunks were dropped last
DOCUMENTS_KEY = b"counted"  # revisions at which documents changed, and chunks were dropped, last
_NUMBER = struct.Struct("<Q")
_LEVEL_ROW = struct.Struct("<IIQ")


def name_key(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=ID_BYTES, person=b"kvtool name").digest()


def mark_of(data: Bytes) -> bytes:
    """Return 16 bytes that identify a stored value."""
    return hashlib.blake2b(data, digest_size=16).digest()


def level_key(chunk_id: bytes, level: str) -> bytes:
    """Make the key of the row that says: all layers of this chunk are stored at this level."""
    return check_chunk_id(chunk_id) + check_level(level).encode("ascii")


def record_key(chunk_id: bytes, level: str, layer: int) -> bytes:
    """Make the key of one KV record. The level follows its length, so "1" is no prefix of "10"."""
    name = check_level(level).encode("ascii")
    return check_chunk_id(chunk_id) + bytes([len(name)]) + name + struct.pack(">H", layer)


def split_record_key(key: bytes) -> tuple[bytes, str, int]:
    level = key[ID_BYTES + 1 : -2]
    if len(key) < ID_BYTES + 4 or key[ID_BYTES] != len(level):
        raise DamagedError("a record key is damaged")
    return key[:ID_BYTES], level.decode("ascii", "replace"), struct.unpack(">H", key[-2:])[0]


def open_record(chunk_id: bytes, level: str, layer: int, data: Bytes) -> tuple[KVHeader, memoryview]:
    """Return header and payload of a record. Raises DamagedError, also for the record of another level or layer."""
    header, payload = decode_record(chunk_id, data)
    if (header.level, header.layer) != (level, layer):
        raise DamagedError(f"the record is of level {header.level}, layer {header.layer}")
    return header, payload


def check_chunk_id(chunk_id: bytes) -> bytes:
    if len(chunk_id) != ID_BYTES:
        raise ValueError(f"a chunk id has {ID_BYTES} bytes, not {len(chunk_id)}")
    return bytes(chunk_id)


def seal_number(key: bytes, value: int) -> bytes:
    return seal(key, Kind.NUMBER, _NUMBER.pack(value))


def unseal_number(key: bytes, data: Bytes) -> int:
    payload = unseal(key, Kind.NUMBER, data)
    if payload.nbytes != _NUMBER.size:
        raise DamagedError("a stored number has the wrong size")
    return int(_NUMBER.unpack(payload)[0])


@dataclass(frozen=True, slots=True)
class LevelRow:
    """A chunk at a level, complete: layers, tokens, bytes of its records."""

    layers: int
    tokens: int
    size: int

    def seal(self, key: bytes) -> bytes:
        return seal(key, Kind.LEVEL, _LEVEL_ROW.pack(self.layers, self.tokens, self.size))

    @classmethod
    def unseal(cls, key: bytes, data: Bytes) -> LevelRow:
        payload = unseal(key, Kind.LEVEL, data)
        if payload.nbytes != _LEVEL_ROW.size:
            raise DamagedError("a level row has the wrong size")
        return cls(*_LEVEL_ROW.unpack(payload))


def meta_row(key: bytes, value: Mapping[str, Any]) -> Row:
    return META, key, seal(key, Kind.MANIFEST, dump_json(value))


def file_row(entry: FileEntry) -> Row:
    key = name_key(entry.path)
    return FILES, key, seal(key, Kind.FILE, entry.to_bytes())


def document_row(document: DocumentEntry) -> Row:
    key = name_key(document.source)
    return DOCUMENTS, key, seal(key, Kind.DOCUMENT, document.to_bytes())


def level_rows(
    snapshot: Snapshot,
    chunk_id: bytes,
    info: ChunkInfo,
    level: str,
    layers: Sequence[Bytes],
    replace: bool,
    origin: Origin | None = None,
) -> list[Row]:
    rows = info_rows(snapshot, chunk_id, info, origin)
    replace = replace or bool(superseded(snapshot, chunk_id, origin))
    for number, record in enumerate(layers):
        key = record_key(chunk_id, level, number)
        if replace or not _is_sound_record(snapshot, key):
            rows.append((RECORDS, key, record))
    key = level_key(chunk_id, level)
    row = LevelRow(len(layers), len(info.token_ids), sum(map(len, layers)))
    return [*rows, (LEVELS, key, row.seal(key))]


def info_rows(snapshot: Snapshot, chunk_id: bytes, info: ChunkInfo, origin: Origin | None = None) -> list[Row]:
    """Make the missing rows of a chunk's description and origin. Raises ValueError: another chunk has this id."""
    stored = None
    data = snapshot.get(CHUNKS, chunk_id)
    if data is not None and not superseded(snapshot, chunk_id, origin):
        with contextlib.suppress(DamagedError):
            stored = ChunkInfo.from_bytes(unseal(chunk_id, Kind.CHUNK, data))
    if stored is not None:
        if (stored.token_ids, stored.lead_in, stored.layers) != (info.token_ids, info.lead_in, info.layers):
            raise ValueError(f"chunk {chunk_id.hex()} is stored with other tokens, lead-in or layers")
        if info.arithmetic in (None, stored.arithmetic) and info.sensitivity in (b"", stored.sensitivity):
            return []
    row: Row = (CHUNKS, chunk_id, seal(chunk_id, Kind.CHUNK, info.to_bytes()))
    if stored is not None:
        return [row]
    rows: list[Row] = [row, (ADDED, chunk_id, seal_number(chunk_id, int(time.time())))]
    if origin is not None and origin != HERE:
        rows.append((ORIGINS, chunk_id, seal_origin(chunk_id, origin)))
    return rows


def origin_in(snapshot: Snapshot, chunk_id: bytes) -> Origin:
    """Read where a chunk's records were made; a row that cannot be read counts as foreign."""
    try:
        data = snapshot.get(ORIGINS, chunk_id)
        return HERE if data is None else unseal_origin(chunk_id, data)
    except DamagedError:
        return UNKNOWN


def superseded(snapshot: Snapshot, chunk_id: bytes, origin: Origin | None) -> list[RowKey]:
    """List the rows of a chunk that `origin` replaces: all of a foreign chunk, if `origin` is not foreign. The records
    of a chunk that own documents use then never have another source, whatever their level."""
    if origin is None or origin.is_foreign or not origin_in(snapshot, chunk_id).is_foreign:
        return []
    return chunk_keys(snapshot, chunk_id)


def _is_sound_record(snapshot: Snapshot, key: bytes) -> bool:
    with contextlib.suppress(DamagedError):
        data = snapshot.get(RECORDS, key)
        return data is not None and bool(open_record(*split_record_key(key), data))
    return False


def check_layers(chunk_id: bytes, info: ChunkInfo, level: str, layers: Sequence[Bytes], sealed: bool = False) -> None:
    """Raise ValueError if these are not the records of this chunk at this level, one a layer. `sealed`: only read their
    headers; else their digests are compared, too."""
    check_chunk_id(chunk_id)
    if len(layers) != info.layers or not layers:
        raise ValueError(f"{len(layers)} records for a chunk of {info.layers} layers")
    for number, record in enumerate(layers):
        try:
            header = header_of(record) if sealed else decode_record(chunk_id, record)[0]
        except DamagedError as error:
            raise ValueError(f"layer {number} is no record of this chunk: {error.message}") from error
        if (header.level, header.layer, header.tokens) != (level, number, len(info.token_ids)):
            raise ValueError(f"layer {number} holds a record of another level, layer or length")


def level_keys(snapshot: Snapshot, chunk_id: bytes, level: str) -> list[RowKey]:
    prefix = record_key(chunk_id, level, 0)[:-2]
    deletions = [(RECORDS, key) for key in snapshot.keys(RECORDS, prefix)]
    key = level_key(chunk_id, level)
    return [*deletions, (LEVELS, key)] if snapshot.has(LEVELS, key) else deletions


def chunk_keys(snapshot: Snapshot, chunk_id: bytes) -> list[RowKey]:
    return [(table, key) for table in BY_CHUNK for key in snapshot.keys(table, chunk_id)]


Side = Literal["rows", "state"]
Place = tuple[Side, int]  # a part's side and layer
_SIDES: tuple[Side, ...] = ("rows", "state")
_MOST_LAYER = 2**16 - 1  # the largest number that fits into a part's key
_MOST_COUNT = 2**62


@dataclass(frozen=True, slots=True)
class StretchInfo:
    """Describes a stretch whose parts are all stored: a checkpoint of one segment of an answered prompt, computed after
    all segments before it, for the next prompt of the same beginning. It has keys and values of the layers that have
    some, and the states after its last token. Its name is a digest of all token ids from the prompt's beginning to its
    end. Its table has this description under its id, and one part for each layer and side.

    `start`: its first token's position. `rows`: layers of which keys and values are stored; `states`: layers whose
    state after it is stored; none: no prompt can continue from it, but a later stretch needs it. `own`: the prompt
    begins with the store's own instruction. `size`: bytes of the numbers in its parts.
    """

    start: int
    tokens: int
    rows: tuple[int, ...]
    states: tuple[int, ...]
    chunks: tuple[bytes, ...]
    own: bool
    size: int
    arithmetic: Arithmetic

    @property
    def places(self) -> list[Place]:
        return [*(("rows", layer) for layer in self.rows), *(("state", layer) for layer in self.states)]

    def to_bytes(self) -> bytes:
        row = {name: getattr(self, name) for name in self.__slots__} | {
            "chunks": [chunk_id.hex() for chunk_id in self.chunks]
        }
        return dump_json(row)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> StretchInfo:
        with reading("state checkpoint"):
            row = load_json(data)
            rows, states = (tuple(_within(layer, _MOST_LAYER) for layer in row[name]) for name in ("rows", "states"))
            chunks = tuple(check_chunk_id(bytes.fromhex(chunk_id)) for chunk_id in row["chunks"])
            start, tokens, size = (_within(row[name], _MOST_COUNT) for name in ("start", "tokens", "size"))
            dtype, device = row["arithmetic"]
            if dtype not in NUMBER_FORMATS or device not in DEVICE_KINDS:
                raise ValueError("no arithmetic")
            return cls(start, tokens, rows, states, chunks, bool(row["own"]), size, Arithmetic(dtype, device))


def _within(number: object, most: int) -> int:
    if type(number) is not int or not 0 <= number <= most:
        raise ValueError("no such number")
    return number


def part_name(place: Place) -> str:
    return f"{place[0]}-{place[1]}"


def named_part(place: Place) -> str:
    return f"{'rows' if place[0] == 'rows' else 'states'} of layer {place[1]}"


def part_key(stretch: bytes, place: Place) -> bytes:
    side, layer = place
    return check_chunk_id(stretch) + bytes([_SIDES.index(side)]) + layer.to_bytes(2, "big")


def read_row(key: bytes, data: memoryview) -> object:
    return opened_info(key, data) if len(key) == ID_BYTES else unseal(key, Kind.PART, data)


def opened_info(stretch: bytes, data: Bytes) -> StretchInfo:
    return StretchInfo.from_bytes(unseal(stretch, Kind.STRETCH, data))


def opened_part(stretch: bytes, place: Place, data: Bytes) -> memoryview:
    return unseal(part_key(stretch, place), Kind.PART, data)


def described(snapshot: Snapshot) -> Iterator[tuple[bytes, StretchInfo]]:
    """Yield the stretches whose descriptions can be read."""
    for key in _names(snapshot):
        with suppress(DamagedError):
            data = snapshot.get(STRETCHES, key)
            if data is not None:
                yield key, opened_info(key, data)


def _names(snapshot: Snapshot) -> list[bytes]:
    return [key for key in snapshot.keys(STRETCHES) if len(key) == ID_BYTES]


def part_row(stretch: bytes, place: Place, payload: bytes) -> Row:
    key = part_key(stretch, place)
    return STRETCHES, key, seal(key, Kind.PART, payload)


def info_row(stretch: bytes, info: StretchInfo) -> Row:
    """Make the row of a description: put last, it makes the stretch whole."""
    return STRETCHES, stretch, seal(stretch, Kind.STRETCH, info.to_bytes())


def in_turn(stretches: Mapping[bytes, StretchInfo], used: Mapping[bytes, int]) -> list[bytes]:
    """Order stretches for eviction: least recently `used` first, a prompt's last before those that it needs."""

    return sorted(stretches, key=lambda stretch: (used.get(stretch, 0), -stretches[stretch].start))


def least_used(stretches: Mapping[bytes, StretchInfo], used: Mapping[bytes, int], size: int) -> list[bytes]:
    going = []
    for stretch in in_turn(stretches, used):
        if size <= 0:
            break
        size -= stretches[stretch].size
        going.append(stretch)
    return going


def stretch_keys(snapshot: Snapshot, stretch: bytes) -> list[RowKey]:
    used = [(table, stretch) for table in (USED, WARM) if snapshot.has(table, stretch)]
    return [*used, *((STRETCHES, key) for key in snapshot.keys(STRETCHES, stretch))]


def left_over(snapshot: Snapshot) -> list[RowKey]:
    """List the parts without a description: of a writer that was killed, or whose description was damaged."""
    names = {*_names(snapshot)}
    return [(STRETCHES, key) for key in snapshot.keys(STRETCHES) if key[:ID_BYTES] not in names]


def missing_parts(snapshot: Snapshot) -> Iterator[tuple[bytes, Place]]:
    for stretch, info in described(snapshot):
        for key in info.places:
            if not snapshot.has(STRETCHES, part_key(stretch, key)):
                yield stretch, key
