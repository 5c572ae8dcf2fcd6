"""Prefill chunks and encode their keys and values as records: a function of the batch, and of nothing else.

With each chunk comes how much its tokens' values depend on what stood before it (`sensitivities`), which `union` ranks
rows by.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch

from kvtool.core.cache.entries import ChunkInfo, ChunkSpec
from kvtool.core.cache.record import KVHeader, encode_record
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import NAMES, LayerKV, Payload
from kvtool.core.codec.levels import RAW
from kvtool.core.codec.profile import Profile
from kvtool.core.common.arithmetic import Arithmetic
from kvtool.core.common.types import Ids
from kvtool.core.errors import ModelError
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, prefill_chunks
from kvtool.core.model.prompt import PromptParts, lead_in_ids

# The first layer whose values can differ at all. Further layers rank tokens hardly better (answer KL .084 instead of
# .087), and each would cost another L-th of an ingest.
LAYER = 1
_LARGEST = torch.finfo(torch.float16).max


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

    chunk: ChunkSpec
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


def prefill(decoder: Decoder, lead_ins: LeadIns, chunks: Sequence[ChunkSpec]) -> list[PrefilledChunk]:
    """Compute a batch of chunks; what a chunk gives does not depend on its batch (bit for bit on the CPU).

    Raises
    ------
    ModelError : a number does not fit the store's format.
    """
    kvs = prefill_chunks(decoder, lead_ins.own, [PrefillItem(chunk.ids, chunk.before) for chunk in chunks])
    check_float16_range(side for kv in kvs for sides in kv.layers for side in sides)
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
    chunks: Sequence[ChunkSpec],
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


# ---- what a token's values depend on -------------------------------------------------------------------------------


def other_lead_in(decoder: Decoder, parts: PromptParts, own: Ids, shared: bool) -> LeadIn:
    """Make the lead-in that chunks are compared behind: what counts is how far a text before a chunk moves its values.

    It is the plain prefix for a store whose chunks all stand behind a text of their own (`warm`, a file), and the warm
    one for all others.

    Parameters
    ----------
    own : ids of the store's lead-in.
    shared : whether nothing else stands before its chunks.
    """
    plain, warm = (lead_in_ids(mode, decoder.loaded.tokenizer, parts) for mode in ("prefix", "warm"))
    return LeadIn(decoder, plain if shared and len(own) > len(plain) else warm)


def sensitivities(decoder: Decoder, other: LeadIn, chunks: Sequence[Ids], kvs: Sequence[ChunkKV]) -> list[bytes]:
    """Measure for each chunk, as one little-endian float16 a token, the distance of its values at layer 1 (layer 0 of a
    model with one layer), over all heads, between its own lead-in and the other one.

    Parameters
    ----------
    chunks : token ids.
    kvs : the same chunks behind their own lead-in.
    """
    layer = min(LAYER, decoder.stored_layers - 1)
    others = prefill_chunks(decoder, other, [PrefillItem(ids) for ids in chunks], layer + 1)
    return [_distance(kv.values[layer], moved.values[layer]) for kv, moved in zip(kvs, others, strict=True)]


def _distance(values: torch.Tensor, moved: torch.Tensor) -> bytes:
    """Measure the distance, token by token, of values `[kv_heads, tokens, head_dim]`."""
    distance = (values.float() - moved.float()).square().sum((0, 2)).sqrt().clamp_max(_LARGEST)
    return distance.half().numpy().astype("<f2").tobytes()


# ---- numbers and threads ------------------------------------------------------------------------------------------


def check_float16_range(kept: Iterable[torch.Tensor]) -> None:
    """Refuse what has left the range of float16, 65504, and would be stored as infinity; other formats are not checked.

    Raises
    ------
    ModelError : a number is infinite, or none.
    """
    for tensor in kept:
        if tensor.dtype == torch.float16 and not bool(torch.isfinite(tensor).all()):
            raise ModelError(
                "keys or values of the model leave the range of float16, which the store keeps",
                "make another store with --store-dtype bfloat16",
            )


def encoder_threads() -> ThreadPoolExecutor:
    """Make as many threads as torch would take for one product; a product of theirs takes one. The codec's work is
    machine code, in which Python serves others."""
    return ThreadPoolExecutor(torch.get_num_threads(), "kvtool-records", _alone)


def _alone() -> None:
    """Let this thread's products be its own.

    By OpenMP itself: `torch.set_num_threads` would hold for all threads that begin later, too.
    """
    torch.get_num_threads()  # a thread takes its number from torch once, when it first asks
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).omp_set_num_threads(1)
