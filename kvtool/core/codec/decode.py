"""Transform coding by a fitted profile, levels `1` to `4`: small records with a stated loss (`kvtool help codec`).

Decoding turns streams to the profile's whole numbers, and these to keys and values: the inverse of encode.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, compress

import torch

from kvtool.core.codec import cachegen
from kvtool.core.codec.backend import Backend, Streams, backend_for, sides_of
from kvtool.core.codec.base import (
    DTYPES,
    Codec,
    Device,
    Encoded,
    LayerKV,
    Payload,
    Profiles,
    channels_of,
    heads_of,
    no_profiles,
)
from kvtool.core.codec.encode import encode_nested
from kvtool.core.codec.levels import NESTED, check_of
from kvtool.core.codec.profile import SIDES, Profile
from kvtool.core.codec.record import Record
from kvtool.core.errors import DamagedError
from kvtool.core.kernels.triton_jit import has_triton

Parsed = tuple[Record, Encoded]
Work = tuple[int, Sequence[Parsed], Sequence[int]]  # a layer, some records of it, and the first row of each
AT_ONCE = 1 << 20  # bytes of decoded numbers, or one layer's: what is made of them finds them in a core's cache


def decode_layers(
    profile: Profile,
    layers: Sequence[int],
    level: str,
    items: Sequence[Sequence[Parsed]],
    device: Device = None,
) -> torch.Tensor:
    """Decode sides `[layers, 2, tokens, C]` of records of one level, profile and dtype.

    At each layer the records of the same chunks follow one another. Few calls do it, in which Python serves other
    threads. `device` is a GPU that decodes by triton. Raises DamagedError: a record does not fit the profile or its
    shape.
    """
    tokens = [record.tokens for record, _ in items[0]]
    if any([record.tokens for record, _ in some] != tokens for some in items):
        raise DamagedError("compressed records of a chunk that differ in length")
    layout, ends = profile.layout, list(accumulate(tokens))
    starts, rows = [end - count for end, count in zip(ends, tokens, strict=True)], ends[-1]
    shape = len(layers), SIDES, rows, layout.groups, layout.size
    out = torch.empty(shape, dtype=DTYPES[items[0][0][1].dtype], device=device)
    backend = backend_for(out.dtype, device)
    step = max(1, AT_ONCE // max(1, 2 * rows * layout.stride))
    for first in range(0, len(layers), step):
        slab, parsed = layers[first : first + step], items[first : first + step]
        records = [[record for record, _ in chunks] for chunks in parsed]
        refined = any(record.base for chunks in records for record in chunks)  # a finer level codes more columns
        numbers = backend.allocate(len(slab) * rows, layout.stride, zeroed=refined)
        firsts = [[at * rows + start for start in starts] for at in range(len(slab))]
        fill(profile, list(zip(slab, parsed, firsts, strict=True)), numbers, backend)
        whole = numbers.view(len(slab), rows, layout.stride)
        sides_of(profile, slab, level, whole, records, out[first : first + step], backend)
    return out.flatten(3)


def decodes_there(device: str) -> bool:
    return device.startswith("cuda") and has_triton()


def fill(profile: Profile, work: Sequence[Work], numbers: torch.Tensor, backend: Backend) -> None:
    """Decode records of one level, coarser levels first, into their coded columns. Raises DamagedError."""
    for refines in (False, True):
        some = [one for one in (_chosen(*one, refines) for one in work) if one[1]]
        if refines and some:
            bases = [(layer, [_base_of(*item) for item in items], starts) for layer, items, starts in some]
            fill(profile, bases, numbers, backend)
        backend.decode([_streams(profile, *one, refines) for one in some], numbers)
    for _, items, starts in work:
        for (record, _), start in zip(items, starts, strict=True):
            if len(record.escapes.places):
                backend.place(record.escapes, numbers[start : start + record.tokens])


def _chosen(layer: int, items: Sequence[Parsed], starts: Sequence[int], refines: bool) -> Work:
    which = [bool(record.base) is refines for record, _ in items]
    return layer, list(compress(items, which)), list(compress(starts, which))


def _streams(profile: Profile, layer: int, items: Sequence[Parsed], starts: Sequence[int], refines: bool) -> Streams:
    records = [record for record, _ in items]
    coded = profile.coded(NESTED[records[0].level - 1], layer)
    columns = coded.fine if refines else coded.alone
    fits = columns is not None and all(
        record.columns == len(columns)
        and record.transformed
        and record.profile == profile.digest
        and record.level == records[0].level
        and not (columns.refines and len(record.escapes.marked))
        for record in records
    )
    if columns is None or not fits:
        raise DamagedError("a compressed record that does not fit its profile")
    return columns, records, starts


def _base_of(record: Record, item: Encoded) -> Parsed:
    if item.base is None:
        raise DamagedError("a compressed record without the level that it refines")
    base = Record.parse(item.base.payload)
    other = record.base_check != check_of([item.base.payload])
    if other or (base.level, base.tokens) != (record.base, record.tokens):
        raise DamagedError("a compressed record that refines another one than is stored")
    return base, item.base


class TransformCodec(Codec):
    """A level of transform coding. Before a store has a profile its chunks are encoded by CacheGen's scheme."""

    def __init__(self, level: str) -> None:
        self.level = level
        self._without_profile = cachegen.CacheGen(f"cachegen-{level}")

    def encode_layers(self, kvs: Sequence[LayerKV], profile: Profile | None = None) -> Sequence[Sequence[Payload]]:
        if profile is None:
            return self._without_profile.encode_layers(kvs)
        return encode_nested(profile, range(len(kvs)), kvs, [self.level])[self.level]

    def decode(
        self, items: Sequence[Encoded], layer: int = 0, profiles: Profiles = no_profiles, device: Device = None
    ) -> list[LayerKV]:
        """Decode several chunks at one layer to views; the CPU always decodes records without a profile. Raises
        DamagedError."""
        parsed = [(self._parsed(item), item) for item in items]
        together: dict[tuple[bool, bytes, str], list[int]] = {}
        for number, (record, item) in enumerate(parsed):
            together.setdefault((record.transformed, record.profile, item.dtype), []).append(number)
        out: dict[int, LayerKV] = {}
        for (transformed, digest, _), numbers in together.items():
            some = [parsed[number] for number in numbers]
            made = (
                self._transformed(profiles(digest), layer, some, device)
                if transformed
                else [cachegen.unpack(record, item.shape, item.dtype) for record, item in some]
            )
            out.update(zip(numbers, made, strict=True))
        return [out[number] for number in range(len(items))]

    def decode_layers(self, items: Sequence[Encoded], profiles: Profiles = no_profiles) -> list[LayerKV]:
        parsed = [(self._parsed(item), item) for item in items]
        alike = {(record.transformed, record.profile, item.dtype, item.shape[1]) for record, item in parsed}
        if len(alike) != 1 or not parsed[0][0].transformed:
            return super().decode_layers(items, profiles)
        profile, layers = profiles(parsed[0][0].profile), range(len(items))
        _check_fit(profile, layers, items)
        sides = decode_layers(profile, layers, self.level, [[one] for one in parsed])
        return [heads_of(own, item.shape) for own, item in zip(sides, items, strict=True)]

    def stated_error(self, payload: Payload) -> tuple[float, float]:
        return Record.parse(payload).errors

    def _parsed(self, item: Encoded) -> Record:
        record = Record.parse(item.payload)
        if (record.level, record.tokens) != (NESTED.index(self.level) + 1, item.shape[1]):
            raise DamagedError("a compressed record of another level or length")
        return record

    def _transformed(self, profile: Profile, layer: int, items: Sequence[Parsed], device: Device) -> list[LayerKV]:
        _check_fit(profile, [layer], [item for _, item in items])
        sides = decode_layers(profile, [layer], self.level, [items], device)[0]
        each = sides.split_with_sizes([record.tokens for record, _ in items], 1)
        return [heads_of(own, item.shape) for own, (_, item) in zip(each, items, strict=True)]


def _check_fit(profile: Profile, layers: Sequence[int], items: Sequence[Encoded]) -> None:
    widest = channels_of([item.shape for item in items])
    if widest > profile.layout.channels or not 0 <= min(layers) <= max(layers) < profile.layers:
        raise DamagedError("a codec profile of another model")
