"""Shift reused KV of a chunk by the average change of its recomputed tokens (after AgentKVShift, arXiv 2607.21604).

A prompt changes the keys and values of a chunk mostly by one offset for all its tokens, layer by layer. A token's share
of the offset is its sensitivity, which was stored at ingest. The rows that a mode recomputes anyway are the probes that
estimate the offset: no further row is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.fusion.loader import Loader
from kvtool.core.fusion.plan import Plan
from kvtool.core.kernels.rope import RopeTables
from kvtool.core.kernels.shift import ShiftKernel, ShiftSpans, shift_kernel
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import BufferLayer, PromptCache
from kvtool.core.model.rope import Rotary

Numbers: TypeAlias = "np.ndarray[Any, Any]"

# Least number of probes: two or three unusual tokens (a chunk's first ones, after a lead-in without text) would shift
# the whole chunk wrongly, and later layers still more.
_FEWEST = 4
_MOST = 2.0  # largest factor of an offset


@dataclass(frozen=True, slots=True, eq=False)
class LayerShift:
    """The shift of one layer, as squares of values. `changes`: of the probes' changes, any shape, to be summed.
    `offsets`: of each chunk's offset, `[chunks, kv_heads]`."""

    changes: torch.Tensor
    offsets: torch.Tensor
    probes: Probes

    def mean_squares(self) -> tuple[float, float, float]:
        """Mean squares: of a row's shift, of a probe's change, of the change that a chunk's probes share."""
        probes, offsets = self.probes, self.offsets.sum(1).double().cpu().numpy()
        count = int(probes.counts.sum())
        change = float(self.changes.double().sum()) / count
        return float(offsets @ probes.reach) / len(probes.shifted), change, float(offsets @ probes.counts) / count


@dataclass(frozen=True, slots=True)
class Shifted:
    """The shifted rows, bool `[length]`, and how far they were shifted; its statistics are computed on demand."""

    rows: torch.Tensor
    by_layer: tuple[LayerShift, ...]

    def __add__(self, later: Shifted) -> Shifted:
        rows = later.rows.clone()
        rows[self.rows.nonzero()[:, 0]] = True
        return Shifted(rows, self.by_layer + later.by_layer)

    def to_json(self) -> dict[str, Any]:
        return {"tokens_shifted": int(self.rows.sum()), "size": self.size, "common": self.common}

    @property
    def size(self) -> float:
        """A row's shift as a share of a probe's change, root mean square, the mean over layers."""
        return self._mean(0)

    @property
    def common(self) -> float:
        """The share of a probe's change that a chunk's probes have in common: 1 if all change alike."""
        return self._mean(2)

    def _mean(self, place: int) -> float:
        if not self.by_layer:
            return 0.0
        squares = np.array([moved.mean_squares() for moved in self.by_layer])
        return float(np.sqrt(squares[:, place] / squares[:, 1].clip(1e-30)).mean())


@dataclass(frozen=True, slots=True, eq=False)
class Probes:
    """The recomputed rows of chunks that have reused rows, too. `rows`: places, int64 `[probes]` on the device, by
    chunk. `factors`: each row's share of its chunk's offset, float32 `[length]`. `spans`: places, int64 `[chunks, 2]`.
    `counts`: probes, int64 `[chunks]`; `reach`: sum of squared factors, float64 `[chunks]`. `shifted`: rows with a
    factor."""

    rows: torch.Tensor
    factors: torch.Tensor
    spans: Numbers
    counts: Numbers
    reach: Numbers
    shifted: Numbers

    @property
    def weights(self) -> torch.Tensor:
        """The matrix, float32 `[chunks, probes]`, that averages probes by chunk."""
        counts = torch.from_numpy(self.counts)
        numbers = torch.arange(len(counts)).repeat_interleave(counts)
        weights = torch.zeros(len(counts), len(numbers), dtype=torch.float32)
        weights[numbers, torch.arange(len(numbers))] = 1.0
        return weights / counts[:, None]

    @property
    def chunks(self) -> torch.Tensor:
        """The number of each row's chunk, int64 `[length]`; of rows that are not shifted any."""
        numbers = np.searchsorted(self.spans[:, 1], np.arange(len(self.factors)), side="right")
        return torch.from_numpy(numbers.clip(max=len(self.spans) - 1))


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """The cached chunks of a plan. `spans`: places, int64 `[chunks, 2]`. `known`: sensitivities are stored, bool
    `[chunks]`; without them rows would be shifted too far. `of_row`: each row's chunk, int64 `[length]`; 0 outside.
    `hits`: rows that differ from full prefill, bool `[length]`. `sensitivity`: float32 `[length]`."""

    spans: Numbers
    known: Numbers
    of_row: Numbers
    hits: Numbers
    sensitivity: Numbers

    @classmethod
    def of(cls, plan: Plan) -> _Chunks:
        chunks = plan.cached_chunks
        spans = np.array([(chunk.start, chunk.stop) for chunk in chunks], np.int64).reshape(-1, 2)
        of_row = np.zeros(plan.length, np.int64)
        for number, (start, stop) in enumerate(spans.tolist()):
            of_row[start:stop] = number
        known = np.array([bool(chunk.source.sensitivity) for chunk in chunks], np.bool_)
        return cls(spans, known, of_row, plan.hit_rows().numpy(), plan.sensitivity().numpy())

    def summed(self, values: Numbers) -> Numbers:
        return np.bincount(self.of_row, values, len(self.spans))

    def taking(self, computed: Numbers) -> tuple[Numbers, Numbers]:
        """Find the chunks with enough computed rows (bool `[length]`) to shift the others, bool `[chunks]`, and the
        factors of all rows, float32 `[length]`."""
        probes, reused = self.hits & computed, self.hits & ~computed
        counts = self.summed(probes)
        shares = self._shares(self.summed(self.sensitivity * probes) / counts.clip(1))
        some = self.known & (counts >= _FEWEST) & (self.summed(reused & (shares > 0)) > 0)
        return some, np.where(reused & some[self.of_row], shares, np.float32(0))

    def _shares(self, means: Numbers) -> Numbers:
        """Divide each token's sensitivity by the probes' mean one: its share of its chunk's offset. Probes are the
        tokens that change most; without this the others would be shifted too far."""
        of_row = means.astype(np.float32)[self.of_row]
        shares = np.minimum(self.sensitivity / np.where(of_row > 0, of_row, 1), np.float32(_MOST))
        return np.where(of_row > 0, shares, np.float32(1))


class Shift:
    """The shift of a pass's reused rows, layer by layer; `probes` is None if nothing is shifted. That is so if rows of
    the prompt are not stored: a probe then changes also by what it no longer sees, a reused row does not."""

    def __init__(self, decoder: Decoder, plan: Plan, cache: PromptCache, loader: Loader, wanted: bool) -> None:
        self.decoder, self.plan, self.cache = decoder, plan, cache
        self._wanted, self._loader = wanted and not plan.dropped, loader
        self.probes: Probes | None = None
        self._steps: ShiftKernel | ShiftSteps | None = None
        self._refreshed: torch.Tensor | None = None
        self._rows = plan.mask()
        self._by_layer: list[LayerShift] = []

    @property
    def done(self) -> Shifted:
        return Shifted(self._rows, tuple(self._by_layer))

    def follow(self, rows: QueryRows, refreshed: torch.Tensor | None = None) -> None:
        """Take the rows that are computed from the next layer on. `refreshed`: rows, bool `[length]`, whose keys and
        values are new in the next layer, which drops them."""
        if not self._wanted or not len(self._chunks.spans):
            return
        self.probes, self._steps, self._refreshed = self._probes_of(rows), None, refreshed

    def before(self, layer: int) -> None:
        if self.probes is not None:
            self._steps = self._steps or self._steps_of(self.probes)
            self._steps.keep(layer)

    def after(self, layer: int) -> None:
        if (probes := self.probes) is None or self._steps is None:
            return
        factors = None
        if self._refreshed is not None:
            factors = probes.factors.masked_fill(self._to_device(self._refreshed), 0.0)
            self._refreshed = None
        self._by_layer.append(LayerShift(*self._steps.add(layer, factors), probes))

    def set_done(self, changes: torch.Tensor, offsets: torch.Tensor) -> None:
        assert self.probes is not None
        pairs = zip(changes.unbind(), offsets.unbind(), strict=True)
        self._by_layer = [LayerShift(*pair, self.probes) for pair in pairs]

    def _steps_of(self, probes: Probes) -> ShiftKernel | ShiftSteps:
        """Choose machine code to shift these chunks; torch's operations if this machine has none."""
        table, kernel = self._loader.table, None
        if self.decoder.device == "cpu" and self.decoder.rotary.halves:
            back = table[probes.rows].inverse()
            spans = ShiftSpans(probes.spans, probes.counts, probes.rows, probes.factors, table, back)
            kinds = self.decoder.kinds[: len(self._layers)]
            kernel = shift_kernel(spans, self._layers, [kind.rotation for kind in kinds])
        if kernel is not None:
            return kernel
        weights, chunks = self._to_device(probes.weights), self._to_device(probes.chunks)
        return ShiftSteps(self.decoder.rotary, self.cache, table, probes.rows, weights, chunks, probes.factors)

    @cached_property
    def _layers(self) -> list[LayerKV]:
        return [(buffer.keys[0], buffer.values[0]) for buffer in self.cache.buffers]

    @cached_property
    def _chunks(self) -> _Chunks:
        return _Chunks.of(self.plan)

    def _probes_of(self, rows: QueryRows) -> Probes | None:
        """Find the probes of each chunk; None if no chunk has enough."""
        computed, chunks = np.zeros(self.plan.length, np.bool_), self._chunks
        computed[rows.order] = True
        some, factors = chunks.taking(computed)
        self._rows = torch.from_numpy(factors != 0)
        if not some.any():
            return None
        probes = chunks.hits & computed & some[chunks.of_row]
        places = self._to_device(torch.from_numpy(probes.nonzero()[0]))
        return Probes(
            rows=places,
            factors=self._to_device(torch.from_numpy(factors)),
            spans=chunks.spans[some],
            counts=chunks.summed(probes)[some].astype(np.int64),
            reach=chunks.summed(np.square(factors))[some],
            shifted=factors.nonzero()[0],
        )

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.decoder.device, non_blocking=True)


class ShiftSteps:
    """The shift of one pass by torch's operations: `keep`, then `add`, layer by layer (`ShiftKernel`); nothing is read
    on the host. `table`: RoPE of the places up to the last shifted one. `rows`: the probes' places, int64 `[probes]`.
    `weights`: float32 `[chunks, probes]`, averages them. `chunks`, `factors`: each place's chunk, int64, and share,
    float32."""

    def __init__(
        self,
        rotary: Rotary,
        cache: PromptCache,
        table: RopeTables,
        rows: torch.Tensor,
        weights: torch.Tensor,
        chunks: torch.Tensor,
        factors: torch.Tensor,
    ) -> None:
        self._rotary, self._cache, self._rows, self._weights = rotary, cache, rows, weights
        places = min(len(table), len(chunks))
        self._table, self._back = table[:places], table[rows].inverse()
        self._chunks, self._factors = chunks[:places], factors[:places]
        self._old: LayerKV | None = None

    def keep(self, layer: int) -> None:
        self._old = rows_of(self._cache.buffers[layer], self._rows)

    def add(self, layer: int, factors: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to each row its share (`factors` replace the given ones) of its chunk's offset, in float32, rounded once.
        Returns sums of squares of values: of all changes, `[]`, and of each chunk's offset, `[chunks, kv_heads]`."""
        assert self._old is not None
        buffer = self._cache.buffers[layer]
        new = rows_of(buffer, self._rows)
        keys, values = (now.float() - old.float() for now, old in zip(new, self._old, strict=True))
        self._old = None
        keys = self._rotary.rotate(keys[None], self._back, layer)[0]
        offsets = self._weights @ keys, self._weights @ values
        share = (self._factors if factors is None else factors[: len(self._factors)])[:, None]
        more = [side[:, self._chunks] * share for side in offsets]
        more[0] = self._rotary.rotate(more[0][None], self._table, layer)[0]
        for side, added in zip((buffer.keys, buffer.values), more, strict=True):
            rows = side[0, :, : added.shape[1]]
            rows.copy_(rows.float() + added)
        return values.square().sum(), offsets[1].square().sum(2).T


def rows_of(buffer: BufferLayer, rows: torch.Tensor) -> LayerKV:
    return buffer.keys[0].index_select(1, rows), buffer.values[0].index_select(1, rows)
