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
from kvtool.core.cache.record import Kind, seal, unseal
from kvtool.core.errors import DamagedError, StoreFormatError

FORMAT = 1
HEAD = "head"
_MOST_BYTES = 2**31
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
        """By level, of those levels that name one."""
        return {level: one.maker for level, one in self.levels.items() if one.maker is not None}


@dataclass(frozen=True, slots=True)
class File:
    """A file's entry with its documents: digest of both, and when the file was last changed (ns)."""

    mark: str
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All of it. Keys and ids are in hex; two stores may be joined if they have the same `identity`."""

    identity: dict[str, Any]
    meta: dict[str, str] = field(default_factory=dict)
    profiles: tuple[str, ...] = ()
    files: dict[str, File] = field(default_factory=dict)
    chunks: dict[str, Chunk] = field(default_factory=dict)

    def pack(self) -> bytes:
        """Canonical, packed."""
        value = {
            "format": FORMAT,
            "identity": self.identity,
            "meta": self.meta,
            "profiles": sorted(self.profiles),
            "files": {key: [one.mark, one.mtime_ns] for key, one in self.files.items()},
            "chunks": {
                key: [one.mark, one.layers, {n: [v.size, v.mark, v.base] for n, v in one.levels.items()}]
                for key, one in self.chunks.items()
            },
        }
        makers = {key: one.makers for key, one in self.chunks.items() if one.makers}
        if makers:
            value["makers"] = makers  # beside the chunks: a kvtool that does not know of it reads the rest
        text = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
        return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(text)

    @classmethod
    def unpack(cls, data: bytes) -> Catalogue:
        """Inverse of :meth:`pack`.

        Raises
        ------
        DamagedError : it cannot be read.
        StoreFormatError : a newer kvtool wrote it.
        """
        try:
            if not 0 <= zstandard.frame_content_size(data) <= _MOST_BYTES:
                raise ValueError("its size is out of bounds")
            value = json.loads(zstandard.ZstdDecompressor().decompress(data))
            if value["format"] > FORMAT:
                raise StoreFormatError(f"the shared store has format {value['format']}", "update kvtool")
            makers = value.get("makers", {})
            chunks = {
                key: Chunk(mark, int(layers), _levels(levels, makers.get(key, {})))
                for key, (mark, layers, levels) in value["chunks"].items()
            }
            files = {key: File(*fields) for key, fields in value["files"].items()}
            return cls(dict(value["identity"]), dict(value["meta"]), tuple(value["profiles"]), files, chunks)
        except (ValueError, KeyError, TypeError, AttributeError, zstandard.ZstdError) as error:
            raise DamagedError("the shared store's catalogue cannot be read", _PUSH_AGAIN) from error

    def with_chunks(self, chunks: dict[str, Chunk]) -> Catalogue:
        """The same with other chunks."""
        return replace(self, chunks=chunks)

    def blobs(self) -> set[str]:
        """Names of all that it counts on, itself and `head` aside."""
        found = {f"meta/{name}-{mark}" for name, mark in self.meta.items()}
        found |= {f"profile/{digest}" for digest in self.profiles}
        found |= {file_name(key, one) for key, one in self.files.items()}
        for key, chunk in self.chunks.items():
            found.add(chunk_name(key, chunk))
            for level in chunk.levels:
                found.update(kv_names(key, chunk, level))
        return found


def _levels(rows: dict[str, list[Any]], makers: dict[str, str]) -> dict[str, Level]:
    return {name: replace(Level(*fields), maker=makers.get(name)) for name, fields in rows.items()}


_PUSH_AGAIN = "push again from a store that is whole"


def digest_of(data: bytes) -> str:
    """What names a value by its content: 16 bytes in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def file_name(key: str, file: File) -> str:
    """Of a file's blob."""
    return f"file/{key}-{file.mark}"


def chunk_name(key: str, chunk: Chunk) -> str:
    """Of the blob of a chunk's description."""
    return f"chunk/{key}-{chunk.mark}"


def kv_names(key: str, chunk: Chunk, level: str) -> list[str]:
    """Of the blobs of a chunk's records at a level, by layer."""
    return [f"kv/{key}/{level}-{chunk.levels[level].mark}/{layer}" for layer in range(chunk.layers)]


_MARK = "[0-9a-f]{32}"
_ID = f"[0-9a-f]{{{2 * ID_BYTES}}}"
_LEFT = r"\.tmp-[0-9]+-[0-9A-Za-z-]+"  # by a push that was killed
_FOLDERS = f"catalogue|meta|profile|file|chunk|kv/{_ID}/[a-z0-9]+-{_MARK}"
_OWN = re.compile(
    f"{HEAD}|catalogue/{_MARK}|meta/[a-z][a-z-]*-{_MARK}|profile/{_MARK}|(?:file|chunk)/{_ID}-{_MARK}"
    f"|kv/{_ID}/[a-z0-9]+-{_MARK}/[0-9]+|(?:(?:{_FOLDERS})/)?{_LEFT}"
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
    """Of a catalogue's blob."""
    return f"catalogue/{digest}"


def seal_head(head: Head) -> bytes:
    """The value of `head`."""
    value = {"format": FORMAT, "catalogue": head.catalogue, "before": head.before}
    return seal(_HEAD_KEY, Kind.MANIFEST, json.dumps(value).encode())


def unseal_head(data: bytes) -> Head:
    """Inverse of :func:`seal_head`; one that knows of none before is of an older kvtool.

    Raises
    ------
    DamagedError : it cannot be read.
    StoreFormatError : a newer kvtool wrote it.
    """
    try:
        value = json.loads(bytes(unseal(_HEAD_KEY, Kind.MANIFEST, data)))
        if value["format"] > FORMAT:
            raise StoreFormatError(f"the shared store has format {value['format']}", "update kvtool")
        digests = [value["catalogue"], *value.get("before", ())]
        if not all(isinstance(one, str) and re.fullmatch(_MARK, one) for one in digests):
            raise ValueError("it names no catalogue")
        return Head(digests[0], tuple(digests[1:]))
    except (DamagedError, ValueError, KeyError, TypeError) as error:
        raise DamagedError("the shared store's head cannot be read", _PUSH_AGAIN) from error
