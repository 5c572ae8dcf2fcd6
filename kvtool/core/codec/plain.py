"""Prediction without a profile: from the chunk alone, with the tables that come with kvtool.

MEAN subtracts each channel's mean over the chunk. ANCHOR is the paper's (CacheGen, section 5.1): tokens in groups of
ten, the first of each kept in 8 bits, the others as differences to it. Either way one step a layer and side.

Side information: for each side, in this order: MEAN: bfloat16[C], the means. ANCHOR: float32[C], the anchors' steps.
Then u8 table ids of every stream's columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from kvtool.core.codec import integers as whole
from kvtool.core.codec.entropy.columns import in_order
from kvtool.core.codec.entropy.decoder import Decoding, decode
from kvtool.core.codec.entropy.encoder import Encoding, encode_all
from kvtool.core.codec.entropy.reference import LANES
from kvtool.core.codec.entropy.symbols import to_symbols
from kvtool.core.codec.entropy.tables import ESCAPE, ZERO
from kvtool.core.codec.parametric import shipped
from kvtool.core.codec.payload import Coded, Escapes, Predictor, streams_of
from kvtool.core.errors import DamagedError

GROUP = 10
STEPS = {
    Predictor.MEAN: (1 / 6, 1 / 2, 3 / 2, 9 / 2),
    Predictor.ANCHOR: (1 / 4, 1 / 2, 1.0, 2.0),
}  # × the spread
_THIRDS = (0.5, 1.0, 1.5)  # the paper's bins for the first, middle and last third of the layers
_ANCHOR_STEPS = 127

F32 = npt.NDArray[np.float32]
I16 = npt.NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Side:
    """A side of a layer that is quantised.

    Attributes
    ----------
    rows : for ANCHOR without the anchors' rows.
    anchors : a row each, or None.
    about : side information without table ids.
    values : what a decoder makes of it, `[tokens, C]`.
    """

    predictor: Predictor
    step: float
    rows: Coding
    anchors: Coding | None
    about: bytes
    values: F32

    @property
    def bits(self) -> float:
        """Bits that it will take, states and side information left out."""
        return self.rows.bits + (0.0 if self.anchors is None else self.anchors.bits)


@dataclass(frozen=True, slots=True)
class Coding:
    """Numbers of a stream, int16 `[rows, columns]`, columns padded to a multiple of 64; each column's table, and what
    they will take together."""

    numbers: I16
    ids: npt.NDArray[np.uint16]
    bits: float

    @classmethod
    def of(cls, rows: I16) -> Coding:
        """Take the cheapest table for each column of numbers that are yet to be padded."""
        numbers = np.zeros((len(rows), padded(rows.shape[1])), np.int16)
        numbers[:, : rows.shape[1]] = rows
        return cls(numbers, *cheapest(numbers))


def padded(channels: int) -> int:
    """Columns of a side's streams."""
    return -(-channels // LANES) * LANES


def is_anchor(tokens: int) -> npt.NDArray[np.bool_]:
    """Which tokens are anchors, bool `[tokens]`."""
    return np.asarray(np.arange(tokens) % GROUP == 0)


def step_of(predictor: Predictor, level: int, layer: int, layers: int, spread: float) -> float:
    """The step of a side of a layer, as a float32 number; `spread` is its RMS around the channel means."""
    factor = STEPS[predictor][level - 1]
    if predictor is Predictor.ANCHOR:
        factor *= _THIRDS[min(2, 3 * layer // max(1, layers))]
    return float(np.float32(max(spread * factor, 1e-12)))


def quantise(predictor: Predictor, side: F32, step: float) -> Side:
    """Quantise a side `[tokens, C]`."""
    return _mean(side, step) if predictor is Predictor.MEAN else _anchor(side, step)


def _mean(side: F32, step: float) -> Side:
    means = torch.from_numpy(side.mean(0)).to(torch.bfloat16)
    offset = means.float().numpy()
    rows = whole.clipped((side - offset) / np.float32(step))
    return Side(
        Predictor.MEAN,
        step,
        Coding.of(rows),
        None,
        means.view(torch.uint8).numpy().tobytes(),
        rows * np.float32(step) + offset,
    )


def _anchor(side: F32, step: float) -> Side:
    anchors = is_anchor(len(side))
    widths = np.maximum(np.abs(side[anchors]).max(0) / np.float32(_ANCHOR_STEPS), np.float32(1e-12)).astype(np.float32)
    quantised = whole.clipped(side[anchors] / widths)
    base = _spread(quantised * widths, len(side))
    rows = whole.clipped((side - base) / np.float32(step))
    rows[anchors] = 0
    return Side(
        Predictor.ANCHOR,
        step,
        Coding.of(rows[~anchors]),
        Coding.of(quantised),
        widths.astype("<f4").tobytes(),
        rows * np.float32(step) + base,
    )


def _spread(anchors: F32, tokens: int) -> F32:
    return np.repeat(anchors, GROUP, 0)[:tokens]


# ---- tables ------------------------------------------------------------------------------------------------------


def cheapest(numbers: I16) -> tuple[npt.NDArray[np.uint16], float]:
    """The cheapest table of each column, escapes counted; and the bits of all numbers with these."""
    columns = numbers.shape[1]
    if not numbers.size:
        return np.zeros(columns, np.uint16), 0.0
    first, last = max(int(numbers.min()), -ZERO), min(int(numbers.max()), ESCAPE - ZERO)
    first, last = min(first, last), max(first, last)
    width = last - first + 1
    places = np.clip(numbers, first, last) + (np.arange(columns) * width - first)
    counts = np.bincount(places.reshape(-1), minlength=columns * width).reshape(columns, width)
    # float64: the sums are as good as exact, whoever adds them up. By torch: numpy's threads would wait for each other.
    costs = torch.from_numpy(_costs()[:, first + ZERO : last + ZERO + 1])
    bits, ids = (torch.from_numpy(counts).double() @ costs.T).min(1)
    return ids.numpy().astype(np.uint16), float(bits.sum())


@cache
def _costs() -> npt.NDArray[np.float64]:
    """Bits of each symbol by the tables that come with kvtool, float64 `[tables, 256]`: what is beyond a table, or is
    the escape's own symbol, is an escape and 16 bits beside the stream."""
    costs = shipped().costs.astype(np.float64)
    escape = costs[:, ESCAPE, None] + 16
    costs = np.where(np.isfinite(costs), costs, escape)
    costs[:, ESCAPE, None] = escape
    return costs


# ---- records -----------------------------------------------------------------------------------------------------


def pack(sides: tuple[Side, Side], level: int, tokens: int, errors: tuple[float, float]) -> Coded:
    """The record of two quantised sides."""
    tables = shipped()
    parts = [sides[0].rows, sides[1].rows, *(side.anchors for side in sides if side.anchors is not None)]
    columns = [in_order(part.ids, tables) for part in parts]
    found = [to_symbols(part.numbers, of) for part, of in zip(parts, columns, strict=True)]
    streams = encode_all([Encoding(symbols, of) for (symbols, _), of in zip(found, columns, strict=True)])
    return Coded(
        predictors=(sides[0].predictor, sides[1].predictor),
        level=level,
        base=0,
        tokens=tokens,
        columns=sides[0].rows.numbers.shape[1],
        streams=tuple(streams),
        escapes=Escapes(np.empty(0, np.uint32), np.empty(0, np.int16), np.concatenate([marked for _, marked in found])),
        steps=(sides[0].step, sides[1].step),
        errors=errors,
        side=b"".join([sides[0].about, sides[1].about, *(part.ids.astype(np.uint8).tobytes() for part in parts)]),
    )


def unpack(coded: Coded, channels: int) -> tuple[F32, F32]:
    """Decode both sides, float32 `[tokens, C]`.

    Raises
    ------
    DamagedError : parts that do not fit the channels.
    """
    tables = shipped()
    count, columns = streams_of(coded.predictors), padded(channels)
    about = _About(coded.side)
    parameters = [about.of(predictor, channels) for predictor in coded.predictors]
    ids = [about.ids(columns) for _ in range(count)]
    if coded.columns != columns or about.left or coded.base or int(np.stack(ids).max()) >= len(tables):
        raise DamagedError("a compressed record that does not fit its channels")
    anchors = int(is_anchor(coded.tokens).sum())
    heights = [coded.tokens - anchors if p is Predictor.ANCHOR else coded.tokens for p in coded.predictors]
    heights += [anchors] * (count - 2)
    whole_rows = np.zeros((sum(heights), columns), np.int16)
    ends = np.cumsum(heights)
    parts = [whole_rows[end - height : end] for end, height in zip(ends, heights, strict=True)]
    for stream, chosen, end, height in zip(coded.streams, ids, ends.tolist(), heights, strict=True):
        decode(Decoding([stream], in_order(chosen, tables), [end - height], [height], whole_rows))
    coded.escapes.place(whole_rows, "int16")
    escaped = np.flatnonzero(whole_rows == ESCAPE - ZERO)
    if len(escaped) != len(coded.escapes.marked):
        raise DamagedError("a compressed record whose escapes are not those of its streams")
    whole_rows.reshape(-1)[escaped] = coded.escapes.marked
    with np.errstate(over="ignore", invalid="ignore"):  # by a step that no encoder wrote
        return _restored(coded, parameters, [part[:, :channels] for part in parts])


def _restored(coded: Coded, parameters: list[F32], parts: list[I16]) -> tuple[F32, F32]:
    """Both sides from their rows, the anchors' rows, and the means or anchors' steps."""
    more = iter(parts[2:])
    sides = []
    for number, (predictor, about) in enumerate(zip(coded.predictors, parameters, strict=True)):
        rows = parts[number].astype(np.float32) * np.float32(coded.steps[number])
        if predictor is Predictor.MEAN:
            sides.append(rows + about)
            continue
        base = _spread(next(more).astype(np.float32) * about, coded.tokens)
        base[~is_anchor(coded.tokens)] += rows
        sides.append(base)
    return sides[0], sides[1]


class _About:
    """Reads side information."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def _take(self, size: int) -> bytes:
        if size > self.left:
            raise DamagedError("a compressed record without its side information")
        self._at += size
        return self._data[self._at - size : self._at]

    def of(self, predictor: Predictor, channels: int) -> F32:
        if predictor is Predictor.MEAN:
            bits16 = np.frombuffer(self._take(2 * channels), "<u2").astype(np.uint32) << np.uint32(16)
            values = bits16.view(np.float32)
        else:
            values = np.frombuffer(self._take(4 * channels), "<f4").astype(np.float32)
        if not np.isfinite(values).all():
            raise DamagedError("a compressed record whose side information is no number")
        return values

    def ids(self, columns: int) -> npt.NDArray[np.uint16]:
        return np.frombuffer(self._take(columns), np.uint8).astype(np.uint16)
