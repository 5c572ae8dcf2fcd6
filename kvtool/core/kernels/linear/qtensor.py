"""A weight matrix as it is kept in memory, and its numbers: the reference for every kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
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


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device.type != "cpu":
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has gaps")


# Blocks of GGUF files, as in ggml-common.h of https://github.com/ggml-org/ggml. In every kind "qs" are the lower bits
# of codes and "qh" the upper ones; "d" holds dmin as well.
READERS = {
    "q8_0": np.dtype([("d", "V2"), ("qs", "V32")]),
    "q4_0": np.dtype([("d", "V2"), ("qs", "V16")]),
    "q4_1": np.dtype([("d", "V2"), ("m", "V2"), ("qs", "V16")]),
    "q5_0": np.dtype([("d", "V2"), ("qh", "V4"), ("qs", "V16")]),
    "q5_1": np.dtype([("d", "V2"), ("m", "V2"), ("qh", "V4"), ("qs", "V16")]),
    "q2_k": np.dtype([("scales", "V16"), ("qs", "V64"), ("d", "V4")]),
    "q3_k": np.dtype([("qh", "V32"), ("qs", "V64"), ("scales", "V12"), ("d", "V2")]),
    "q4_k": np.dtype([("d", "V4"), ("scales", "V12"), ("qs", "V128")]),
    "q5_k": np.dtype([("d", "V4"), ("scales", "V12"), ("qh", "V32"), ("qs", "V128")]),
    "q6_k": np.dtype([("qs", "V128"), ("qh", "V64"), ("scales", "V16"), ("d", "V2")]),
}
_AT_ONCE = 1 << 19  # bytes that are laid out in a core's own cache
_INFINITE = 0x7C00  # exponent of a float16 that is not finite
_Array = npt.NDArray[Any]


def read_blocks(kind: str, file: BinaryIO, nbytes: int, rows: int, columns: int) -> QuantizedTensor:
    """Read a matrix, row after row, from the next bytes of an unbuffered file.

    It is read in pieces: memory that a process touches for the first time costs more than the reading. Raises
    ValueError: too few or too many bytes, or a scale that is not a finite number.
    """
    layout, block = LAYOUTS[kind], READERS[kind]
    spans = (SUPERBLOCK if layout.superblocks else BLOCK) // BLOCK
    count = rows * columns // (spans * BLOCK)
    if count * block.itemsize != nbytes or count * spans * BLOCK != rows * columns:
        raise ValueError(f"{nbytes} bytes are not {rows} rows of {columns} columns")
    planes = list(zip(("qs", "qh"), layout.planes, strict=False))
    data = np.empty((count, spans), [(name, f"V{4 * width}") for name, width in planes])
    scales = np.empty(count, f"V{layout.block_bytes}" if layout.superblocks else "V2")
    mins = np.empty(count if "m" in (block.names or ()) else 0, "V2")
    buffer = np.empty(min(count, _AT_ONCE // block.itemsize), block)
    for first in range(0, count, len(buffer)):
        here = slice(first, first + len(buffer))
        part = buffer[: count - first]
        if file.readinto(part.view(np.uint8)) != part.nbytes:  # type: ignore[attr-defined]
            raise ValueError("the file is cut off")
        for name, width in planes:
            data[name][here] = _plane(kind, part[name], width) if layout.superblocks else part[name][:, None]
        scales[here] = _block_scales(kind, part) if layout.superblocks else part["d"]
        if len(mins):
            mins[here] = part["m"]
        _check_finite(part)
    numbers = np.uint8 if layout.superblocks else np.float16
    parts = (data.view(np.uint8), scales.view(numbers), mins.view(np.float16))
    tensors = (torch.from_numpy(part.reshape(rows, -1)) if part.size else none() for part in parts)
    return QuantizedTensor(kind, rows, columns, *tensors)


def _check_finite(part: _Array) -> None:
    for name in {"d", "m"}.intersection(part.dtype.names or ()):
        if ((_words(part[name], np.uint16) & _INFINITE) == _INFINITE).any():
            raise ValueError("a scale is not a finite number")


def _words(field: _Array, dtype: Any) -> _Array:
    return np.ascontiguousarray(field).view(dtype)


def _swap(first: _Array, second: _Array, shift: int, mask: int) -> None:
    """Exchange the bits of `mask` in `second` with those in `first` that are `shift` higher."""
    changed = ((first >> shift) ^ second) & mask
    second ^= changed
    first ^= changed << shift


def _plane(kind: str, field: _Array, width: int) -> _Array:
    """Reorder codes of `width` bits `[blocks]` into spans of 32 columns `[blocks, 8]`.

    The next field of a byte is 32 columns on, or 64 (lower bits of Q6_K).
    """
    if width == 1:
        return _bits(_words(field, np.uint64)).reshape(len(field), -1)
    count = 8 // width  # words of a span, which trade fields
    words = _words(field, f"V{4 * width}")
    parts = [_words(words[number::count], np.uint64) for number in range(count)]
    if width == 4:
        _swap(parts[0], parts[1], 4, 0x0F0F0F0F0F0F0F0F)
    else:
        for first, second in ((0, 2), (1, 3)):
            _swap(parts[first], parts[second], 4, 0x0F0F0F0F0F0F0F0F)
        for first, second in ((0, 1), (2, 3)):
            _swap(parts[first], parts[second], 2, 0x3333333333333333)
    together = 2 if kind == "q6_k" and width == 4 else 1
    plane = np.empty((len(words) // count // together, count, together), words.dtype)
    for number, part in enumerate(parts):
        plane[:, number] = part.view(words.dtype).reshape(-1, together)
    return plane.reshape(len(field), -1)


def _bits(words: _Array) -> _Array:
    """Transpose the 8 by 8 bits of each word, then the bytes of four words: 32 columns are in a row."""
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0)):
        changed = (words ^ (words >> shift)) & mask
        words = words ^ changed ^ (changed << shift)
    return _words(words.view(np.uint8).reshape(-1, 4, 8).swapaxes(1, 2), "V4")


def _block_scales(kind: str, part: _Array) -> _Array:
    """The bytes of each block in a `QuantizedTensor`: one or two float16, then scales and mins of its groups."""
    low, two, six = 0x0F0F0F0F, 0x03030303, 0x3F3F3F3F
    packed = _words(part["scales"], np.uint32).reshape(len(part), -1).T  # four groups a word
    if kind == "q2_k":
        words = [*(packed & low), *(packed >> 4 & low)]
    elif kind == "q3_k":
        first, second, high = packed
        lower = (first & low, second & low, first >> 4 & low, second >> 4 & low)
        words = [word | (high >> 2 * number & two) << 4 for number, word in enumerate(lower)]
    elif kind == "q6_k":
        words = list(packed)
    else:
        first, second, third = packed
        words = [first & six, (third & low) | (first >> 6 & two) << 4]
        words += [second & six, (third >> 4 & low) | (second >> 6 & two) << 4]
    groups = np.stack(words, 1)
    if kind == "q3_k":
        groups = (groups.view(np.uint8) - np.uint8(32)).view(np.uint32)
    halves = part.dtype["d"]
    scales = np.empty(len(part), [("d", halves), ("groups", f"V{4 * len(words)}")])
    scales["d"], scales["groups"] = part["d"], groups.view(scales.dtype["groups"])[:, 0]
    return scales.view(f"V{scales.itemsize}")
