"""A weight matrix as it is kept in memory, and its numbers: the reference for every kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Layout:
    """How a kind of weights lies in memory: w = scale · (code - centre) + min for each group of columns.

    Attributes
    ----------
    bits : of a code; 16 and 32: the numbers themselves, without scales.
    group : columns that share a scale.
    centre : what is taken from each code.
    mins : whether each group has a min, too (float16).
    """

    bits: int
    group: int = 1
    centre: int = 0
    mins: bool = False

    @property
    def dense(self) -> bool:
        """Whether the weights are plain numbers."""
        return self.bits >= 16

    def row_bytes(self, columns: int) -> int:
        """Bytes of `data` for one row."""
        return columns * self.bits // 8

    def groups(self, columns: int) -> int:
        """Scales of one row."""
        return 0 if self.dense else columns // self.group


# Named as in GGUF, whose numbers each kind keeps exactly.
LAYOUTS = {
    "float32": Layout(32),
    "bfloat16": Layout(16),
    "q8_0": Layout(8, 32),
    "q4_0": Layout(4, 32, centre=8),
    "q4_1": Layout(4, 32, mins=True),
}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix `[rows, columns]`, rows being outputs; every tensor contiguous and on the CPU.

    Attributes
    ----------
    kind : one of LAYOUTS.
    data : float32 or bfloat16 `[rows, columns]`; else uint8 `[rows, bytes]`: of eight bits, int8 as two's complement;
        of four, byte j of a group's 16 holds column j in its low and column 16 + j in its high half.
    scales : float16 `[rows, columns / group]`; empty where the kind has none.
    mins : as scales.
    """

    kind: str
    rows: int
    columns: int
    data: torch.Tensor
    scales: torch.Tensor
    mins: torch.Tensor

    def __post_init__(self) -> None:
        """Refuse what a kernel would read outside of.

        Raises
        ------
        ValueError : a shape or dtype that does not fit the kind.
        """
        layout = LAYOUTS[self.kind]
        groups = layout.groups(self.columns)
        if self.rows < 1 or self.columns < 1 or self.columns % layout.group:
            raise ValueError(f"no {self.kind} matrix has {self.rows} rows of {self.columns} columns")
        if layout.dense:
            _check("data", self.data, getattr(torch, self.kind), (self.rows, self.columns))
        else:
            _check("data", self.data, torch.uint8, (self.rows, layout.row_bytes(self.columns)))
        _check("scales", self.scales, torch.float16, (self.rows, groups) if groups else (0,))
        _check("mins", self.mins, torch.float16, (self.rows, groups) if layout.mins else (0,))

    @property
    def layout(self) -> Layout:
        """How it lies in memory."""
        return LAYOUTS[self.kind]

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.data.nbytes + self.scales.nbytes + self.mins.nbytes


def dense(weight: torch.Tensor) -> Matrix:
    """Make a matrix of a float32 or bfloat16 weight `[rows, columns]`, which is shared, not copied, if contiguous."""
    kind = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[weight.dtype]
    return Matrix(kind, weight.shape[0], weight.shape[1], weight.detach().contiguous(), none(), none())


def none() -> torch.Tensor:
    """What stands for scales or mins that a kind does not have."""
    return torch.empty(0, dtype=torch.float16)


def numbers(matrix: Matrix) -> torch.Tensor:
    """Compute the weights, float32 `[rows, columns]`: each is scale · (code - centre) + min, every step in float32."""
    layout = matrix.layout
    if layout.dense:
        return matrix.data.float()
    codes = (_codes(matrix).float() - layout.centre).view(matrix.rows, -1, layout.group)
    weights = codes * matrix.scales.float()[:, :, None]
    if layout.mins:
        weights += matrix.mins.float()[:, :, None]
    return weights.view(matrix.rows, matrix.columns)


def _codes(matrix: Matrix) -> torch.Tensor:
    """The codes `[rows, columns]`."""
    if matrix.layout.bits == 8:
        return matrix.data.view(torch.int8)
    nibbles = matrix.data.view(matrix.rows, -1, 16)
    return torch.cat([nibbles & 15, nibbles >> 4], -1).view(matrix.rows, matrix.columns)


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device.type != "cpu":
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has gaps")
