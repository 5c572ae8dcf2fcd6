"""Fitting of a codec profile: means, a Karhunen-Loève transform weighted by sensitivity, shared frequency tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import erf
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtool.core.codec.base import Shape, channels_of, side_shapes
from kvtool.core.codec.levels import NESTED
from kvtool.core.codec.profile import SIDES, Layout, Profile, inverted
from kvtool.core.codec.rans.tables import (
    ALPHABET,
    BLOCK,
    ESCAPE,
    I16,
    PROBABILITY_BITS,
    U8,
    U16,
    ZERO,
    TableSet,
    quantised,
)
from kvtool.core.codec.transform import coarsened
from kvtool.core.codec.transform_kernels import Weights, numbers_of
from kvtool.core.errors import KvtoolError
from kvtool.core.native.isa import best_isa
from kvtool.core.native.simd import tile_of

# Of the finest level, in units of 1 / sqrt(sensitivity): some thousandths of a nat an answer token.
FINEST_STEP = 2.2e-5
_WIDEST = 512  # channels of a group, where heads differ from layer to layer
WHOLE_LAYER = 256  # channels of a side up to which all heads are transformed together; each head separately beyond
_FULL = 0.8  # share of the full sensitivity matrix; the rest is its diagonal: a sample's correlations are noisy
_FLOOR = 1e-4  # of the mean sensitivity of a layer's side: nothing is free
_MOST_COUNTERS = 2**22  # at once: a column with a wide range of numbers has one for each of 65,536
_LEAST_USED = 5e-4  # a column with fewer numbers other than 0 is not coded; they are escapes then

TABLES = 48
FINE_CLASSES = 16
_ROUNDS = 8
_MOST_COLUMNS = 20_000  # that the tables are fitted to; all are given one
_SMOOTHING = 0.02  # share of a bell of the same spread: another text has numbers that the sample did not
_LEAST_PROBABILITY = 1 / 8192  # of a symbol that gets a slot of its own; others are escapes
_ESCAPES = 1 / 4096

F64 = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int32]
Each = Callable[[Callable[[int], None], Iterable[int]], Iterable[None]]
LayerSides = Callable[[int], torch.Tensor]  # layer → float32 [2, tokens, C]


def default_groups(shapes: Sequence[Shape]) -> int:
    """Choose the number of groups of a model's layers from the shape of each; tokens do not count.

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

    `sample` gives un-rotated keys and values of some chunks at a layer. `sensitivity`, float32 `[2, layers, C, C]`: the
    loss, in nats, of an error e in one token is e @ this @ e / 2. `advance` is called after each layer; `each` is
    `map`, or that of a pool of threads, which then call `sample`.
    """
    layers, channels = sensitivity.shape[1:3]
    layout = Layout(groups, channels // groups)
    means = torch.empty((layers, SIDES, channels), dtype=torch.float32)
    basis = torch.empty((layers, SIDES, groups, layout.size, layout.size), dtype=torch.bfloat16)
    counts = _Counts(layers, layout)

    def fit_layer(layer: int) -> None:
        sides = sample(layer)
        means[layer] = sides.mean(1)
        for side in range(SIDES):
            centred = sides[side] - means[layer, side]
            basis[layer, side] = _basis(centred, sensitivity[side, layer], layout, step)
        forward = inverted(basis[layer])
        if forward is None:
            raise KvtoolError(
                f"the keys and values of layer {layer} are too much alike for a transform", "fit to other chunks"
            )
        counts.add(layer, _finest(layout, means[layer], forward, sides))

    for _ in each(fit_layer, range(layers)):
        advance(1)
    ids, fine_ids, tables = counts.tables()
    return Profile(means, basis, counts.active(), ids, fine_ids, tables, about | {"step": step})


def _finest(layout: Layout, means: torch.Tensor, forward: torch.Tensor, sides: torch.Tensor) -> I16:
    isa, tokens = best_isa(), sides.shape[1]
    out: I16 = np.zeros((tokens, layout.stride), np.int16)
    weights = Weights.of([*forward.flatten(0, 1)], means.view(SIDES * layout.groups, layout.size), tile_of(isa))
    heads = sides.view(SIDES, tokens, layout.groups, layout.size).transpose(1, 2)
    numbers_of(isa, layout, [weights], [*heads], out[None])
    return out


def _basis(centred: torch.Tensor, sensitivity: torch.Tensor, layout: Layout, step: float) -> torch.Tensor:
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
    wide = sensitivity.double()
    mixed = _FULL * wide + (1 - _FULL) * torch.diag(wide.diagonal())
    values, vectors = torch.linalg.eigh(mixed)
    values = values.clamp_min(0)
    values = values + max(_FLOOR * float(values.mean()), 1e-20)
    root, inverse = (vectors * values.sqrt()) @ vectors.T, (vectors * values.rsqrt()) @ vectors.T
    return root.float(), inverse.float()


class _Counts:
    def __init__(self, layers: int, layout: Layout) -> None:
        self._layout = layout
        self._alone = np.zeros((len(NESTED), layers, layout.stride, ALPHABET), np.int32)
        self._fine = np.zeros((len(NESTED) - 1, layers, layout.stride, 3, 3), np.int32)

    def add(self, layer: int, finest: I16) -> None:
        values = np.arange(int(finest.min()), int(finest.max()) + 1, dtype=np.int16)
        at_once = max(1, _MOST_COUNTERS // len(values))
        for first in range(0, finest.shape[1], at_once):
            columns = slice(first, first + at_once)
            part = finest[:, columns]
            starts = np.arange(part.shape[1], dtype=np.int64) * len(values) - int(values[0])
            counts = np.bincount((part + starts).reshape(-1), minlength=part.shape[1] * len(values))
            found, numbers = counts.reshape(part.shape[1], -1), values
            for level in range(len(NESTED)):
                self._count(level, layer, columns, found, numbers)
                numbers = coarsened(numbers)

    def _count(self, level: int, layer: int, columns: slice, found: npt.NDArray[np.int64], numbers: I16) -> None:
        symbols = np.clip(numbers.astype(np.int32), -ZERO, ESCAPE - ZERO) + ZERO  # ascending, as the values are
        there, starts = np.unique(symbols, return_index=True)
        self._alone[level, layer, columns, there] = np.add.reduceat(found, starts, axis=1).T
        if level < len(NESTED) - 1:
            coarse = coarsened(numbers).astype(np.int32)
            rest = numbers - 3 * coarse
            cells = np.minimum(np.abs(coarse), 2) * 3 + np.where(coarse < 0, -rest, rest) + 1
            counts = np.stack([found[:, cells == cell].sum(1) for cell in range(9)], 1)
            self._fine[level, layer, columns] = counts.reshape(-1, 3, 3)

    def active(self) -> U8:
        """Count each group's blocks up to the last with a column worth coding; never fewer than coarser levels have."""
        tokens = np.maximum(self._alone[0, 0, 0].sum(), 1)
        used = 1 - self._alone[..., ZERO] / tokens >= _LEAST_USED
        blocks = used.reshape(*used.shape[:2], SIDES * self._layout.groups, -1, BLOCK).any(-1)
        last = np.where(blocks.any(-1), blocks.shape[-1] - blocks[..., ::-1].argmax(-1), 0)
        return np.maximum.accumulate(last[::-1], 0)[::-1].astype(np.uint8)

    def tables(self) -> tuple[U16, U16, TableSet]:
        shape, fine_shape = self._alone.shape[:3], self._fine.shape[:3]
        tables, ids = shared_tables(self._alone.reshape(-1, ALPHABET))
        more, fine_ids = fine_tables(self._fine.reshape(-1, 3, 3))
        return (
            ids.reshape(shape),
            (fine_ids + len(tables)).astype(np.uint16).reshape(fine_shape),
            TableSet(np.concatenate([tables, more])),
        )


def frequencies(probabilities: F64) -> U16:
    kept = np.where(probabilities >= _LEAST_PROBABILITY * probabilities.sum(), probabilities, 0.0)
    used = np.flatnonzero(kept[:ESCAPE])
    first, last = (used[0], used[-1]) if len(used) else (ZERO, ZERO)
    kept[first : last + 1] = np.maximum(kept[first : last + 1], probabilities.sum() * _LEAST_PROBABILITY)
    kept[ESCAPE] = probabilities.sum() - kept[:ESCAPE].sum()
    kept[ESCAPE] = max(kept[ESCAPE], probabilities.sum() * _ESCAPES)
    return quantised(kept)


def bell(spread: float) -> F64:
    edges = np.arange(-ZERO, ALPHABET - ZERO) - 0.5
    edges = np.append(edges, edges[-1] + 1)
    scale = spread / np.sqrt(2)
    tail = 0.5 * np.exp(-np.abs(edges) / scale)
    laplace = np.where(edges < 0, tail, 1 - tail)
    gauss = np.array([0.5 * (1 + erf(edge / spread / np.sqrt(2))) for edge in edges])
    inside = np.diff(0.5 * laplace + 0.5 * gauss)
    inside[ESCAPE] = 0.0
    return np.asarray(inside, np.float64)


def shared_tables(counts: Counts) -> tuple[U16, U16]:
    """Cluster columns by their counts `[columns, 256]` to shared tables; also returns each column's table id."""
    rows = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    sample = rows[:: -(-len(rows) // _MOST_COLUMNS)]
    groups = _start(sample, min(TABLES, len(sample)))
    for _ in range(_ROUNDS):
        tables = np.stack([_table(sample[groups == group]) for group in range(groups.max() + 1)])
        groups = _nearest(sample, tables)
        groups = np.unique(groups, return_inverse=True)[1]  # those that lost all their columns go
    tables = np.stack([_table(sample[groups == group]) for group in range(groups.max() + 1)])
    return tables, _nearest(rows, tables).astype(np.uint16)


def _start(rows: F64, count: int) -> npt.NDArray[np.int64]:
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(rows * np.log2(rows), 1)
    groups = np.empty(len(rows), np.int64)
    groups[np.argsort(entropy, kind="stable")] = np.arange(len(rows)) * count // len(rows)
    return groups


def _nearest(rows: F64, tables: U16) -> npt.NDArray[np.int64]:
    with np.errstate(divide="ignore"):
        bits = PROBABILITY_BITS - np.log2(tables.astype(np.float64))
    escape = bits[:, ESCAPE, None] + 16
    return np.asarray((rows @ np.where(np.isfinite(bits), bits, escape).T).argmin(1))


def _table(rows: F64) -> U16:
    mean = rows.mean(0)
    inside = mean.copy()
    inside[ESCAPE] = 0.0
    numbers = np.arange(ALPHABET) - ZERO
    total = max(inside.sum(), 1e-9)
    spread = float(np.sqrt(max((inside * numbers**2).sum() / total, 1e-3)))
    return frequencies((1 - _SMOOTHING) * mean + _SMOOTHING * bell(spread))


def fine_tables(counts: Counts) -> tuple[U16, npt.NDArray[np.int64]]:
    """Make a refinement's tables, three a class, of counts `[columns, context, -1|0|1]`; and each column's first."""
    some = counts + 0.5
    share = some[:, 0, 1] / some[:, 0].sum(1)  # of zeros that stay zeros: distinguishes narrow columns from wide ones
    order = np.argsort(share, kind="stable")
    classes = np.empty(len(counts), np.int64)
    classes[order] = np.arange(len(counts)) * FINE_CLASSES // len(counts)
    tables = []
    for number in range(classes.max() + 1):
        for context in range(3):
            table = np.zeros(ALPHABET)
            table[ZERO - 1 : ZERO + 2] = some[classes == number, context].sum(0)
            tables.append(quantised(table))
    return np.stack(tables), classes * 3
