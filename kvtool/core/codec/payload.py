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
32         4I           placed escapes, marked escapes, their columns, bytes of side information
48         f, f         step of K, of V (untransformed predictors)
56         f, f         relative error of K, of V: RMS of the difference over RMS of the tensor
64         16s          digest of the profile, or zeros
80         u16[words]   a stream's words, then u32[64], its states: for each stream
…          bytes        side information of the untransformed predictors (plain.py)
…          u32[], i16[] placed escapes: where in the numbers `[rows, stride]`, ascending; and which number
…          u16[], i16[] columns with marked escapes, ascending; the numbers, row by row
=========  ===========  =====================================================================

Transformed records have one stream, K's and V's columns side by side. Others have one for K, one for V, and one more
for each side whose predictor is ANCHOR, in this order. A marked escape stands in a stream as a symbol of its own; a
placed one belongs to a column that is not coded.
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
from kvtool.core.codec.entropy.tables import ESCAPE, ZERO
from kvtool.core.codec.levels import LOSSY
from kvtool.core.errors import DamagedError

FORMAT = 1
NO_PROFILE = bytes(16)
MOST_NUMBER = 32767

_MAGIC = b"kvg" + bytes([FORMAT])
_HEADER = struct.Struct("<4s4B10I4f16s")
_MOST_STREAMS = 4
_STATES_BYTES = 4 * LANES


class Predictor(enum.IntEnum):
    """What is subtracted before a side is quantised. The numbers are on disk: never reuse one."""

    MEAN = 0  # each channel's mean over the chunk
    ANCHOR = 1  # the first token of each group of ten, in 8 bits (CacheGen, section 5.1)
    TRANSFORM = 2  # the profile's mean, then its transform


_KINDS = frozenset(Predictor)


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
class Escapes:
    """Numbers that no symbol of their column's table stands for.

    Attributes
    ----------
    places, placed : in columns that are not coded: uint32, flat in the numbers `[rows, stride]`; and int16.
    columns, marked : in columns that are: uint16; and int16, row by row, for each symbol ESCAPE in these columns.
    """

    places: npt.NDArray[np.uint32]
    placed: npt.NDArray[np.int16]
    columns: npt.NDArray[np.uint16]
    marked: npt.NDArray[np.int16]

    @classmethod
    def of(cls, numbers: npt.NDArray[np.int16], marks: npt.NDArray[np.bool_], left: npt.NDArray[np.int64]) -> Escapes:
        """The escapes of numbers `[rows, stride]`: where `marks` is true, and at the flat places `left`."""
        columns = np.flatnonzero(marks.any(0))
        return cls(
            left.astype(np.uint32),
            numbers.reshape(-1)[left],
            columns.astype(np.uint16),
            numbers[:, columns][marks[:, columns]],
        )

    @property
    def counts(self) -> tuple[int, int, int]:
        """Placed ones, marked ones, columns of these."""
        return len(self.places), len(self.marked), len(self.columns)

    def pack(self) -> list[Payload]:
        """As they stand in a record."""
        return [
            self.places.astype("<u4").tobytes(),
            self.placed.astype("<i2").tobytes(),
            self.columns.astype("<u2").tobytes(),
            self.marked.astype("<i2").tobytes(),
        ]

    def patch(self, numbers: npt.NDArray[np.int16]) -> None:
        """Put the escapes into decoded numbers `[rows, stride]`.

        Raises
        ------
        DamagedError : one lies outside, or the stream has not as many marks.
        """
        if len(self.places):
            if int(self.places[-1]) >= numbers.size:
                raise DamagedError("a compressed record with an escape outside of it")
            numbers.reshape(-1)[self.places] = self.placed
        if not len(self.columns):
            return
        if int(self.columns[-1]) >= numbers.shape[1]:
            raise DamagedError("a compressed record with an escape outside of it")
        some = numbers[:, self.columns]
        marks = some == ESCAPE - ZERO
        if np.count_nonzero(marks) != len(self.marked):
            raise DamagedError("a compressed record whose escapes are not those of its stream")
        some[marks] = self.marked
        numbers[:, self.columns] = some


def _ascends(values: npt.NDArray[np.unsignedinteger]) -> bool:
    return len(values) < 2 or bool((values[1:] > values[:-1]).all())


@dataclass(frozen=True, slots=True)
class Coded:
    """A record's parts.

    Attributes
    ----------
    base : number of the level it refines; 0: it stands alone.
    columns : of the first stream.
    escapes : numbers that no symbol of their table stands for.
    """

    predictors: tuple[Predictor, Predictor]
    level: int
    base: int
    tokens: int
    columns: int
    streams: tuple[Stream, ...]
    escapes: Escapes
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
            *self.escapes.counts,
            len(self.side),
            *self.steps,
            *self.errors,
            self.profile,
        )
        streams = [part for stream in self.streams for part in _stream_parts(stream)]
        return [header, *streams, self.side, *self.escapes.pack()]

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
        counts, side, steps, errors, profile = fields[10:13], fields[13], fields[14:16], fields[16:18], fields[18]
        if magic != _MAGIC:
            raise DamagedError(f"a compressed record of another format than {FORMAT}")
        if not 1 <= level <= len(LOSSY) or base not in (0, level + 1) or base > len(LOSSY):
            raise DamagedError("a compressed record of no known level")
        if not _KINDS.issuperset(kinds) or columns % LANES:
            raise DamagedError("a compressed record with an unknown predictor or layout")
        if not all(math.isfinite(number) and number >= 0 for number in (*steps, *errors)):
            raise DamagedError("a compressed record whose step or error is no number")
        predictors = (Predictor(kinds[0]), Predictor(kinds[1]))
        count = streams_of(predictors)
        cut = _Cut(view, _HEADER.size)
        streams = tuple(cut.stream(number) for number in words[:count])
        about = bytes(cut.take(side))
        escapes = Escapes(
            np.frombuffer(cut.take(4 * counts[0]), "<u4"),
            np.frombuffer(cut.take(2 * counts[0]), "<i2"),
            np.frombuffer(cut.take(2 * counts[2]), "<u2"),
            np.frombuffer(cut.take(2 * counts[1]), "<i2"),
        )
        if cut.at != len(view) or any(words[count:]):
            raise DamagedError("a compressed record with bytes that belong to nothing")
        if not (_ascends(escapes.places) and _ascends(escapes.columns)):
            raise DamagedError("a compressed record whose escapes are out of order")
        return cls(
            predictors=predictors,
            level=level,
            base=base,
            tokens=tokens,
            columns=columns,
            streams=streams,
            escapes=escapes,
            steps=(steps[0], steps[1]),
            errors=(errors[0], errors[1]),
            profile=profile,
            side=about,
        )


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
