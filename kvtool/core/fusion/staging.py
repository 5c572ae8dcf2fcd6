"""Pinned memory that records are read into, and from which they cross to the device as their bytes stand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ALIGN = 64
_LEAST, _MOST = 2**16, 2**25  # bytes of a block, unless a record is larger: pinned memory comes in powers of two


@dataclass(slots=True)
class _Block:
    """Pinned memory in one piece, of which the first `used` bytes are given out."""

    memory: torch.Tensor
    address: int
    bytes: memoryview
    used: int = 0

    @classmethod
    def of(cls, size: int) -> _Block:
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return cls(memory, memory.data_ptr(), memory.numpy().data)


class Staging:
    """What one layer needs of pinned memory, given out piece by piece and brought to the device in a copy or a few.

    Parameters
    ----------
    size : bytes that a layer's records are expected to have.
    """

    def __init__(self, size: int) -> None:
        self._size = min(size, _MOST)
        self._blocks: list[_Block] = []
        self._current = 0

    def room(self, size: int) -> memoryview:
        """Private, writable, on a 64-byte boundary; until `clear`."""
        return self._room(size, self._size)

    def small(self, size: int) -> memoryview:
        """Room for what needs no memory for all records beside it."""
        return self._room(size, _LEAST)

    def _room(self, size: int, block_size: int) -> memoryview:
        while self._current < len(self._blocks):
            block = self._blocks[self._current]
            if block.used + size <= len(block.bytes):
                break
            self._current += 1
        else:
            block = _Block.of(max(size, block_size, 1))
            self._blocks.append(block)
        start = block.used
        block.used = min(len(block.bytes), -(-(start + size) // _ALIGN) * _ALIGN)
        return block.bytes[start : start + size]

    def clear(self) -> None:
        """All of it may be given out anew."""
        self._current = 0
        for block in self._blocks:
            block.used = 0

    def find(self, address: int) -> tuple[int, int] | None:
        """Number of the block in which an address of main memory lies, and its place there."""
        for number, block in enumerate(self._blocks):
            if block.address <= address < block.address + block.used:
                return number, address - block.address
        return None

    def targets(self, device: torch.device) -> list[torch.Tensor]:
        """Memory on the device for every block of which something was given out, uint8."""
        return [torch.empty(block.used, dtype=torch.uint8, device=device) for block in self._in_use]

    def cross(self, targets: list[torch.Tensor]) -> None:
        """Copy all that was given out; the copies read it until they are done."""
        for block, target in zip(self._in_use, targets, strict=True):
            target.copy_(block.memory[: block.used], non_blocking=True)

    @property
    def _in_use(self) -> list[_Block]:
        return self._blocks[: self._current + 1]
