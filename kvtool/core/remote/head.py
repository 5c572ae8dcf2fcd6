"""The one value of a tier that is replaced: it names the catalogue in force, and those before it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from kvtool.core.cache.record import Kind, seal, unseal
from kvtool.core.errors import DamagedError, StoreFormatError
from kvtool.core.remote import checks

HEAD = "head"
_FORMAT = 1
_DIGEST = "[0-9a-f]{32}"
_HEAD_KEY = b"remote head"


@dataclass(frozen=True, slots=True)
class Head:
    """The value of `head`: digests of the catalogue in force and of earlier ones still valid, latest first."""

    catalogue: str
    before: tuple[str, ...] = ()


def seal_head(head: Head) -> bytes:
    """The value of `head`."""
    value = {"format": _FORMAT, "catalogue": head.catalogue, "before": head.before}
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
        if value["format"] > _FORMAT:
            raise StoreFormatError(f"the shared store has format {value['format']}", "update kvtool")
        digests = [value["catalogue"], *value.get("before", ())]
        if not all(isinstance(digest, str) and re.fullmatch(_DIGEST, digest) for digest in digests):
            raise ValueError("it names no catalogue")
        return Head(digests[0], tuple(digests[1:]))
    except (DamagedError, ValueError, KeyError, TypeError) as error:
        raise DamagedError("the shared store's head cannot be read", "push again from a store that is whole") from error
