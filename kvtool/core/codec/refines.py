"""What a nested record refines, told from its first bytes (payload.py) without importing torch."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from kvtool.core.codec.levels import NESTED, coarser, level_of
from kvtool.core.errors import DamagedError

Payload = bytes | bytearray | memoryview
_BASE, _CHECK = 7, slice(40, 44)


def base_level(level: str, payload: Payload) -> str | None:
    """The coarser level that a record of this level refines; None: it stands alone. Raises DamagedError."""
    if not level_of(level).nested:
        return None
    base = coarser(level)
    number = payload[_BASE] if len(payload) > _CHECK.stop else None
    if number == 0:
        return None
    if base is None or number != NESTED.index(base) + 1:
        raise DamagedError("a compressed record of no known level")
    return base


def stated_check(payload: Payload) -> int:
    """Of the very record that is refined (:func:`check_of`); 0: an older record, which does not state it."""
    return int.from_bytes(payload[_CHECK], "little")


def check_of(parts: Iterable[Payload]) -> int:
    """32 bits, not all 0, that tell a record from others of its level; its payload's parts end to end."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest() & 0xFFFFFFFF or 1
