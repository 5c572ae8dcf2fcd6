"""Stretches of answered prompts: rows of what a model that keeps states computed of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from kvtool.core.cache import tables
from kvtool.core.cache.entries import dump_json, load_json, reading
from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.record import Bytes, Kind, seal, unseal
from kvtool.core.cache.tables import Row, RowKey
from kvtool.core.cache.transaction import Snapshot
from kvtool.core.common.machine import DEVICE_KINDS, NUMBER_FORMATS, Arithmetic
from kvtool.core.errors import DamagedError

Side = Literal["rows", "state"]
Place = tuple[Side, int]  # a part's side and layer
_SIDES: tuple[Side, ...] = ("rows", "state")
_MOST_LAYER = 2**16 - 1  # the largest number that fits into a part's key
_MOST_COUNT = 2**62


@dataclass(frozen=True, slots=True)
class StretchInfo:
    """Describes a stretch whose parts are all stored: a checkpoint of one segment of an answered prompt, computed after
    all segments before it, for the next prompt of the same beginning. It has keys and values of the layers that have
    some, and the states after its last token. Its name is a digest of all token ids from the prompt's beginning to its
    end. Its table has this description under its id, and one part for each layer and side.

    `start`: its first token's position. `rows`: layers of which keys and values are stored; `states`: layers whose
    state after it is stored; none: no prompt can continue from it, but a later stretch needs it. `own`: the prompt
    begins with the store's own instruction. `size`: bytes of the numbers in its parts.
    """

    start: int
    tokens: int
    rows: tuple[int, ...]
    states: tuple[int, ...]
    chunks: tuple[bytes, ...]
    own: bool
    size: int
    arithmetic: Arithmetic

    @property
    def places(self) -> list[Place]:
        return [*(("rows", layer) for layer in self.rows), *(("state", layer) for layer in self.states)]

    def to_bytes(self) -> bytes:
        row = {name: getattr(self, name) for name in self.__slots__} | {
            "chunks": [chunk_id.hex() for chunk_id in self.chunks]
        }
        return dump_json(row)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> StretchInfo:
        with reading("state checkpoint"):
            row = load_json(data)
            rows, states = (tuple(_within(layer, _MOST_LAYER) for layer in row[name]) for name in ("rows", "states"))
            chunks = tuple(tables.check_chunk_id(bytes.fromhex(chunk_id)) for chunk_id in row["chunks"])
            start, tokens, size = (_within(row[name], _MOST_COUNT) for name in ("start", "tokens", "size"))
            dtype, device = row["arithmetic"]
            if dtype not in NUMBER_FORMATS or device not in DEVICE_KINDS:
                raise ValueError("no arithmetic")
            return cls(start, tokens, rows, states, chunks, bool(row["own"]), size, Arithmetic(dtype, device))


def _within(number: object, most: int) -> int:
    if type(number) is not int or not 0 <= number <= most:
        raise ValueError("no such number")
    return number


def part_name(place: Place) -> str:
    return f"{place[0]}-{place[1]}"


def named_part(place: Place) -> str:
    return f"{'rows' if place[0] == 'rows' else 'states'} of layer {place[1]}"


def part_key(stretch: bytes, place: Place) -> bytes:
    side, layer = place
    return tables.check_chunk_id(stretch) + bytes([_SIDES.index(side)]) + layer.to_bytes(2, "big")


def read_row(key: bytes, data: memoryview) -> object:
    return opened_info(key, data) if len(key) == ID_BYTES else unseal(key, Kind.PART, data)


def opened_info(stretch: bytes, data: Bytes) -> StretchInfo:
    return StretchInfo.from_bytes(unseal(stretch, Kind.STRETCH, data))


def opened_part(stretch: bytes, place: Place, data: Bytes) -> memoryview:
    return unseal(part_key(stretch, place), Kind.PART, data)


def described(snapshot: Snapshot) -> Iterator[tuple[bytes, StretchInfo]]:
    """Yield the stretches whose descriptions can be read."""
    for key in _names(snapshot):
        with suppress(DamagedError):
            data = snapshot.get(tables.STRETCHES, key)
            if data is not None:
                yield key, opened_info(key, data)


def _names(snapshot: Snapshot) -> list[bytes]:
    return [key for key in snapshot.keys(tables.STRETCHES) if len(key) == ID_BYTES]


def part_row(stretch: bytes, place: Place, payload: bytes) -> Row:
    key = part_key(stretch, place)
    return tables.STRETCHES, key, seal(key, Kind.PART, payload)


def info_row(stretch: bytes, info: StretchInfo) -> Row:
    """Make the row of a description: put last, it makes the stretch whole."""
    return tables.STRETCHES, stretch, seal(stretch, Kind.STRETCH, info.to_bytes())


def in_turn(stretches: Mapping[bytes, StretchInfo], used: Mapping[bytes, int]) -> list[bytes]:
    """Order stretches for eviction: least recently `used` first, a prompt's last before those that it needs."""

    return sorted(stretches, key=lambda stretch: (used.get(stretch, 0), -stretches[stretch].start))


def least_used(stretches: Mapping[bytes, StretchInfo], used: Mapping[bytes, int], size: int) -> list[bytes]:
    going = []
    for stretch in in_turn(stretches, used):
        if size <= 0:
            break
        size -= stretches[stretch].size
        going.append(stretch)
    return going


def stretch_keys(snapshot: Snapshot, stretch: bytes) -> list[RowKey]:
    used = [(table, stretch) for table in (tables.USED, tables.WARM) if snapshot.has(table, stretch)]
    return [*used, *((tables.STRETCHES, key) for key in snapshot.keys(tables.STRETCHES, stretch))]


def left_over(snapshot: Snapshot) -> list[RowKey]:
    """List the parts without a description: of a writer that was killed, or whose description was damaged."""
    names = {*_names(snapshot)}
    return [(tables.STRETCHES, key) for key in snapshot.keys(tables.STRETCHES) if key[:ID_BYTES] not in names]


def missing_parts(snapshot: Snapshot) -> Iterator[tuple[bytes, Place]]:
    for stretch, info in described(snapshot):
        for key in info.places:
            if not snapshot.has(tables.STRETCHES, part_key(stretch, key)):
                yield stretch, key
