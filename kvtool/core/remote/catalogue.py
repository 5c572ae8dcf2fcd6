"""Catalogue of a shared store: the files and chunks that it holds (the table of values: `kvtool help shared-stores`).

A mark is a digest of the value, so no name ever means two values, and readers of an earlier catalogue keep theirs."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn, TypeVar

from kvtool.core.cache.backend import BlobRequest
from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.record import Kind, seal, unseal
from kvtool.core.errors import DamagedError, StoreFormatError

HEAD = "head"
FORMAT = 1  # of the head, and of a catalogue or its root
MARK_BYTES = 16
_MARK = f"[0-9a-f]{{{2 * MARK_BYTES}}}"
_HEAD_KEY = b"remote head"
PUSH_AGAIN = "push again from a store that is whole"


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
        value = strict_json(unseal(_HEAD_KEY, Kind.MANIFEST, data))
        check_format(value["format"])
        return Head(mark_of(value["catalogue"]), tuple(map(mark_of, value["before"])))
    except (DamagedError, ValueError, KeyError, TypeError) as error:
        raise DamagedError("the shared store's head cannot be read", PUSH_AGAIN) from error


def check_format(number: Any) -> None:
    if count_of(number, 0, INT64) != FORMAT:
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
    return hashlib.blake2b(data, digest_size=MARK_BYTES).hexdigest()


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


# ---- the signature of a catalogue --------------------------------------------------------------------------------

_CONTEXT = b"kvtool catalogue 1\0"  # no signature of anything else is one of a catalogue


@dataclass(frozen=True, slots=True)
class Proof:
    """The signature of a catalogue by an Ed25519 key, not yet verified. `name` is the comment of the key's file;
    `digest` is of the catalogue without the signature."""

    name: str
    key: bytes
    signature: bytes
    digest: bytes

    @property
    def signer(self) -> str:
        return f"{self.name or 'a key'} ({fingerprint(self.key)})"

    @property
    def message(self) -> bytes:
        return _CONTEXT + self.digest + self.key + self.name.encode("utf-8", "surrogatepass")


def fingerprint(key: bytes) -> str:
    """Return the first 16 hexadecimal digits of a key's SHA-256, by which people compare keys."""
    return hashlib.sha256(key).hexdigest()[:16]


def proof_row(proof: Proof) -> dict[str, str]:
    return {"name": proof.name, "key": proof.key.hex(), "signature": proof.signature.hex()}


def proof_of(row: Mapping[str, Any], digest: bytes) -> Proof:
    name = typed(row["name"], str)
    if len(name) > 100 or not name.isprintable():
        raise ValueError("a signer's name that cannot be printed")
    key, signature = hex_of(row["key"], 32), hex_of(row["signature"], 64)
    return Proof(name, bytes.fromhex(key), bytes.fromhex(signature), digest)


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


def places_of(files: Mapping[str, File], chunks: Mapping[str, Chunk]) -> Iterator[Place]:
    for file in files.values():
        if file.place is not None:
            yield file.place
    for chunk in chunks.values():
        if chunk.place is not None:
            yield chunk.place
        yield from (level.place for level in chunk.levels.values() if level.place is not None)


# ---- JSON that others have made: every part is checked for what it can be; if it is not, that is a ValueError --------
#
# The bounds are far above what is ever written, and far below a machine's memory.

INT64 = 2**63 - 1
MOST_TOKENS = 2**22  # of a chunk
_HEX = re.compile(r"(?:[0-9a-f]{2})+", re.ASCII)
_KEY = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_MOST_NESTED = 32
_MOST_IDS = 2**20
_MOST_ID = 2**32 - 1

_T = TypeVar("_T")


def strict_json(data: bytes | memoryview) -> Any:
    text = bytes(data).decode("utf-8", "surrogatepass")
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is out of bounds")
    return number


def typed(value: Any, kind: type[_T]) -> _T:
    if type(value) is not kind:
        raise ValueError(f"not of the type {kind.__name__}")
    return value


def object_of(value: Any) -> dict[str, Any]:
    return typed(value, dict)


def list_of(value: Any, length: int | None = None) -> list[Any]:
    if type(value) is not list or length not in (None, len(value)):
        raise ValueError("not a list of the right length")
    return value


def hex_of(value: Any, size: int) -> str:
    if not isinstance(value, str) or len(value) != 2 * size or not _HEX.fullmatch(value):
        raise ValueError("not bytes in hex of the right length")
    return value


def mark_of(value: Any) -> str:
    return hex_of(value, MARK_BYTES)


def count_of(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError("not a whole number within bounds")
    return value


def plain(value: Any, left: int = _MOST_NESTED) -> Any:
    if left == 0:
        raise ValueError("nested too deep")
    if isinstance(value, dict) and not all(map(_KEY.fullmatch, value)):
        raise ValueError("a key that is no name")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            plain(inner, left - 1)
    elif isinstance(value, int) and not -INT64 <= value <= INT64:
        raise ValueError("a number is out of bounds")
    return value


def identity_of(value: Any) -> dict[str, Any]:
    identity: dict[str, Any] = plain(object_of(value))
    lead_in = object_of(identity.get("lead_in", {}))
    for name in ("model", "fingerprint", "dtype", "system", "namespace"):
        typed(identity.get(name, ""), str)
    typed(lead_in.get("mode", ""), str)
    for ids in (identity.get("prefix", []), identity.get("answer_header", []), lead_in.get("ids", [])):
        if len(list_of(ids)) > _MOST_IDS:
            raise ValueError("too many token ids")
        for number in ids:
            count_of(number, 0, _MOST_ID)
    object_of(identity.get("split", {}))
    return identity


def manifest_of(value: Any) -> dict[str, Any]:
    manifest: dict[str, Any] = plain(object_of(value))
    identity_of(manifest.get("identity", {}))
    return manifest


def codec_of(value: Any) -> dict[str, Any]:
    state: dict[str, Any] = plain(object_of(value))
    if state.get("profile", "") != "":
        mark_of(state["profile"])
    for row in object_of(state.get("losses", {})).values():
        for measured in object_of(row).values():
            for number in object_of(measured).values():
                if number is not None and not isinstance(number, int | float):
                    raise ValueError("a loss that is no number")
    return state
