"""Encoding of a chunk's stored records at other levels."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvtool.core.cache.entries import ChunkInfo
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded, LayerKV, no_profiles
from kvtool.core.codec.encode import encode_levels, encode_rows
from kvtool.core.codec.levels import level_of, whole
from kvtool.core.codec.profile import Profile
from kvtool.core.common.types import Ids
from kvtool.core.records.encode import sealed


@dataclass(frozen=True, slots=True)
class Plan:
    chunk: bytes
    info: ChunkInfo
    source: str
    levels: tuple[str, ...]
    kept: tuple[str, ...]

    @property
    def sparse(self) -> list[str]:
        return [level for level in self.levels if level_of(level).share < 100]


@dataclass(frozen=True, slots=True)
class Made:
    records: dict[str, list[bytes]]
    raw_bytes: int
    seconds: float


def make(
    plan: Plan,
    exact: Sequence[Encoded],
    stored: Mapping[str, Sequence[Encoded]],
    rows: Mapping[str, Ids],
    profile: Profile | None,
) -> Made:
    """Encode a chunk's `exact` records (one a layer) at each of a plan's levels. Raises DamagedError."""
    started = time.thread_time()
    kvs = CODECS[plan.source].decode_layers(exact)
    bases = {
        level: [item.payload for item in items] for level, items in stored.items() if _is_of(kvs, level, items, profile)
    }
    made = encode_levels(kvs, whole(plan.levels), profile, bases)
    for level, kept in rows.items():
        made[level] = encode_rows(kvs, kept, level, profile)
    records = {
        level: [sealed(plan.chunk, kv, level, layer, made[level][layer]) for layer, kv in enumerate(kvs)]
        for level in plan.levels
    }
    size = sum(side.nbytes for kv in kvs for side in kv)
    return Made(records, size, time.thread_time() - started)


def _is_of(kvs: Sequence[LayerKV], level: str, stored: Sequence[Encoded], profile: Profile | None) -> bool:
    """A pulled level may round differently: then only its maker could refine it."""

    def profiles(digest: bytes) -> Profile:
        return profile if profile is not None and digest == profile.digest else no_profiles(digest)

    for layer, (item, payload) in enumerate(zip(stored, CODECS[level].encode_layers(kvs, profile), strict=True)):
        made = Encoded(b"".join(payload), item.shape, item.dtype)
        sides = [CODECS[level].decode([record], layer, profiles)[0] for record in (item, made)]
        if not all(torch.equal(*pair) for pair in zip(*sides, strict=True)):
            return False
    return True
