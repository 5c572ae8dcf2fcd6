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
from typing import TYPE_CHECKING

import torch

from kvtool.core.cache.tables import Place, StretchInfo
from kvtool.core.codec.base import DTYPES, NAMES
from kvtool.core.common.types import Timeline, add_span
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.engine import Fused, FuseTiming, TokenCounts
from kvtool.core.fusion.plan import Plan, Segment
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.shift import Shifted
from kvtool.core.model.decoder import Decoder, has_state, is_recurrent
from kvtool.core.model.forward import QueryRows
from kvtool.core.model.prompt_cache import BufferLayer
from kvtool.core.records.encode import check_float16_range

if TYPE_CHECKING:
    from kvtool.core.model.hf.states import StateCache, States

ReadPart = Callable[[bytes, Place], memoryview]  # a stretch's id and a place -> its payload; raises DamagedError
Parts = dict[Place, dict[str, torch.Tensor]]
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

    def first(self, count: int) -> StoredPrefix:
        return StoredPrefix(self.ids[:count], self.infos[:count])


@dataclass(frozen=True, slots=True)
class NewCheckpoint:
    """A computed segment that can be stored: tensors by place; those of rows are views of the cache."""

    id: bytes
    number: int
    info: StretchInfo
    parts: Parts


def encoded(parts: Parts, dtype: torch.dtype) -> Iterator[tuple[Place, bytes]]:
    """Encode the payloads of parts for a store of the format `kept`. Rows are rounded to that format, as those of
    chunks are. States are not: all that follows would lose what a state has lost (samples/results/speed.md). Raises
    ModelError: a number does not fit its format."""
    for key, tensors in parts.items():
        stored = {name: tensor.to(dtype) for name, tensor in tensors.items()} if key[0] == "rows" else tensors
        check_float16_range(stored.values())
        yield key, encode_part(stored)


def _restore(
    decoder: Decoder, cache: StateCache, segment: Segment, prefix: StoredPrefix, number: int, read: ReadPart
) -> int:
    """Restore one checkpoint, with states if it is the last usable one; return the bytes read. Raises DamagedError."""
    info = prefix.infos[number]
    assert info is not None
    rows = {at for at, layer in enumerate(cache.buffers) if isinstance(layer, BufferLayer)}
    states = {at for at, layer in enumerate(cache.buffers) if has_state(layer)}
    with_states = number == prefix.usable - 1
    if {*info.rows} != rows or (with_states and {*info.states} != states) or info.tokens != len(segment.ids):
        raise DamagedError("a state checkpoint of another model")
    cache.set_length(segment.stop)
    bytes_read = 0
    for side, layer in info.places:
        if side == "state" and not with_states:
            continue
        payload = read(prefix.ids[number], (side, layer))
        bytes_read += payload.nbytes
        tensors = decode_part(payload)
        if side == "state":
            cache.buffers[layer].take(named_states(tensors, decoder, layer))
            continue
        for name, there in _rows(cache.buffers[layer], segment).items():
            stored = tensors.get(name)
            if stored is None or stored.shape != there.shape or not stored.dtype.is_floating_point:
                raise DamagedError("the rows of another model")
            there.copy_(stored.to(there.dtype))
    return bytes_read


def named_states(tensors: dict[str, torch.Tensor], decoder: Decoder, layer: int) -> States:
    """Name the tensors of a part as a layer does, each in the format that the layer's own forward gives here. Raises
    DamagedError: they are another model's, or not finite, which would spoil all that follows."""
    forms, states = decoder.state_forms[layer], {}
    if tensors.keys() != {f"{kind} {number}" for kind, number in forms}:
        raise DamagedError("the states of another model")
    for (kind, number), (dtype, sizes) in forms.items():
        tensor = tensors[f"{kind} {number}"]
        if tensor.shape != sizes:
            raise DamagedError("the states of another model")
        if tensor.numel() and not all(map(torch.isfinite, tensor.aminmax())):
            raise DamagedError("a state whose numbers are not finite")
        states[kind, number] = tensor.to(decoder.device, dtype)
    return states


# ---- bytes of a part ---------------------------------------------------------------------------------------------
#
# 4 bytes     length of the line, little-endian
# line        JSON: [[name, dtype, [sizes]], …], padded with spaces to a multiple of 64 less 4 bytes
# numbers     of each tensor in C order, each padded to a multiple of 64 bytes


def encode_part(tensors: Mapping[str, torch.Tensor]) -> bytes:
    line = json.dumps([[name, NAMES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()]).encode()
    line += b" " * (-(len(line) + _LENGTH) % _ALIGN)
    return b"".join([len(line).to_bytes(_LENGTH, "little"), line, *(_numbers(tensor) for tensor in tensors.values())])


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
    prefix: StoredPrefix,
    read: ReadPart,
    reserve: int = 0,
    timeline: Timeline | None = None,
) -> PrefixFused:
    """Restore the longest stored prefix of a prompt and compute what follows. A damaged checkpoint is given up: the
    prefix is shorter then. The plan has no cached segment; its chunks' ids are noted in the checkpoints. Stored
    checkpoints after the reused ones are replaced."""
    while True:
        cache = decoder.new_cache(plan.length + reserve)
        assert is_recurrent(cache)
        started, bytes_read, number = time.perf_counter(), 0, 0
        try:
            for number in range(prefix.usable):
                bytes_read += _restore(decoder, cache, plan.segments[number], prefix, number, read)
            break
        except DamagedError:
            prefix = replace(prefix, infos=(*prefix.infos[:number], None, *prefix.infos[number + 1 :]))
            plan = plan.without(plan.segments[number], DAMAGED)
    read_ms = add_span(timeline, "read states", started) * 1e3
    started = time.perf_counter()
    reused = [replace(segment, status="exact", reason="") for segment in plan.segments[: prefix.usable]]
    holes = [replace(segment, status="miss") for segment in plan.segments[prefix.usable : -1]]
    plan = Plan((*reused, *holes, plan.segments[-1]))
    logits, new = _compute(decoder, plan, cache, prefix)
    cache.mark()
    took = add_span(timeline, "compute", started) * 1e3
    fused = _fused(decoder, plan, selector, cache, logits, bytes_read, (read_ms, took))
    return PrefixFused(fused, tuple(new), prefix.ids[: prefix.usable])


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
    decoder: Decoder, plan: Plan, cache: StateCache, prefix: StoredPrefix
) -> tuple[torch.Tensor, list[NewCheckpoint]]:
    """Compute all segments that are not reused, and copy the states where checkpoints have some. Returns the last
    token's logits, float32 `[vocabulary]`, and the new checkpoints."""
    context = plan.segments[:-1]
    ends = checkpoint_ends(len(context)) if prefix.ids else frozenset()
    states: dict[int, dict[int, States]] = {}
    ids: list[int] = []
    start = context[prefix.usable - 1].stop if prefix.usable else 0
    logits = torch.empty(0, dtype=torch.float32)
    for number, segment in enumerate(plan.segments[prefix.usable :], prefix.usable):
        ids.extend(segment.ids)
        if ids and (number in ends or segment is plan.segments[-1]):
            logits = pass_of(decoder, ids, start, cache)
            start, ids = start + len(ids), []
        if number in ends:
            states[number] = {
                at: {name: tensor.to("cpu", copy=True) for name, tensor in layer.states().items()}
                for at, layer in enumerate(cache.buffers)
                if has_state(layer)
            }
    new = []
    for number in range(prefix.usable, len(prefix.ids)):
        info = prefix.infos[number]
        if info is None or (number in states and not info.states):
            new.append(_new(decoder, plan, prefix.ids[number], number, cache, states.get(number, {})))
    return logits, new


def pass_of(decoder: Decoder, ids: Sequence[int], start: int, cache: StateCache) -> torch.Tensor:
    """Compute rows from place `start` on after the current states; return the last logits, float32 `[vocabulary]`."""
    stop = start + len(ids)
    cache.set_length(stop)
    return decoder.compute(ids, QueryRows.of(torch.arange(start, stop), decoder.device), cache)[-1]


def _new(
    decoder: Decoder, plan: Plan, stretch: bytes, number: int, cache: StateCache, states: dict[int, States]
) -> NewCheckpoint:
    segment, parts = plan.segments[number], Parts()
    for at, layer in enumerate(cache.buffers):
        if isinstance(layer, BufferLayer):
            parts["rows", at] = _rows(layer, segment)
    for at, tensors in states.items():
        parts["state", at] = {f"{kind} {count}": tensor for (kind, count), tensor in tensors.items()}
    sizes = (
        tensor.numel() * (decoder.kv_dtype if side == "rows" else tensor.dtype).itemsize
        for (side, _), tensors in parts.items()
        for tensor in tensors.values()
    )
    chunks = [segment.source.chunk_id for segment in plan.segments[1 : number + 1] if segment.source.chunk_id]
    info = StretchInfo(
        start=segment.start,
        tokens=len(segment.ids),
        rows=tuple(at for side, at in parts if side == "rows"),
        states=tuple(sorted(states)),
        chunks=tuple(dict.fromkeys(chunks)),
        own=bool(plan.segments[0].source.chunk_id or not plan.segments[0].ids),
        size=sum(sizes),
        arithmetic=decoder.loaded.arithmetic,
    )
    return NewCheckpoint(stretch, number, info, parts)


def _rows(layer: BufferLayer, segment: Segment) -> dict[str, torch.Tensor]:
    return {side: getattr(layer, side)[:, :, segment.start : segment.stop] for side in ("keys", "values")}


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
