"""What a shared tier holds, as one small value; its `head` names the catalogue that is valid.

======================================  ================================================================
blob                                    holds
======================================  ================================================================
``head``                                the name of the catalogue and of those before, in the store's envelope
``catalogue/DIGEST``                    this, packed
``meta/NAME-MARK``                      the manifest, the state of the codec and of the lead-in
``profile/DIGEST``                      a codec profile or a learned lead-in
``file/KEY-MARK``                       a file's entry with its documents
``chunk/ID-MARK``                       a chunk's token ids, lead-in and side data
``kv/ID/LEVEL-MARK/LAYER``              one KV record, byte for byte as in the local store
======================================  ================================================================

A mark is a digest of the value, so no name ever means two values: readers of the catalogue before keep theirs.
A name of any other shape is not ours, nor is what stands below another `head`: nothing of it is ever deleted.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

import zstandard

from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.record import OVERHEAD_BYTES, Kind, seal, unseal
from kvtool.core.codec.levels import LEVELS, nested, whole
from kvtool.core.codec.nested import coarser
from kvtool.core.errors import DamagedError, StoreFormatError
from kvtool.core.remote import checks
from kvtool.core.remote.limits import MOST_LAYERS, MOST_LEVEL_BYTES

FORMAT = 2
_PLAIN_FORMAT = 1  # of one without levels that leave rows out, which every kvtool reads
HEAD = "head"
_MOST_BYTES = 2**29
_MOST_PACKED = 32  # to one
_MARK_BYTES = 16
_PROFILE_BYTES = (16, 20)  # of a codec profile, of a learned lead-in
_HEAD_KEY = b"remote head"


@dataclass(frozen=True, slots=True)
class Level:
    """A chunk at a level.

    Attributes
    ----------
    size : bytes of its records.
    mark : digest of all of them.
    base : the coarser level that it refines.
    maker : digest, in hex, of the profile that lossy records name; None: they are not, or an older kvtool pushed them.
    """

    size: int
    mark: str
    base: str | None = None
    maker: str | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk's description and its levels.

    Attributes
    ----------
    mark : of the description.
    """

    mark: str
    layers: int
    levels: dict[str, Level]

    @property
    def makers(self) -> dict[str, str]:
        """The profile that each level's records name, of those levels that say it."""
        return {level: stored.maker for level, stored in self.levels.items() if stored.maker is not None}


@dataclass(frozen=True, slots=True)
class File:
    """A file's entry with its documents: digest of both, and when the file was last changed (ns)."""

    mark: str
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What a tier holds. Keys and ids are in hex; two stores may be joined if they have the same `identity`.

    Attributes
    ----------
    left_out : of one that was read: what cannot be used, and why.
    """

    identity: dict[str, Any]
    meta: dict[str, str] = field(default_factory=dict)
    profiles: tuple[str, ...] = ()
    files: dict[str, File] = field(default_factory=dict)
    chunks: dict[str, Chunk] = field(default_factory=dict)
    left_out: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def pack(self) -> bytes:
        """Canonical, packed."""
        levels = {name for row in self.chunks.values() for name in row.levels}
        value = {
            "format": _PLAIN_FORMAT if len(whole(levels)) == len(levels) else FORMAT,
            "identity": self.identity,
            "meta": self.meta,
            "profiles": sorted(self.profiles),
            "files": {key: [row.mark, row.mtime_ns] for key, row in self.files.items()},
            "chunks": {
                key: [row.mark, row.layers, {n: [v.size, v.mark, v.base] for n, v in row.levels.items()}]
                for key, row in self.chunks.items()
            },
        }
        makers = {key: row.makers for key, row in self.chunks.items() if row.makers}
        if makers:
            value["makers"] = makers  # beside the chunks: a kvtool that does not know of it reads the rest
        text = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
        return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(text)

    @classmethod
    def unpack(cls, data: bytes) -> Catalogue:
        """Inverse of :meth:`pack`; every part is checked for what it can be before anything is made of it.

        Raises
        ------
        DamagedError : it cannot be read.
        StoreFormatError : a newer kvtool wrote it.
        """
        try:
            return _parsed(checks.object_of(checks.strict_json(_unpacked(data))))
        except (ValueError, KeyError, zstandard.ZstdError) as error:
            raise DamagedError(f"the shared store's catalogue cannot be read: {error}", _PUSH_AGAIN) from error

    def with_chunks(self, chunks: dict[str, Chunk]) -> Catalogue:
        """This catalogue with other chunks."""
        return replace(self, chunks=chunks)

    def blobs(self) -> set[str]:
        """The names of all blobs that it counts on, itself and `head` aside."""
        names = {f"meta/{name}-{mark}" for name, mark in self.meta.items()}
        names |= {f"profile/{digest}" for digest in self.profiles}
        names |= {file_name(key, file) for key, file in self.files.items()}
        for key, chunk in self.chunks.items():
            names.add(chunk_name(key, chunk))
            for level in chunk.levels:
                names.update(kv_names(key, chunk, level))
        return names


def _unpacked(data: bytes) -> bytes:
    """The JSON of a packed catalogue, which is mostly digests: what claims to have been packed much better is none."""
    size = zstandard.frame_content_size(data)
    if not 0 <= size <= min(_MOST_BYTES, _MOST_PACKED * len(data) + 2**16):
        raise ValueError("its size is out of bounds")
    return zstandard.ZstdDecompressor().decompress(data)


def _parsed(value: dict[str, Any]) -> Catalogue:
    if checks.count_of(value["format"], 0, checks.INT64) > FORMAT:
        raise StoreFormatError(f"the shared store has format {value['format']}", "update kvtool")
    makers, left_out = checks.object_of(value.get("makers", {})), list[tuple[str, str]]()
    return Catalogue(
        identity=checks.identity_of(value["identity"]),
        meta={
            checks.name_of(name): checks.hex_of(mark, _MARK_BYTES)
            for name, mark in checks.object_of(value["meta"]).items()
        },
        profiles=tuple(checks.hex_of(row, *_PROFILE_BYTES) for row in checks.list_of(value["profiles"])),
        files={checks.hex_of(key, ID_BYTES): _file(row) for key, row in checks.object_of(value["files"]).items()},
        chunks={
            checks.hex_of(key, ID_BYTES): _chunk(key, row, makers.get(key, {}), left_out)
            for key, row in checks.object_of(value["chunks"]).items()
        },
        left_out=tuple(left_out),
    )


def _file(value: Any) -> File:
    mark, mtime_ns = checks.list_of(value, 2)
    return File(checks.hex_of(mark, _MARK_BYTES), checks.count_of(mtime_ns, -checks.INT64, checks.INT64))


def _chunk(key: str, value: Any, makers: Any, left_out: list[tuple[str, str]]) -> Chunk:
    mark, layers, levels = checks.list_of(value, 3)
    layers = checks.count_of(layers, 0, MOST_LAYERS)  # 0: of a model that keeps states, no KV of chunks is stored
    checks.object_of(makers)
    by_name = {name: _level(name, row, layers, makers.get(name)) for name, row in checks.object_of(levels).items()}
    for name in reversed(nested(by_name)):  # coarsest first: what refines nothing is of no use to what refines it
        base = by_name[name].base
        if base is not None and base not in by_name:
            del by_name[name]
            left_out.append((f"chunk {key} at level {name}", f"level {base}, which it refines, is not there"))
    return Chunk(checks.hex_of(mark, _MARK_BYTES), layers, by_name)


def _level(name: str, value: Any, layers: int, maker: Any) -> Level:
    size, mark, base = checks.list_of(value, 3)
    if name not in LEVELS:
        raise ValueError(f"there is no level {name[:20]!r} here: a plugin made it, or a newer kvtool")
    if base is not None and base != coarser(name):
        raise ValueError(f"nothing at level {name} refines level {str(base)[:20]!r}")
    return Level(
        checks.count_of(size, layers * OVERHEAD_BYTES, MOST_LEVEL_BYTES),
        checks.hex_of(mark, _MARK_BYTES),
        base,
        None if maker is None else checks.hex_of(maker, _MARK_BYTES),
    )


_PUSH_AGAIN = "push again from a store that is whole"


def digest_of(data: bytes) -> str:
    """What names a value by its content: 16 bytes in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def file_name(key: str, file: File) -> str:
    """The name of a file's blob."""
    return f"file/{key}-{file.mark}"


def chunk_name(key: str, chunk: Chunk) -> str:
    """The name of the blob of a chunk's description."""
    return f"chunk/{key}-{chunk.mark}"


def kv_names(key: str, chunk: Chunk, level: str) -> list[str]:
    """The names of the blobs of a chunk's records at a level, by layer."""
    return [f"kv/{key}/{level}-{chunk.levels[level].mark}/{layer}" for layer in range(chunk.layers)]


_MARK = "[0-9a-f]{32}"
_ID = f"[0-9a-f]{{{2 * ID_BYTES}}}"
_LEFT = r"\.tmp-[0-9]+-[0-9A-Za-z-]+"  # by a push that was killed
_FOLDERS = f"catalogue|meta|profile|file|chunk|kv/{_ID}/[a-z0-9-]+-{_MARK}"
_OWN = re.compile(
    f"{HEAD}|catalogue/{_MARK}|meta/[a-z][a-z-]*-{_MARK}|profile/(?:{_MARK}|{_ID})|(?:file|chunk)/{_ID}-{_MARK}"
    f"|kv/{_ID}/[a-z0-9-]+-{_MARK}/[0-9]+|(?:(?:{_FOLDERS})/)?{_LEFT}"
)


def is_own(name: str) -> bool:
    """Whether a name is of one of the shapes above, or a temporary file's beside such."""
    return bool(_OWN.fullmatch(name))


@dataclass(frozen=True, slots=True)
class Head:
    """What `head` says: digests of the catalogue in force and of those before it that still stand, latest first."""

    catalogue: str
    before: tuple[str, ...] = ()


def catalogue_name(digest: str) -> str:
    """The name of a catalogue's blob."""
    return f"catalogue/{digest}"


def seal_head(head: Head) -> bytes:
    """The value of `head`."""
    value = {"format": _PLAIN_FORMAT, "catalogue": head.catalogue, "before": head.before}
    return seal(_HEAD_KEY, Kind.MANIFEST, json.dumps(value).encode())


def unseal_head(data: bytes) -> Head:
    """Inverse of :func:`seal_head`; one that knows of none before is of an older kvtool.

    Raises
    ------
    DamagedError : it cannot be read.
    StoreFormatError : a newer kvtool wrote it.
    """
    try:
        value = checks.strict_json(unseal(_HEAD_KEY, Kind.MANIFEST, data))
        if value["format"] > _PLAIN_FORMAT:
            raise StoreFormatError(f"the shared store has format {value['format']}", "update kvtool")
        digests = [value["catalogue"], *value.get("before", ())]
        if not all(isinstance(digest, str) and re.fullmatch(_MARK, digest) for digest in digests):
            raise ValueError("it names no catalogue")
        return Head(digests[0], tuple(digests[1:]))
    except (DamagedError, ValueError, KeyError, TypeError) as error:
        raise DamagedError("the shared store's head cannot be read", _PUSH_AGAIN) from error
