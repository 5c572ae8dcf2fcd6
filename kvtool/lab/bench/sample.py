"""Exact chunks of a store in memory, for measurements."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvtool.core.cache.store import Store
from kvtool.core.codec.base import DTYPES, Shape, shape_of_layer
from kvtool.core.errors import KvtoolError
from kvtool.core.model.prefill import ChunkKV
from kvtool.core.records.read import exact_level, read_chunk

AT_ONCE = 16  # chunks that are decoded together


@dataclass(frozen=True, slots=True)
class Sample:
    """Chunks whose numbers have 16 bit; those of a float32 store are rounded to bfloat16.

    Attributes
    ----------
    decoded : the dtype that lossy records are decoded to: the store's own, as a query takes it, or another's.
    """

    chunks: tuple[ChunkKV, ...]
    decoded: torch.dtype

    @classmethod
    def of(cls, store: Store, tokens: int, leave_out: bytes | None = None, decoded: str = "auto") -> Sample:
        """The first exact chunks, of about `tokens` tokens, one chunk at least.

        Parameters
        ----------
        decoded : name of the dtype that lossy records are decoded to; `auto`: the store's own.

        Raises
        ------
        KvtoolError : none is exact.
        DamagedError : a record is damaged.
        """
        found: list[ChunkKV] = []
        read = 0
        for chunk in store.chunk_ids():
            level, info = exact_level(store, chunk), store.chunk_info(chunk)
            if level is None or info is None or chunk == leave_out:
                continue
            if found and read + len(info.token_ids) > tokens:
                break
            kv = read_chunk(store, chunk, level, info.layers)
            own = kv.dtype
            found.append(ChunkKV(*([_of_16_bit(numbers) for numbers in side] for side in (kv.keys, kv.values))))
            read += len(info.token_ids)
        if not found:
            raise KvtoolError(
                "the store holds no exact chunk to measure on", "run `kvtool ingest PATH` with --level raw"
            )
        return cls(tuple(found), own if decoded == "auto" else DTYPES[decoded])

    @property
    def layers(self) -> int:
        return len(self.chunks[0].keys)

    @property
    def tokens(self) -> int:
        """The tokens of all chunks."""
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def channels(self) -> int:
        """How many numbers a token has in K, or in V, of a layer."""
        return self.chunks[0].keys[0].shape[0] * self.chunks[0].keys[0].shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.chunks[0].dtype

    @property
    def raw_bytes(self) -> int:
        """The bytes of K and V of all layers of all chunks, at 16 bit."""
        return 4 * self.layers * self.tokens * self.channels

    def shape(self, chunk: int) -> Shape:
        """The shape of K and V of a layer of a chunk."""
        return shape_of_layer(self.chunks[chunk].layers[0])

    def batches(self) -> list[range]:
        """Numbers of the chunks that are decoded together."""
        count = len(self.chunks)
        return [range(first, min(first + AT_ONCE, count)) for first in range(0, count, AT_ONCE)]


def _of_16_bit(side: torch.Tensor) -> torch.Tensor:
    return (side if side.element_size() == 2 else side.to(torch.bfloat16)).contiguous()
