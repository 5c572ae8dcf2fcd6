"""The bytes of a CacheGen record, and the checks that stand between them and an unchecked kernel.

Little-endian, no padding:

=========  ===========  =====================================================================
offset     type         field
=========  ===========  =====================================================================
0          4s           ``kvg`` and the format version
4          B, B         predictor of K, of V (:class:`Predictor`)
6          B, B         level, and the level it refines (0: none)
8          I            tokens
12         I            columns of the first stream (a multiple of 64)
16         4I           words of the streams; 0 for those that there are not
32         I, I         escapes, bytes of side information
40         f, f         step of K, of V (untransformed predictors)
48         f, f         relative error of K, of V: RMS of the difference over RMS of the tensor
56         16s          digest of the profile, or zeros
72         u16[words]   a stream's words, then u32[64], its states: for each stream
…          bytes        side information of the untransformed predictors (plain.py)
…          u32[escapes] places of the escapes in the numbers `[tokens, stride]`, ascending
…          i16[escapes] their numbers
=========  ===========  =====================================================================

Transformed records have one stream, K's and V's columns side by side. Others have one for K, one for V, and one more
for each side whose predictor is ANCHOR, in this order.
"""

from __future__ import annotations

import enum
import math
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtool.core.codec.base import Payload
from kvtool.core.codec.entropy.reference import LANES, Stream
from kvtool.core.codec.levels import LOSSY
from kvtool.core.errors import DamagedError

FORMAT = 1
NO_PROFILE = bytes(16)
MOST_NUMBER = 32767

_MAGIC = b"kvg" + bytes([FORMAT])
_HEADER = struct.Struct("<4s4B8I4f16s")
_MOST_STREAMS = 4
_STATES_BYTES = 4 * LANES


class Predictor(enum.IntEnum):
    """What is subtracted before a side is quantised. The numbers are on disk: never reuse one."""

    MEAN = 0  # each channel's mean over the chunk
    ANCHOR = 1  # the first token of each group of ten, in 8 bits (CacheGen, section 5.1)
    TRANSFORM = 2  # the profile's mean, then its transform


def streams_of(predictors: tuple[Predictor, Predictor]) -> int:
    """How many streams a record has.

    Raises
    ------
    DamagedError : only one side is transformed.
    """
    transformed = predictors.count(Predictor.TRANSFORM)
    if transformed == 1:
        raise DamagedError("a compressed record with one side transformed")
    return 1 if transformed else 2 + predictors.count(Predictor.ANCHOR)


@dataclass(frozen=True, slots=True)
class Coded:
    """A record's parts.

    Attributes
    ----------
    base : number of the level it refines; 0: it stands alone.
    columns : of the first stream.
    places, numbers : escapes: where in the numbers `[tokens, stride]`, flat, uint32; and what, int16.
    """

    predictors: tuple[Predictor, Predictor]
    level: int
    base: int
    tokens: int
    columns: int
    streams: tuple[Stream, ...]
    places: npt.NDArray[np.uint32]
    numbers: npt.NDArray[np.int16]
    steps: tuple[float, float] = (0.0, 0.0)
    errors: tuple[float, float] = (0.0, 0.0)
    profile: bytes = NO_PROFILE
    side: bytes = b""

    def pack(self) -> list[Payload]:
        """The record as parts, to be joined."""
        words = [len(stream.words) for stream in self.streams]
        header = _HEADER.pack(
            _MAGIC,
            *self.predictors,
            self.level,
            self.base,
            self.tokens,
            self.columns,
            *words,
            *[0] * (_MOST_STREAMS - len(words)),
            len(self.places),
            len(self.side),
            *self.steps,
            *self.errors,
            self.profile,
        )
        streams = [part for stream in self.streams for part in _stream_parts(stream)]
        return [
            header,
            *streams,
            self.side,
            self.places.astype("<u4").tobytes(),
            self.numbers.astype("<i2").tobytes(),
        ]

    @classmethod
    def parse(cls, payload: Payload) -> Coded:
        """The parts of a record, as views; every length and place is checked.

        Raises
        ------
        DamagedError : what no encoder writes.
        """
        view = memoryview(payload)
        if len(view) < _HEADER.size:
            raise DamagedError("a compressed record without its header")
        magic, *fields = _HEADER.unpack_from(view)
        kinds, (level, base, tokens, columns), words = fields[:2], fields[2:6], fields[6:10]
        (escapes, side), steps, errors, profile = fields[10:12], fields[12:14], fields[14:16], fields[16]
        if magic != _MAGIC:
            raise DamagedError(f"a compressed record of another format than {FORMAT}")
        if not 1 <= level <= len(LOSSY) or base not in (0, level + 1) or base > len(LOSSY):
            raise DamagedError("a compressed record of no known level")
        if any(kind not in set(Predictor) for kind in kinds) or columns % LANES:
            raise DamagedError("a compressed record with an unknown predictor or layout")
        if not all(math.isfinite(number) and number >= 0 for number in (*steps, *errors)):
            raise DamagedError("a compressed record whose step or error is no number")
        predictors = (Predictor(kinds[0]), Predictor(kinds[1]))
        count = streams_of(predictors)
        cut = _Cut(view, _HEADER.size)
        streams = tuple(cut.stream(number) for number in words[:count])
        about = bytes(cut.take(side))
        places = np.frombuffer(cut.take(4 * escapes), "<u4")
        numbers = np.frombuffer(cut.take(2 * escapes), "<i2")
        if cut.at != len(view) or any(words[count:]):
            raise DamagedError("a compressed record with bytes that belong to nothing")
        if len(places) > 1 and (np.diff(places.astype(np.int64)) <= 0).any():
            raise DamagedError("a compressed record whose escapes are out of order")
        return cls(
            predictors=predictors,
            level=level,
            base=base,
            tokens=tokens,
            columns=columns,
            streams=streams,
            places=places,
            numbers=numbers,
            steps=(steps[0], steps[1]),
            errors=(errors[0], errors[1]),
            profile=profile,
            side=about,
        )

    def patch(self, numbers: npt.NDArray[np.int16]) -> None:
        """Put the escapes into the numbers `[tokens, stride]`; raises DamagedError."""
        if not len(self.places):
            return
        if int(self.places[-1]) >= numbers.size:
            raise DamagedError("a compressed record with an escape outside of it")
        numbers.reshape(-1)[self.places] = self.numbers


def _stream_parts(stream: Stream) -> list[Payload]:
    return [stream.words.astype("<u2").tobytes(), stream.states.astype("<u4").tobytes()]


class _Cut:
    """Takes one part after another off a payload, and never more than there is."""

    def __init__(self, view: memoryview, at: int) -> None:
        self._view, self.at = view, at

    def take(self, size: int) -> memoryview:
        if size > len(self._view) - self.at:
            raise DamagedError("a compressed record that ends too early")
        self.at += size
        return self._view[self.at - size : self.at]

    def stream(self, words: int) -> Stream:
        taken = np.frombuffer(self.take(2 * words), "<u2")
        return Stream(taken, np.frombuffer(self.take(_STATES_BYTES), "<u4"))
