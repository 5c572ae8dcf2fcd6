"""Broken variants of the engine. A law that holds for them is no law, so each law has a test with one of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvtool.core.fusion import loader
from kvtool.core.model import attention, kernels, side_by_side
from kvtool.core.model.rotary import Copy, Rotary, Table, Turn


def keys_rotated_twice(patch: pytest.MonkeyPatch) -> None:
    """The loader rotates every cached key once more."""
    load = loader.Loader._load

    def twice(self: Any, layer: int, turning: Any, worker: Any) -> None:
        load(self, layer, turning, worker)
        table = turning.table
        for segment in self._segments:
            span = self._cache.buffers[layer].keys[:, :, segment.start : segment.stop]
            span.copy_(self._decoder.rotary.rotate(span, table[segment.start : segment.stop], layer))

    patch.setattr(loader.Loader, "_load", twice)


def positions_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """The loader puts every cached key one position too far."""
    table = loader.Loader._table

    def shifted(self: Any) -> Table:
        stop = table(self).cos.shape[1]
        return self._decoder.rotary.table(torch.arange(1, stop + 1))

    patch.setattr(loader.Loader, "_table", shifted)


def rotation_of_wrong_sign(patch: pytest.MonkeyPatch) -> None:
    place = Rotary.place

    def backwards(self: Rotary, turns: Sequence[Turn], copies: Sequence[Copy], layer: int) -> None:
        place(self, [(out, keys, Table(table.cos, -table.sin)) for out, keys, table in turns], copies, layer)

    patch.setattr(Rotary, "place", backwards)


def unrotation_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Keys lose one position less than they have."""
    inverse = Table.inverse

    def shifted(self: Table) -> Table:
        table = inverse(self)
        return Table(table.cos.roll(1, 1), table.sin.roll(1, 1))

    patch.setattr(Table, "inverse", shifted)


def rows_see_the_future(patch: pytest.MonkeyPatch) -> None:
    """Scattered rows attend to all keys of the prompt."""

    def all_visible(query: Any, key: Any, value: Any, scale: float, last: Any, at: Any) -> torch.Tensor:
        return kernels._sdpa(query, key, value, None, scale)

    patch.setattr(attention, "attend_rows", all_visible)


def chunks_see_their_own_future(patch: pytest.MonkeyPatch) -> None:
    """A chunk's rows attend to all of its tokens at ingest."""

    def all_visible(query: Any, key: Any, value: Any, scale: float) -> torch.Tensor:
        return kernels._sdpa(query, key, value, None, scale)

    patch.setattr(side_by_side, "own_kernel", lambda *tensors: None)
    patch.setattr(side_by_side, "_as_rows", all_visible)


def nobody_waits(patch: pytest.MonkeyPatch) -> None:
    """Layers run before their records stand in the buffers."""
    patch.setattr(loader.Loader, "wait", lambda self, layer: None)
