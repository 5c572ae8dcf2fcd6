"""CacheGen's delta coding, the measured baseline of levels 1 to 4; without a profile a store has records made by it.

As in the paper (Liu et al. 2024, arXiv 2310.07240, section 5): of each group of ten tokens the first is an anchor,
quantised to 8 bits; the others are their difference from it, quantised in steps that grow from the first third of the
layers to the last. Tables come with kvtool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import numpy.typing as npt
import torch

from kvtool.core.codec.base import (
    DTYPES,
    LayerKV,
    Payload,
    SelfContained,
    Shape,
    channels_of,
    heads_of,
    shape_of_layer,
    wide_sides,
)
from kvtool.core.codec.profile import Profile
from kvtool.core.codec.rans.coder import Decoding, Encoding, decode, encode, symbols_of
from kvtool.core.codec.rans.tables import ESCAPE, I16, LANES, U16, ZERO, TableSet, in_order
from kvtool.core.codec.record import Escapes, Record
from kvtool.core.errors import DamagedError, KvtoolError

GROUP = 10
STEPS = (1 / 4, 1 / 2, 1.0, 2.0)  # of a level, times the spread
_THIRDS = (0.5, 1.0, 1.5)  # the paper's bins for the first, middle and last third of the layers
_ANCHOR_STEPS = 127
_LEAST_SPREAD = 2**-10  # of the RMS: a side that varies little must not take hundreds of steps

F32 = npt.NDArray[np.float32]


class CacheGen(SelfContained):
    """A level of the paper's scheme; `cachegen-1` has the finest steps."""

    def encode_layers(self, kvs: Sequence[LayerKV], profile: Profile | None = None) -> list[Sequence[Payload]]:
        return [self._encoded(kv, layer, len(kvs)) for layer, kv in enumerate(kvs)]

    def decode_one(self, payload: Payload, shape: Shape, dtype: str) -> LayerKV:
        record = Record.parse(payload)
        if (record.level, record.tokens) != (self._number, shape[1]):
            raise DamagedError("a compressed record of another level or length")
        return unpack(record, shape, dtype)

    def stated_error(self, payload: Payload) -> tuple[float, float]:
        return Record.parse(payload).errors

    @property
    def _number(self) -> int:
        return int(self.level.rpartition("-")[2])

    @np.errstate(over="ignore", invalid="ignore")  # the record's error is no number then, and it is refused
    def _encoded(self, kv: LayerKV, layer: int, layers: int) -> Sequence[Payload]:
        both = wide_sides(kv, channels_of([shape_of_layer(kv)])).float().cpu()
        if both.numel() and not all(torch.isfinite(end) for end in torch.aminmax(both)):
            raise KvtoolError("the KV holds numbers that are not finite", "keep it at the level raw or lossless")
        step = STEPS[self._number - 1] * _THIRDS[min(2, 3 * layer // layers)]
        sides = [quantise(side, step * _spread_of(side)) for side in both.numpy()]
        restored = torch.stack([torch.from_numpy(side.values) for side in sides]).to(kv[0].dtype).float()
        streams, marked, ids = [], [], []
        for part in (*(side.rows for side in sides), *(side.anchors for side in sides)):
            numbers = np.pad(part, ((0, 0), (0, padded(part.shape[1]) - part.shape[1])))
            columns = in_order(cheapest(numbers), shipped())
            ((symbols, escapes),) = symbols_of(numbers[None], [columns])
            streams += encode(Encoding(symbols, columns))
            marked.append(escapes)
            ids.append(columns.ids.astype(np.uint8))
        widths = [side.widths.astype("<f4") for side in sides]
        return Record(
            transformed=False,
            level=self._number,
            base=0,
            tokens=both.shape[1],
            columns=padded(both.shape[2]),
            streams=tuple(streams),
            escapes=Escapes(np.empty(0, np.uint32), np.empty(0, np.int16), np.concatenate(marked)),
            steps=(sides[0].step, sides[1].step),
            errors=_errors(both, restored),
            side=b"".join(part.tobytes() for part in (*widths, *ids)),
        ).pack()


def _spread_of(side: F32) -> float:
    if not side.size:
        return 0.0
    spread, size = (float(np.sqrt(np.square(part).mean())) for part in (side - side.mean(0), side))
    return max(spread, _LEAST_SPREAD * size)


def _errors(sides: torch.Tensor, made: torch.Tensor) -> tuple[float, float]:
    wrong = made.sub(sides).square_().mean((1, 2)).sqrt()
    size = sides.square().mean((1, 2)).sqrt().clamp_min(1e-30)
    key, value = (np.nextafter(np.float32(error), np.float32(np.inf)) for error in (wrong / size).tolist())
    return float(key), float(value)


@dataclass(frozen=True, slots=True)
class Side:
    step: float
    rows: I16  # `[rows, C]`, without the anchors' rows
    anchors: I16  # `[rows, C]`
    widths: F32  # step of each channel's anchors, float32
    values: F32  # the decoded side, `[tokens, C]`


def quantise(side: F32, step: float) -> Side:
    step = float(np.float32(max(step, 1e-12)))
    anchors = is_anchor(len(side))
    widths = np.maximum(np.abs(side[anchors]).max(0) / np.float32(_ANCHOR_STEPS), np.float32(1e-12)).astype(np.float32)
    quantised = _clipped(side[anchors] / widths)
    base = _spread(quantised * widths, len(side))
    rows = _clipped((side - base) / np.float32(step))
    rows[anchors] = 0
    return Side(step, rows[~anchors], quantised, widths, rows * np.float32(step) + base)


def padded(channels: int) -> int:
    return -(-channels // LANES) * LANES


def is_anchor(tokens: int) -> npt.NDArray[np.bool_]:
    return np.asarray(np.arange(tokens) % GROUP == 0)


def _clipped(values: F32) -> I16:
    return np.clip(np.rint(values), -32767, 32766).astype(np.int16)


def _spread(anchors: F32, tokens: int) -> F32:
    return np.repeat(anchors, GROUP, 0)[:tokens]


@cache
def shipped() -> TableSet:
    """Load the tables, by growing spread; the first has nothing but zeros. Every kvtool has the same integers."""
    with files("kvtool.core.codec").joinpath("tables-1.npy").open("rb") as file:
        return TableSet(np.load(file, allow_pickle=False))


def cheapest(numbers: I16) -> U16:
    columns = numbers.shape[1]
    if not numbers.size:
        return np.zeros(columns, np.uint16)
    first, last = max(int(numbers.min()), -ZERO), min(int(numbers.max()), ESCAPE - ZERO)
    first, last = min(first, last), max(first, last)
    width = last - first + 1
    places = np.clip(numbers, first, last) + (np.arange(columns) * width - first)
    counts = np.bincount(places.reshape(-1), minlength=columns * width).reshape(columns, width)
    # float64: the sums are as good as exact in any order. By torch: numpy's threads would wait for each other.
    costs = torch.from_numpy(_costs()[:, first + ZERO : last + ZERO + 1])
    _, ids = (torch.from_numpy(counts).double() @ costs.T).min(1)
    return ids.numpy().astype(np.uint16)


@cache
def _costs() -> npt.NDArray[np.float64]:
    """Bits of each symbol, float64 `[tables, 256]`; an escape costs 16 more, outside of the stream."""
    costs = shipped().costs.astype(np.float64)
    escape = costs[:, ESCAPE, None] + 16
    costs = np.where(np.isfinite(costs), costs, escape)
    costs[:, ESCAPE, None] = escape
    return costs


def unpack(record: Record, shape: Shape, dtype: str) -> LayerKV:
    if record.transformed:
        raise DamagedError("a transformed record, which names no profile")
    channels = channels_of([shape])
    tables, columns = shipped(), padded(channels)
    if record.columns != columns or record.base or len(record.side) != 2 * 4 * channels + 4 * columns:
        raise DamagedError("a compressed record that does not fit its channels")
    widths = np.frombuffer(record.side, "<f4", 2 * channels).astype(np.float32).reshape(2, 1, channels)
    ids = np.frombuffer(record.side, np.uint8, offset=widths.nbytes).astype(np.uint16).reshape(4, columns)
    if int(ids.max(initial=0)) >= len(tables) or not np.isfinite(widths).all():
        raise DamagedError("a compressed record whose side information is no number or names no table")
    marks = is_anchor(record.tokens)
    anchors = int(marks.sum())
    heights = [record.tokens - anchors] * 2 + [anchors] * 2
    whole_rows = np.zeros((sum(heights), columns), np.int16)
    ends = np.cumsum(heights)
    parts = [whole_rows[end - height : end] for end, height in zip(ends, heights, strict=True)]
    for stream, chosen, part in zip(record.streams, ids, parts, strict=True):
        decode(Decoding(stream, in_order(chosen, tables), part))
    record.escapes.place(whole_rows)
    escaped = np.flatnonzero(whole_rows == ESCAPE - ZERO)
    if len(escaped) != len(record.escapes.marked):
        raise DamagedError("a compressed record whose escapes are not those of its streams")
    whole_rows.reshape(-1)[escaped] = record.escapes.marked
    sides = list[torch.Tensor]()
    with np.errstate(over="ignore", invalid="ignore"):  # by a step that no encoder wrote
        for rows, anchor_rows, step, width in zip(parts[:2], parts[2:], record.steps, widths, strict=True):
            side = _spread(anchor_rows[:, :channels].astype(np.float32) * width, record.tokens)
            side[~marks] += rows[:, :channels].astype(np.float32) * np.float32(step)
            sides.append(torch.from_numpy(side).to(DTYPES[dtype]))
    return heads_of(torch.stack(sides), shape)
