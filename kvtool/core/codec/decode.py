"""Transform decoding: streams to a profile's whole numbers, and these to keys and values (inverse of encode.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtool.core.codec import transform_kernels
from kvtool.core.codec.base import DTYPES, NAMES, Encoded
from kvtool.core.codec.levels import NESTED, check_of
from kvtool.core.codec.profile import SIDES, Profile
from kvtool.core.codec.rans import coder
from kvtool.core.codec.rans.tables import ESCAPE, ZERO, Columns
from kvtool.core.codec.rans.triton import CudaDecoding, decode_batch_cuda
from kvtool.core.codec.record import Escapes, Record, in_form
from kvtool.core.common.machine import product_dtype
from kvtool.core.errors import DamagedError
from kvtool.core.kernels.triton_jit import has_triton
from kvtool.core.native.job import scratch

Parsed = tuple[Record, Encoded]
Work = tuple[int, Sequence[Parsed], Sequence[int]]  # a layer, some records of it, and the first row of each
Streams = tuple[Columns, Sequence[Record], Sequence[int]]  # the columns of some records, and the first row of each
AT_ONCE = 1 << 20  # bytes of decoded numbers, or one layer's: what is made of them finds them in a core's cache


def decode_layers(
    profile: Profile,
    layers: Sequence[int],
    level: str,
    items: Sequence[Sequence[Parsed]],
    device: torch.device | None = None,
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
    starts = [end - count for end, count in zip(ends, tokens, strict=True)]
    shape = len(layers), SIDES, ends[-1], layout.groups, layout.size
    out = torch.empty(shape, dtype=DTYPES[items[0][0][1].dtype], device=device)
    step = max(1, AT_ONCE // max(1, 2 * ends[-1] * layout.stride))
    for first in range(0, len(layers), step):
        part = slice(first, first + step)
        _decode_slab(profile, layers[part], level, items[part], starts, out[part], device)
    return out.flatten(3)


def _decode_slab(
    profile: Profile,
    layers: Sequence[int],
    level: str,
    items: Sequence[Sequence[Parsed]],
    starts: Sequence[int],
    out: torch.Tensor,
    device: torch.device | None,
) -> None:
    rows = out.shape[2]
    shape = (len(layers) * rows, profile.layout.stride)
    refined = any(record.base for some in items for record, _ in some)
    by = None if out.is_cuda else transform_kernels.reading_by(profile.layout, out.dtype)
    whole: HostBuffer | DeviceBuffer
    if device is None:
        whole = HostBuffer.of(shape, by, refined)
    else:
        whole = DeviceBuffer(torch.zeros(shape, dtype=torch.int16, device=device))
    firsts = [[at * rows + start for start in starts] for at in range(len(layers))]
    fill(profile, list(zip(layers, items, firsts, strict=True)), whole)
    records = [[record for record, _ in some] for some in items]
    sides_of(profile, layers, level, whole.tensor.view(len(layers), rows, -1), records, out, by)


# ---- streams to numbers ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Coefficients in main memory, `[rows, stride]`, int16, or bfloat16 that holds the same numbers."""

    tensor: torch.Tensor
    form: coder.Form = "int16"

    @classmethod
    def of(cls, shape: tuple[int, int], by: transform_kernels.Multiplier | None, refined: bool) -> HostBuffer:
        """Make a buffer for numbers of which `by`, or else torch, makes sides; only int16 is refined.

        Torch does for bfloat16 alone, in which it multiplies faster on some CPUs.
        """
        if by is not None:  # in this thread's memory: a kernel reads only what has been decoded
            held = scratch("decoded", shape[0] * shape[1], np.int16).reshape(shape)
            if refined:
                held[:] = 0  # a finer level codes more columns than its base
            return cls(torch.from_numpy(held))
        if refined:
            return cls(torch.zeros(shape, dtype=torch.int16))
        return cls(torch.empty(shape, dtype=torch.bfloat16), "bfloat16")

    @property
    def _held(self) -> npt.NDArray[Any]:
        return self.tensor.view(torch.int16).numpy().view(coder.HELD[self.form])

    def decode(self, streams: Sequence[Streams]) -> None:
        """Decode each record's stream from its first row on, escapes included, in one call. Raises DamagedError."""
        jobs = []
        for columns, records, starts in streams:
            marked, marks = None, list[int]()
            if not columns.refines:
                marked = in_form(np.concatenate([record.escapes.marked for record in records]), self.form)
                marks = [len(record.escapes.marked) for record in records]
            words, rows = [record.streams[0] for record in records], [record.tokens for record in records]
            jobs.append(coder.Decoding(words, columns, starts, rows, self._held, self.form, marked, marks))
        coder.decode(*jobs)

    def place(self, escapes: Escapes, start: int, rows: int) -> None:
        if len(escapes.places):
            escapes.place(self._held[start : start + rows], self.form)


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    tensor: torch.Tensor

    def decode(self, streams: Sequence[Streams]) -> None:
        jobs = [
            CudaDecoding(record.streams[0], columns, record.tokens, self.tensor[start : start + record.tokens])
            for columns, records, starts in streams
            for record, start in zip(records, starts, strict=True)
        ]
        decode_batch_cuda(jobs, self.tensor.device)
        for columns, records, starts in streams:
            if not columns.refines:
                self._replace(columns, records, starts)

    def _replace(self, columns: Columns, records: Sequence[Record], starts: Sequence[int]) -> None:
        device, rows = self.tensor.device, [record.tokens for record in records]
        marked = [record.escapes.marked for record in records]
        wanted = torch.from_numpy(columns.numbers).to(device)
        spans = zip(starts, rows, strict=True)
        at = torch.cat([torch.arange(start, start + count) for start, count in spans]).to(device)
        escaped = (self.tensor[at[:, None], wanted] == ESCAPE - ZERO).nonzero()
        ends = np.fromiter(accumulate(rows), np.int64)
        of_stream = np.searchsorted(ends, escaped[:, 0].cpu().numpy(), side="right")
        if np.bincount(of_stream, minlength=len(rows)).tolist() != [*map(len, marked)]:
            raise DamagedError("an encoded stream whose escapes are not those that were kept")
        if len(escaped):
            values = torch.from_numpy(np.concatenate(marked)).to(device)
            self.tensor[at[escaped[:, 0]], wanted[escaped[:, 1]]] = values

    def place(self, escapes: Escapes, start: int, rows: int) -> None:
        numbers = self.tensor[start : start + rows].view(-1)
        if escapes.has_places(numbers.numel()):
            places = torch.from_numpy(escapes.places.astype(np.int64)).to(numbers.device)
            numbers[places] = torch.from_numpy(escapes.placed.astype(np.int16)).to(numbers.device)


def decodes_there(device: str) -> bool:
    return device.startswith("cuda") and has_triton()


def fill(profile: Profile, work: Sequence[Work], buffer: HostBuffer | DeviceBuffer) -> None:
    """Decode records of one level, coarser levels first, into their coded columns. Raises DamagedError."""
    for refines in (False, True):
        some = [one for one in (_chosen(*one, refines) for one in work) if one[1]]
        if refines and some:
            bases = [(layer, [_base_of(*item) for item in items], starts) for layer, items, starts in some]
            fill(profile, bases, buffer)
        buffer.decode([_streams(profile, *one, refines) for one in some])
    for _, items, starts in work:
        for (record, _), start in zip(items, starts, strict=True):
            buffer.place(record.escapes, start, record.tokens)


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


# ---- numbers to sides --------------------------------------------------------------------------------------------


def sides_of(
    profile: Profile,
    layers: Sequence[int],
    level: str,
    numbers: torch.Tensor,
    records: Sequence[Sequence[Record]],
    out: torch.Tensor,
    by: transform_kernels.Multiplier | None,
) -> None:
    """Make sides `[layers, 2, tokens, groups, size]` of numbers `[layers, tokens, stride]` of one level.

    Numbers are int16, or of the dtype of `out`. At each layer the records' numbers follow one another.
    """
    if by is not None and out.numel():
        weights = [transform_kernels.Weights.backward(profile, layer, level, out.dtype, by.tile) for layer in layers]
        widths = [profile.coded(level, layer).widths for layer in layers]
        transform_kernels.sides_of(profile.layout, by, weights, widths, numbers.numpy(), out)
    else:
        for layer, own, sides in zip(layers, numbers, out, strict=True):
            _sides_by_torch(profile, layer, level, own, sides)
    for layer, some, sides in zip(layers, records, out, strict=True):
        if any(len(record.escapes.places) for record in some):
            _add_outside(profile, layer, level, some, sides)


def _sides_by_torch(profile: Profile, layer: int, level: str, numbers: torch.Tensor, out: torch.Tensor) -> None:
    """Multiply in the format that is fast here, with weights rounded to the output's.

    On a GPU, where the products cost least, in float32: a number far from all others would show the weights' rounding.
    """
    layout, kept = profile.layout, torch.float32 if out.is_cuda else out.dtype
    dtype = torch.float32 if out.is_cuda else DTYPES[product_dtype(NAMES[out.dtype], out.device.type)]
    back, means = (part.to(dtype) for part in profile.backward(layer, level, kept, out.device))
    wide = numbers.to(kept).to(dtype)
    widths = profile.coded(level, layer).widths
    for side in range(SIDES):
        for group in range(layout.groups):
            start, width = layout.start(side, group), widths[side * layout.groups + group]
            taken = wide[:, start : start + width]
            out[side, :, group] = torch.addmm(means[side, group], taken, back[side, group, :width])


def _add_outside(profile: Profile, layer: int, level: str, records: Sequence[Record], out: torch.Tensor) -> None:
    """Add to sides `[2, tokens, groups, size]` of some records, end to end, the escapes in columns that are not coded.

    Few, so each is a row of the basis. They are large and cancel each other: summed up in float32.
    """
    layout, widths = profile.layout, np.asarray(profile.coded(level, layer).widths)
    back, _ = profile.backward(layer, level, torch.float32, out.device)
    first = 0
    for record in records:
        rows, columns = np.divmod(record.escapes.places.astype(np.int64), layout.stride)
        group, within = np.divmod(columns, layout.padded)
        outside = within >= widths[group]
        for number in np.unique(group[outside]):
            here = outside & (group == number)
            side, part = divmod(int(number), layout.groups)
            times = torch.from_numpy(record.escapes.placed[here].astype(np.float32))[:, None].to(out.device)
            rows_here, which = (torch.from_numpy(some).to(out.device) for some in (rows[here], within[here]))
            wide = out[side, first : first + record.tokens, part].float()
            wide.index_add_(0, rows_here, back[side, part, which] * times)
            out[side, first : first + record.tokens, part] = wide.to(out.dtype)
        first += record.tokens
