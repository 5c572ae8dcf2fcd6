"""The levels whose records may refine one another, and what their first bytes say (payload.py); needs no torch."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from kvtool.core.codec.base import Payload
from kvtool.core.errors import DamagedError

NESTED = ("1", "2", "3", "4")  # finest first; each has steps three times as wide as the one before
NO_PROFILE = bytes(16)  # what a record names that was made without one
MAKER = slice(64, 80)  # of a payload: the digest of its profile
_BASE, _CHECK = 7, slice(40, 44)


def coarser(level: str) -> str | None:
    """The next coarser level that a record of this one may refine; None: it always stands alone."""
    at = NESTED.index(level) + 1 if level in NESTED else len(NESTED)
    return NESTED[at] if at < len(NESTED) else None


def base_level(level: str, payload: Payload) -> str | None:
    """The coarser level that a record of this level refines; None: it stands alone. Raises DamagedError."""
    if level not in NESTED:
        return None
    base = coarser(level)
    number = payload[_BASE] if len(payload) > _CHECK.stop else None
    if number == 0:
        return None
    if base is None or number != NESTED.index(base) + 1:
        raise DamagedError("a compressed record of no known level")
    return base


def stated_check(payload: Payload) -> int:
    """`check_of` the very record that is refined; 0: an older record, which does not state it."""
    return int.from_bytes(payload[_CHECK], "little")


def check_of(parts: Iterable[Payload]) -> int:
    """32 bits, not all 0, that tell a record from others of its level; its payload's parts end to end."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest() & 0xFFFFFFFF or 1
