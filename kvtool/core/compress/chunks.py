"""Stored chunks as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtool.core.cache.store import REPAIR, Store
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded, Profiles, no_profiles
from kvtool.core.codec.levels import exact
from kvtool.core.errors import DamagedError, KvtoolError
from kvtool.core.model.prefill import ChunkKV


def exact_level(store: Store, chunk_id: bytes) -> str | None:
    """A level that loses nothing and is stored, or None."""
    return next(iter(exact(store.levels(chunk_id))), None)


def read_records(store: Store, chunk_ids: Sequence[bytes], level: str, layer: int) -> list[Encoded]:
    """Records of several chunks, each with the coarser ones that it refines.

    Raises
    ------
    DamagedError : one is missing or damaged.
    """
    items = []
    for chunk_id, record in zip(chunk_ids, store.read_layer(chunk_ids, level, layer), strict=True):
        if record is None:
            raise DamagedError(f"chunk {chunk_id.hex()[:12]} has no layer {layer} at level {level}", REPAIR)
        if isinstance(record, KvtoolError):
            where = f"layer {layer} of chunk {chunk_id.hex()[:12]} at level {level}"
            raise DamagedError(f"{where} is damaged: {record.message}", REPAIR)
        header, payload = record
        base = CODECS[level].base_of(payload)
        coarse = None if base is None else read_records(store, [chunk_id], base, layer)[0]
        items.append(Encoded(payload, (header.kv_heads, header.tokens, header.head_dim_k), header.dtype, coarse))
    return items


def read_chunk(store: Store, chunk_id: bytes, level: str, layers: int, profiles: Profiles = no_profiles) -> ChunkKV:
    """All layers of a chunk; raises DamagedError."""
    sides = [
        CODECS[level].decode(read_records(store, [chunk_id], level, layer), layer, profiles)[0]
        for layer in range(layers)
    ]
    return ChunkKV(torch.stack([keys for keys, _ in sides]), torch.stack([values for _, values in sides]))
