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
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.forward import QueryRows
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

    def _mean(self, index: int) -> float:
        if not self.by_layer:
            return 0.0
        squares = np.array([moved.mean_squares() for moved in self.by_layer])
        return float(np.sqrt(squares[:, index] / squares[:, 1].clip(1e-30)).mean())


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


class _Chunks:
    """The cached chunks of a plan. `ranked`: sensitivities are stored, bool `[chunks]`; without them rows would be
    shifted too far. `of_row`: each row's chunk, int64 `[length]`; 0 outside."""

    def __init__(self, plan: Plan) -> None:
        chunks = plan.cached_chunks
        self.spans = np.array([(chunk.start, chunk.stop) for chunk in chunks], np.int64).reshape(-1, 2)
        self.ranked = np.array([bool(chunk.source.sensitivity) for chunk in chunks], np.bool_)
        self.of_row = np.zeros(plan.length, np.int64)
        for number, chunk in enumerate(chunks):
            self.of_row[chunk.start : chunk.stop] = number
        self.hits, self.sensitivity = plan.hit_rows().numpy(), plan.sensitivity().numpy()

    def summed(self, values: Numbers) -> Numbers:
        return np.bincount(self.of_row, values, len(self.spans))

    def probes(self, rows: QueryRows, device: str) -> Probes | None:
        """Find each chunk's probes among computed rows; None if no chunk has enough of them to shift other rows."""
        computed = np.zeros(len(self.hits), np.bool_)
        computed[rows.order] = True
        probes, reused = self.hits & computed, self.hits & ~computed
        counts = self.summed(probes)
        # A row's share of its chunk's offset is its sensitivity divided by the probes' mean one. Probes are the tokens
        # that change most: without the division the others would be shifted too far.
        means = (self.summed(self.sensitivity * probes) / counts.clip(1)).astype(np.float32)[self.of_row]
        shares = np.minimum(self.sensitivity / np.where(means > 0, means, 1), np.float32(_MOST))
        shares = np.where(means > 0, shares, np.float32(1))
        enough = self.ranked & (counts >= _FEWEST) & (self.summed(reused & (shares > 0)) > 0)
        if not enough.any():
            return None
        factors = np.where(reused & enough[self.of_row], shares, np.float32(0))
        return Probes(
            rows=_moved((probes & enough[self.of_row]).nonzero()[0], device),
            factors=_moved(factors, device),
            spans=self.spans[enough],
            counts=counts[enough].astype(np.int64),
            reach=self.summed(np.square(factors))[enough],
            shifted=factors.nonzero()[0],
        )


def _moved(numbers: Numbers, device: str) -> torch.Tensor:
    return torch.from_numpy(numbers).to(device, non_blocking=True)


class Shift:
    """The shift of a pass's reused rows, layer by layer; `probes` is None if nothing is shifted. That is so if rows of
    the prompt are not stored: a probe then changes also by what it no longer sees, a reused row does not."""

    def __init__(self, decoder: Decoder, plan: Plan, cache: PromptCache, loader: Loader, enabled: bool) -> None:
        self.decoder, self.plan, self.cache = decoder, plan, cache
        self._enabled, self._loader = enabled and not plan.dropped and bool(plan.cached_chunks), loader
        self.probes: Probes | None = None
        self._steps: ShiftKernel | ShiftSteps | None = None
        self._refreshed: torch.Tensor | None = None
        self._by_layer: list[LayerShift] = []

    @property
    def done(self) -> Shifted:
        rows = self.plan.mask()
        if self.probes is not None:
            rows[self.probes.shifted] = True
        return Shifted(rows, tuple(self._by_layer))

    def follow(self, rows: QueryRows, refreshed: torch.Tensor | None = None) -> None:
        """Set the rows that are computed from the next layer on. `refreshed`: rows, bool `[length]`, whose keys and
        values are new in the next layer, which drops them."""
        if self._enabled:
            self.probes = self._chunks.probes(rows, self.decoder.device)
            self._steps, self._refreshed = None, refreshed

    def before(self, layer: int) -> None:
        if self.probes is not None:
            self._steps = self._steps or self._steps_of(self.probes)
            self._steps.keep(layer)

    def after(self, layer: int) -> None:
        if (probes := self.probes) is None or self._steps is None:
            return
        factors = None
        if self._refreshed is not None:
            refreshed = self._refreshed.to(self.decoder.device, non_blocking=True)
            factors = probes.factors.masked_fill(refreshed, 0.0)
            self._refreshed = None
        self._by_layer.append(LayerShift(*self._steps.add(layer, factors), probes))

    def _steps_of(self, probes: Probes) -> ShiftKernel | ShiftSteps:
        """Choose machine code to shift these chunks; torch's operations if this machine has none."""
        table, kernel = self._loader.table, None
        if self.decoder.device == "cpu" and self.decoder.rotary.halves:
            back = table[probes.rows].inverse()
            spans = ShiftSpans(probes.spans, probes.counts, probes.rows, probes.factors, table, back)
            layers = [(buffer.keys[0], buffer.values[0]) for buffer in self.cache.buffers]
            kernel = shift_kernel(spans, layers, [kind.rotation for kind in self.decoder.kinds[: len(layers)]])
        if kernel is not None:
            return kernel
        weights, chunks = (side.to(self.decoder.device, non_blocking=True) for side in (probes.weights, probes.chunks))
        return ShiftSteps(self.decoder.rotary, self.cache, table, probes.rows, weights, chunks, probes.factors)

    @cached_property
    def _chunks(self) -> _Chunks:
        return _Chunks(self.plan)


@dataclass(eq=False)
class ShiftSteps:
    """The shift of one pass by torch's operations: `keep`, then `add`, layer by layer (`ShiftKernel`); nothing is read
    on the host. `table`: RoPE of the places up to the last shifted one. `rows`: the probes' places, int64 `[probes]`.
    `weights`: float32 `[chunks, probes]`, averages them. `chunks`, `factors`: each place's chunk, int64, and share,
    float32."""

    rotary: Rotary
    cache: PromptCache
    table: RopeTables
    rows: torch.Tensor
    weights: torch.Tensor
    chunks: torch.Tensor
    factors: torch.Tensor

    def __post_init__(self) -> None:
        places = min(len(self.table), len(self.chunks))
        self.table, self.back = self.table[:places], self.table[self.rows].inverse()
        self.chunks, self.factors = self.chunks[:places], self.factors[:places]
        self.old: LayerKV | None = None

    def keep(self, layer: int) -> None:
        self.old = rows_of(self.cache.buffers[layer], self.rows)

    def add(self, layer: int, factors: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to each row its share (`factors` replace the given ones) of its chunk's offset, in float32, rounded once.
        Returns sums of squares of values: of all changes, `[]`, and of each chunk's offset, `[chunks, kv_heads]`."""
        assert self.old is not None
        buffer = self.cache.buffers[layer]
        new = rows_of(buffer, self.rows)
        keys, values = (now.float() - old.float() for now, old in zip(new, self.old, strict=True))
        self.old = None
        keys = self.rotary.rotate(keys[None], self.back, layer)[0]
        offsets = self.weights @ keys, self.weights @ values
        share = (self.factors if factors is None else factors[: len(self.factors)])[:, None]
        more = [side[:, self.chunks] * share for side in offsets]
        more[0] = self.rotary.rotate(more[0][None], self.table, layer)[0]
        for side, added in zip((buffer.keys, buffer.values), more, strict=True):
            rows = side[0, :, : added.shape[1]]
            rows.copy_(rows.float() + added)
        return values.square().sum(), offsets[1].square().sum(2).T


def rows_of(buffer: BufferLayer, rows: torch.Tensor) -> LayerKV:
    return buffer.keys[0].index_select(1, rows), buffer.values[0].index_select(1, rows)
