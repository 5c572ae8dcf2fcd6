"""Prefill chunks alone, behind a shared lead-in, and keep their keys without a position."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvtool.core.model.attention import BLOCK, Rows
from kvtool.core.model.decoder import Decoder, out_of_memory_hint

_LEAST_WIDTH = 16  # one row alone would take a matrix-vector kernel, whose sums round otherwise


@dataclass(frozen=True, slots=True)
class PrefillItem:
    """A chunk to prefill: its token ids, and ids of its own that stand between the shared lead-in and it."""

    ids: tuple[int, ...]
    before: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkKV:
    """Keys (un-rotated) and values of a chunk: two tensors `[layers, kv_heads, tokens, head_dim]` on the CPU."""

    keys: torch.Tensor
    values: torch.Tensor


class LeadIn:
    """A lead-in's rotated keys and values per layer, computed once and shared by all chunks behind it."""

    def __init__(self, decoder: Decoder, ids: Sequence[int]) -> None:
        self.ids = tuple(ids)
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self.ids:
            _, cache = decoder.prefill(self.ids)
            self.layers = [buffer.view() for buffer in cache.buffers]

    def __len__(self) -> int:
        return len(self.ids)


class _Done(Exception):
    """The last layer's keys and values are there: its attention and MLP would be computed for nothing."""


class _BatchCache(Cache):
    """Puts the lead-in before each batch row, and hands every layer's new keys and values to the collector."""

    def __init__(self, lead_in: LeadIn, collect: Any, last: int) -> None:
        super().__init__(layers=[])
        self._lead_in = lead_in
        self._last = last
        self._collect = collect

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return len(self._lead_in)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._collect(layer_idx, key_states, value_states)
        if layer_idx == self._last:
            raise _Done
        lead = self._lead_in.layers[layer_idx] if self._lead_in.layers else (None, None)
        return self._joined(lead[0], key_states), self._joined(lead[1], value_states)

    @staticmethod
    def _joined(lead: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        """Lead-in, new rows, and zeros up to a whole attention block (see `attention.rows_attention`)."""
        parts = [new] if lead is None else [lead.expand(new.shape[0], -1, -1, -1), new]
        spare = -new.shape[2] % BLOCK
        return torch.cat([*parts, new.new_zeros((*new.shape[:2], spare, new.shape[3]))], 2)


@torch.inference_mode()
def prefill_chunks(decoder: Decoder, lead_in: LeadIn, items: Sequence[PrefillItem]) -> list[ChunkKV]:
    """Prefill chunks of similar length in one batch.

    Shorter rows are padded at the end, where causal attention never looks. Of the last layer only keys and values are
    computed, and the LM head does not run.
    What a chunk gives does not depend on its batch: bit for bit on the CPU, so that a resumed ingest ends with the
    bytes of an undisturbed one.
    Keys lose their position here: rotated by the model at lead-in length onwards, un-rotated in float32, rounded once.

    Returns
    -------
    One `ChunkKV` an item, without the rows of the lead-in and of `item.before`.
    """
    sequences = [item.before + item.ids for item in items]
    width = max(_LEAST_WIDTH, *map(len, sequences))
    tokens = torch.zeros((len(items), width), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
    positions = torch.arange(len(lead_in), len(lead_in) + width)
    rows = Rows.of(positions, decoder.device, whole_blocks=True)
    table = decoder.rotary.table(rows.positions)
    shape = (len(items), len(decoder.layers), decoder.kv_heads, width, decoder.head_dim)
    all_keys, all_values = torch.empty(shape, dtype=decoder.dtype), torch.empty(shape, dtype=decoder.dtype)

    def collect(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        all_keys[:, layer] = decoder.rotary.unrotate(keys, table, layer)
        all_values[:, layer] = values

    with out_of_memory_hint(tokens.numel()), suppress(_Done):
        decoder.base(
            input_ids=tokens.to(decoder.device),
            position_ids=rows.positions[None].expand(len(items), -1),
            past_key_values=_BatchCache(lead_in, collect, len(decoder.layers) - 1),
            use_cache=True,
            rows=rows,
        )
    return [
        ChunkKV(all_keys[row][:, :, start:stop].clone(), all_values[row][:, :, start:stop].clone())
        for row, item in enumerate(items)
        for start, stop in [(len(item.before), len(item.before) + len(item.ids))]
    ]
