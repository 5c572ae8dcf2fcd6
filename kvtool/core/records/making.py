"""Chunks → records that can be put into a store: a function of the batch, and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.core.cache.entries import ChunkInfo
from kvtool.core.cache.record import KVHeader, encode_record
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import LayerKV, Payload
from kvtool.core.codec.levels import RAW
from kvtool.core.codec.profile import Profile
from kvtool.core.codec.raw import NAMES
from kvtool.core.common.arithmetic import Arithmetic
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, prefill_chunks
from kvtool.core.records.sensitivity import sensitivities
from kvtool.core.records.wanted import WantedChunk
from kvtool.core.records.within import check_within


@dataclass(frozen=True, slots=True)
class LeadIns:
    """Holds what chunks are prefilled behind, and the other text that their sensitivity is measured against.

    Attributes
    ----------
    other : None: no sensitivity is measured, as of the prompt's own beginning.
    """

    own: LeadIn
    other: LeadIn | None

    @classmethod
    def nothing(cls, decoder: Decoder) -> LeadIns:
        """Make the lead-in of the prompt's own beginning: nothing stands before it."""
        return cls(LeadIn(decoder, ()), None)


@dataclass(frozen=True, slots=True)
class PrefilledChunk:
    """Holds a chunk's keys and values, how much each token's values depend on what stood before the chunk, and what
    computed them."""

    chunk: WantedChunk
    kv: ChunkKV
    sensitivity: bytes
    arithmetic: Arithmetic


@dataclass(frozen=True, slots=True)
class ChunkRecords:
    """Holds a chunk's description and its records at one level, one a layer: what `Writer.put_chunk` takes."""

    chunk_id: bytes
    info: ChunkInfo
    level: str
    layers: list[bytes]


def prefill(decoder: Decoder, lead_ins: LeadIns, chunks: Sequence[WantedChunk]) -> list[PrefilledChunk]:
    """Compute a batch of chunks; what a chunk gives does not depend on its batch (bit for bit on the CPU).

    Raises
    ------
    ModelError : a number does not fit the store's format.
    """
    kvs = prefill_chunks(decoder, lead_ins.own, [PrefillItem(chunk.ids, chunk.before) for chunk in chunks])
    check_within(side for kv in kvs for sides in kv.layers for side in sides)
    values = [b""] * len(chunks)
    if lead_ins.other is not None:
        values = sensitivities(decoder, lead_ins.other, [chunk.ids for chunk in chunks], kvs)
    own = decoder.loaded.arithmetic
    return [PrefilledChunk(*made, own) for made in zip(chunks, kvs, values, strict=True)]


def encode(made: PrefilledChunk, level: str = RAW, profile: Profile | None = None) -> ChunkRecords:
    """Make the records of a chunk at one level."""
    layers = encode_layers(made.chunk.chunk_id, made.kv, level, profile)
    return ChunkRecords(
        made.chunk.chunk_id, made.chunk.info(len(layers), made.sensitivity, made.arithmetic), level, layers
    )


def make(
    decoder: Decoder,
    lead_ins: LeadIns,
    chunks: Sequence[WantedChunk],
    level: str = RAW,
    profile: Profile | None = None,
) -> list[ChunkRecords]:
    """Make the records of a batch of chunks at one level."""
    return [encode(made, level, profile) for made in prefill(decoder, lead_ins, chunks)]


def encode_layers(chunk_id: bytes, kv: ChunkKV, level: str, profile: Profile | None = None) -> list[bytes]:
    """Encode keys and values as records, one a layer."""
    kvs = kv.layers
    payloads = CODECS[level].encode_layers(kvs, profile)
    return [sealed(chunk_id, kvs[layer], level, layer, payload) for layer, payload in enumerate(payloads)]


def sealed(chunk_id: bytes, kv: LayerKV, level: str, layer: int, payload: Sequence[Payload]) -> bytes:
    """Put one layer's record around what a codec made of it."""
    keys, values = kv
    kv_heads, tokens, head_dim = keys.shape
    header = KVHeader(NAMES[keys.dtype], kv_heads, tokens, head_dim, values.shape[2], level, layer)
    return encode_record(chunk_id, header, payload)
