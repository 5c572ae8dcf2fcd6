"""A profile from a sample of KV and from how much errors in it matter.

Directions are weighted by the sensitivity, so that a unit of error costs the same everywhere, in every layer; a KLT of
what comes out packs it into few coefficients; one step for all does the allocation of bits by itself (reverse
water-filling: what stays below the step costs next to nothing). kvtool/docs/codec.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtool.core.codec.base import Shape, side_shapes
from kvtool.core.codec.clusters import fine_tables, shared_tables
from kvtool.core.codec.entropy.tables import ALPHABET, ESCAPE, ZERO, TableSet
from kvtool.core.codec.integers import coarsened
from kvtool.core.codec.layout import BLOCK, SIDES, Layout, channels_of
from kvtool.core.codec.nested import NESTED
from kvtool.core.codec.profile import Profile, inverted
from kvtool.core.codec.transform import finest_numbers
from kvtool.core.errors import KvtoolError

# Of the finest level, in units of 1 / sqrt(sensitivity): some thousandths of a nat an answer token.
FINEST_STEP = 2.2e-5
_WIDEST = 512  # channels of a group, where heads differ from layer to layer
WHOLE_LAYER = 256  # channels of a side up to which all heads are transformed together; a head by itself beyond
_FULL = 0.8  # share of the full sensitivity matrix; the rest is its diagonal: a sample's correlations are noisy
_FLOOR = 1e-4  # of the mean sensitivity of a layer's side: nothing is free
_MOST_COUNTERS = 2**22  # at once: a column whose numbers are far apart has one for each of 65,536
_LEAST_USED = 5e-4  # a column with fewer numbers other than 0 is not coded; they are escapes then

Each = Callable[[Callable[[int], None], Iterable[int]], Iterable[None]]
LayerSides = Callable[[int], torch.Tensor]  # layer → float32 [2, tokens, C]


def default_groups(shapes: Sequence[Shape]) -> int:
    """Choose how many groups a model's layers are transformed in, from the shape of each; tokens do not count.

    1: one transform for all heads of a layer. A basis has C * C numbers, so wide layers take one a head. Where shapes
    differ, groups are equal parts of the widest side, whichever heads these are.
    """
    kv_heads, _, head_dim = side_shapes(shapes[0])[0]
    channels = channels_of(shapes)
    if len(set(shapes)) == 1 and len(shapes[0]) == 3:
        return 1 if kv_heads * head_dim <= WHOLE_LAYER else kv_heads
    return next(count for count in range(1, channels + 1) if channels % count == 0 and channels // count <= _WIDEST)


def fit_profile(
    sample: LayerSides,
    sensitivity: torch.Tensor,
    groups: int,
    about: dict[str, Any],
    step: float = FINEST_STEP,
    advance: Callable[[int], None] = lambda layers: None,
    each: Each = map,
) -> Profile:
    """Fit means, transforms and tables.

    Parameters
    ----------
    sample : un-rotated keys and values of some chunks at a layer.
    sensitivity : float32 `[2, layers, C, C]`: the loss, in nats, of an error e in one token is e @ this @ e / 2.
    groups : into how many the channels are divided; those of one are transformed together.
    advance : told after each layer.
    each : does something for each layer, `map` or that of a pool of threads; `sample` is called by whom it has do it.
    """
    layers, channels = sensitivity.shape[1:3]
    layout = Layout(groups, channels // groups)
    means = torch.empty((layers, SIDES, channels), dtype=torch.float32)
    basis = torch.empty((layers, SIDES, groups, layout.size, layout.size), dtype=torch.bfloat16)
    counts = _Counts(layers, layout)

    def fit_layer(layer: int) -> None:
        """Fill in one layer's part of all three."""
        sides = sample(layer)
        means[layer] = sides.mean(1)
        for side in range(SIDES):
            centred = sides[side] - means[layer, side]
            basis[layer, side] = _basis(centred, sensitivity[side, layer], layout, step)
        forward = inverted(basis[layer])
        if forward is None:
            raise KvtoolError(f"the keys and values of layer {layer} cannot be told apart", "fit to other chunks")
        counts.add(layer, finest_numbers(layout, means[layer], forward, sides))

    for _ in each(fit_layer, range(layers)):
        advance(1)
    ids, fine_ids, tables = counts.tables()
    return Profile(means, basis, counts.active(), ids, fine_ids, tables, about | {"step": step})


def _basis(centred: torch.Tensor, sensitivity: torch.Tensor, layout: Layout, step: float) -> torch.Tensor:
    """Rows of one step of a coefficient each, `[groups, size, size]`, the coefficient of the widest spread first."""
    out = torch.empty((layout.groups, layout.size, layout.size), dtype=torch.float32)
    for group in range(layout.groups):
        channels = slice(group * layout.size, (group + 1) * layout.size)
        root, inverse = _roots(sensitivity[channels, channels])
        own = centred[:, channels]
        spread = root.double() @ (own.T @ own / max(1, len(own))).double() @ root.double()  # root is symmetric
        directions = torch.linalg.eigh(spread)[1].flip(1).float()
        out[group] = step * (directions.T @ inverse)
    return out


def _roots(sensitivity: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Square root of a sensitivity matrix and its inverse, regularised."""
    wide = sensitivity.double()
    mixed = _FULL * wide + (1 - _FULL) * torch.diag(wide.diagonal())
    values, vectors = torch.linalg.eigh(mixed)
    values = values.clamp_min(0)
    values = values + max(_FLOOR * float(values.mean()), 1e-20)
    root, inverse = (vectors * values.sqrt()) @ vectors.T, (vectors * values.rsqrt()) @ vectors.T
    return root.float(), inverse.float()


def _histograms(numbers: npt.NDArray[np.int16], values: npt.NDArray[np.int16]) -> npt.NDArray[np.int64]:
    """How often each column `[tokens, columns]` has each of these successive values: `[columns, values]`."""
    width = numbers.shape[1]
    first = np.arange(width, dtype=np.int64) * len(values) - int(values[0])
    return np.bincount((numbers + first).reshape(-1), minlength=width * len(values)).reshape(width, -1)


class _Counts:
    """How often each number occurs in each column, alone and given the coarser level's number."""

    def __init__(self, layers: int, layout: Layout) -> None:
        self._layout = layout
        self._alone = np.zeros((len(NESTED), layers, layout.stride, ALPHABET), np.int32)
        self._fine = np.zeros((len(NESTED) - 1, layers, layout.stride, 3, 3), np.int32)

    def add(self, layer: int, finest: npt.NDArray[np.int16]) -> None:
        """Count a layer's numbers `[tokens, stride]`: once, at the finest level, of which all others follow."""
        values = np.arange(int(finest.min()), int(finest.max()) + 1, dtype=np.int16)
        at_once = max(1, _MOST_COUNTERS // len(values))
        for first in range(0, finest.shape[1], at_once):
            columns = slice(first, first + at_once)
            found = _histograms(finest[:, columns], values)
            for level in range(len(NESTED)):
                self._count(level, layer, columns, found, coarsened(values, level))

    def _count(
        self, level: int, layer: int, columns: slice, found: npt.NDArray[np.int64], numbers: npt.NDArray[np.int16]
    ) -> None:
        """Add up, of `found[column, value]`, what has one symbol at a level where the values are these `numbers`."""
        symbols = np.clip(numbers.astype(np.int32), -ZERO, ESCAPE - ZERO) + ZERO  # ascending, as the values are
        there, starts = np.unique(symbols, return_index=True)
        self._alone[level, layer, columns, there] = np.add.reduceat(found, starts, axis=1).T
        if level < len(NESTED) - 1:
            coarse = coarsened(numbers).astype(np.int32)
            rest = numbers - 3 * coarse
            cells = np.minimum(np.abs(coarse), 2) * 3 + np.where(coarse < 0, -rest, rest) + 1
            counts = np.stack([found[:, cells == cell].sum(1) for cell in range(9)], 1)
            self._fine[level, layer, columns] = counts.reshape(-1, 3, 3)

    def active(self) -> npt.NDArray[np.uint8]:
        """Blocks of each group up to the last with a column worth coding; never fewer than coarser levels have."""
        tokens = np.maximum(self._alone[0, 0, 0].sum(), 1)
        used = 1 - self._alone[..., ZERO] / tokens >= _LEAST_USED
        blocks = used.reshape(*used.shape[:2], SIDES * self._layout.groups, -1, BLOCK).any(-1)
        last = np.where(blocks.any(-1), blocks.shape[-1] - blocks[..., ::-1].argmax(-1), 0)
        return np.maximum.accumulate(last[::-1], 0)[::-1].astype(np.uint8)

    def tables(self) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16], TableSet]:
        """Tables, and each column's."""
        shape, fine_shape = self._alone.shape[:3], self._fine.shape[:3]
        tables, ids = shared_tables(self._alone.reshape(-1, ALPHABET))
        more, fine_ids = fine_tables(self._fine.reshape(-1, 3, 3))
        return (
            ids.reshape(shape),
            (fine_ids + len(tables)).astype(np.uint16).reshape(fine_shape),
            TableSet(np.concatenate([tables, more])),
        )
