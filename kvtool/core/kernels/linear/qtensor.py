"""A weight matrix as it is kept in memory, and its numbers: the reference for every kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtool.core.kernels import FORMATS

BLOCK = 32  # columns whose codes are stored together
SUPERBLOCK = 256  # columns whose scales are read together
BLOCKS = SUPERBLOCK // BLOCK
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a kind of weights in memory: w = scale · (code - zero_point) + min for each group of columns."""

    bits: int  # of a code; 16 and 32: the numbers themselves, without scales
    group: int = 1  # columns that share a scale
    zero_point: int = 0
    group_mins: bool = False  # whether each group has a min, too
    superblocks: bool = (
        False  # scales are products: a float16 of 256 columns, and a whole number of each group (the K kinds)
    )

    @property
    def dense(self) -> bool:
        return self.bits >= 16

    @property
    def is_shifted(self) -> bool:
        return self.group_mins or self.zero_point != 0

    @property
    def planes(self) -> tuple[int, ...]:
        return _PLANES[self.bits]

    @property
    def multiple(self) -> int:
        return 1 if self.dense else SUPERBLOCK if self.superblocks else BLOCK

    @property
    def block_bytes(self) -> int:
        return (1 + self.group_mins) * (2 + SUPERBLOCK // self.group)

    def row_bytes(self, columns: int) -> int:
        return columns * self.bits // 8

    def scales_of_row(self, columns: int) -> int:
        if self.dense:
            return 0
        return columns // SUPERBLOCK * self.block_bytes if self.superblocks else columns // self.group


# Named as in GGUF, whose numbers each kind keeps exactly.
LAYOUTS = {
    "float32": Layout(32),
    "bfloat16": Layout(16),
    "q8_0": Layout(8, 32),
    "q4_0": Layout(4, 32, zero_point=8),
    "q4_1": Layout(4, 32, group_mins=True),
    "q5_0": Layout(5, 32, zero_point=16),
    "q5_1": Layout(5, 32, group_mins=True),
    "q2_k": Layout(2, 16, group_mins=True, superblocks=True),
    "q3_k": Layout(3, 16, zero_point=4, superblocks=True),
    "q4_k": Layout(4, 32, group_mins=True, superblocks=True),
    "q5_k": Layout(5, 32, group_mins=True, superblocks=True),
    "q6_k": Layout(6, 16, zero_point=32, superblocks=True),
}


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A weight matrix `[rows, columns]`, rows being outputs; every tensor contiguous and on the CPU.

    Attributes
    ----------
    kind : one of LAYOUTS.
    data : float32 or bfloat16 `[rows, columns]`; else uint8 `[rows, bytes]`, the codes of 32 columns after those of 32
        others, plane by plane. Of eight bits: int8. Of four: byte j holds column j low and column 16 + j high. Of two:
        byte j holds the columns j, 8 + j, 16 + j, 24 + j from low to high. Of one: bit j of 32 is column j.
    scales : float16 `[rows, columns / group]`; in superblocks uint8 `[rows, bytes]`, for each 256 columns a float16,
        one more for mins, an int8 for each group, one more for its min, which is taken away. Empty: the kind has none.
    group_mins : as scales; empty where the kind has none, or has superblocks.
    """

    kind: str
    rows: int
    columns: int
    data: torch.Tensor
    scales: torch.Tensor
    group_mins: torch.Tensor

    def __post_init__(self) -> None:
        """Refuse what a kernel would read outside of: ValueError."""
        layout = self.layout
        if self.rows < 1 or self.columns < 1 or self.columns % layout.multiple:
            raise ValueError(f"no {self.kind} matrix has {self.rows} rows of {self.columns} columns")
        width = layout.scales_of_row(self.columns)
        numbers = torch.uint8 if layout.superblocks else torch.float16
        if layout.dense:
            _check("data", self.data, getattr(torch, self.kind), (self.rows, self.columns))
        else:
            _check("data", self.data, torch.uint8, (self.rows, layout.row_bytes(self.columns)))
        _check("scales", self.scales, numbers, (self.rows, width) if width else (0,))
        has_mins = layout.group_mins and not layout.superblocks
        _check("group_mins", self.group_mins, torch.float16, (self.rows, width) if has_mins else (0,))

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.kind]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes + self.group_mins.nbytes


def dense(weight: torch.Tensor) -> QuantizedTensor:
    """Make a matrix of a float32 or bfloat16 weight `[rows, columns]`, which is shared, not copied, if contiguous."""
    kind = FORMATS[weight.dtype]
    return QuantizedTensor(kind, weight.shape[0], weight.shape[1], weight.detach().contiguous(), none(), none())


def none() -> torch.Tensor:
    return torch.empty(0, dtype=torch.float16)


def take_rows(matrix: QuantizedTensor, rows: torch.Tensor) -> QuantizedTensor:
    parts = (matrix.data, matrix.scales, matrix.group_mins)
    data, scales, group_mins = (part[rows] if part.dim() == 2 else part for part in parts)
    return QuantizedTensor(matrix.kind, len(rows), matrix.columns, data, scales, group_mins)


def packed_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return codes.view(torch.uint8)
    spans, parts, done = codes.view(-1, BLOCK), [], 0
    for width in _PLANES[bits]:
        parts.append(_plane((spans >> done) & (2**width - 1), width))
        done += width
    return torch.cat(parts, 1).view(len(codes), -1)


def _plane(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Pack codes of `width` bits `[spans, 32]` into bytes `[spans, 4 · width]`; `_bit_fields` unpacks them."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    fields = codes.view(len(codes), -1, len(shifts), _run(width))
    plane: torch.Tensor = (fields << shifts).sum(2, dtype=torch.uint8)
    return plane.flatten(1)


def _run(width: int) -> int:
    """Return how many adjacent codes of a plane are in as many bytes: the next ones are in higher bits of those."""
    return 1 if width == 1 else 4 * width


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device.type != "cpu":
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has gaps")


# Contents of GGUF's blocks: codes `[blocks, columns]`, scales, mins; float16 `[blocks, 1]`, or the bytes of a
# `QuantizedTensor`'s blocks. Layouts: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml
_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tensor_of_blocks(kind: str, blocks: torch.Tensor, rows: int, columns: int) -> QuantizedTensor:
    """Make a matrix of all bytes of a tensor, uint8; row after row.

    Raises ValueError: too few or too many bytes, or a scale that is no finite number.
    """
    layout, (width, read) = LAYOUTS[kind], READERS[kind]
    codes, scales, group_mins = read(layout, blocks.view(-1, width))
    data = packed_codes(codes.view(rows, columns), layout.bits)
    matrix = QuantizedTensor(
        kind, rows, columns, data, *(part.view(rows, -1) if len(part) else part for part in (scales, group_mins))
    )
    _check_finite(matrix)
    return matrix


def _check_finite(matrix: QuantizedTensor) -> None:
    factors = [matrix.scales, matrix.group_mins]
    if matrix.layout.superblocks:
        halves = 2 * (1 + matrix.layout.group_mins)
        factors = [matrix.scales.view(-1, matrix.layout.block_bytes)[:, :halves].contiguous().view(torch.float16)]
    if not all(bool(part.isfinite().all()) for part in factors):
        raise ValueError("a scale is not a finite number")


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _bit_fields(bytes_: torch.Tensor, width: int, run: int) -> torch.Tensor:
    """Return codes of `width` bits: of each `run` bytes first all lowest, then the next."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    fields: torch.Tensor = (bytes_.reshape(len(bytes_), -1, 1, run) >> shifts) & (2**width - 1)
    return fields.flatten(1)


def _q8(_: Layout, blocks: torch.Tensor) -> _Parts:
    return blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0), none()


def _q4_q5(layout: Layout, blocks: torch.Tensor) -> _Parts:
    fifths = 4 if layout.group_mins else 2
    codes = _bit_fields(blocks[:, -16:], 4, 16)
    if layout.bits == 5:
        codes |= _bit_fields(blocks[:, fifths : fifths + 4], 1, 1) << 4
    return codes, _half(blocks, 0), _half(blocks, 2) if layout.group_mins else none()


def _q2_k(_: Layout, blocks: torch.Tensor) -> _Parts:
    scales = [blocks[:, 80:84], blocks[:, :16] & 15, blocks[:, :16] >> 4]
    return _bit_fields(blocks[:, 16:80], 2, 32), torch.cat(scales, 1), none()


def _q3_k(_: Layout, blocks: torch.Tensor) -> _Parts:
    low, high = _bit_fields(blocks[:, 96:104], 4, 8), _bit_fields(blocks[:, 104:108], 2, 4)
    scales = [blocks[:, 108:110], (low | high << 4) - 32]  # of uint8: what is below 0 comes out as int8 has it
    return _bit_fields(blocks[:, 32:96], 2, 32) | _bit_fields(blocks[:, :32], 1, 32) << 2, torch.cat(scales, 1), none()


def _k_scales(packed: torch.Tensor) -> torch.Tensor:
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = [first & 63, (third & 15) | (first >> 6 << 4)]
    mins = [second & 63, (third >> 4) | (second >> 6 << 4)]
    return torch.cat([*scales, *mins], 1)


def _q4_k_q5_k(layout: Layout, blocks: torch.Tensor) -> _Parts:
    scales = torch.cat([blocks[:, :4], _k_scales(blocks[:, 4:16])], 1)
    codes = _bit_fields(blocks[:, -128:], 4, 32)
    if layout.bits == 5:
        codes |= _bit_fields(blocks[:, 16:48], 1, 32) << 4
    return codes, scales, none()


def _q6_k(_: Layout, blocks: torch.Tensor) -> _Parts:
    codes = _bit_fields(blocks[:, :128], 4, 64) | _bit_fields(blocks[:, 128:192], 2, 32) << 4
    return codes, torch.cat([blocks[:, 208:], blocks[:, 192:208]], 1), none()


# Bytes of a block, and the function that reads it; named in LAYOUTS and by GGUF alike.
READERS: dict[str, tuple[int, Callable[[Layout, torch.Tensor], _Parts]]] = {
    "q8_0": (34, _q8),
    "q4_0": (18, _q4_q5),
    "q4_1": (20, _q4_q5),
    "q5_0": (22, _q4_q5),
    "q5_1": (24, _q4_q5),
    "q2_k": (84, _q2_k),
    "q3_k": (110, _q3_k),
    "q4_k": (144, _q4_k_q5_k),
    "q5_k": (176, _q4_k_q5_k),
    "q6_k": (210, _q6_k),
}
