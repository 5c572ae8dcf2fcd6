"""Decoding of streams to a profile's whole numbers, and of these to keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, compress

import torch

from kvtool.core.codec.backend import Backend, Streams, backend_for, sides_of
from kvtool.core.codec.base import (
    DTYPES,
    Device,
    Encoded,
)
from kvtool.core.codec.levels import NESTED, check_of
from kvtool.core.codec.profile import SIDES, Profile
from kvtool.core.codec.record import Record
from kvtool.core.errors import DamagedError
from kvtool.core.kernels.triton_jit import has_triton

Parsed = tuple[Record, Encoded]
Work = tuple[int, Sequence[Parsed], Sequence[int]]  # a layer, some records of it, and the first row of each
DECODED_AT_ONCE = 1 << 20  # bytes of decoded numbers, or one layer's: what is made of them finds them in a core's cache


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
    step = max(1, DECODED_AT_ONCE // max(1, 2 * rows * layout.stride))
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
