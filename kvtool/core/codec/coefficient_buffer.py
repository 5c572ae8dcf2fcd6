"""Buffers of coefficients that records are decoded into: whole numbers `[rows, stride]`, in main memory or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtool.core.codec.entropy.columns import Columns
from kvtool.core.codec.entropy.decoder import HELD, Decoding, Form, decode, refine
from kvtool.core.codec.entropy.tables import ESCAPE, ZERO
from kvtool.core.codec.entropy.triton_decode import CudaDecoding, decode_batch_cuda, refine_batch_cuda
from kvtool.core.codec.payload import Coded, Escapes, in_form
from kvtool.core.codec.raw import NAMES
from kvtool.core.codec.transform_kernels import torch_is_faster
from kvtool.core.errors import DamagedError
from kvtool.core.kernels.machine import has_triton
from kvtool.core.native.job import scratch

_FLOAT_FORMS: dict[str, Form] = {"bfloat16": "bfloat16", "float16": "float16"}


class Numbers(Protocol):
    """Rows of numbers that records are decoded into.

    Attributes
    ----------
    tensor : `[rows, stride]`, int16 or a float form that holds the same numbers.
    """

    @property
    def tensor(self) -> torch.Tensor: ...

    def decode(self, columns: Columns, records: Sequence[Coded], starts: Sequence[int]) -> None:
        """Decode each record's stream from its first row on, escapes included; by columns that refine, what stands
        there becomes finer. Raises DamagedError."""

    def place(self, escapes: Escapes, start: int, rows: int) -> None:
        """Put a record's placed escapes into its rows. Raises DamagedError."""


@dataclass(frozen=True, slots=True)
class HostNumbers:
    """Numbers in main memory, which the CPU decodes.

    Attributes
    ----------
    form : what the numbers are held as.
    """

    tensor: torch.Tensor
    form: Form = "int16"

    @classmethod
    def of(cls, shape: tuple[int, int], dtype: torch.dtype, nested: bool) -> HostNumbers:
        """Numbers that torch makes a tensor of this dtype of; only int16 can be refined (`nested`)."""
        form = _FLOAT_FORMS.get(NAMES[dtype])
        if form is not None and not nested and torch_is_faster(dtype):
            return cls(torch.empty(shape, dtype=dtype), form)
        return cls(torch.zeros(shape, dtype=torch.int16))

    @classmethod
    def in_memory(cls, shape: tuple[int, int], nested: bool) -> HostNumbers:
        """Numbers in this thread's memory: a kernel looks at what has been decoded and at nothing else."""
        held = scratch("decoded", shape[0] * shape[1], np.int16).reshape(shape)
        if nested:
            held[:] = 0  # a finer level codes more columns than its base
        return cls(torch.from_numpy(held))

    def part(self, first: int, end: int) -> HostNumbers:
        """Some of the rows."""
        return HostNumbers(self.tensor[first:end], self.form)

    @property
    def _held(self) -> npt.NDArray[Any]:
        return self.tensor.view(torch.int16).numpy().view(HELD[self.form])

    def decode(self, columns: Columns, records: Sequence[Coded], starts: Sequence[int]) -> None:
        """Fulfil `Numbers`."""
        (refine if columns.refines else decode)(self.job(columns, records, starts))

    def job(self, columns: Columns, records: Sequence[Coded], starts: Sequence[int]) -> Decoding:
        """What `decode` does, to be done together with others."""
        marked, marks = None, [len(coded.escapes.marked) for coded in records]
        if not columns.refines:
            marked = in_form(np.concatenate([coded.escapes.marked for coded in records]), self.form)
        streams, rows = [coded.streams[0] for coded in records], [coded.tokens for coded in records]
        return Decoding(
            streams, columns, starts, rows, self._held, self.form, marked=marked, marks=() if marked is None else marks
        )

    def place(self, escapes: Escapes, start: int, rows: int) -> None:
        """Fulfil `Numbers`."""
        if len(escapes.places):
            escapes.place(self._held[start : start + rows], self.form)


def decodes_there(device: str) -> bool:
    """Whether records can be decoded on this device: it is a CUDA one, and there is triton."""
    return device.startswith("cuda") and has_triton()


@dataclass(frozen=True, slots=True)
class DeviceNumbers:
    """Numbers on a device, int16. What it does is put on the device's current stream."""

    tensor: torch.Tensor

    @classmethod
    def of(cls, shape: tuple[int, int], device: torch.device) -> DeviceNumbers:
        """Numbers on a device, all 0."""
        return cls(torch.zeros(shape, dtype=torch.int16, device=device))

    def decode(self, columns: Columns, records: Sequence[Coded], starts: Sequence[int]) -> None:
        """Fulfil `Numbers`."""
        jobs = [
            CudaDecoding(
                coded.streams[0],
                columns.ids,
                columns.tables,
                coded.tokens,
                columns.places,
                self.tensor[start : start + coded.tokens],
                "int16",
            )
            for coded, start in zip(records, starts, strict=True)
        ]
        (refine_batch_cuda if columns.refines else decode_batch_cuda)(jobs, self.tensor.device)
        if not columns.refines:
            self._replace(columns, [coded.escapes.marked for coded in records], jobs, starts)

    def _replace(
        self,
        columns: Columns,
        marked: Sequence[npt.NDArray[np.int16]],
        jobs: Sequence[CudaDecoding],
        starts: Sequence[int],
    ) -> None:
        """Put what they stand for where the symbol ESCAPE was decoded: streams in order, each row by row."""
        device = self.tensor.device
        wanted = torch.from_numpy(columns.numbers).to(device)
        rows = torch.cat([torch.arange(start, start + job.rows) for start, job in zip(starts, jobs, strict=True)])
        rows = rows.to(device)
        escaped = (self.tensor[rows[:, None], wanted] == ESCAPE - ZERO).nonzero()
        ends = np.fromiter(accumulate(job.rows for job in jobs), np.int64)
        of_stream = np.searchsorted(ends, escaped[:, 0].cpu().numpy(), side="right")
        if np.bincount(of_stream, minlength=len(jobs)).tolist() != [*map(len, marked)]:
            raise DamagedError("an encoded stream whose escapes are not those that were kept")
        if len(escaped):
            values = torch.from_numpy(np.concatenate(marked)).to(device)
            self.tensor[rows[escaped[:, 0]], wanted[escaped[:, 1]]] = values

    def place(self, escapes: Escapes, start: int, rows: int) -> None:
        """Fulfil `Numbers`."""
        numbers = self.tensor[start : start + rows].view(-1)
        if not len(escapes.places):
            return
        if int(escapes.places[-1]) >= numbers.numel():
            raise DamagedError("a compressed record with an escape outside of it")
        places = torch.from_numpy(escapes.places.astype(np.int64)).to(numbers.device)
        numbers[places] = torch.from_numpy(escapes.placed.astype(np.int16)).to(numbers.device)
