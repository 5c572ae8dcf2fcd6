"""Shift reused KV of a chunk by the average change of its recomputed tokens (after AgentKVShift, arXiv 2607.21604).

What a prompt does to a chunk's keys and values is mostly one offset for all its tokens, layer by layer; how much of it
a token takes is what its sensitivity says, which was kept at ingest. Rows that are recomputed anyway are the probes
that tell the offset: no other row is computed for it.
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
from kvtool.core.kernels.shift import ShiftKernel, ShiftSpans
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import BufferLayer, PromptCache
from kvtool.core.native.isa import isa_here

Numbers: TypeAlias = "np.ndarray[Any, Any]"

# Probes that a chunk's offset is taken from: two or three that are no ordinary tokens (a chunk's first ones, behind a
# lead-in without text) would move all of it wrongly, and what is computed over that still more.
_FEWEST = 4
_MOST = 2.0  # times the mean change of its probes that a row takes at most


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """What a shift has done in one layer.

    Attributes
    ----------
    changes : squares of values, any shape: summed, those of all probes' changes.
    offsets : `[chunks, kv_heads]`, those of each chunk's offset.
    probes : the chunks'.
    """

    changes: torch.Tensor
    offsets: torch.Tensor
    probes: Probes

    def mean_squares(self) -> tuple[float, float, float]:
        """Of a row's shift, of a probe's change, and of what a chunk's probes have in common of it."""
        probes, offsets = self.probes, self.offsets.sum(1).double().cpu().numpy()
        count = int(probes.counts.sum())
        change = float(self.changes.double().sum()) / count
        return float(offsets @ probes.reach) / len(probes.shifted), change, float(offsets @ probes.counts) / count


@dataclass(frozen=True, slots=True)
class Shifted:
    """What a shift has done.

    Attributes
    ----------
    rows : bool `[length]`, those that were shifted.
    by_layer : how far; what is told of it is computed when somebody asks.
    """

    rows: torch.Tensor
    by_layer: tuple[Moved, ...]

    def __add__(self, later: Shifted) -> Shifted:
        """Both, of two rounds over one prompt."""
        rows = later.rows.clone()
        rows[self.rows.nonzero()[:, 0]] = True
        return Shifted(rows, self.by_layer + later.by_layer)

    def to_json(self) -> dict[str, Any]:
        """What `query --explain` tells of it."""
        return {"tokens_shifted": int(self.rows.sum()), "size": self.size, "common": self.common}

    @property
    def size(self) -> float:
        """A row's shift as a share of a probe's change, root mean square, the mean over layers."""
        return self._mean(0)

    @property
    def common(self) -> float:
        """What a chunk's probes have in common of their change, as a share of it: 1 where they all move alike."""
        return self._mean(2)

    def _mean(self, place: int) -> float:
        if not self.by_layer:
            return 0.0
        squares = np.array([moved.mean_squares() for moved in self.by_layer])
        return float(np.sqrt(squares[:, place] / squares[:, 1].clip(1e-30)).mean())


@dataclass(frozen=True, eq=False)
class Probes:
    """The recomputed rows of chunks of which others are reused.

    Attributes
    ----------
    rows : their places, int64 `[probes]` on the model's device, chunk by chunk.
    unturned : the table that takes their positions off keys.
    factors : float32 `[length]` on the device: how much of its chunk's offset each row takes; 0 where it takes none.
    spans : int64 `[chunks, 2]`, the chunks' first rows and those behind their last.
    counts : of their probes, int64 `[chunks]`; `reach`: sum of their squared factors, float64 `[chunks]`.
    shifted : places of the rows that take an offset, int64 `[others]` on the host.
    """

    rows: torch.Tensor
    unturned: RopeTables
    factors: torch.Tensor
    spans: Numbers
    counts: Numbers
    reach: Numbers
    shifted: Numbers

    @cached_property
    def weights(self) -> torch.Tensor:
        """float32 `[chunks, probes]`: the probes' change times these is a chunk's offset."""
        counts = torch.from_numpy(self.counts)
        numbers = torch.arange(len(counts)).repeat_interleave(counts)
        weights = torch.zeros(len(counts), len(numbers), dtype=torch.float32)
        weights[numbers, torch.arange(len(numbers))] = 1.0
        return (weights / counts[:, None]).to(self.rows.device, non_blocking=True)

    @cached_property
    def others(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`shifted` and the number of each one's chunk, int64 `[others]` on the model's device."""
        chunks = np.searchsorted(self.spans[:, 1], self.shifted, side="right")
        rows, numbers = (torch.from_numpy(side) for side in (self.shifted, chunks))
        device = self.rows.device  # it is not waited for
        return rows.to(device, non_blocking=True), numbers.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """What of a plan's chunks stays the same, whatever is computed.

    Attributes
    ----------
    spans : int64 `[chunks, 2]`.
    known : bool `[chunks]`, of which the sensitivities were kept: at full strength all rows would be moved too far.
    of_row : int64 `[length]`, the number of each row's chunk; outside of chunks 0.
    hits : bool `[length]`, rows that are not what full prefill gives. `sensitivity`: float32 `[length]`.
    """

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
        """The sum of each chunk's rows, float64 `[chunks]`; values are 0 outside of chunks."""
        return np.bincount(self.of_row, values, len(self.spans))

    def taking(self, computed: Numbers) -> tuple[Numbers, Numbers]:
        """Chunks of which some rows are computed (bool `[length]`) and others shifted by these, bool `[chunks]`; and
        the factors of all rows, float32 `[length]`."""
        probes, reused = self.hits & computed, self.hits & ~computed
        counts = self.summed(probes)
        shares = self._shares(self.summed(self.sensitivity * probes) / counts.clip(1))
        some = self.known & (counts >= _FEWEST) & (self.summed(reused & (shares > 0)) > 0)
        return some, np.where(reused & some[self.of_row], shares, np.float32(0))

    def _shares(self, means: Numbers) -> Numbers:
        """How much of the mean change of its chunk's probes each token takes: its sensitivity over their mean one.

        Probes are the tokens that move most; without this the others would be moved too far.
        """
        of_row = means.astype(np.float32)[self.of_row]
        shares = np.minimum(self.sensitivity / np.where(of_row > 0, of_row, 1), np.float32(_MOST))
        return np.where(of_row > 0, shares, np.float32(1))


class Shift:
    """Shifts the reused rows of a pass, layer by layer, once the layer's own rows are in the cache; where it is not
    `wanted`, none.

    None either where rows of the prompt are missing (fusion/engine.py): what a probe changes by is then also what it
    no longer sees, while a row that is reused has seen the whole chunk. Moved by that it misses as much, the probes of
    the next layer change the more, and some modes end far from any answer.

    Parameters
    ----------
    loader : of what is reused, which has the table of its positions already; None: it is made here.
    """

    def __init__(
        self, decoder: Decoder, plan: Plan, cache: PromptCache, wanted: bool = True, loader: Loader | None = None
    ) -> None:
        self.decoder, self.plan, self.cache = decoder, plan, cache
        self._wanted, self._loader = wanted and not plan.dropped, loader
        self._probes: Probes | None = None
        self._mover: ShiftKernel | None = None
        self._spared: torch.Tensor | None = None
        self._old: LayerKV | None = None
        self._rows = plan.mask()
        self._by_layer: list[Moved] = []

    @property
    def done(self) -> Shifted:
        """What has been done so far; its rows are those of the layer that ran last."""
        return Shifted(self._rows, tuple(self._by_layer))

    def follow(self, rows: QueryRows, spared: torch.Tensor | None = None) -> None:
        """Take the rows that are computed from the next layer on.

        Parameters
        ----------
        spared : bool `[length]`, rows that the next layer has made anew although it does not compute them.
        """
        if not self._wanted or not len(self._chunks.spans):
            return
        self._probes = self._made(rows)
        self._mover = None if self._probes is None else self._mover_of(self._probes)
        self._spared = spared

    def before(self, layer: int) -> None:
        """Remember what the cache holds in place of the rows that are written next."""
        if self._mover is not None:
            self._mover.keep(layer)
        elif self._probes is not None:
            self._old = rows_of(self.cache.buffers[layer], self._probes.rows)

    def after(self, layer: int) -> None:
        """Shift the layer's reused rows by what has become of the remembered ones."""
        if (probes := self._probes) is None:
            return
        factors = None
        if self._spared is not None:
            factors = probes.factors.masked_fill(self._there(self._spared), 0.0)
            self._spared = None
        if self._mover is not None:
            sums = self._mover.add(layer, factors)
            self._by_layer.append(Moved(sums[..., 0], sums[..., 1], probes))
        else:
            self._add(probes, layer, probes.factors if factors is None else factors)

    def offsets(self, layer: int, probes: Probes, changes: LayerKV) -> LayerKV:
        """Estimate the offset of each chunk's rows, `[kv_heads, chunks, head_dim]`, of un-rotated keys and of values.

        Parameters
        ----------
        changes : of the probes, float32 `[kv_heads, probes, head_dim]`, keys un-rotated.
        """
        keys, values = changes
        return probes.weights @ keys, probes.weights @ values

    def _mover_of(self, probes: Probes) -> ShiftKernel | None:
        """The chunks as machine code takes them; None: it does not, or somebody estimates otherwise."""
        isa = isa_here() if self.decoder.device == "cpu" else None
        if isa is None or not self.decoder.rotary.halves or type(self).offsets is not _MEANS:
            return None
        runs = ShiftSpans(probes.spans, probes.counts, probes.rows, probes.factors, self._table, probes.unturned)
        try:
            return ShiftKernel(
                runs, self._layers, isa, [kind.rotation for kind in self.decoder.kinds[: len(self._layers)]]
            )
        except ValueError:
            return None

    def _add(self, probes: Probes, layer: int, factors: torch.Tensor) -> None:
        """Estimate offsets and add them by torch, on any device."""
        assert self._old is not None
        buffer = self.cache.buffers[layer]
        new = rows_of(buffer, probes.rows)
        keys, values = (now.float() - old.float() for now, old in zip(new, self._old, strict=True))
        self._old = None
        keys = self.decoder.rotary.rotate(keys[None], probes.unturned, layer)[0]
        offsets = self.offsets(layer, probes, (keys, values))
        where, chunks = probes.others
        share = factors[where][:, None]
        more = [side[:, chunks] * share for side in offsets]
        more[0] = self.decoder.rotary.rotate(more[0][None], self._table[where], layer)[0]
        before = rows_of(buffer, where)
        for side, rows, added in zip((buffer.keys, buffer.values), before, more, strict=True):
            side[0].index_copy_(1, where, (rows.float() + added).to(rows.dtype))
        self._by_layer.append(Moved(values.square().sum(), offsets[1].square().sum(2).T, probes))

    @cached_property
    def _table(self) -> RopeTables:
        """Of the positions of all places up to the last one that is reused, or more."""
        if self._loader is not None:
            return self._loader.table
        return self.decoder.rotary.table(self._there(self.plan.positions))

    @cached_property
    def _layers(self) -> list[LayerKV]:
        return [(buffer.keys[0], buffer.values[0]) for buffer in self.cache.buffers]

    @cached_property
    def _chunks(self) -> _Chunks:
        return _Chunks.of(self.plan)

    def _made(self, rows: QueryRows) -> Probes | None:
        """Weigh the probes of each chunk; None: none has enough of them."""
        computed, chunks = np.zeros(self.plan.length, np.bool_), self._chunks
        computed[rows.order] = True
        some, factors = chunks.taking(computed)
        self._rows = torch.from_numpy(factors != 0)
        if not some.any():
            return None
        probes = chunks.hits & computed & some[chunks.of_row]
        places = self._there(torch.from_numpy(probes.nonzero()[0]))
        return Probes(
            rows=places,
            unturned=self._table[places].inverse(),
            factors=self._there(torch.from_numpy(factors)),
            spans=chunks.spans[some],
            counts=chunks.summed(probes)[some].astype(np.int64),
            reach=chunks.summed(np.square(factors))[some],
            shifted=factors.nonzero()[0],
        )

    def _there(self, values: torch.Tensor) -> torch.Tensor:
        """Send to the model's device, without waiting for it."""
        return values.to(self.decoder.device, non_blocking=True)


_MEANS = Shift.offsets  # what machine code does


def rows_of(buffer: BufferLayer, rows: torch.Tensor) -> LayerKV:
    """Copies of keys and values `[kv_heads, rows, head_dim]`."""
    return buffer.keys[0].index_select(1, rows), buffer.values[0].index_select(1, rows)
