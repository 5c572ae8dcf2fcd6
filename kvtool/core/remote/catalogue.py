"""Catalogue of a shared store: the files and chunks that it holds (the table of values: `kvtool help shared-stores`).

A mark is a digest of the value, so no name ever means two values, and readers of an earlier catalogue keep theirs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import zstandard

from kvtool.core.cache.backend import BlobRequest
from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.record import OVERHEAD_BYTES, Kind, seal, unseal
from kvtool.core.codec.levels import LEVELS, coarser, nested
from kvtool.core.errors import DamagedError, StoreFormatError
from kvtool.core.remote import validation
from kvtool.core.remote.signing import Proof, SigningKey, proof_of, proof_row
from kvtool.core.remote.validation import MOST_BYTES, MOST_LAYERS, MOST_LEVEL_BYTES

HEAD = "head"
FORMAT = 1  # of the head, and of a catalogue or its root
_MARK = "[0-9a-f]{32}"
_HEAD_KEY = b"remote head"
_PUSH_AGAIN = "push again from a store that is whole"


@dataclass(frozen=True, slots=True)
class Head:
    """Digests of the catalogue in force and of earlier ones still valid, latest first."""

    catalogue: str
    before: tuple[str, ...] = ()


def seal_head(head: Head) -> bytes:
    value = {"format": FORMAT, "catalogue": head.catalogue, "before": head.before}
    return seal(_HEAD_KEY, Kind.MANIFEST, json.dumps(value).encode())


def unseal_head(data: bytes) -> Head:
    """Inverse of :func:`seal_head`. Raises DamagedError, StoreFormatError."""
    try:
        value = validation.strict_json(unseal(_HEAD_KEY, Kind.MANIFEST, data))
        check_format(value["format"])
        digests = [value["catalogue"], *value["before"]]
        if not all(isinstance(digest, str) and re.fullmatch(_MARK, digest) for digest in digests):
            raise ValueError("it names no catalogue")
        return Head(digests[0], tuple(digests[1:]))
    except (DamagedError, ValueError, KeyError, TypeError) as error:
        raise DamagedError("the shared store's head cannot be read", _PUSH_AGAIN) from error


def check_format(number: Any) -> None:
    if validation.count_of(number, 0, validation.INT64) != FORMAT:
        raise StoreFormatError(
            f"the catalogue has format {number}, this kvtool reads format {FORMAT}", "push again, to an empty place"
        )


# ---- entries, and the names of their values ----------------------------------------------------------------------


class Pack(NamedTuple):
    """A value that holds records of several chunks, or descriptions."""

    digest: str
    size: int

    @property
    def name(self) -> str:
        return f"pack/{self.digest}"


class Place(NamedTuple):
    """A place of a chunk's records in a pack, layer after layer: the first byte, and the length of each."""

    pack: Pack
    start: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Level:
    """A chunk at a level: bytes and digest of all its records.

    `base`: the coarser level that it refines. `maker`: digest, in hex, of the profile that lossy records name; None:
    they name none. `place`: None: each record is a value of its own. `seal`: of a signed catalogue: BLAKE2b-256 of all
    records, in hex, which nobody can forge.
    """

    size: int
    mark: str
    base: str | None = None
    maker: str | None = None
    place: Place | None = None
    seal: str | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk's levels, and the digest and the place of its description; the place is None outside of a pack.
    `foreign`: the owner of the catalogue received it from another user."""

    mark: str
    layers: int
    levels: dict[str, Level]
    place: Place | None = None
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class File:
    mark: str
    mtime_ns: int
    place: Place | None = None
    foreign: bool = False


class Shard(NamedTuple):
    """A part of a catalogue, as its root has it; it describes so many files and chunks."""

    digest: str
    size: int
    files: int
    chunks: int

    @property
    def name(self) -> str:
        return f"shard/{self.digest}"


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest that names a value by its content: 16 bytes in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def file_name(key: str, file: File) -> str:
    return f"file/{key}-{file.mark}"


def chunk_name(key: str, chunk: Chunk) -> str:
    return f"chunk/{key}-{chunk.mark}"


def kv_names(key: str, chunk: Chunk, level: str) -> list[str]:
    return [f"kv/{key}/{level}-{chunk.levels[level].mark}/{layer}" for layer in range(chunk.layers)]


def records_wanted(key: str, chunk: Chunk, level: str) -> list[BlobRequest]:
    """Return the requests for a chunk's records at a level, by layer; none reads more bytes than are stated."""
    stored, names = chunk.levels[level], kv_names(key, chunk, level)
    if stored.place is None:
        return [BlobRequest(name, stored.size) for name in names]
    pack, start, lengths = stored.place
    starts = accumulate(lengths, initial=start)
    return [BlobRequest(name, size, pack.name, at) for name, size, at in zip(names, lengths, starts, strict=False)]


_ID = f"[0-9a-f]{{{2 * ID_BYTES}}}"
_LEFT = r"\.tmp-[0-9]+-[0-9A-Za-z-]+"  # by a push that was killed
_FOLDERS = f"catalogue|shard|meta|profile|pack|kv/{_ID}/[a-z0-9-]+-{_MARK}"
_OWN = re.compile(
    f"{HEAD}|(?:catalogue|shard|pack|profile)/{_MARK}|meta/[a-z][a-z-]*-{_MARK}"
    f"|kv/{_ID}/[a-z0-9-]+-{_MARK}/[0-9]+|(?:(?:{_FOLDERS})/)?{_LEFT}"
)


def is_own(name: str) -> bool:
    """Return True if kvtool gives such a name to a value or to a temporary file. Others are never deleted."""
    return bool(_OWN.fullmatch(name))


def catalogue_name(digest: str) -> str:
    return f"catalogue/{digest}"


# ---- the catalogue -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Catalogue:
    """A catalogue of a shared store. Keys and ids are in hex; stores of one `identity` may be joined.

    `left_out`: entries that could not be used, and why. `shards`: by the first bits of the keys, a power of two; None
    for an empty shard. `proof`: its signature, not yet verified; None if it is not signed.
    """

    identity: dict[str, Any]
    meta: dict[str, str] = field(default_factory=dict)
    profiles: tuple[str, ...] = ()
    files: dict[str, File] = field(default_factory=dict)
    chunks: dict[str, Chunk] = field(default_factory=dict)
    left_out: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    shards: tuple[Shard | None, ...] = field(default=(), compare=False)
    proof: Proof | None = field(default=None, compare=False)

    def facts(self) -> dict[str, Any]:
        return {"identity": self.identity, "meta": self.meta, "profiles": sorted(self.profiles)}

    def packs(self) -> set[Pack]:
        return {place.pack for place in places_of(self.files, self.chunks)}

    def blobs(self) -> set[str]:
        names = {f"meta/{name}-{mark}" for name, mark in self.meta.items()}
        names |= {f"profile/{digest}" for digest in self.profiles}
        names |= {shard.name for shard in self.shards if shard is not None}
        names |= {pack.name for pack in self.packs()}
        for key, chunk in self.chunks.items():
            for level, stored in chunk.levels.items():
                if stored.place is None:
                    names.update(kv_names(key, chunk, level))
        return names


def canonical(value: dict[str, Any], proof: Proof | None = None, key: SigningKey | None = None) -> bytes:
    """Return a catalogue's JSON, the same for the same catalogue; with the signature of a key, else with `proof`."""
    plain = _json(value)
    proof = proof if key is None else key.sign(hashlib.blake2b(plain).digest())
    return plain if proof is None else _json(value | {"signature": proof_row(proof)})


def proof_in(value: dict[str, Any]) -> Proof | None:
    row = value.get("signature")
    if row is None:
        return None
    rest = {name: part for name, part in value.items() if name != "signature"}
    return proof_of(validation.object_of(row), hashlib.blake2b(_json(rest)).digest())


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def catalogue_json(data: bytes) -> dict[str, Any]:
    try:
        value = unpacked(data)
        check_format(value["format"])
    except (ValueError, KeyError, zstandard.ZstdError) as error:
        raise unreadable(error) from error
    return value


def facts_of(value: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    meta = {
        validation.name_of(name): validation.hex_of(mark, MARK_BYTES)
        for name, mark in validation.object_of(value["meta"]).items()
    }
    profiles = tuple(validation.hex_of(row, MARK_BYTES) for row in validation.list_of(value["profiles"]))
    return validation.identity_of(value["identity"]), meta, profiles


def unreadable(error: Exception) -> DamagedError:
    return DamagedError(f"the shared store's catalogue cannot be read: {error}", _PUSH_AGAIN)


# ---- entries as JSON rows ------------------------------------------------------------------------------------------

MARK_BYTES = 16
SEAL_BYTES = 32
_MOST_UNPACKED = 2**29
_MOST_RATIO = 32  # to one

Entries = tuple[dict[str, File], dict[str, Chunk]]


def packed(text: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(text)


def unpacked(data: bytes) -> dict[str, Any]:
    """Inverse of :func:`packed`. JSON that is mostly digests compresses little: a much better ratio is refused."""
    size = zstandard.frame_content_size(data)
    if not 0 <= size <= min(_MOST_UNPACKED, _MOST_RATIO * len(data) + 2**16):
        raise ValueError("its size is out of bounds")
    return validation.object_of(validation.strict_json(zstandard.ZstdDecompressor().decompress(data)))


# ---- entries -> JSON ---------------------------------------------------------------------------------------------


def places_of(files: Mapping[str, File], chunks: Mapping[str, Chunk]) -> Iterator[Place]:
    for file in files.values():
        if file.place is not None:
            yield file.place
    for chunk in chunks.values():
        if chunk.place is not None:
            yield chunk.place
        yield from (level.place for level in chunk.levels.values() if level.place is not None)


def rows_of(files: Mapping[str, File], chunks: Mapping[str, Chunk]) -> dict[str, Any]:
    numbers = {pack: number for number, pack in enumerate(sorted({place.pack for place in places_of(files, chunks)}))}
    return {
        "packs": list(numbers),
        "files": {
            key: [row.mark, row.mtime_ns, row.foreign, *_placed(row.place, numbers)] for key, row in files.items()
        },
        "chunks": {
            key: [
                row.mark,
                row.layers,
                {name: _level_row(level, numbers) for name, level in row.levels.items()},
                row.foreign,
                *_placed(row.place, numbers),
            ]
            for key, row in chunks.items()
        },
    }


def _placed(place: Place | None, numbers: Mapping[Pack, int]) -> list[int]:
    return [] if place is None else [numbers[place.pack], place.start, place.lengths[0]]


def _level_row(level: Level, numbers: Mapping[Pack, int]) -> list[Any]:
    row: list[Any] = [level.size, level.mark, level.base, level.maker, level.seal]
    if level.place is not None:
        lengths = level.place.lengths
        row += [numbers[level.place.pack], level.place.start, [] if len({*lengths}) == 1 else [*lengths]]
    return row


# ---- JSON -> entries, each checked for what it can be ------------------------------------------------------------


def entries_of(value: dict[str, Any], left_out: list[tuple[str, str]]) -> Entries:
    """Inverse of :func:`rows_of`. `left_out` receives the entries that cannot be used, and why."""
    packs = [_pack(row) for row in validation.list_of(value["packs"])]
    files = {
        validation.hex_of(key, ID_BYTES): _file(row, packs) for key, row in validation.object_of(value["files"]).items()
    }
    chunks = {
        validation.hex_of(key, ID_BYTES): _chunk(key, row, packs, left_out)
        for key, row in validation.object_of(value["chunks"]).items()
    }
    return files, chunks


def _file(value: Any, packs: list[Pack]) -> File:
    mark, mtime_ns, foreign = validation.list_of(validation.list_of(value)[:3], 3)
    mtime_ns = validation.count_of(mtime_ns, -validation.INT64, validation.INT64)
    place = _place(value[3:], packs)
    return File(validation.hex_of(mark, MARK_BYTES), mtime_ns, place, validation.flag_of(foreign))


def _chunk(key: str, value: Any, packs: list[Pack], left_out: list[tuple[str, str]]) -> Chunk:
    mark, layers, levels, foreign = validation.list_of(validation.list_of(value)[:4], 4)
    layers = validation.count_of(layers, 0, MOST_LAYERS)  # 0: of a model that keeps states, no KV of chunks is stored
    by_name = {name: _level(name, row, layers, packs) for name, row in validation.object_of(levels).items()}
    for name in reversed(nested(by_name)):  # coarsest first: what refines nothing is of no use to what refines it
        base = by_name[name].base
        if base is not None and base not in by_name:
            del by_name[name]
            left_out.append((f"chunk {key} at level {name}", f"level {base}, which it refines, is not there"))
    place = _place(value[4:], packs)
    return Chunk(validation.hex_of(mark, MARK_BYTES), layers, by_name, place, validation.flag_of(foreign))


def _level(name: str, value: Any, layers: int, packs: list[Pack]) -> Level:
    placed = validation.list_of(value)[5:]
    size, mark, base, maker, seal = validation.list_of(value[:5], 5)
    if name not in LEVELS:
        raise ValueError(f"there is no level {name[:20]!r} here: a newer kvtool made it")
    if base is not None and base != coarser(name):
        raise ValueError(f"nothing at level {name} refines level {str(base)[:20]!r}")
    return Level(
        validation.count_of(size, layers * OVERHEAD_BYTES, MOST_LEVEL_BYTES),
        validation.hex_of(mark, MARK_BYTES),
        base,
        None if maker is None else validation.hex_of(maker, MARK_BYTES),
        _place(placed, packs, layers, size),
        None if seal is None else validation.hex_of(seal, SEAL_BYTES),
    )


def _pack(value: Any) -> Pack:
    digest, size = validation.list_of(value, 2)
    return Pack(validation.hex_of(digest, MARK_BYTES), validation.count_of(size, 1, MOST_BYTES))


def _place(value: list[Any], packs: list[Pack], layers: int = 1, size: int | None = None) -> Place | None:
    """Read the place of a description, or of the records of all layers, of so many bytes together."""
    if not value:
        return None
    number, start, lengths = validation.list_of(value, 3)
    pack = packs[validation.count_of(number, 0, len(packs) - 1)]
    if size is None:
        size, lengths = validation.count_of(lengths, OVERHEAD_BYTES, pack.size), [lengths]
    elif layers and not validation.list_of(lengths):
        lengths = [size // layers] * layers
    validation.count_of(start, 0, pack.size - size)
    for length in validation.list_of(lengths, layers):
        validation.count_of(length, OVERHEAD_BYTES, size)
    if sum(lengths) != size:
        raise ValueError("records of another size than their level")
    return Place(pack, start, tuple(lengths))
