"""Prefill of single chunks after a shared lead-in; their keys are kept without a position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from kvtool.core.common.types import Ids
from kvtool.core.kernels.attention.params import KV
from kvtool.core.model.attention import ChunkWatch, PackedChunks, rows_of_pass
from kvtool.core.model.decoder import Decoder, out_of_memory_hint
from kvtool.core.model.modules import CacheProxy, ForwardEnded, cache_name
from kvtool.core.model.preemption import preemptible

_LEAST_ROWS = 16  # a single row would take a matrix-vector kernel, whose sums round otherwise


@dataclass(frozen=True, slots=True)
class PrefillItem:
    """A chunk to prefill: its token ids, and ids of its own between the shared lead-in and it."""

    ids: Ids
    before: Ids = ()


@dataclass(frozen=True, slots=True)
class ChunkKV:
    """Keys (un-rotated) and values of a chunk: for each layer `[kv_heads, tokens, head_dim]` on the CPU.

    They may be views into the memory of their batch. Layers may differ in heads and head_dim.
    """

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]

    @property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values of each layer."""
        return list(zip(self.keys, self.values, strict=True))

    @property
    def tokens(self) -> int:
        """Count its tokens."""
        return self.keys[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    @property
    def nbytes(self) -> int:
        return sum(side.nbytes for layer in self.layers for side in layer)


class LeadIn:
    """A lead-in's rotated keys and values per layer, computed once and shared by all chunks after it."""

    def __init__(self, decoder: Decoder, ids: Sequence[int]) -> None:
        self.ids = tuple(ids)
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self.ids:
            self.layers = [buffer.view() for buffer in decoder.prefill_stored(self.ids).buffers]

    def __len__(self) -> int:
        return len(self.ids)


class PrefillStopped(Exception):
    """Raised where `going` says that the work is no longer wanted."""


@torch.inference_mode()
def prefill_chunks(
    decoder: Decoder,
    lead_in: LeadIn,
    items: Sequence[PrefillItem],
    layers: int | None = None,
    going: Callable[[], bool] = lambda: True,
    watches: Sequence[ChunkWatch] = (),
) -> list[ChunkKV]:
    """Prefill chunks packed into one row, each as if only it came after the lead-in.

    Of the last layer only keys and values are computed, and the LM head does not run.
    What a chunk gives does not depend on its batch: bit for bit on the CPU, so that a resumed ingest ends with the
    bytes of an undisturbed one.
    Keys lose their position here: rotated by the model at lead-in length onwards, un-rotated in float32, rounded once.

    Parameters
    ----------
    layers : how many of the first layers to compute; None: all.
    going : asked at every layer; False raises `PrefillStopped`.
    watches : one an item, or none: called with every layer's queries and keys but the last one's (`PackedChunks`).

    Returns
    -------
    One `ChunkKV` an item, without the rows of the lead-in and of `item.before`: views into the batch's memory.
    """
    lengths = [len(item.before) + len(item.ids) for item in items]
    spare = max(0, _LEAST_ROWS - sum(lengths))
    tokens = [*(token for item in items for token in item.before + item.ids), *[0] * spare]
    rows = PackedChunks.of([*lengths, spare] if spare else lengths, lead_in.layers, watches)
    positions = torch.cat([torch.arange(len(lead_in), len(lead_in) + length) for length in [*lengths, spare]])
    positions = positions.to(decoder.device)
    undo = decoder.rotary.table(positions).inverse()
    wanted = decoder.stored_layers if layers is None else min(layers, decoder.stored_layers)
    on_gpu = decoder.device.startswith("cuda")
    # Pinned: a layer's copy then runs while the next ones compute, and nothing waits for it before the end.
    made = [shape.empty(len(tokens), decoder.kv_dtype, on_gpu) for shape in decoder.shapes[:wanted]]

    def collect(keys: torch.Tensor, values: torch.Tensor, layer: int) -> KV:
        if not going():
            raise PrefillStopped
        to_keys, to_values = made[layer]
        to_keys.copy_(decoder.rotary.rotate(keys, undo, layer)[0], non_blocking=True)
        to_values.copy_(values[0], non_blocking=True)
        if layer == wanted - 1:
            raise ForwardEnded
        return keys, values

    with (
        out_of_memory_hint(len(tokens)),
        suppress(ForwardEnded),
        rows_of_pass(lambda: rows),
        preemptible(decoder.layers),
    ):
        decoder.base(
            input_ids=decoder.device_ids(tokens)[None],
            position_ids=positions[None],
            use_cache=True,
            rows=rows,
            **{cache_name(decoder.base): CacheProxy(collect)},
        )
    if on_gpu:
        torch.cuda.current_stream(decoder.device).synchronize()
    spans = [slice(start + len(item.before), stop) for item, (start, stop) in zip(items, rows.spans, strict=False)]
    return [ChunkKV(*zip(*((k[:, span], v[:, span]) for k, v in made), strict=True)) for span in spans]
