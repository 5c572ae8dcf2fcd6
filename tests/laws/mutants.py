"""Broken variants of the engine. A law that holds for them is no law, so each law has a test with one of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kvtool.core.fusion import loader
from kvtool.core.fusion.loader import Loader
from kvtool.core.kernels.attention import dispatch, eager
from kvtool.core.kernels.attention.params import AttentionParams, KeyRanges
from kvtool.core.kernels.rope import CosSin
from kvtool.core.model import forward
from kvtool.core.model.rope import Copy, RopeJob, Rotary


def keys_rotated_twice(patch: pytest.MonkeyPatch) -> None:
    """The loader rotates every cached key once more."""
    load = Loader.load

    def twice(self: Loader, layer: int, *worker: Any) -> None:
        load(self, layer, *worker)
        for segment in self.segments:
            span = self.cache.buffers[layer].keys[:, :, segment.start : segment.stop]
            span.copy_(self.decoder.rotary.rotate(span, self.table[segment.start : segment.stop], layer))

    patch.setattr(Loader, "load", twice)


def positions_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """The loader puts every cached key one position too far."""
    positions_of = loader.positions_of
    patch.setattr(loader, "positions_of", lambda segments, device: positions_of(segments, device) + 1)


def latents_rotated(patch: pytest.MonkeyPatch) -> None:
    """The loader turns a cached latent's first numbers, too, as if they carried the position."""
    load = Loader.load

    def turned(self: Loader, layer: int, *worker: Any) -> None:
        load(self, layer, *worker)
        buffer = self.cache.buffers[layer]
        for segment in self.segments:
            span = buffer.values[:, :, segment.start : segment.stop, : buffer.shape.key_dim]
            span.copy_(self.decoder.rotary.rotate(span, self.table[segment.start : segment.stop], layer))

    patch.setattr(Loader, "load", turned)


def rotation_of_wrong_sign(patch: pytest.MonkeyPatch) -> None:
    place = Rotary.place

    def backwards(self: Rotary, jobs: Sequence[RopeJob], copies: Sequence[Copy], layer: int) -> None:
        place(self, [(out, keys, table.transposed()) for out, keys, table in jobs], copies, layer)

    patch.setattr(Rotary, "place", backwards)


def unrotation_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Keys lose one position less than they have."""
    inverse = CosSin.inverse

    def shifted(self: CosSin) -> CosSin:
        angles = inverse(self)
        return CosSin(angles.cos.roll(1, 1), angles.sin.roll(1, 1))

    patch.setattr(CosSin, "inverse", shifted)


def rows_see_the_future(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forward, "attend", _all_visible)


def _all_visible(query: Any, key: Any, value: Any, params: AttentionParams, ranges: KeyRanges) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, scale=params.scale, enable_gqa=True)


def chunks_see_their_own_future(patch: pytest.MonkeyPatch) -> None:
    """A chunk's rows attend to all of its tokens at ingest."""

    patch.setattr(dispatch, "_backend", lambda call: eager)
    patch.setattr(dispatch, "attend", _all_visible)


def nobody_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Loader, "wait", lambda self, layer, meanwhile=None: None)


def _scored_otherwise(patch: pytest.MonkeyPatch, **change: Any) -> None:
    """Rows of a prompt attend with another scoring than their layer's; chunks at ingest with their own."""
    attend = forward.QueryRows.attend

    def changed(self: Any, layer: int, query: Any, key: Any, value: Any, scoring: AttentionParams) -> torch.Tensor:
        more = {name: make(getattr(scoring, name)) for name, make in change.items()}
        return attend(self, layer, query, key, value, replace(scoring, **more))

    patch.setattr(forward.QueryRows, "attend", changed)


def window_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A row sees one key more than its window has."""
    _scored_otherwise(patch, window=lambda window: window and window + 1)


def cap_dropped(patch: pytest.MonkeyPatch) -> None:
    _scored_otherwise(patch, softcap=lambda cap: None)


def sinks_dropped(patch: pytest.MonkeyPatch) -> None:
    _scored_otherwise(patch, sinks=lambda sinks: None)


def sink_counted_as_a_key(patch: pytest.MonkeyPatch) -> None:
    """What a head leaves to its sink is given to the last key."""
    softmax = eager._softmax

    def counted(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        found = softmax(scores, sinks)
        found[..., -1] += 1 - found.sum(-1)
        return found

    patch.setattr(eager, "_softmax", counted)


def wrong_rope_of_a_kind(patch: pytest.MonkeyPatch) -> None:
    """Every layer's stored keys are turned by the RoPE of the first."""
    patch.setattr(Rotary, "angles", lambda self, table, layer: table.by_name[self.names[0]])
