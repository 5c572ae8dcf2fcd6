"""Save and restore checkpoints of a model's recurrent states, with the rows of the layers that attend (*stretches*).

A stretch is the same one on machines of different arithmetic. Rows stand in the store's format and are rounded to what
is computed in here; a state is brought to what the layer's own forward makes of it here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvtool.core.cache.stretches import Place, StretchInfo
from kvtool.core.codec.base import DTYPES, NAMES
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.plan import Plan, Segment
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import BufferLayer
from kvtool.core.model.states import StateCache, StateLayer, States
from kvtool.core.records.encode import check_float16_range

ReadPart = Callable[[bytes, Place], memoryview]  # a stretch's id and a place -> its payload; raises DamagedError
Parts = dict[Place, dict[str, torch.Tensor]]
KEYS, VALUES = "keys", "values"
_ALIGN = 64
_LENGTH = 4
_MOST_SIZES = 8


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """What is stored of a prompt's segments, question excluded.

    Attributes
    ----------
    ids : names of the stretches, one a segment. `infos`: what is stored of each; None: nothing.
    """

    ids: tuple[bytes, ...]
    infos: tuple[StretchInfo | None, ...]

    @property
    def usable(self) -> int:
        """How many segments from the first on can be reused."""
        usable = 0
        for number, info in enumerate(self.infos, 1):
            if info is None:
                break
            usable = number if info.states else usable
        return usable

    def has(self, number: int, with_states: bool) -> bool:
        """Whether a segment's stretch is stored as it could be stored now, or with more."""
        info = self.infos[number]
        return info is not None and (bool(info.states) or not with_states)

    def of(self, numbers: Sequence[int]) -> StoredPrefix:
        """What is stored of these segments."""
        return StoredPrefix(
            tuple(self.ids[number] for number in numbers), tuple(self.infos[number] for number in numbers)
        )

    def without(self, number: int) -> StoredPrefix:
        """The same, had a segment's stretch not been stored."""
        return replace(self, infos=(*self.infos[:number], None, *self.infos[number + 1 :]))


@dataclass(frozen=True, slots=True)
class NewCheckpoint:
    """A segment that was computed, as it can be stored: tensors by place, as they were
    computed; those of rows are views of the cache. `info.size` is of what is kept of them."""

    id: bytes
    number: int
    info: StretchInfo
    parts: Parts


def kept_size(parts: Parts, kept: torch.dtype) -> int:
    """Bytes of numbers that a store keeps of parts, its format being `kept`."""
    return sum(
        tensor.numel() * (kept if place[0] == "rows" else tensor.dtype).itemsize
        for place, tensors in parts.items()
        for tensor in tensors.values()
    )


def encoded(parts: Parts, kept: torch.dtype) -> Iterator[tuple[Place, bytes]]:
    """Make the payloads of parts, as a store of the format `kept` keeps them.

    Rows are rounded to that format, as those of chunks are. States stay in what the model makes of them: what a state
    lost, all that follows would lose (samples/results/states.md).

    Raises
    ------
    ModelError : a number does not fit its format.
    """
    for place, tensors in parts.items():
        stored = {name: one.to(kept) for name, one in tensors.items()} if place[0] == "rows" else tensors
        check_float16_range(stored.values())
        yield place, encode_part(stored)


class CheckpointLoader:
    """Takes stored stretches into a cache."""

    def __init__(self, decoder: Decoder, cache: StateCache, read: ReadPart) -> None:
        self._decoder, self._cache, self._read = decoder, cache, read
        self.bytes_read = 0

    def take(self, plan: Plan, found: StoredPrefix) -> int | None:
        """Take all that is usable; returns the number of a segment of which something is damaged."""
        usable = found.usable
        for number in range(usable):
            info, segment = found.infos[number], plan.segments[number]
            assert info is not None
            try:
                self.take_one(found.ids[number], info, segment, with_states=number == usable - 1)
            except DamagedError:
                return number
        return None

    def take_one(self, stretch: bytes, info: StretchInfo, segment: Segment, with_states: bool) -> None:
        """Take one stretch. Raises DamagedError."""
        self._cache.set_length(segment.stop)
        expected = {number for number, layer in enumerate(self._cache.buffers) if isinstance(layer, BufferLayer)}
        states = {number for number, layer in enumerate(self._cache.buffers) if isinstance(layer, StateLayer)}
        if {*info.rows} != expected or (with_states and {*info.states} != states) or info.tokens != len(segment.ids):
            raise DamagedError("a stretch of another model")
        for layer in info.rows:
            tensors = self._part(stretch, ("rows", layer))
            buffer = self._cache.buffers[layer]
            for name in (KEYS, VALUES):
                there = getattr(buffer, name)[:, :, segment.start : segment.stop]
                there.copy_(fitting(tensors.get(name), there))
        for layer in info.states if with_states else ():
            tensors = self._part(stretch, ("state", layer))
            self._cache.buffers[layer].take(named_states(tensors, self._decoder, layer))

    def _part(self, stretch: bytes, place: Place) -> dict[str, torch.Tensor]:
        payload = self._read(stretch, place)
        self.bytes_read += payload.nbytes
        return decode_part(payload)


def fitting(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Rows as they were stored, in the format of `like`. Raises DamagedError where they cannot stand where it does."""
    if tensor is None or tensor.shape != like.shape or not tensor.dtype.is_floating_point:
        raise DamagedError("the rows of another model")
    return tensor.to(like.dtype)


def named_states(tensors: dict[str, torch.Tensor], decoder: Decoder, layer: int) -> States:
    """Name the tensors of a part as a layer does, each in the format that the layer itself computes it in here.

    Raises
    ------
    DamagedError : they are another model's, or not finite, so that all that follows would be no numbers.
    """
    forms = decoder.state_forms[layer]
    expected = {f"{what} {number}": (what, number) for what, number in forms}
    if tensors.keys() != expected.keys():
        raise DamagedError("the states of another model")
    states = States()
    for name, key in expected.items():
        kind, sizes = forms[key]
        if tensors[name].shape != sizes:
            raise DamagedError("the states of another model")
        if tensors[name].numel() and not all(map(torch.isfinite, tensors[name].aminmax())):
            raise DamagedError("a state whose numbers are not finite")
        states[key] = tensors[name].to(decoder.device, kind)
    return states


# ---- bytes of a part ---------------------------------------------------------------------------------------------
#
# 4 bytes     length of the line, little-endian
# line        JSON: [[name, dtype, [sizes]], …], padded with spaces to a multiple of 64 less 4 bytes
# numbers     of each tensor in C order, each padded to a multiple of 64 bytes


def encode_part(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Make the payload of a part."""
    line = json.dumps([[name, NAMES[one.dtype], list(one.shape)] for name, one in tensors.items()]).encode()
    line += b" " * (-(len(line) + _LENGTH) % _ALIGN)
    return b"".join([len(line).to_bytes(_LENGTH, "little"), line, *(_numbers(one) for one in tensors.values())])


def _numbers(tensor: torch.Tensor) -> bytes:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return data + b"\0" * (-len(data) % _ALIGN)


def decode_part(payload: memoryview) -> dict[str, torch.Tensor]:
    """Make the tensors of a payload: views into its memory.

    Raises
    ------
    DamagedError : it holds something else than it says.
    """
    try:
        stop = _LENGTH + int.from_bytes(payload[:_LENGTH], "little")
        return dict(_tensors(json.loads(bytes(payload[_LENGTH:stop])), payload, stop))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DamagedError(f"a part of a stretch cannot be read: {type(error).__name__}") from error


def _tensors(
    rows: Sequence[tuple[str, str, list[int]]], payload: memoryview, start: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, kind, sizes in rows:
        dtype = DTYPES[kind]
        if len(sizes) > _MOST_SIZES or not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError("no sizes")
        stop = start + math.prod(sizes) * dtype.itemsize
        if stop > payload.nbytes:
            raise ValueError("truncated")
        flat = torch.frombuffer(payload[start:stop], dtype=dtype) if stop > start else torch.empty(0, dtype=dtype)
        yield str(name), flat.view(sizes)
        start = stop + -stop % _ALIGN
    if start != payload.nbytes:
        raise ValueError("another length than it says")
