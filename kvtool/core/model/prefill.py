"""Prefill of single chunks after a shared lead-in; their keys are kept without a position."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from kvtool.core.common.types import Ids
from kvtool.core.model.decoder import Decoder, out_of_memory_hint
from kvtool.core.model.forward import ChunkWatch, OnLayer, PackedChunks, Pass
from kvtool.core.model.prompt_cache import KVShape

MARGINS = 64, 16  # bytes before and behind a chunk's keys and values at a layer, for a record's header and digest
_LEAST_ROWS = 16  # a single row would take a matrix-vector kernel, whose sums round otherwise


@dataclass(frozen=True, slots=True)
class PrefillItem:
    """A chunk to prefill: its token ids, and ids of its own between the shared lead-in and it."""

    ids: Ids
    before: Ids = ()


@dataclass(frozen=True, slots=True)
class ChunkKV:
    """Keys (un-rotated) and values of a chunk: for each layer `[kv_heads, tokens, head_dim]` on the CPU. They may be
    views into their batch's memory, with `MARGINS` around them: `rooms`."""

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    rooms: Sequence[memoryview] = field(default=(), kw_only=True)

    @property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self.keys, self.values, strict=True))

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    @property
    def nbytes(self) -> int:
        return sum(side.nbytes for layer in self.layers for side in layer)


class LeadIn:
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
    """Prefill chunks packed into one row, each as if only it came after the lead-in; return one `ChunkKV` an item. On
    the CPU the bits do not depend on the batch, so a resumed ingest ends with the same bytes. Keys lose their position
    here: un-rotated in float32, rounded once. `layers`: how many of the first layers to compute. If `going` returns
    False at a layer, raises `PrefillStopped`. Each item has a watch (`PackedChunks`), or none has."""
    lengths = [len(item.before) + len(item.ids) for item in items]
    spare = max(0, _LEAST_ROWS - sum(lengths))
    tokens = [*chain.from_iterable(item.before + item.ids for item in items), *[0] * spare]
    rows = PackedChunks.of([*lengths, spare] if spare else lengths, lead_in.layers, watches)
    positions = torch.cat([torch.arange(len(lead_in), len(lead_in) + length) for length in [*lengths, spare]])
    positions = positions.to(decoder.device)
    undo = decoder.rotary.table(positions).inverse()
    stop_layer = decoder.stored_layers if layers is None else min(layers, decoder.stored_layers)
    spans = [slice(start + len(item.before), stop) for item, (start, stop) in zip(items, rows.spans, strict=False)]
    brought = _Brought(decoder, stop_layer, spans)

    class Collect(OnLayer):
        def collect(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> bool:
            if not going():
                raise PrefillStopped
            brought.bring(layer, decoder.rotary.rotate(keys, undo, layer)[0], values[0])
            return layer == stop_layer - 1

    with out_of_memory_hint(len(tokens)):
        decoder.forward.fill(Pass(decoder.device_ids(tokens), rows, positions, None, Collect(), exact=True))
    if decoder.device.startswith("cuda"):
        torch.cuda.current_stream(decoder.device).synchronize()
    return [brought.chunk(number) for number in range(len(items))]


class _Brought:
    """Memory on the CPU for a batch's keys and values, chunk by chunk, so that records can be made where they lie. From
    a GPU one copy fills a layer's; on a CPU each chunk has its own, which others do not retain."""

    def __init__(self, decoder: Decoder, layers: int, spans: Sequence[slice]) -> None:
        self._shapes, self._dtype, self._spans = decoder.shapes[:layers], decoder.kv_dtype, spans
        self._orders: dict[KVShape, torch.Tensor] = {}
        counts = [span.stop - span.start for span in spans]
        each = [[(shape, count) for count in counts] for shape in self._shapes]
        if decoder.device == "cpu":
            of_chunks = [self._laid(decoder, blocks)[1] for blocks in zip(*each, strict=True)]
            self._rooms = tuple(zip(*of_chunks, strict=True))
        else:
            self._whole, self._rooms = zip(*(self._laid(decoder, blocks) for blocks in each), strict=True)

    def _laid(
        self, decoder: Decoder, blocks: Sequence[tuple[KVShape, int]]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Allocate memory for blocks of so many tokens each, and cut it into those, with their margins."""
        places, end, (before, behind) = [], 0, MARGINS
        for shape, count in blocks:
            start = end + self._gap(shape)
            end = start + shape.numbers * count * self._dtype.itemsize
            places.append(slice(start - before, end + behind))
        memory = decoder.host_memory(end + self._gap(blocks[-1][0]))
        return memory, tuple(memory[span] for span in places)

    def _gap(self, shape: KVShape) -> int:
        """Bytes between two blocks: whole rows, so that one copy may fill blocks and gaps."""
        row = shape.key_dim * self._dtype.itemsize
        return -(-sum(MARGINS) // row) * row

    def bring(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take over a layer's keys and values `[kv_heads, rows, head_dim]`; from a GPU they come later."""
        shape = self._shapes[layer]
        if keys.is_cuda and shape.key_dim == shape.value_dim:
            if shape not in self._orders:
                self._orders[shape] = self._order(shape, keys.shape[1]).to(keys.device)
            rows = torch.cat([keys.to(self._dtype), values.to(self._dtype)]).flatten(0, 1)
            whole = self._whole[layer].view(self._dtype).view(-1, shape.key_dim)
            whole.copy_(rows.index_select(0, self._orders[shape]), non_blocking=True)
            return
        for number, span in enumerate(self._spans):
            for to, side in zip(self._sides(layer, number), (keys, values), strict=True):
                to.copy_(side[:, span], non_blocking=True)

    def _order(self, shape: KVShape, rows: int) -> torch.Tensor:
        gap = torch.zeros(self._gap(shape) // (shape.key_dim * self._dtype.itemsize), dtype=torch.int64)
        heads = torch.arange(2 * shape.heads)[:, None] * rows
        each = [(heads + torch.arange(span.start, span.stop)).flatten() for span in self._spans]
        return torch.cat([part for of_chunk in each for part in (gap, of_chunk)] + [gap])

    def _sides(self, layer: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape, span = self._shapes[layer], self._spans[number]
        before, behind = MARGINS
        flat = self._rooms[layer][number][before:-behind].view(self._dtype)
        rows = shape.heads, span.stop - span.start
        keys, values = flat.split([math.prod(rows) * dim for dim in (shape.key_dim, shape.value_dim)])
        return keys.view(*rows, shape.key_dim), values.view(*rows, shape.value_dim)

    def chunk(self, number: int) -> ChunkKV:
        layers = range(len(self._shapes))
        rooms = [self._rooms[layer][number].numpy().data for layer in layers]
        return ChunkKV(*zip(*(self._sides(layer, number) for layer in layers), strict=True), rooms=rooms)
