"""Prefills batches of chunks, and encodes their keys and values as records. With each chunk comes the sensitivity of
its tokens' values to the text before it, by which `union` ranks rows; and the rows worth storing when not all are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch

from kvtool.core.cache.entries import ChunkInfo, ChunkSpec
from kvtool.core.cache.record import Bytes, KVHeader, encode_record, seal_room
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import NAMES, LayerKV, Payload
from kvtool.core.codec.levels import RAW, level_of
from kvtool.core.codec.profile import Profile
from kvtool.core.common.machine import Arithmetic
from kvtool.core.common.types import Ids
from kvtool.core.errors import ModelError
from kvtool.core.kernels.attention.eager import attention_weights
from kvtool.core.kernels.attention.params import AttentionParams, KeyRanges
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, prefill_chunks

# The first layer whose values can differ at all. Further layers rank tokens hardly better (answer KL .084 instead of
# .087), and each would cost another L-th of an ingest.
LAYER = 1
_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True, eq=False)
class LeadIns:
    """The lead-in of chunks, and the other one that sensitivity is measured against; None: it is not measured."""

    own: LeadIn
    other: LeadIn | None

    @classmethod
    def nothing(cls, decoder: Decoder) -> LeadIns:
        return cls(LeadIn(decoder, ()), None)


@dataclass(frozen=True, slots=True)
class PrefilledChunk:
    chunk: ChunkSpec
    kv: ChunkKV
    sensitivity: bytes
    arithmetic: Arithmetic


@dataclass(frozen=True, slots=True)
class ChunkRecords:
    """A chunk's description and its records at one level, one a layer, for `Writer.put_chunk`."""

    chunk_id: bytes
    info: ChunkInfo
    level: str
    layers: Sequence[Bytes]


def prefill(decoder: Decoder, lead_ins: LeadIns, chunks: Sequence[ChunkSpec]) -> list[PrefilledChunk]:
    """Compute chunks, each independent of its batch (bit for bit on the CPU). Raises ModelError: beyond float16."""
    kvs = prefill_chunks(decoder, lead_ins.own, [PrefillItem(chunk.ids, chunk.before) for chunk in chunks])
    check_float16_range(side for kv in kvs for sides in kv.layers for side in sides)
    values = [b""] * len(chunks)
    if lead_ins.other is not None:
        values = sensitivities(decoder, lead_ins.other, [chunk.ids for chunk in chunks], kvs)
    arithmetic = decoder.loaded.arithmetic
    return [PrefilledChunk(*parts, arithmetic) for parts in zip(chunks, kvs, values, strict=True)]


def encode(
    prefilled: PrefilledChunk, level: str = RAW, profile: Profile | None = None, in_place: bool = False
) -> ChunkRecords:
    """Make the records of a chunk. `in_place`: those of a verbatim level are the memory of their numbers."""
    chunk_id, kv = prefilled.chunk.chunk_id, prefilled.kv
    layers: Sequence[Bytes]
    if in_place and kv.rooms and level_of(level).verbatim:
        headers = [_header(of, level, layer) for layer, of in enumerate(kv.layers)]
        layers = [seal_room(chunk_id, *pair) for pair in zip(headers, kv.rooms, strict=True)]
    else:
        layers = encode_layers(chunk_id, kv, level, profile)
    return ChunkRecords(
        prefilled.chunk.chunk_id,
        prefilled.chunk.info(len(layers), prefilled.sensitivity, prefilled.arithmetic),
        level,
        layers,
    )


def make(
    decoder: Decoder, lead_ins: LeadIns, chunks: Sequence[ChunkSpec], level: str = RAW, profile: Profile | None = None
) -> list[ChunkRecords]:
    return [encode(prefilled, level, profile) for prefilled in prefill(decoder, lead_ins, chunks)]


def encode_layers(chunk_id: bytes, kv: ChunkKV, level: str, profile: Profile | None = None) -> list[bytes]:
    kvs = kv.layers
    payloads = CODECS[level].encode_layers(kvs, profile)
    return [sealed(chunk_id, kvs[layer], level, layer, payload) for layer, payload in enumerate(payloads)]


def sealed(chunk_id: bytes, kv: LayerKV, level: str, layer: int, payload: Sequence[Payload]) -> bytes:
    return encode_record(chunk_id, _header(kv, level, layer), payload)


def _header(kv: LayerKV, level: str, layer: int) -> KVHeader:
    keys, values = kv
    kv_heads, tokens, head_dim = keys.shape
    return KVHeader(NAMES[keys.dtype], kv_heads, tokens, head_dim, values.shape[2], level, layer)


def sensitivities(decoder: Decoder, other: LeadIn, chunks: Sequence[Ids], kvs: Sequence[ChunkKV]) -> list[bytes]:
    """Measure the distance of each chunk's values at layer 1, over all heads, between its own lead-in (`kvs`) and the
    other. Returns one little-endian float16 a token. Layer 0 serves for a model with one layer."""
    layer = min(LAYER, decoder.stored_layers - 1)
    others = prefill_chunks(decoder, other, [PrefillItem(ids) for ids in chunks], layer + 1)
    return [_distance(kv.values[layer], moved.values[layer]) for kv, moved in zip(kvs, others, strict=True)]


def _distance(values: torch.Tensor, moved: torch.Tensor) -> bytes:
    distance = (values.float() - moved.float()).square().sum((0, 2)).sqrt().clamp_max(_LARGEST)
    return distance.half().numpy().astype("<f2").tobytes()


def check_float16_range(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse float16 numbers that are not finite: the model has left the range of 65504. Raises ModelError."""
    for tensor in tensors:
        if tensor.dtype == torch.float16 and not bool(torch.isfinite(tensor).all()):
            raise ModelError(
                "keys or values of the model leave the range of float16, which the store keeps",
                "make another store with --store-dtype bfloat16",
            )


def encoder_threads() -> ThreadPoolExecutor:
    """Make as many threads as torch would take for one product; a product of theirs takes one. The codec's work is
    machine code, in which Python serves other threads."""
    return ThreadPoolExecutor(torch.get_num_threads(), "kvtool-records", _alone)


def _alone() -> None:
    """Limit this thread's products to itself, by OpenMP: `torch.set_num_threads` would hold for later threads, too."""
    torch.get_num_threads()  # a thread takes its number from torch once, when it first asks
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).omp_set_num_threads(1)


SINKS = 4  # first rows of a chunk, which always stay: its later rows lean on them
_BLOCK = 64  # rows whose weights exist at a time
_TWICE = "each chunk is read twice to choose its rows: leave --keep out, or ingest with fewer --chunk-tokens"


class _Watch:
    """Sum over layers (`worth`, float32 `[tokens]`) of the largest weight a chunk's rows get from its repetition."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.worth = torch.zeros(tokens, dtype=torch.float32)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, scoring: AttentionParams) -> None:
        """Look at a layer's queries `[heads, 2 · tokens, head_dim]` and at all keys that the last of them sees."""
        tokens, keys = self._tokens, key.shape[1]
        before = keys - 2 * tokens
        most = torch.zeros(tokens, device=key.device, dtype=torch.float32)
        for start in range(tokens, 2 * tokens, _BLOCK):
            stop = min(start + _BLOCK, 2 * tokens)
            seen = KeyRanges.run(range(before + start, before + stop), scoring.window, key.device)
            weights = attention_weights(query[:, start:stop], key, seen, scoring)
            most = torch.maximum(most, weights[:, :, before : before + tokens].amax((0, 1)))
        self.worth += most.cpu()


def repeated(decoder: Decoder, lead_in: LeadIn, chunks: Sequence[Ids]) -> list[torch.Tensor]:
    """Measure the worth of each row of some chunks, float32 `[tokens]`, without the text before them that a `neighbour`
    store has. Raises UsageError: a chunk and its repetition are longer than the model's context."""
    decoder.check_length(len(lead_in) + 2 * max(map(len, chunks), default=0), _TWICE)
    watches = [_Watch(len(ids)) for ids in chunks]
    prefill_chunks(decoder, lead_in, [PrefillItem((*ids, *ids)) for ids in chunks], watches=watches)
    return [watch.worth for watch in watches]


def heaviest(worth: torch.Tensor, share: int) -> Ids:
    """Choose `share` percent of the rows, ascending: the first ones, and of the others those of the highest worth."""
    tokens = len(worth)
    ranked = worth.clone()
    ranked[:SINKS] = torch.inf
    count = min(tokens, max(SINKS, -(-tokens * share // 100)))
    chosen = ranked.argsort(descending=True, stable=True)[:count]
    return tuple(chosen.sort().values.tolist())
