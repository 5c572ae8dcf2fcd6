"""A weight matrix as it is kept in memory, and its numbers: the reference for every kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SPAN = 32  # columns whose codes lie together
CHUNK = 8  # spans whose scales are read together: a block of the kinds that have blocks
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}


@dataclass(frozen=True, slots=True)
class Layout:
    """How a kind of weights lies in memory: w = scale · (code - centre) + min for each group of columns.

    Attributes
    ----------
    bits : of a code; 16 and 32: the numbers themselves, without scales.
    group : columns that share a scale.
    centre : what is taken from each code.
    mins : whether each group has a min, too.
    blocks : scales are products: a float16 of 256 columns, and a whole number of each group (the K kinds).
    """

    bits: int
    group: int = 1
    centre: int = 0
    mins: bool = False
    blocks: bool = False

    @property
    def dense(self) -> bool:
        """Whether the weights are plain numbers."""
        return self.bits >= 16

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of each plane that codes are split into, the lowest first."""
        return _PLANES[self.bits]

    @property
    def multiple(self) -> int:
        """Columns come in multiples of this."""
        return 1 if self.dense else SPAN * CHUNK if self.blocks else SPAN

    @property
    def block_bytes(self) -> int:
        """Bytes of the scales of a block of 256 columns."""
        return (1 + self.mins) * (2 + SPAN * CHUNK // self.group)

    def row_bytes(self, columns: int) -> int:
        """Bytes of `data` for one row."""
        return columns * self.bits // 8

    def scales_of_row(self, columns: int) -> int:
        """Elements of `scales` for one row."""
        if self.dense:
            return 0
        return columns // (SPAN * CHUNK) * self.block_bytes if self.blocks else columns // self.group


# Named as in GGUF, whose numbers each kind keeps exactly.
LAYOUTS = {
    "float32": Layout(32),
    "bfloat16": Layout(16),
    "q8_0": Layout(8, 32),
    "q4_0": Layout(4, 32, centre=8),
    "q4_1": Layout(4, 32, mins=True),
    "q5_0": Layout(5, 32, centre=16),
    "q5_1": Layout(5, 32, mins=True),
    "q2_k": Layout(2, 16, mins=True, blocks=True),
    "q3_k": Layout(3, 16, centre=4, blocks=True),
    "q4_k": Layout(4, 32, mins=True, blocks=True),
    "q5_k": Layout(5, 32, mins=True, blocks=True),
    "q6_k": Layout(6, 16, centre=32, blocks=True),
}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix `[rows, columns]`, rows being outputs; every tensor contiguous and on the CPU.

    Attributes
    ----------
    kind : one of LAYOUTS.
    data : float32 or bfloat16 `[rows, columns]`; else uint8 `[rows, bytes]`, the codes of 32 columns after those of 32
        others, plane by plane. Of eight bits: int8. Of four: byte j holds column j low and column 16 + j high. Of two:
        byte j holds the columns j, 8 + j, 16 + j, 24 + j from low to high. Of one: bit j of 32 is column j.
    scales : float16 `[rows, columns / group]`; with blocks uint8 `[rows, bytes]`, for each 256 columns a float16, one
        more for mins, an int8 for each group, one more for its min, which is taken away; empty where the kind has none.
    mins : as scales; empty where the kind has none, or has blocks.
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
        layout = self.layout
        if self.rows < 1 or self.columns < 1 or self.columns % layout.multiple:
            raise ValueError(f"no {self.kind} matrix has {self.rows} rows of {self.columns} columns")
        width = layout.scales_of_row(self.columns)
        numbers = torch.uint8 if layout.blocks else torch.float16
        if layout.dense:
            _check("data", self.data, getattr(torch, self.kind), (self.rows, self.columns))
        else:
            _check("data", self.data, torch.uint8, (self.rows, layout.row_bytes(self.columns)))
        _check("scales", self.scales, numbers, (self.rows, width) if width else (0,))
        _check("mins", self.mins, torch.float16, (self.rows, width) if layout.mins and not layout.blocks else (0,))

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


def none(dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """What stands for scales or mins that a kind does not have."""
    return torch.empty(0, dtype=dtype)


def take_rows(matrix: Matrix, rows: torch.Tensor) -> Matrix:
    """Copy some rows, in the order given."""
    parts = (matrix.data, matrix.scales, matrix.mins)
    data, scales, mins = (part[rows] if part.dim() == 2 else part for part in parts)
    return Matrix(matrix.kind, len(rows), matrix.columns, data, scales, mins)


def numbers(matrix: Matrix) -> torch.Tensor:
    """Compute the weights, float32 `[rows, columns]`: scale · (code - centre) + min, exact but for the addition."""
    layout = matrix.layout
    if layout.dense:
        return matrix.data.float()
    codes = (unpacked_codes(matrix).float() - layout.centre).view(matrix.rows, -1, layout.group)
    scales, mins = _factors(matrix)
    weights = codes * scales[:, :, None]
    if mins is not None:
        weights += mins[:, :, None]
    return weights.view(matrix.rows, matrix.columns)


def _factors(matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and mins of every group, float32 `[rows, groups]`."""
    layout = matrix.layout
    if not layout.blocks:
        return matrix.scales.float(), matrix.mins.float() if layout.mins else None
    kinds = 1 + layout.mins
    blocks = matrix.scales.view(-1, layout.block_bytes)
    whole = blocks[:, : 2 * kinds].contiguous().view(torch.float16).float()
    each = blocks[:, 2 * kinds :].contiguous().view(torch.int8).float().view(len(blocks), kinds, -1)
    products = (whole[:, :, None] * each).view(matrix.rows, -1, kinds, each.shape[-1])
    scales, *mins = (products[:, :, kind].reshape(matrix.rows, -1) for kind in range(kinds))
    return scales, -mins[0] if mins else None


def packed_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Lay out codes, uint8 `[rows, columns]` (of eight bits: int8), as the `data` of a matrix."""
    if bits == 8:
        return codes.view(torch.uint8)
    spans, parts, done = codes.view(-1, SPAN), [], 0
    for width in _PLANES[bits]:
        parts.append(_plane((spans >> done) & (2**width - 1), width))
        done += width
    return torch.cat(parts, 1).view(len(codes), -1)


def _plane(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Codes of `width` bits `[spans, 32]` as bytes `[spans, 4 · width]`."""
    each = 8 // width  # codes in a byte
    fields = codes.view(-1, 4, 8) if width == 1 else codes.view(-1, each, 4 * width).transpose(1, 2)
    shifts = torch.arange(each, dtype=torch.uint8) * width
    plane: torch.Tensor = (fields << shifts).sum(-1, dtype=torch.uint8)
    return plane


def unpacked_codes(matrix: Matrix) -> torch.Tensor:
    """The codes `[rows, columns]`: uint8, of eight bits int8."""
    layout = matrix.layout
    if layout.bits == 8:
        return matrix.data.view(torch.int8)
    spans, first, done = matrix.data.view(-1, 4 * layout.bits), 0, 0
    codes = torch.zeros(len(spans), SPAN, dtype=torch.uint8)
    for width in layout.planes:
        codes |= _fields(spans[:, first : first + 4 * width], width) << done
        first, done = first + 4 * width, done + width
    return codes.view(matrix.rows, matrix.columns)


def _fields(plane: torch.Tensor, width: int) -> torch.Tensor:
    """What `_plane` made bytes of."""
    shifts = torch.arange(8 // width, dtype=torch.uint8) * width
    fields: torch.Tensor = (plane[:, :, None] >> shifts) & (2**width - 1)
    return fields.reshape(-1, SPAN) if width == 1 else fields.transpose(1, 2).reshape(-1, SPAN)


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device.type != "cpu":
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has gaps")
