"""Forward pass: its rows and their attention, what is called within its layers, and the loop over them, which is the
same on every device. `kernels/attention/dispatch.py` chooses the backend that computes attention."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, Protocol, cast

import torch

from kvtool.core.kernels.attention.dispatch import attend, attend_packed
from kvtool.core.kernels.attention.params import KV, AttentionParams, KeyRanges, Spans
from kvtool.core.kernels.rope import CosSin
from kvtool.core.model.prompt_cache import BufferLayer, PromptCache
from kvtool.core.model.rope import Rotary

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


class OnLayer:
    """Called at each layer of a pass in turn; as it is, it does nothing.

    `narrows`: the layers at which `choose` is called, and how many reused rows they keep. Keys and values are `[1,
    kv_heads, rows, head_dim]`, keys rotated.
    """

    narrows: Mapping[int, int] = {}

    def choose(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, QueryRows]:
        """Choose the rows that this layer and later ones compute. Returns their indices among the rows so far, int64 on
        the device, ascending."""
        raise NotImplementedError

    def before_write(self, layer: int, rows: int) -> None:
        """Called before so many rows of a layer are written to the cache."""

    def written(self, layer: int) -> None:
        """Called as soon as they are written."""

    def collect(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Called, in a pass without a cache, with what a layer would write to one; returns True to end the pass."""
        return False

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> bool:
        """Called with what attention is about to take, of the cache too; returns True to end the pass."""
        return False


NOTHING = OnLayer()


@dataclass(slots=True, eq=False)
class Pass:
    """`ids`, `positions`: int64 `[rows]` on the device. Without a cache, rows attend to those of the pass only.
    `exact`: by products whose sums do not depend on the number of rows, so that stored numbers do not depend on their
    batch."""

    ids: torch.Tensor
    rows: AttentionRows
    positions: torch.Tensor
    cache: PromptCache | None
    on_layer: OnLayer = NOTHING
    exact: bool = False

    @property
    def placed(self) -> PlacedRows:
        """The rows of a pass with a cache."""
        return cast("PlacedRows", self.rows)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KV:
        """Write a layer's rows to the cache; return the keys and values to attend to."""
        self.on_layer.before_write(layer, keys.shape[2])
        if self.cache is None:
            return keys, values
        buffer = self.cache.buffers[layer]
        buffer.scatter(self.placed.places, keys, values)
        self.on_layer.written(layer)
        return buffer.view()


Map = Callable[[torch.Tensor], torch.Tensor]
Threads = Callable[[int, bool], AbstractContextManager[object]]
# Rows of the last layer's end at least: a single one would take a matrix-vector kernel, whose sums depend on threads.
_TAIL = 16


class Heads(NamedTuple):
    """A layer's queries, keys and values before rotation: `[rows, heads · head_dim]` each, rows of adjacent numbers."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def of(self, rows: torch.Tensor) -> Heads:
        return Heads(*(side.index_select(0, rows) for side in self))


class Layer(Protocol):
    """One decoder layer; `exact` as of `Pass`."""

    @property
    def params(self) -> AttentionParams: ...

    def project(self, hidden: torch.Tensor, positions: torch.Tensor, exact: bool) -> Heads:
        """Norm rows `[rows, hidden]` at positions `[rows]`, and project them."""

    def rotate(self, heads: Heads, angles: CosSin | None) -> Heads:
        """Return rotated queries and keys, and values, `[1, heads, rows, head_dim]`. Those given may be overwritten."""

    def write(self, heads: Heads, angles: CosSin | None, places: torch.Tensor, buffer: BufferLayer) -> torch.Tensor:
        """Rotate heads, and write keys and values to their places in a buffer; return rotated queries."""

    def finish(self, attended: torch.Tensor, hidden: torch.Tensor, exact: bool) -> torch.Tensor:
        """Add to rows what attention gives, `[rows, heads · head_dim]`, projected, and then the MLP."""


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """What is before the first layer, and after the last one. `embed` gives `[rows, hidden]`, `logits` float32 `[rows,
    vocabulary]`; `threads` sets up those that compute a pass of so many rows, exact or not."""

    embed: Map
    logits: Map
    threads: Threads = lambda rows, exact: nullcontext()


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    rotary: Rotary
    pause: Callable[[], None]  # called before each layer: others may have work to do
    layers: Sequence[Layer]
    ends: Ends
    why: str = ""  # it is not as fast as it could be

    def logits(self, job: Pass, keep: int) -> torch.Tensor:
        """Compute a pass; return logits of its last `keep` rows, float32 `[keep, vocabulary]`."""
        with self.ends.threads(len(job.ids), job.exact):
            hidden = self.hidden(job, keep)
            assert hidden is not None, "a pass that ends early has no logits"
            return self.ends.logits(hidden)

    def fill(self, job: Pass) -> None:
        """Compute a pass up to the keys and values of the last layer."""
        with self.ends.threads(len(job.ids), job.exact):
            self.hidden(job, keep=0)

    def hidden(self, job: Pass, keep: int) -> torch.Tensor | None:
        """Return the last layer's output `[keep, hidden]` of the last rows; None where nothing needs it."""
        hidden, rows, on_layer, last = self.ends.embed(job.ids), job.placed, job.on_layer, len(self.layers) - 1
        positions, table = job.positions, self.rotary.table(job.positions)
        for number, layer in enumerate(self.layers):
            self.pause()
            heads, angles = layer.project(hidden, positions, job.exact), self.rotary.angles(table, number)
            if number in on_layer.narrows:
                copies = Heads(*(side.clone() for side in heads))
                chosen, rows = on_layer.choose(number, *layer.rotate(copies, angles)[1:])
                hidden, heads = hidden.index_select(0, chosen), heads.of(chosen)
                positions, table = positions[chosen], table[chosen]
                angles = self.rotary.angles(table, number)
            on_layer.before_write(number, len(hidden))
            if job.cache is None:
                queries, keys, values = layer.rotate(heads, angles)
                if on_layer.collect(number, keys, values):
                    return None
            else:
                buffer = job.cache.buffers[number]
                queries = layer.write(heads, angles, rows.places, buffer)
                on_layer.written(number)
                keys, values = buffer.view()
            if on_layer.attend(number, queries, keys, values, layer.params) or (number == last and not keep):
                return None
            if number == last and (tail := max(keep, _TAIL)) < len(hidden):  # nothing needs the others any more
                queries, hidden, rows = queries[:, :, -tail:], hidden[-tail:], rows.last(tail)
            attended = rows.attend(number, queries, keys, values, layer.params)
            hidden = layer.finish(attended.transpose(1, 2).reshape(len(hidden), -1), hidden, job.exact)
        return hidden[-keep:]
