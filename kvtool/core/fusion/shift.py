"""Reused rows moved as the recomputed ones among them have moved (after AgentKVShift, arXiv 2607.21604).

What a prompt does to a chunk's keys and values is mostly one offset for all its tokens, layer by layer; how much of it
a token takes is what its sensitivity says, which was kept at ingest. Rows that are recomputed anyway are the probes
that tell the offset: no other row is computed for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.fusion.plan import Plan
from kvtool.core.model.attention import Rows
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.kernels import isa_here
from kvtool.core.model.offsets import Runs, add_offsets
from kvtool.core.model.prompt_cache import BufferLayer, PromptCache
from kvtool.core.model.rotary import Table

_FEWEST = 2  # probes that a chunk's offset is taken from
_MOST = 2.0  # times the mean change of its probes that a row takes at most


@dataclass(frozen=True, slots=True)
class Shifted:
    """What a shift has done.

    Attributes
    ----------
    rows : bool `[length]`, those that were shifted.
    by_layer : float32 `[3]` each, mean squares of values: of a row's shift, of a probe's change, and of what a chunk's
        probes have in common of it.
    """

    rows: torch.Tensor
    by_layer: tuple[torch.Tensor, ...]

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
        squares = torch.stack(self.by_layer)
        return float((squares[:, place] / squares[:, 1].clamp_min(1e-30)).sqrt().mean())


@dataclass(frozen=True, slots=True)
class Probes:
    """The recomputed rows of chunks of which others are reused.

    Attributes
    ----------
    rows : their places, int64 `[probes]` on the model's device.
    unturned : the table that takes their positions off keys.
    weights : float32 `[chunks, probes]`: the probes' change times these is a chunk's offset.
    factors : float32 `[length]`: how much of its chunk's offset each row takes; 0 where it takes none.
    spans : of the chunks; `counts`: of their probes, `reach`: sum of their squared factors, float32 `[chunks]`.
    others : places of the rows that take an offset, int64 `[others]`, and the number of each one's chunk.
    """

    rows: torch.Tensor
    unturned: Table
    weights: torch.Tensor
    factors: torch.Tensor
    spans: tuple[slice, ...]
    counts: torch.Tensor
    reach: torch.Tensor
    others: tuple[torch.Tensor, torch.Tensor]


class Shift:
    """Shifts the reused rows of a pass, layer by layer, once the layer's own rows are in the cache; where it is not
    `wanted`, none."""

    def __init__(self, decoder: Decoder, plan: Plan, cache: PromptCache, wanted: bool = True) -> None:
        self.decoder, self.plan, self.cache = decoder, plan, cache
        self._wanted = wanted
        self._isa = isa_here() if decoder.device == "cpu" else None
        self._probes: Probes | None = None
        self._runs: Runs | None = None
        self._spared: torch.Tensor | None = None
        self._old: LayerKV | None = None
        self._rows = plan.mask()
        self._by_layer: list[torch.Tensor] = []

    @property
    def done(self) -> Shifted:
        """What has been done so far; its rows are those of the layer that ran last."""
        return Shifted(self._rows, tuple(self._by_layer))

    def follow(self, rows: Rows, spared: torch.Tensor | None = None) -> None:
        """Take the rows that are computed from the next layer on.

        Parameters
        ----------
        spared : bool `[length]`, rows that the next layer has made anew although it does not compute them.
        """
        if not self._wanted:
            return
        computed = self.plan.mask()
        computed[rows.order] = True
        hits = self.plan.hit_rows()
        self._probes = self._made(hits & computed, hits & ~computed)
        self._runs = self._runs_of(self._probes)
        self._spared = spared

    def before(self, layer: int) -> None:
        """Remember what the cache holds in place of the rows that are written next."""
        if self._probes is not None:
            self._old = rows_of(self.cache.buffers[layer], self._probes.rows)

    def after(self, layer: int) -> None:
        """Shift the layer's reused rows by what has become of the remembered ones."""
        if (probes := self._probes) is None or self._old is None:
            return
        buffer = self.cache.buffers[layer]
        new = rows_of(buffer, probes.rows)
        keys, values = (now.float() - old.float() for now, old in zip(new, self._old, strict=True))
        keys = self.decoder.rotary.rotate(keys[None], probes.unturned, layer)[0]
        factors = probes.factors
        if self._spared is not None:
            factors = factors.masked_fill(self._there(self._spared), 0.0)
        self._old = self._spared = None
        offsets = self.offsets(layer, probes, (keys, values))
        self._by_layer.append(_mean_squares(probes, values, offsets[1]))
        if not self._added_at_once(buffer, layer, offsets, factors):
            self._add(probes, buffer, layer, offsets, factors)

    def offsets(self, layer: int, probes: Probes, changes: LayerKV) -> LayerKV:
        """Estimate the offset of each chunk's rows, `[kv_heads, chunks, head_dim]`, of un-rotated keys and of values.

        Parameters
        ----------
        changes : of the probes, float32 `[kv_heads, probes, head_dim]`, keys un-rotated.
        """
        keys, values = changes
        return probes.weights @ keys, probes.weights @ values

    def _added_at_once(self, buffer: BufferLayer, layer: int, offsets: LayerKV, factors: torch.Tensor) -> bool:
        """Add the chunks' offsets, `[kv_heads, chunks, head_dim]`, by machine code. False: there is none."""
        if (runs := self._runs) is None or self._isa is None:
            return False
        if factors is not runs.factors:
            runs = replace(runs, factors=factors)
        keys, values = offsets
        turned = self.decoder.rotary.rotates(layer)
        return add_offsets([(buffer.keys[0], keys, turned), (buffer.values[0], values, False)], runs, self._isa)

    def _runs_of(self, probes: Probes | None) -> Runs | None:
        """The chunks as machine code takes them; None: it does not."""
        if probes is None or self._isa is None or not self.decoder.rotary.halves:
            return None
        spans = np.array([(span.start, span.stop) for span in probes.spans], np.int64)
        runs = Runs(spans, probes.factors, self._table)
        return runs if runs.fits else None

    def _add(self, probes: Probes, buffer: BufferLayer, layer: int, offsets: LayerKV, factors: torch.Tensor) -> None:
        """Add them by torch, on any device."""
        where, chunks = probes.others
        share = factors[where][:, None]
        keys, values = (side[:, chunks] * share for side in offsets)
        keys = self.decoder.rotary.rotate(keys[None], self._at(where), layer)[0]
        old = rows_of(buffer, where)
        for side, rows, more in zip((buffer.keys, buffer.values), old, (keys, values), strict=True):
            side[0].index_copy_(1, where, (rows.float() + more).to(rows.dtype))

    @cached_property
    def _table(self) -> Table:
        """Of the positions of all places of the prompt."""
        places = self.plan.positions if self.plan.dropped else torch.arange(self.plan.length)
        return self.decoder.rotary.table(self._there(places))

    def _at(self, rows: torch.Tensor) -> Table:
        return Table(self._table.cos[:, rows], self._table.sin[:, rows])

    def _made(self, probes: torch.Tensor, reused: torch.Tensor) -> Probes | None:
        """Weigh the probes (bool `[length]`, as the reused rows) of each chunk; None: none has enough of them."""
        sensitivity, factors = self.plan.sensitivity(), torch.zeros(self.plan.length, dtype=torch.float32)
        spans, counts = [], []
        for segment in self.plan.cached_chunks:
            span = slice(segment.start, segment.stop)
            mine, others = probes[span], reused[span]
            known = bool(segment.source.sensitivity)  # at full strength all rows would be moved too far
            if not known or int(mine.sum()) < _FEWEST or not bool(others.any()):
                probes[span] = False
                continue
            factors[span] = _shares(sensitivity[span], mine).masked_fill(~others, 0.0)
            spans.append(span)
            counts.append(int(mine.sum()))
        self._rows = factors != 0
        return self._weighed(probes.nonzero()[:, 0], factors, spans, torch.tensor(counts)) if spans else None

    def _weighed(
        self, places: torch.Tensor, factors: torch.Tensor, spans: Sequence[slice], counts: torch.Tensor
    ) -> Probes:
        weights = torch.zeros(len(spans), len(places), dtype=torch.float32)
        weights[torch.arange(len(spans)).repeat_interleave(counts), torch.arange(len(places))] = 1.0
        others = factors.nonzero()[:, 0]
        stops = torch.tensor([span.stop for span in spans])
        rows = self._there(places)
        return Probes(
            rows=rows,
            unturned=self._at(rows).inverse(),
            weights=self._there(weights / counts[:, None]),
            factors=self._there(factors),
            spans=tuple(spans),
            counts=self._there(counts.float()),
            reach=self._there(torch.stack([factors[span].square().sum() for span in spans])),
            others=(self._there(others), self._there(torch.searchsorted(stops, others, right=True))),
        )

    def _there(self, values: torch.Tensor) -> torch.Tensor:
        """Send to the model's device, without waiting for it."""
        return values.to(self.decoder.device, non_blocking=True)


def _shares(sensitivity: torch.Tensor, probes: torch.Tensor) -> torch.Tensor:
    """How much of the mean change of its probes each token of a chunk takes, float32 `[tokens]`.

    Probes are the tokens that move most; without this the others would be moved too far.
    """
    mean = float(sensitivity[probes].mean())
    return (sensitivity / mean).clamp_max(_MOST) if mean > 0 else torch.ones_like(sensitivity)


def rows_of(buffer: BufferLayer, rows: torch.Tensor) -> LayerKV:
    """Copies of keys and values `[kv_heads, rows, head_dim]`."""
    return buffer.keys[0].index_select(1, rows), buffer.values[0].index_select(1, rows)


def _mean_squares(probes: Probes, changes: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """As `Shifted.by_layer` has them, from the probes' changes and the chunks' offsets in values."""
    squares, count = offsets.square().sum((0, 2)), len(probes.rows)
    flat = changes.flatten()  # one call of a product instead of two that wake other threads
    shifted = squares @ probes.reach / len(probes.others[0])
    return torch.stack([shifted, flat @ flat / count, squares @ probes.counts / count])
