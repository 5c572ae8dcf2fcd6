"""Attention of query rows: scattered rows over a whole prompt cache, and packed chunks, without an N×N mask.

Which backend computes their attention is chosen in `core/kernels/attention/dispatch.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

import torch

from kvtool.core.kernels.attention.dispatch import attend, attend_packed
from kvtool.core.kernels.attention.params import KV, AttentionParams, KeyRanges, Spans

ChunkWatch = Callable[[torch.Tensor, torch.Tensor, AttentionParams], None]


@dataclass(frozen=True, slots=True, eq=False)
class QueryRows:
    places: torch.Tensor  # int64 `[rows]` on the model's device
    order: list[int] = field(repr=False)  # the same, so that key limits need no device synchronisation
    dense: bool  # the rows are exactly 0 … n-1, so plain causal attention can be used
    # The position of every place of the prompt, ascending, where some are not their place.
    position_ids: Sequence[int] | None = field(default=None, repr=False)
    _seen: dict[int | None, KeyRanges] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, places: torch.Tensor, device: torch.device | str, position_ids: Sequence[int] | None = None
    ) -> QueryRows:
        order: list[int] = places.tolist()
        dense = order == list(range(len(order)))
        return cls(places.to(device, non_blocking=True), order, dense, position_ids=position_ids)

    def __len__(self) -> int:
        return len(self.order)

    @property
    def pairs(self) -> int:
        """Number of keys that all rows see without a window."""
        return sum(self.order) + len(self.order)

    @property
    def positions(self) -> torch.Tensor:
        if self.position_ids is None:
            return self.places
        positions = torch.tensor([self.position_ids[place] for place in self.order])
        return positions.to(self.places.device, non_blocking=True)

    def last(self, count: int) -> QueryRows:
        return replace(self, places=self.places[-count:], order=self.order[-count:], dense=False, _seen={})

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        return attend(query, key, value, params, self.seen(params.window))

    def seen(self, window: int | None) -> KeyRanges:
        if window not in self._seen:
            self._seen[window] = self._through(window)
        return self._seen[window]

    def _through(self, window: int | None) -> KeyRanges:
        if window is None:
            return KeyRanges(self.order, self.places, dense=self.dense)
        if self.position_ids is None:
            first = [max(0, limit - window + 1) for limit in self.order]
        else:
            first = [bisect_left(self.position_ids, self.position_ids[limit] - window + 1) for limit in self.order]
        return KeyRanges(self.order, self.places, first, torch.tensor(first).to(self.places.device, non_blocking=True))


@dataclass(frozen=True, slots=True, eq=False)
class PackedChunks:
    """Chunks packed into one row, each after the same lead-in; none sees another or is padded. Each of the first chunks
    may have a watch, called with every layer's queries `[heads, rows, head_dim]`, the keys up to it `[kv_heads, keys,
    head_dim]`, the lead-in's included, and the parameters."""

    spans: tuple[tuple[int, int], ...]  # start and stop of each chunk
    lead_in: Sequence[KV]  # rotated, `[1, kv_heads, lead-in tokens, head_dim]` for each layer; or none
    _rows: Spans
    watches: Sequence[ChunkWatch] = ()
    _windows: dict[int | None, Spans] = field(default_factory=dict)

    @classmethod
    def of(cls, lengths: Sequence[int], lead_in: Sequence[KV], watches: Sequence[ChunkWatch] = ()) -> PackedChunks:
        stops = list(accumulate(lengths))
        starts = [0, *stops[:-1]]
        leads = lead_in[0][0].shape[2] if lead_in else 0
        limits = torch.cat([torch.arange(leads, leads + length) for length in lengths])
        rows = Spans([(start, length, start) for start, length in zip(starts, lengths, strict=True) if length], limits)
        return cls(tuple(zip(starts, stops, strict=True)), lead_in, rows, watches)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        lead_in = self.lead_in[layer] if self.lead_in else None
        for watch, (start, stop) in zip(self.watches, self.spans, strict=False):
            chunk_keys = key[:, :, start:stop]
            seen = chunk_keys if lead_in is None else torch.cat([lead_in[0], chunk_keys], 2)
            watch(query[0, :, start:stop], seen[0], params)
        return attend_packed(query, key, value, params, self._through(params.window), lead_in)

    def _through(self, window: int | None) -> Spans:
        if window not in self._windows:
            begins = None if window is None else (self._rows.limits - (window - 1)).clamp_min_(0)
            self._windows[window] = replace(self._rows, begins=begins)
        return self._windows[window]


class AttentionRows(Protocol):
    """The rows of a pass, as attention takes them."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor: ...


class PlacedRows(AttentionRows, Protocol):
    """`places` in the prompt, and rotary `positions`: int64 `[rows]` on the model's device."""

    @property
    def places(self) -> torch.Tensor: ...

    @property
    def positions(self) -> torch.Tensor: ...

    def last(self, count: int) -> PlacedRows: ...
