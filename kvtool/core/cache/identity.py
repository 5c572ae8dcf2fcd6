"""Identity of chunks, a digest of all that their KV depends on; and origin of documents and records."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvtool.core.cache.record import Bytes, Kind, seal, unseal
from kvtool.core.common.text import UNSEEN, normalised
from kvtool.core.errors import DamagedError, UsageError

ID_BYTES = 20  # blake2b-160
ID_VERSION = 1  # of the encoding below; part of every id
FEWEST_DIGITS = 6  # that name a chunk


def _pack_ids(token_ids: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise ValueError("token ids must be integers from 0 to 2**32 - 1") from error


def _digest(person: bytes, *fields: bytes) -> bytes:
    state = hashlib.blake2b(struct.pack("<I", ID_VERSION), digest_size=ID_BYTES, person=person)
    for field in fields:  # the length first, so that no two lists of fields share an encoding
        state.update(struct.pack("<Q", len(field)) + field)
    return state.digest()


def ids_digest(token_ids: Sequence[int]) -> bytes:
    return _digest(b"kvtool ids", _pack_ids(token_ids))


def chunk_id(*, namespace: str, model_fingerprint: str, lead_in: bytes, token_ids: Sequence[int]) -> bytes:
    """Name a chunk: blake2b-160 over a canonical encoding of its identity. `namespace` separates equal chunks of
    different owners; `model_fingerprint` covers architecture, weights, tokenizer and the number format of KV; `lead_in`
    is the digest of the lead-in's token ids and mode. Raises ValueError: a token id does not fit."""
    return _digest(
        b"kvtool chunk",
        namespace.encode("utf-8", "surrogatepass"),
        model_fingerprint.encode("utf-8", "surrogatepass"),
        bytes(lead_in),
        _pack_ids(token_ids),
    )


def is_id(text: str) -> bool:
    return not text.strip().lower().strip("0123456789abcdef")


def chunks_named(text: str, known: Collection[bytes]) -> list[bytes]:
    """List the known ids that begin with these hexadecimal digits; none if the text is too short or not hexadecimal."""
    digits = text.strip().lower()
    if len(digits) < FEWEST_DIGITS or not is_id(digits):
        return []
    return [known_id for known_id in known if known_id.hex().startswith(digits)]


def chunk_named(text: str, known: Collection[bytes]) -> bytes:
    """Find the one known id that begins with these digits; raises UsageError if none does, or several do."""
    named = chunks_named(text, known)
    if len(named) != 1:
        problem = f"could be any of {len(named)}: give more digits" if named else "is not in the store"
        hint = f"`kvtool store ls --chunks` lists their ids, of which {FEWEST_DIGITS} digits or more are given"
        raise UsageError(f"chunk {text!r} {problem}", hint)
    return named[0]


_LIKE_SIGNED = re.compile(r"^\W*signed", re.IGNORECASE)
_UNSEEN = re.compile(f"[{UNSEEN}\u200c\u200d]")


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a document, or of a chunk's records. `name`: a pack's file name, another store's folder, a shared
    store's URL or a signer; "" for what was made here. `trusted`: signed by a key that the user named, or `--mine`."""

    name: str = ""
    trusted: bool = True

    @classmethod
    def signed(cls, signer: str) -> Origin:
        return cls(f"signed by {signer}")

    @classmethod
    def untrusted(cls, place: str) -> Origin:
        """Origin of what is from an untrusted place, whose name does not make it a signer's."""
        is_like_signed = _LIKE_SIGNED.search(normalised("NFKC", _UNSEEN.sub("", place)))
        return cls(f"unsigned: {place}" if is_like_signed else place, trusted=False)

    @property
    def is_foreign(self) -> bool:
        """True for what an untrusted source made: own documents never use it."""
        return bool(self.name) and not self.trusted

    def to_json(self) -> list[object]:
        return [self.name, self.trusted]


HERE = Origin()
ORIGIN = "origin"  # its name in a manifest
UNKNOWN = Origin("an origin that cannot be read", trusted=False)


def origin_of(value: object) -> Origin:
    """Read an origin from JSON; None is HERE. Raises ValueError."""
    if value is None:
        return HERE
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("not an origin")
    name, trusted = value
    if not isinstance(name, str) or not isinstance(trusted, bool):
        raise ValueError("not an origin")
    return Origin(name, trusted)


def seal_origin(chunk_id: bytes, origin: Origin) -> bytes:
    return seal(chunk_id, Kind.ORIGIN, json.dumps(origin.to_json()).encode())


def unseal_origin(chunk_id: bytes, data: Bytes) -> Origin:
    try:
        return origin_of(json.loads(bytes(unseal(chunk_id, Kind.ORIGIN, data))))
    except ValueError as error:
        raise DamagedError("a stored origin cannot be read") from error
