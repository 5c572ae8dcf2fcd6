"""Lossy records (`1` to `4`, `cachegen-…`): their bytes, and the checks before an unchecked kernel reads them.

`kvtool help codec` has the fields of the header, little-endian without padding, in the order of `_HEADER`. After it
follow, for each stream, its words (u16) and states (u32[64]); the side information of records without a transform
(cachegen.py); the placed escapes' places (u32, ascending) and numbers (i16); and the marked escapes' numbers (i16),
stream by stream, row by row.

Transformed records have one stream, K's columns and then V's. Others have four: K, V, the anchors of K and those of V.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtool.core.codec.base import Payload
from kvtool.core.codec.levels import NESTED, NO_PROFILE
from kvtool.core.codec.rans.tables import LANES, Stream
from kvtool.core.errors import DamagedError, KvtoolError
from kvtool.core.native.jit import address

FORMAT = 1

_MAGIC = b"kvg" + bytes([FORMAT])
# Magic; 1 if transformed, level and base's level; tokens, columns of the first stream, words of 4 streams,
# placed escapes, marked escapes, check of the base, bytes of side information; steps and errors of K and of V; profile.
_HEADER = struct.Struct("<4sH2B10I4f16s")
_STREAMS = {True: 1, False: 4}  # by whether a record is transformed
_STATES_BYTES = 4 * LANES
_U8, _U16, _U32, _I16 = (np.dtype(name) for name in ("u1", "<u2", "<u4", "<i2"))
_NOTHING = {dtype: np.empty(0, dtype) for dtype in (_U8, _U16, _U32, _I16)}


@dataclass(slots=True)  # see Stream
class Escapes:
    """Numbers that their column's table has no symbol for."""

    places: npt.NDArray[np.uint32]  # in columns that are not coded: flat places in `[rows, stride]`
    placed: npt.NDArray[np.int16]  # the numbers there
    marked: npt.NDArray[np.int16]  # in columns that are coded, one for each ESCAPE, stream by stream, row by row

    def pack(self) -> list[Payload]:
        return [
            part.astype(dtype).tobytes()
            for part, dtype in ((self.places, _U32), (self.placed, _I16), (self.marked, _I16))
            if len(part)
        ]

    def has_places(self, count: int) -> bool:
        if len(self.places) and int(self.places[-1]) >= count:
            raise DamagedError("a compressed record with an escape outside of it")
        return bool(len(self.places))

    def place(self, numbers: npt.NDArray[np.int16]) -> None:
        if self.has_places(numbers.size):
            numbers.reshape(-1)[self.places] = self.placed


@dataclass(slots=True)  # see Stream
class Record:
    transformed: bool  # by the profile's transform; else by the paper's scheme (cachegen.py)
    level: int
    base: int  # number of the level that it refines; 0: none
    tokens: int
    columns: int  # of the first stream
    streams: tuple[Stream, ...]
    escapes: Escapes
    steps: tuple[float, float] = (0.0, 0.0)
    errors: tuple[float, float] = (0.0, 0.0)
    profile: bytes = NO_PROFILE
    side: bytes = b""
    base_check: int = 0  # `check_of` the record that it refines

    def pack(self) -> list[Payload]:
        """As parts, to be joined. Raises KvtoolError: numbers were too large to state an error."""
        if not sum(self.errors) < math.inf:
            raise KvtoolError("the KV holds numbers that are too large to code", "keep it at the level raw or lossless")
        words = [len(stream.words) for stream in self.streams]
        header = _HEADER.pack(
            _MAGIC,
            self.transformed,
            self.level,
            self.base,
            self.tokens,
            self.columns,
            *words,
            *[0] * (_STREAMS[False] - len(words)),
            len(self.escapes.places),
            len(self.escapes.marked),
            self.base_check,
            len(self.side),
            *self.steps,
            *self.errors,
            self.profile,
        )
        streams = [
            part.astype(dtype, copy=False).tobytes()
            for stream in self.streams
            for part, dtype in ((stream.words, _U16), (stream.states, _U32))
        ]
        return [header, *streams, self.side, *self.escapes.pack()]

    @classmethod
    def parse(cls, payload: Payload) -> Record:
        """View the parts of a record. Raises DamagedError: a length or place that no encoder writes."""
        fields = _header(payload)
        transformed, level, base, tokens, columns = fields[1:6]
        words, (placed, marked, check, side), numbers = fields[6:10], fields[10:14], fields[14:18]
        if transformed > 1 or columns % LANES:
            raise DamagedError("a compressed record of an unknown kind or layout")
        if min(numbers) < 0 or not sum(numbers) < math.inf:  # a sum with NaN is NaN
            raise DamagedError("a compressed record whose step or error is no number")
        count = _STREAMS[bool(transformed)]
        size = _HEADER.size + 2 * sum(words) + _STATES_BYTES * count + side + 6 * placed + 2 * marked
        if size != len(payload) or any(words[count:]) or bool(check) != bool(base):
            what = "that ends too early" if size > len(payload) else "with bytes that belong to nothing"
            raise DamagedError(f"a compressed record {what}")
        cut = _Cut(payload, _HEADER.size)
        return cls(
            transformed=bool(transformed),
            level=level,
            base=base,
            tokens=tokens,
            columns=columns,
            streams=tuple([cut.stream(number) for number in words[:count]]),
            side=cut.take(_U8, side).tobytes(),
            escapes=cut.escapes(placed, marked),
            steps=numbers[:2],
            errors=numbers[2:],
            profile=fields[18],
            base_check=check,
        )


def _header(payload: Payload) -> tuple[Any, ...]:
    if len(payload) < _HEADER.size:
        raise DamagedError("a compressed record without its header")
    fields = _HEADER.unpack_from(payload)
    level, base = fields[2:4]
    if fields[0] != _MAGIC:
        raise DamagedError(f"a compressed record of another format than {FORMAT}")
    if not 1 <= level <= len(NESTED) or base not in (0, level + 1) or base > len(NESTED):
        raise DamagedError("a compressed record of no known level")
    return fields


class _Cut:
    def __init__(self, payload: Payload, at: int) -> None:
        self._payload, self._at = payload, at
        self._begin = address(np.frombuffer(payload, np.uint8))

    def stream(self, words: int) -> Stream:
        begin = self._begin + self._at
        return Stream(self.take(_U16, words), self.take(_U32, LANES), begin)

    def escapes(self, placed: int, marked: int) -> Escapes:
        places, numbers = self.take(_U32, placed), self.take(_I16, placed)
        if not (places[1:] > places[:-1]).all():
            raise DamagedError("a compressed record whose escapes are out of order")
        return Escapes(places, numbers, self.take(_I16, marked))

    def take(self, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        if not count:
            return _NOTHING[dtype]
        at = self._at
        self._at += count * dtype.itemsize
        return np.frombuffer(self._payload, dtype, count, at)
