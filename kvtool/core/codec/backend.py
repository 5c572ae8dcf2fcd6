"""Kernels that codecs compute with on one device: chosen once a call, by `backend_for`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, TypeAlias

import numpy as np
import torch

from kvtool.core.codec import transform_kernels
from kvtool.core.codec.base import NAMES, Device
from kvtool.core.codec.profile import SIDES, Profile
from kvtool.core.codec.rans import coder
from kvtool.core.codec.rans.tables import ESCAPE, I16, ZERO, Columns
from kvtool.core.codec.rans.triton import CudaDecoding, decode_batch_cuda
from kvtool.core.codec.record import Escapes, Record
from kvtool.core.codec.transform_kernels import Weights
from kvtool.core.common.machine import cpu_features, is_fast
from kvtool.core.errors import DamagedError
from kvtool.core.native.isa import Isa, best_isa, multiplies_bfloat16
from kvtool.core.native.jit import scratch
from kvtool.core.native.simd import tile_of

Streams = tuple[Columns, Sequence[Record], Sequence[int]]  # the columns of some records, and the first row of each


@dataclass(frozen=True, slots=True)
class CpuBackend:
    """Machine code. Whole numbers are int16 `[rows, stride]`."""

    isa: Isa = field(default_factory=best_isa)
    pairs: bool = False  # bfloat16 is multiplied as such, two by two

    def make_finest(self, profile: Profile, layers: Sequence[int], sides: Sequence[torch.Tensor], out: I16) -> bool:
        """Make the finest level's numbers of sides, as `transform_kernels.numbers_of` does."""
        weights = [Weights.forward(profile, layer, tile_of(self.isa)) for layer in layers]
        return transform_kernels.numbers_of(self.isa, profile.layout, weights, sides, out)

    def allocate(self, rows: int, stride: int, zeroed: bool) -> torch.Tensor:
        """This thread's memory for numbers; where it is not `zeroed`, columns that are not decoded hold anything."""
        numbers = scratch("decoded", rows * stride, np.int16).reshape(rows, stride)
        if zeroed:
            numbers[:] = 0
        return torch.from_numpy(numbers)

    def decode(self, streams: Sequence[Streams], numbers: torch.Tensor) -> None:
        """Decode each record's stream from its first row on, escapes included, in one call. Raises DamagedError."""
        out = numbers.numpy()
        jobs = [
            coder.Decoding(
                record.streams[0],
                columns,
                out[start : start + record.tokens],
                None if columns.refines else record.escapes.marked,
            )
            for columns, records, starts in streams
            for record, start in zip(records, starts, strict=True)
        ]
        coder.decode(*jobs)

    def place(self, escapes: Escapes, numbers: torch.Tensor) -> None:
        """Put a record's escapes in columns that are not coded into its rows. Raises DamagedError: one is outside."""
        escapes.place(numbers.numpy())

    def multiply(
        self, profile: Profile, layers: Sequence[int], level: str, numbers: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Make sides `[layers, 2, tokens, groups, size]` of the coded columns of numbers `[layers, tokens, stride]`."""
        if out.numel():
            tile = transform_kernels.backward_kernel(profile.layout, out.dtype, self.pairs).tile(self.isa)
            weights = [Weights.backward(profile, layer, level, out.dtype, tile) for layer in layers]
            widths = [profile.coded(level, layer).widths for layer in layers]
            transform_kernels.sides_of(self.isa, profile.layout, weights, widths, numbers.numpy(), out, self.pairs)


class TorchProducts:
    dtype: ClassVar[torch.dtype | None] = None  # to multiply in; None: that of the sides

    def multiply(
        self, profile: Profile, layers: Sequence[int], level: str, numbers: torch.Tensor, out: torch.Tensor
    ) -> None:
        layout, dtype = profile.layout, self.dtype or out.dtype
        for layer, rows, sides in zip(layers, numbers.to(dtype), out, strict=True):
            back, means = profile.backward(layer, level, dtype, out.device)
            widths = profile.coded(level, layer).widths
            for side in range(SIDES):
                for group in range(layout.groups):
                    start, width = layout.start(side, group), widths[side * layout.groups + group]
                    coded = rows[:, start : start + width]
                    sides[side, :, group] = torch.addmm(means[side, group], coded, back[side, group, :width])


class TorchBackend(TorchProducts, CpuBackend):
    """Machine code, and torch's products."""


@dataclass(frozen=True, slots=True)
class GpuBackend(TorchProducts):
    """Triton's decoder, and torch's products.

    These cost least, so they are in float32: a number far from all others would show the weights' rounding.
    """

    dtype: ClassVar[torch.dtype | None] = torch.float32
    device: torch.device

    def allocate(self, rows: int, stride: int, zeroed: bool) -> torch.Tensor:
        return torch.zeros((rows, stride), dtype=torch.int16, device=self.device)

    def decode(self, streams: Sequence[Streams], numbers: torch.Tensor) -> None:
        jobs = [
            CudaDecoding(record.streams[0], columns, numbers[start : start + record.tokens])
            for columns, records, starts in streams
            for record, start in zip(records, starts, strict=True)
        ]
        decode_batch_cuda(jobs, self.device)
        for columns, records, starts in streams:
            if not columns.refines:
                self._replace(columns, records, starts, numbers)

    def _replace(
        self, columns: Columns, records: Sequence[Record], starts: Sequence[int], numbers: torch.Tensor
    ) -> None:
        rows, marked = [record.tokens for record in records], [record.escapes.marked for record in records]
        coded = torch.from_numpy(columns.numbers).to(self.device)
        spans = zip(starts, rows, strict=True)
        at = torch.cat([torch.arange(start, start + count) for start, count in spans]).to(self.device)
        escaped = (numbers[at[:, None], coded] == ESCAPE - ZERO).nonzero()
        ends = np.fromiter(accumulate(rows), np.int64)
        of_stream = np.searchsorted(ends, escaped[:, 0].cpu().numpy(), side="right")
        if np.bincount(of_stream, minlength=len(rows)).tolist() != [*map(len, marked)]:
            raise DamagedError("an encoded stream whose escapes are not those that were kept")
        if len(escaped):
            values = torch.from_numpy(np.concatenate(marked)).to(self.device)
            numbers[at[escaped[:, 0]], coded[escaped[:, 1]]] = values

    def place(self, escapes: Escapes, numbers: torch.Tensor) -> None:
        if escapes.has_places(numbers.numel()):
            places = torch.from_numpy(escapes.places.astype(np.int64)).to(self.device)
            numbers.view(-1)[places] = torch.from_numpy(escapes.placed.astype(np.int16)).to(self.device)


Backend: TypeAlias = "CpuBackend | GpuBackend"


def backend_for(dtype: torch.dtype, device: Device = None) -> Backend:
    """The fastest that decodes to sides of a dtype.

    Torch multiplies bfloat16 where the CPU has instructions for it that no kernel uses. Measured with one thread of an
    AMD EPYC (Zen 5): decoding to bfloat16 0.80 GB/s by torch's products, 0.60 by kernels that widen it; to float32 0.35
    and 0.59.
    """
    if device is not None:
        return GpuBackend(device)
    if dtype != torch.bfloat16 or not is_fast(NAMES[dtype]):
        return CpuBackend()
    if multiplies_bfloat16(best_isa()) and "amxbf16" not in cpu_features():
        return CpuBackend(pairs=True)
    return TorchBackend()


def sides_of(
    profile: Profile,
    layers: Sequence[int],
    level: str,
    numbers: torch.Tensor,
    records: Sequence[Sequence[Record]],
    out: torch.Tensor,
    backend: Backend,
) -> None:
    """Make sides `[layers, 2, tokens, groups, size]` of numbers `[layers, tokens, stride]` of one level.

    At each layer the records' numbers follow one another.
    """
    backend.multiply(profile, layers, level, numbers, out)
    for layer, some, sides in zip(layers, records, out, strict=True):
        if any(len(record.escapes.places) for record in some):
            _add_outside(profile, layer, level, some, sides)


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
