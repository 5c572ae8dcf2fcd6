"""Transformed records decoded where they are wanted, on a GPU: the records cross the bus as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from kvtool.core.codec.entropy.columns import Columns
from kvtool.core.codec.entropy.tables import ESCAPE, ZERO
from kvtool.core.codec.entropy.triton_decode import CudaDecoding, decode_batch_cuda, refine_batch_cuda
from kvtool.core.codec.payload import Coded, Escapes
from kvtool.core.errors import DamagedError
from kvtool.core.kernels.machine import has_triton


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
