"""Reading and writing of a shared store's catalogue: the head, the root, and the shards that the root names.

Each shard describes the files and chunks whose keys begin alike. A push sends, and a reader fetches, only the root and
the shards in which something has changed. This machine keeps copies of the values that it has read or sent last."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import log2
from pathlib import Path
from typing import Any

import zstandard

from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.layout import make_folder
from kvtool.core.cache.record import OVERHEAD_BYTES
from kvtool.core.codec.levels import LEVELS, coarser, nested
from kvtool.core.common.collecting import paused_collection
from kvtool.core.common.files import cache_dir
from kvtool.core.common.urls import is_url, place_of
from kvtool.core.errors import DamagedError, KvtoolError, StoreFormatError, StoreNotFoundError
from kvtool.core.remote.blobs import MOST_BYTES, Blobs, most_bytes
from kvtool.core.remote.catalogue import (
    FORMAT,
    HEAD,
    INT64,
    PUSH_AGAIN,
    Catalogue,
    Chunk,
    File,
    Level,
    Pack,
    Place,
    Proof,
    Shard,
    catalogue_name,
    check_format,
    count_of,
    digest_of,
    hex_of,
    identity_of,
    list_of,
    mark_of,
    object_of,
    places_of,
    plain,
    proof_of,
    proof_row,
    strict_json,
    typed,
    unseal_head,
)
from kvtool.core.remote.signing import SigningKey

_TRIES = 8  # pushes that come in between reading the head and the catalogue
_AT_ONCE = 256  # shards that are asked for together


def read_head(blobs: Blobs, whole: bool = True, most: int = INT64) -> tuple[bytes, Catalogue]:
    """Read the head and the catalogue in force, or its root alone; its shards unpack to at most so many bytes. Raises
    StoreNotFoundError if nothing was ever pushed, RemoteError, DamagedError, StoreFormatError."""
    (head,) = blobs.get([HEAD])
    for _ in range(_TRIES):
        if head is None:
            raise StoreNotFoundError(
                f"there is no store at {blobs.url}", f"make one with `kvtool store push {blobs.url}`"
            )
        try:
            digest = unseal_head(head).catalogue
            catalogue = root_of(blobs, digest)
            if whole:
                catalogue = with_shards(blobs, catalogue, range(len(catalogue.shards)), most)
                keep_copies(blobs, digest, catalogue)
            return head, catalogue
        except DamagedError:
            before, (head,) = head, blobs.get([HEAD])
            if head == before:
                raise
    raise DamagedError(f"the head of {blobs.url} changes all the time", "try again when no push runs")


def read_catalogue(blobs: Blobs) -> Catalogue:
    return read_head(blobs)[1]


def root_of(blobs: Blobs, digest: str) -> Catalogue:
    """Read the root of the catalogue of a digest. Raises DamagedError, StoreFormatError."""
    ((_, packed),) = _values(blobs, [(0, digest, catalogue_name(digest))])
    return open_root(packed)


def with_shards(blobs: Blobs, root: Catalogue, numbers: Iterable[int], most: int = INT64) -> Catalogue:
    shards = [(number, shard) for number in numbers if (shard := root.shards[number]) is not None]
    return filled(root, _values(blobs, [(number, shard.digest, shard.name) for number, shard in shards]), most)


def _values(blobs: Blobs, wanted: list[tuple[int, str, str]]) -> Iterator[tuple[int, bytes]]:
    copies = CatalogueCache(blobs.url)
    for at in range(0, len(wanted), _AT_ONCE):
        some = [(number, digest, name, copies.get(digest)) for number, digest, name in wanted[at : at + _AT_ONCE]]
        came = iter(blobs.get([name for _, _, name, value in some if value is None]))
        for number, digest, _, value in some:
            if value is None:
                value = next(came)
                if value is None or digest_of(value) != digest:
                    raise DamagedError(f"the catalogue of {blobs.url} is lost or damaged", PUSH_AGAIN)
                copies.put(digest, value)
            yield number, value


def keep_copies(blobs: Blobs, digest: str, root: Catalogue) -> None:
    CatalogueCache(blobs.url).keep({digest, *(shard.digest for shard in root.shards if shard is not None)})


def check_same_identity(mine: dict[str, object], other: dict[str, object], url: str) -> None:
    differs = sorted(key for key in {*mine, *other} - {"model"} if mine.get(key) != other.get(key))
    if differs:
        raise StoreFormatError(
            f"the store at {url} was made with another {', '.join(differs)}",
            "take another place (--store, or a database, ?prefix= or folder), or ingest with the same settings",
        )


# ---- copies on this machine --------------------------------------------------------------------------------------


def cache_folder(kind: str, url: str) -> Path:
    digest = hashlib.blake2b(place_of(url).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return cache_dir() / kind / digest


class CatalogueCache:
    """Values by their digests, in kvtool's cache folder. Where none can be kept, none is; nor of a pack, a file."""

    def __init__(self, url: str) -> None:
        self._folder: Path | None = None
        with suppress(KvtoolError):
            self._folder = cache_folder("catalogues", url) if is_url(url) else None

    def get(self, digest: str) -> bytes | None:
        with suppress(OSError):
            if self._folder is not None and digest_of(value := (self._folder / digest).read_bytes()) == digest:
                return value
        return None

    def put(self, digest: str, value: bytes) -> None:
        """Keep a value. It need not survive a crash: what is cut off is fetched again."""
        if self._folder is not None:
            with suppress(OSError):
                make_folder(self._folder)
                handle = os.open(self._folder / digest, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with open(handle, "wb") as file:
                    file.write(value)

    def keep(self, digests: Collection[str]) -> None:
        with suppress(OSError):
            for path in self._folder.iterdir() if self._folder is not None else ():
                if path.name not in digests:
                    path.unlink(missing_ok=True)


class LazyCatalogue:
    """The chunks of a catalogue; a shard is read when one of its chunks is first asked for."""

    def __init__(self, blobs: Blobs, root: Catalogue) -> None:
        self._blobs, self._root = blobs, root
        self._read = dict[int, Mapping[str, Chunk]]()

    def get(self, key: str) -> Chunk | None:
        """Raises RemoteError, DamagedError."""
        number = number_of(key, len(self._root.shards))
        if number not in self._read:
            self._read[number] = with_shards(self._blobs, self._root, [number]).chunks
        return self._read[number].get(key)


# ---- shards ------------------------------------------------------------------------------------------------------

ENTRIES = 512  # in a shard, when their number is chosen: some ten KB; a changed document of ten chunks changes twenty
_FEWEST, _MOST = ENTRIES // 4, ENTRIES * 2  # before it is chosen anew
_MOST_BITS = 20


def number_of(key: str, count: int) -> int:
    """Return the number of a key's shard out of `count`, a power of two: the first bits of the key."""
    return int(key[:5], 16) * count >> _MOST_BITS


@paused_collection()  # of a million entries a look for garbage costs a tenth of what making them does
def sharded(catalogue: Catalogue, before: Catalogue | None) -> tuple[Catalogue, dict[str, bytes]]:
    """Return the catalogue with its shards, and the values of those shards that `before` does not have."""
    now = before.shards if before is not None else ()
    count = count_for(len(catalogue.files) + len(catalogue.chunks), len(now))
    parts = _split(catalogue, count)
    then = _split(before, count) if before is not None and len(now) == count else None
    shards, values = list[Shard | None](), dict[str, bytes]()
    for number, part in enumerate(parts):
        if then is not None and part == then[number]:
            shards.append(now[number])
        elif not any(part):
            shards.append(None)
        else:
            data = packed(canonical(rows_of(*part)))
            shards.append(Shard(digest_of(data), len(data), len(part[0]), len(part[1])))
            values[shards[-1].name] = data  # type: ignore[union-attr]
    return replace(catalogue, shards=tuple(shards)), values


def count_for(entries: int, now: int = 0) -> int:
    """Return the number of shards for so many entries; keep `now` as long as they are neither large nor tiny."""
    if now and entries <= _MOST * now and (now == 1 or entries >= _FEWEST * now):
        return now
    return 1 << min(_MOST_BITS, max(0, round(log2(max(1, entries) / ENTRIES))))


def _split(catalogue: Catalogue, count: int) -> list[Entries]:
    parts: list[Entries] = [(dict[str, File](), dict[str, Chunk]()) for _ in range(count)]
    for key, file in catalogue.files.items():
        parts[number_of(key, count)][0][key] = file
    for key, chunk in catalogue.chunks.items():
        parts[number_of(key, count)][1][key] = chunk
    return parts


# ---- the root ----------------------------------------------------------------------------------------------------


def pack_root(catalogue: Catalogue, key: SigningKey | None = None) -> bytes:
    return packed(canonical({"format": FORMAT, **catalogue.facts(), "shards": catalogue.shards}, catalogue.proof, key))


def open_root(data: bytes) -> Catalogue:
    """Inverse of :func:`pack_root`; checks every part. Raises DamagedError, StoreFormatError."""
    with _explained():
        value = unpacked(data)
        check_format(value["format"])
        shards = tuple(map(_shard_row, list_of(value["shards"])))
        if len(shards).bit_count() != 1 or len(shards) > 1 << _MOST_BITS:
            raise ValueError("shards of another number than a power of two")
        return Catalogue(*facts_of(value), shards=shards, proof=proof_in(value))


def _shard_row(value: Any) -> Shard | None:
    if value is None:
        return None
    digest, size, files, chunks = list_of(value, 4)
    least = 0 if count_of(files, 0, INT64) else 1  # of nothing there is no shard: a root could name it often
    return Shard(mark_of(digest), count_of(size, 1, most_bytes("shard")), files, count_of(chunks, least, INT64))


def open_shard(data: bytes, number: int, count: int, left_out: list[tuple[str, str]]) -> Entries:
    """Read the entries of a shard, by its number out of `count`. Raises DamagedError."""
    with _explained():
        files, chunks = entries_of(unpacked(data), left_out)
        if any(number_of(key, count) != number for keys in (files, chunks) for key in keys):
            raise ValueError("a shard describes what belongs into another one")
        return files, chunks


@paused_collection()  # of a million entries a look for garbage costs a tenth of what making them does
def filled(root: Catalogue, entries: Iterable[tuple[int, bytes]], most: int) -> Catalogue:
    """Return a root with what the shards of these numbers describe. Raises DamagedError."""
    files, chunks, left_out = dict[str, File](), dict[str, Chunk](), list[tuple[str, str]]()
    for number, data in entries:
        shard = root.shards[number]
        some_files, some_chunks = open_shard(data, number, len(root.shards), left_out)
        most -= zstandard.frame_content_size(data)
        with _explained():
            if shard is None or (shard.files, shard.chunks) != (len(some_files), len(some_chunks)):
                raise ValueError("a shard describes another number of files or chunks")
            if most < 0:
                raise ValueError("its shards unpack to too much")
        files |= some_files
        chunks |= some_chunks
    return replace(root, files=files, chunks=chunks, left_out=tuple(left_out))


# ---- as JSON, of which every part is checked for what it can be ----------------------------------------------------

SEAL_BYTES = 32
MOST_LAYERS = 1000
MOST_LEVEL_BYTES = 2**32  # a chunk's records of one level
_MOST_UNPACKED = 2**29
_MOST_RATIO = 32  # to one

Entries = tuple[dict[str, File], dict[str, Chunk]]


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
    return proof_of(object_of(row), hashlib.blake2b(_json(rest)).digest())


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def facts_of(value: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    meta = {name: mark_of(mark) for name, mark in plain(object_of(value["meta"])).items()}
    return identity_of(value["identity"]), meta, tuple(map(mark_of, list_of(value["profiles"])))


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, zstandard.ZstdError) as error:
        raise DamagedError(f"the shared store's catalogue cannot be read: {error}", PUSH_AGAIN) from error


def packed(text: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(text)


def unpacked(data: bytes) -> dict[str, Any]:
    """Inverse of :func:`packed`. JSON that is mostly digests compresses little: a much better ratio is refused."""
    size = zstandard.frame_content_size(data)
    if not 0 <= size <= min(_MOST_UNPACKED, _MOST_RATIO * len(data) + 2**16):
        raise ValueError("its size is out of bounds")
    return object_of(strict_json(zstandard.ZstdDecompressor().decompress(data)))


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
    packs = [_pack(row) for row in list_of(value["packs"])]
    files = {hex_of(key, ID_BYTES): _file(row, packs) for key, row in object_of(value["files"]).items()}
    chunks = {
        hex_of(key, ID_BYTES): _chunk(key, row, packs, left_out) for key, row in object_of(value["chunks"]).items()
    }
    return files, chunks


def _file(value: Any, packs: list[Pack]) -> File:
    mark, mtime_ns, foreign = list_of(list_of(value)[:3], 3)
    mtime_ns = count_of(mtime_ns, -INT64, INT64)
    place = _place(value[3:], packs)
    return File(mark_of(mark), mtime_ns, place, typed(foreign, bool))


def _chunk(key: str, value: Any, packs: list[Pack], left_out: list[tuple[str, str]]) -> Chunk:
    mark, layers, levels, foreign = list_of(list_of(value)[:4], 4)
    layers = count_of(layers, 0, MOST_LAYERS)  # 0: of a model that keeps states, no KV of chunks is stored
    by_name = {name: _level(name, row, layers, packs) for name, row in object_of(levels).items()}
    for name in reversed(nested(by_name)):  # coarsest first: what refines nothing is of no use to what refines it
        base = by_name[name].base
        if base is not None and base not in by_name:
            del by_name[name]
            left_out.append((f"chunk {key} at level {name}", f"level {base}, which it refines, is not there"))
    place = _place(value[4:], packs)
    return Chunk(mark_of(mark), layers, by_name, place, typed(foreign, bool))


def _level(name: str, value: Any, layers: int, packs: list[Pack]) -> Level:
    placed = list_of(value)[5:]
    size, mark, base, maker, seal = list_of(value[:5], 5)
    if name not in LEVELS:
        raise ValueError(f"there is no level {name[:20]!r} here: a newer kvtool made it")
    if base is not None and base != coarser(name):
        raise ValueError(f"nothing at level {name} refines level {str(base)[:20]!r}")
    return Level(
        count_of(size, layers * OVERHEAD_BYTES, MOST_LEVEL_BYTES),
        mark_of(mark),
        base,
        None if maker is None else mark_of(maker),
        _place(placed, packs, layers, size),
        None if seal is None else hex_of(seal, SEAL_BYTES),
    )


def _pack(value: Any) -> Pack:
    digest, size = list_of(value, 2)
    return Pack(mark_of(digest), count_of(size, 1, MOST_BYTES))


def _place(value: list[Any], packs: list[Pack], layers: int = 1, size: int | None = None) -> Place | None:
    """Read the place of a description, or of the records of all layers, of so many bytes together."""
    if not value:
        return None
    number, start, lengths = list_of(value, 3)
    pack = packs[count_of(number, 0, len(packs) - 1)]
    if size is None:
        size, lengths = count_of(lengths, OVERHEAD_BYTES, pack.size), [lengths]
    elif layers and not list_of(lengths):
        lengths = [size // layers] * layers
    count_of(start, 0, pack.size - size)
    for length in list_of(lengths, layers):
        count_of(length, OVERHEAD_BYTES, size)
    if sum(lengths) != size:
        raise ValueError("records of another size than their level")
    return Place(pack, start, tuple(lengths))
