"""Entries of a catalogue, and the names of the values that a catalogue refers to."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from kvtool.core.cache.backend import Wanted
from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.remote.head import HEAD
from kvtool.core.remote.limits import MOST_BYTES


class Pack(NamedTuple):
    """A value that holds records of several chunks: the digest that names it, and its bytes."""

    digest: str
    size: int

    @property
    def name(self) -> str:
        """Return the name of the pack's value."""
        return f"pack/{self.digest}"


class Place(NamedTuple):
    """A place of a chunk's records in a pack, layer after layer: the first byte, and the length of each."""

    pack: Pack
    start: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Level:
    """A chunk at a level.

    Attributes
    ----------
    size : bytes of its records.
    mark : digest of all of them.
    base : the coarser level that it refines.
    maker : digest, in hex, of the profile that lossy records name; None: they are not, or an older kvtool pushed them.
    place : of its records; None: each is a value of its own.
    seal : of a signed catalogue: BLAKE2b-256 of all records, in hex, which nobody can forge.
    """

    size: int
    mark: str
    base: str | None = None
    maker: str | None = None
    place: Place | None = None
    seal: str | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk's description and its levels.

    Attributes
    ----------
    mark : of the description.
    place : of the description; None: it is a value of its own, or of a catalogue of what is not packed.
    foreign : who says so did not make it, but has it from somebody else; so of a file.
    """

    mark: str
    layers: int
    levels: dict[str, Level]
    place: Place | None = None
    foreign: bool = False

    @property
    def makers(self) -> dict[str, str]:
        """The profile that each level's records name, of those levels that say it."""
        return {level: stored.maker for level, stored in self.levels.items() if stored.maker is not None}

    @property
    def seals(self) -> dict[str, str]:
        """The digest of each level's records, of those levels that have one."""
        return {level: stored.seal for level, stored in self.levels.items() if stored.seal is not None}


@dataclass(frozen=True, slots=True)
class File:
    """A file's entry with its documents: digest of both, when the file was last changed (ns), and their place, as of
    a chunk's description."""

    mark: str
    mtime_ns: int
    place: Place | None = None
    foreign: bool = False


class Shard(NamedTuple):
    """A part of a catalogue, as its root has it: digest and bytes of the value, and how many it describes."""

    digest: str
    size: int
    files: int
    chunks: int

    @property
    def name(self) -> str:
        """Return the name of the shard's value."""
        return f"shard/{self.digest}"


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest that names a value by its content: 16 bytes in hex."""
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


def described_by(name: str, place: Place | None) -> Wanted:
    """Return the request for the description of a file or a chunk."""
    if place is None:
        return Wanted(name, MOST_BYTES)
    return Wanted(name, place.lengths[0], place.pack.name, place.start)


def records_wanted(key: str, chunk: Chunk, level: str) -> list[Wanted]:
    """Return the requests for a chunk's records at a level, layer by layer; none reads more bytes than are stated."""
    stored, names = chunk.levels[level], kv_names(key, chunk, level)
    if stored.place is None:
        return [Wanted(name, stored.size) for name in names]
    pack, start, lengths = stored.place
    starts = accumulate(lengths, initial=start)
    return [Wanted(name, size, pack.name, at) for name, size, at in zip(names, lengths, starts, strict=False)]


_MARK = "[0-9a-f]{32}"
_ID = f"[0-9a-f]{{{2 * ID_BYTES}}}"
_LEFT = r"\.tmp-[0-9]+-[0-9A-Za-z-]+"  # by a push that was killed
_FOLDERS = f"catalogue|shard|meta|profile|file|chunk|pack|kv/{_ID}/[a-z0-9-]+-{_MARK}"
_OWN = re.compile(
    f"{HEAD}|(?:catalogue|shard|pack)/{_MARK}|meta/[a-z][a-z-]*-{_MARK}|profile/(?:{_MARK}|{_ID})|(?:file|chunk)/{_ID}-{_MARK}"
    f"|kv/{_ID}/[a-z0-9-]+-{_MARK}/[0-9]+|(?:(?:{_FOLDERS})/)?{_LEFT}"
)


def is_own(name: str) -> bool:
    """Return True if a name has one of the shapes above, or is a temporary file's next to such a value."""
    return bool(_OWN.fullmatch(name))


def catalogue_name(digest: str) -> str:
    """The name of a catalogue's blob."""
    return f"catalogue/{digest}"
