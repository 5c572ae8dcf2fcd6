"""Origin of documents and records: made in this store, or taken from a pack, another store or a shared one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from kvtool.core.cache.record import Bytes, Kind, seal, unseal
from kvtool.core.common.json_text import UNSEEN
from kvtool.core.common.spelling import normalised
from kvtool.core.errors import DamagedError

_LIKE_SIGNED = re.compile(r"^\W*signed", re.IGNORECASE)
_UNSEEN = re.compile(f"[{UNSEEN}\u200c\u200d]")


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a document, or of a chunk's records.

    Parameters
    ----------
    name : a pack's file name, another store's folder, a shared store's URL or a signer; "" for what was made here.
    trusted : the user trusts the source like this machine: a signature of a key that the user named, or `--mine`.
    """

    name: str = ""
    trusted: bool = True

    @classmethod
    def signed(cls, signer: str) -> Origin:
        """Return the origin of what a trusted key has signed."""
        return cls(f"signed by {signer}")

    @classmethod
    def untrusted(cls, place: str) -> Origin:
        """Return the origin of what is from a place that is not trusted. A file's name does not make it a signer's."""
        is_like_signed = _LIKE_SIGNED.search(normalised("NFKC", _UNSEEN.sub("", place)))
        return cls(f"unsigned: {place}" if is_like_signed else place, trusted=False)

    @property
    def is_foreign(self) -> bool:
        """Return True for what somebody else made, who is not trusted: own documents never use it."""
        return bool(self.name) and not self.trusted

    def to_json(self) -> list[object]:
        """Return the JSON form, inverse of :func:`origin_of`."""
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
    """Pack a chunk's origin in the store's envelope."""
    return seal(chunk_id, Kind.ORIGIN, json.dumps(origin.to_json()).encode())


def unseal_origin(chunk_id: bytes, data: Bytes) -> Origin:
    """Unpack a chunk's origin, inverse of :func:`seal_origin`. Raises DamagedError."""
    try:
        return origin_of(json.loads(bytes(unseal(chunk_id, Kind.ORIGIN, data))))
    except ValueError as error:
        raise DamagedError("a stored origin cannot be read") from error
