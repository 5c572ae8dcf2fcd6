"""Prefix cache of a recurrent model: restore the longest stored prefix of a prompt, exactly, and compute what follows.

A recurrent state depends on every earlier token, so only an equal prefix can be reused. An answered prompt is stored as
checkpoints, one a segment: keys and values of the layers that have some, as they are in the prompt, and at some ends
the states. A prefix is reusable as far as no checkpoint is missing, back to the last one with states.

A checkpoint serves machines of every arithmetic. Rows are stored in the store's format and converted to the format that
is computed in here; a state is converted to the format that the layer's own forward gives here.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvtool.core.cache.stretches import Place, StretchInfo
from kvtool.core.codec.base import DTYPES, NAMES
from kvtool.core.common.timeline import Timeline, add_span
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.engine import Fused, FuseTiming, TokenCounts
from kvtool.core.fusion.plan import Plan, Segment
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.shift import Shifted
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.hf.states import StateCache, StateLayer, States
from kvtool.core.model.prompt_cache import BufferLayer
from kvtool.core.records.encode import check_float16_range

ReadPart = Callable[[bytes, Place], memoryview]  # a stretch's id and a place -> its payload; raises DamagedError
Parts = dict[Place, dict[str, torch.Tensor]]
KEYS, VALUES = "keys", "values"
_ALIGN = 64
_LENGTH = 4
_MOST_SIZES = 8


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Checkpoints of a prompt's segments without the question: all `ids`, and the `infos` of those stored."""

    ids: tuple[bytes, ...]
    infos: tuple[StretchInfo | None, ...]

    @property
    def usable(self) -> int:
        usable = 0
        for number, info in enumerate(self.infos, 1):
            if info is None:
                break
            usable = number if info.states else usable
        return usable

    def has(self, number: int, with_states: bool) -> bool:
        info = self.infos[number]
        return info is not None and (bool(info.states) or not with_states)

    def of(self, numbers: Sequence[int]) -> StoredPrefix:
        return StoredPrefix(
            tuple(self.ids[number] for number in numbers), tuple(self.infos[number] for number in numbers)
        )

    def without(self, number: int) -> StoredPrefix:
        return replace(self, infos=(*self.infos[:number], None, *self.infos[number + 1 :]))


@dataclass(frozen=True, slots=True)
class NewCheckpoint:
    """A computed segment that can be stored: tensors by place; those of rows are views of the cache."""

    id: bytes
    number: int
    info: StretchInfo
    parts: Parts


def kept_size(parts: Parts, kept: torch.dtype) -> int:
    return sum(
        tensor.numel() * (kept if place[0] == "rows" else tensor.dtype).itemsize
        for place, tensors in parts.items()
        for tensor in tensors.values()
    )


def encoded(parts: Parts, kept: torch.dtype) -> Iterator[tuple[Place, bytes]]:
    """Encode the payloads of parts for a store of the format `kept`. Rows are rounded to that format, as those of
    chunks are. States are not: all that follows would lose what a state has lost (samples/results/speed.md). Raises
    ModelError: a number does not fit its format."""
    for place, tensors in parts.items():
        stored = {name: one.to(kept) for name, one in tensors.items()} if place[0] == "rows" else tensors
        check_float16_range(stored.values())
        yield place, encode_part(stored)


class CheckpointLoader:
    def __init__(self, decoder: Decoder, cache: StateCache, read: ReadPart) -> None:
        self._decoder, self._cache, self._read = decoder, cache, read
        self.bytes_read = 0

    def take(self, plan: Plan, found: StoredPrefix) -> int | None:
        """Restore all usable checkpoints; return the number of a damaged one, or None."""
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
        """Restore one checkpoint. Raises DamagedError."""
        self._cache.set_length(segment.stop)
        expected = {number for number, layer in enumerate(self._cache.buffers) if isinstance(layer, BufferLayer)}
        states = {number for number, layer in enumerate(self._cache.buffers) if isinstance(layer, StateLayer)}
        if {*info.rows} != expected or (with_states and {*info.states} != states) or info.tokens != len(segment.ids):
            raise DamagedError("a state checkpoint of another model")
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
    if tensor is None or tensor.shape != like.shape or not tensor.dtype.is_floating_point:
        raise DamagedError("the rows of another model")
    return tensor.to(like.dtype)


def named_states(tensors: dict[str, torch.Tensor], decoder: Decoder, layer: int) -> States:
    """Name the tensors of a part as a layer does, each in the format that the layer's own forward gives here. Raises
    DamagedError: they are another model's, or not finite, which would spoil all that follows."""
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
    line = json.dumps([[name, NAMES[one.dtype], list(one.shape)] for name, one in tensors.items()]).encode()
    line += b" " * (-(len(line) + _LENGTH) % _ALIGN)
    return b"".join([len(line).to_bytes(_LENGTH, "little"), line, *(_numbers(one) for one in tensors.values())])


def _numbers(tensor: torch.Tensor) -> bytes:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return data + b"\0" * (-len(data) % _ALIGN)


def decode_part(payload: memoryview) -> dict[str, torch.Tensor]:
    """Decode the tensors of a part: views into the payload's memory. Raises DamagedError."""
    try:
        stop = _LENGTH + int.from_bytes(payload[:_LENGTH], "little")
        return dict(_tensors(json.loads(bytes(payload[_LENGTH:stop])), payload, stop))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DamagedError(f"a part of a state checkpoint cannot be read: {type(error).__name__}") from error


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


DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class PrefixFused:
    """An answered prompt, whose reused segments are `exact` in its plan. `new`: the checkpoints that are worth storing;
    `used`: ids of those that were reused."""

    fused: Fused
    new: tuple[NewCheckpoint, ...]
    used: tuple[bytes, ...]


def checkpoint_ends(segments: int) -> frozenset[int]:
    """Choose the segments of a prompt (from 0) whose checkpoints have states: the first, the last, and those 1, 2, 4,
    8, … before that. A state may be many times larger than a segment's keys and values, so not all are stored. A prompt
    that differs from some segment on computes at most twice as many segments as it must."""
    last = segments - 1
    back = [0, *(2**power for power in range(segments.bit_length()))]
    return frozenset({0, *(last - steps for steps in back)} & {*range(segments)})


def fuse_prefix(
    decoder: Decoder,
    plan: Plan,
    selector: Selector,
    found: StoredPrefix,
    read: ReadPart,
    reserve: int = 0,
    timeline: Timeline | None = None,
) -> PrefixFused:
    """Restore the longest stored prefix of a prompt and compute what follows. A damaged checkpoint is given up: the
    prefix is shorter then. The plan has no cached segment; its chunks' ids are noted in the checkpoints. Stored
    checkpoints after the reused ones are replaced."""
    while True:
        cache = decoder.new_cache(plan.length + reserve)
        assert isinstance(cache, StateCache)
        loading = CheckpointLoader(decoder, cache, read)
        started = time.perf_counter()
        damaged = loading.take(plan, found)
        if damaged is None:
            break
        found = found.without(damaged)
        plan = plan.without(plan.segments[damaged], DAMAGED)
    read_ms = add_span(timeline, "read states", started) * 1e3
    started = time.perf_counter()
    plan = _as_reused(plan, found.usable)
    logits, new = _compute(decoder, plan, cache, found)
    cache.mark()
    took = add_span(timeline, "compute", started) * 1e3
    fused = _fused(decoder, plan, selector, cache, logits, loading.bytes_read, (read_ms, took))
    return PrefixFused(fused, tuple(new), found.ids[: found.usable])


def extend_prefix(
    decoder: Decoder,
    cache: StateCache,
    plan: Plan,
    selector: Selector,
    reserve: int = 0,
    timeline: Timeline | None = None,
) -> PrefixFused:
    """Compute the segments of a plan after the first, whose states `cache` holds; nothing is worth storing."""
    started, resident = time.perf_counter(), plan.segments[0].stop
    cache.reserve(plan.length + reserve)
    logits = pass_of(decoder, plan.ids[resident:], resident, cache)
    took = add_span(timeline, "compute", started) * 1e3
    return PrefixFused(_fused(decoder, plan, selector, cache, logits, 0, (0.0, took)), (), ())


def _compute(
    decoder: Decoder, plan: Plan, cache: StateCache, found: StoredPrefix
) -> tuple[torch.Tensor, list[NewCheckpoint]]:
    """Compute all segments that are not reused, and copy the states where checkpoints have some. Returns the last
    token's logits, float32 `[vocabulary]`, and the new checkpoints."""
    context = plan.segments[:-1]
    ends = checkpoint_ends(len(context)) if found.ids else frozenset()
    states: dict[int, dict[int, States]] = {}
    ids: list[int] = []
    start = context[found.usable - 1].stop if found.usable else 0
    logits = torch.empty(0, dtype=torch.float32)
    for number, segment in enumerate(plan.segments[found.usable :], found.usable):
        ids.extend(segment.ids)
        if ids and (number in ends or segment is plan.segments[-1]):
            logits = pass_of(decoder, ids, start, cache)
            start, ids = start + len(ids), []
        if number in ends:
            states[number] = _copied(cache)
    wanted = [number for number in range(found.usable, len(found.ids)) if not found.has(number, number in states)]
    return logits, [_new(decoder, plan, found, number, cache, states.get(number, {})) for number in wanted]


def pass_of(decoder: Decoder, ids: Sequence[int], start: int, cache: StateCache) -> torch.Tensor:
    """Compute rows from place `start` on after the current states; return the last logits, float32 `[vocabulary]`."""
    stop = start + len(ids)
    cache.set_length(stop)
    return decoder.compute(ids, QueryRows.of(torch.arange(start, stop), decoder.device), cache)[-1]


def _copied(cache: StateCache) -> dict[int, States]:
    return {
        number: {name: tensor.to("cpu", copy=True) for name, tensor in layer.states().items()}
        for number, layer in enumerate(cache.buffers)
        if isinstance(layer, StateLayer)
    }


def _new(
    decoder: Decoder, plan: Plan, found: StoredPrefix, number: int, cache: StateCache, states: dict[int, States]
) -> NewCheckpoint:
    segment = plan.segments[number]
    parts: Parts = dict(_rows(cache, segment))
    for layer, held in states.items():
        parts["state", layer] = {f"{what} {at}": one for (what, at), one in held.items()}
    chunks = [one.source.chunk_id for one in plan.segments[1 : number + 1] if one.source.chunk_id]
    info = StretchInfo(
        start=segment.start,
        tokens=len(segment.ids),
        rows=tuple(sorted(layer for side, layer in parts if side == "rows")),
        states=tuple(sorted(states)),
        chunks=tuple(dict.fromkeys(chunks)),
        own=bool(plan.segments[0].source.chunk_id or not plan.segments[0].ids),
        size=kept_size(parts, decoder.kv_dtype),
        arithmetic=decoder.loaded.arithmetic,
    )
    return NewCheckpoint(found.ids[number], number, info, {place: parts[place] for place in info.places})


def _rows(cache: StateCache, segment: Segment) -> Iterator[tuple[Place, dict[str, torch.Tensor]]]:
    for number, layer in enumerate(cache.buffers):
        if isinstance(layer, BufferLayer):
            sides = {name: getattr(layer, name)[:, :, segment.start : segment.stop] for name in (KEYS, VALUES)}
            yield ("rows", number), sides


# ---- results as of other modes -----------------------------------------------------------------------------------


def _as_reused(plan: Plan, usable: int) -> Plan:
    context = [
        replace(one, status="exact", reason="") if at < usable else replace(one, status="miss")
        for at, one in enumerate(plan.segments[:-1])
    ]
    return Plan((*context, plan.segments[-1]))


def _fused(
    decoder: Decoder,
    plan: Plan,
    selector: Selector,
    cache: StateCache,
    logits: torch.Tensor,
    bytes_read: int,
    took: tuple[float, float],
) -> Fused:
    reused = int(plan.mask("exact").sum())
    none = torch.zeros(plan.length, dtype=torch.bool)
    resident = int(plan.mask("resident").sum())
    fresh = plan.length - reused - resident
    return Fused(
        logits=logits,
        cache=cache,
        plan=plan,
        tokens=TokenCounts(plan.length, reused, 0, fresh, (fresh,) * len(decoder.layers), resident),
        timing=FuseTiming(took[0], 0.0, 0.0, 0.0, 0.0, 0.0, took[1], 0.0),
        bytes_read=bytes_read,
        recomputed=none,
        reasons=selector.reasons(plan, none),
        shifted=Shifted(none, ()),
    )
