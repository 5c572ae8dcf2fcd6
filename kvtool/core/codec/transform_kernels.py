"""Transform sides of layers to whole numbers and back, as fast as this machine can: one call for all layers given.

Without machine code torch does the same, up to the order of its sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtool.core.codec import transform_ir
from kvtool.core.codec.entropy import native
from kvtool.core.codec.layout import SIDES, Layout
from kvtool.core.codec.raw import NAMES
from kvtool.core.common.arithmetic import cpu_features, is_fast
from kvtool.core.native.gemm import Tile, panels
from kvtool.core.native.isa import multiplies_bfloat16
from kvtool.core.native.jit import Function
from kvtool.core.native.job import Jobs, address, scratch

F32 = npt.NDArray[np.float32]
I16 = npt.NDArray[np.int16]
I64 = npt.NDArray[np.int64]
Sums = npt.NDArray[np.float64]
_LEAST = 1e-30  # of an RMS that is divided by


@dataclass(frozen=True, eq=False, slots=True)
class Weights:
    """What the groups of a layer, K's first, are multiplied by, laid out for a kernel.

    Attributes
    ----------
    panels : of each group; None: it has no depth.
    means : float32 `[2 * groups, size]`.
    addresses : of both, int64 `[2 * groups, 2]`.
    """

    panels: tuple[F32 | None, ...]
    means: F32
    addresses: I64

    @classmethod
    def of(cls, matrices: Sequence[torch.Tensor], means: torch.Tensor, tile: Tile) -> Weights:
        """Lay out matrices `[depth, size]` and means `[2 * groups, size]`."""
        laid = tuple(panels(matrix.float().numpy(), tile) if len(matrix) else None for matrix in matrices)
        middle = np.ascontiguousarray(means.float().numpy())
        size = middle.strides[0]
        places = [(0 if part is None else address(part), address(middle) + at * size) for at, part in enumerate(laid)]
        return cls(laid, middle, np.array(places, np.int64))


@dataclass(frozen=True, slots=True)
class Multiplier:
    """A kernel that multiplies, and the tiles that its weights are laid out for."""

    kernel: Function
    tile: Tile


def forward_by(layout: Layout, dtype: torch.dtype) -> Multiplier | None:
    """What makes numbers of sides of this dtype; None: torch does."""
    return _multiplier(transform_ir.Forward(NAMES[dtype], transform_ir.pitch_of(layout.size)))


def backward_by(layout: Layout, dtype: torch.dtype) -> Multiplier | None:
    """What makes sides of this dtype of numbers, the same on every CPU; None: torch does."""
    return _multiplier(transform_ir.Backward(NAMES[dtype], transform_ir.pitch_of(layout.padded)))


def reading_by(layout: Layout, dtype: torch.dtype) -> Multiplier | None:
    """What makes sides of this dtype of numbers fastest here; None: torch does."""
    if multiplies_pairs(dtype):
        return _multiplier(transform_ir.Backward(NAMES[dtype], transform_ir.pitch_of(layout.padded // 2), pairs=True))
    return None if torch_is_faster(dtype) else backward_by(layout, dtype)


def multiplies_pairs(dtype: torch.dtype) -> bool:
    """Whether the kernels here multiply bfloat16 as such: the CPU can, and has nothing faster that torch would take."""
    able = dtype == torch.bfloat16 and multiplies_bfloat16(native.isa()) and is_fast(NAMES[dtype])
    return able and "amxbf16" not in cpu_features()


def torch_is_faster(dtype: torch.dtype) -> bool:
    """Whether torch is faster at sides of numbers: in a narrow format that the CPU multiplies, or without machine code.

    Measured with one thread of an AMD EPYC (Zen 5): decoding to bfloat16 0.80 GB/s by torch's products, 0.60 by the
    kernels here that widen it; to float32 0.35 and 0.59.
    """
    return native.isa() is None or (dtype != torch.float32 and is_fast(NAMES[dtype]))


def _multiplier(kind: transform_ir.Forward | transform_ir.Backward) -> Multiplier | None:
    kernel, isa = native.kernel(kind), native.isa()
    return None if kernel is None or isa is None else Multiplier(kernel, kind.tile(isa))


@dataclass(frozen=True, slots=True)
class Places:
    """Where sides `[kv_heads, tokens, head_dim]` of one form are, whose heads' numbers stand side by side.

    Attributes
    ----------
    first : addresses of their first numbers, int64 `[sides]`.
    head, token : bytes from head to head and from token to token.
    rows : how many tokens each has.
    held : the tensors.
    """

    heads: int
    dim: int
    dtype: torch.dtype
    first: I64
    head: I64
    token: I64
    rows: I64
    held: Sequence[torch.Tensor]

    @classmethod
    def of(cls, sides: Sequence[torch.Tensor]) -> Places:
        """Those of some tensors; they are copied where numbers of a head do not stand side by side."""
        kept = [side if side.stride(2) == 1 or side.shape[2] == 1 else side.contiguous() for side in sides]
        found = [(side.data_ptr(), *side.stride(), side.shape[1]) for side in kept]
        first, head, token, _, rows = np.array(found, np.int64).T
        heads, _, dim = kept[0].shape
        size = kept[0].element_size()
        return cls(heads, dim, kept[0].dtype, first, head * size, token * size, rows, kept)

    @classmethod
    def end_to_end(cls, sides: torch.Tensor, heads: int) -> Places:
        """Those of sides in one piece, `[layers, 2, tokens, channels]`, K and V in turn."""
        count, tokens, channels, size = SIDES * len(sides), sides.shape[2], sides.shape[3], sides.element_size()
        every, row = np.arange(count) * tokens, channels * size
        head, token, rows = (np.full(count, number) for number in (channels // heads * size, row, tokens))
        held = (
            [*sides.view(count, tokens, heads, channels // heads).transpose(1, 2)] if native.isa() is None else [sides]
        )
        return cls(heads, channels // heads, sides.dtype, sides.data_ptr() + every * row, head, token, rows, held)

    @property
    def counts(self) -> I64:
        """How many numbers each side has."""
        return self.heads * self.dim * self.rows


# ---- there and back ----------------------------------------------------------------------------------------------


def numbers_of(layout: Layout, by: Multiplier, weights: Sequence[Weights], sides: Places, out: I16) -> bool:
    """Numbers of the finest level, int16 `[layers, tokens, stride]`, of the sides of some layers, K and V in turn.

    Returns
    -------
    Whether all keys and values are finite.
    """
    groups, own = layout.groups, sides.heads // layout.groups
    if layout.size != layout.padded:
        out[:] = 0
    odd = np.zeros(len(sides.first) * groups, np.int32)
    first = sides.first[:, None] + np.arange(groups) * own * sides.head[:, None]
    jobs = Jobs(transform_ir.FORWARD, len(odd))
    jobs.set(
        source=first.reshape(-1),
        token=np.repeat(sides.token, groups),
        head=np.repeat(sides.head, groups),
        heads=own,
        dim=sides.dim,
        out=_groups_of(layout, out, layout.padded * out.itemsize),
        stride=out.strides[1],
        rows=out.shape[1],
        depth=layout.size,
        odd=address(odd) + np.arange(len(odd)) * odd.itemsize,
        **_laid(weights, layout.size, layout.size, by.tile),
    )
    jobs.run(by.kernel)
    return not odd.any()


def sides_of(
    layout: Layout,
    by: Multiplier,
    weights: Sequence[Weights],
    widths: Sequence[Sequence[int]],
    numbers: I16,
    out: torch.Tensor,
) -> None:
    """Sides `[layers, 2, tokens, groups, size]` of numbers `[layers, tokens, stride]`.

    Parameters
    ----------
    widths : of each layer, how many columns of each group are coded; the others are not looked at.
    """
    depth = np.array(widths, np.int64).reshape(-1)
    jobs = Jobs(transform_ir.BACKWARD, len(depth))
    size = out.element_size()
    at = np.arange(len(widths))[:, None, None] * out.stride(0) + np.arange(SIDES)[:, None] * out.stride(1)
    jobs.set(
        numbers=_groups_of(layout, numbers, layout.padded * numbers.itemsize),
        stride=numbers.strides[1],
        depth=depth,
        out=out.data_ptr() + ((at + np.arange(layout.groups) * out.stride(3)) * size).reshape(-1),
        token=out.stride(2) * size,
        size=layout.size,
        rows=numbers.shape[1],
        **_laid(weights, layout.padded, layout.size, by.tile),
    )
    for number in np.flatnonzero(depth == 0).tolist():
        layer, rest = divmod(number, SIDES * layout.groups)
        side, group = divmod(rest, layout.groups)
        out[layer, side, :, group] = torch.from_numpy(weights[layer].means[rest]).to(out.dtype)
    jobs.keep(depth > 0)
    jobs.run(by.kernel)


def _groups_of(layout: Layout, numbers: I16, padded: int) -> I64:
    """Addresses of every layer's groups in numbers `[layers, tokens, stride]`; a group takes so many bytes of a row."""
    layers = address(numbers) + np.arange(len(numbers))[:, None] * numbers.strides[0]
    return np.asarray((layers + np.arange(SIDES * layout.groups) * padded).reshape(-1), np.int64)


def _laid(weights: Sequence[Weights], depth: int, size: int, tile: Tile) -> dict[str, Any]:
    """Fields that say what is multiplied by, and where a slab's rows and their product are kept meanwhile."""
    addresses = np.concatenate([one.addresses for one in weights])
    count = -(-size // tile.columns)
    return {
        "weights": addresses[:, 0],
        "means": addresses[:, 1],
        "panels": count,
        "a": address(scratch("rows", transform_ir.MOST_ROWS * transform_ir.pitch_of(depth), np.float32)),
        "c": address(scratch("product", transform_ir.MOST_ROWS * count * tile.columns, np.float32)),
    }


# ---- errors ------------------------------------------------------------------------------------------------------


def errors_of(made: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> list[float]:
    """RMS of the difference over RMS of what is exact, for each side.

    Parameters
    ----------
    made, exact : `[kv_heads, tokens, head_dim]`, all of one format; shapes may differ from pair to pair.

    Raises
    ------
    ValueError : shapes or forms that do not fit.
    """
    return _relative(squares_of(made, exact), np.array([side.numel() for side in made], np.int64))


def squares_of(made: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> Sums:
    """Sums of the squares of made less exact, and of exact: float64 `[sides, 2]`; takes and raises as `errors_of`."""
    _check_alike(made, exact)
    sums, forms = np.zeros((len(made), 2)), [(side.shape[0], side.shape[2]) for side in made]
    for form in dict.fromkeys(forms):
        numbers = [number for number, own in enumerate(forms) if own == form]
        sums[numbers] = _squares_at(*(Places.of([sides[number] for number in numbers]) for sides in (made, exact)))
    return sums


def _check_alike(made: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> None:
    formats = {side.dtype for side in (*made, *exact)}
    if len(formats) > 1 or [side.shape for side in made] != [side.shape for side in exact]:
        raise ValueError("sides of different shapes or formats cannot be compared")


def errors_at(made: Places, exact: Places) -> list[float]:
    """What `errors_of` gives."""
    return _relative(_squares_at(made, exact), made.counts)


def _relative(sums: Sums, counts: I64) -> list[float]:
    """Errors of sums of squares, of sides of so many numbers."""
    wrong, size = np.sqrt(sums / np.maximum(counts, 1)[:, None]).T
    errors: list[float] = (wrong / np.maximum(size, _LEAST)).tolist()
    return errors


def _squares_at(made: Places, exact: Places) -> Sums:
    kernel = native.kernel(transform_ir.Errors(NAMES[made.dtype]))
    if kernel is None:
        pairs = [
            (left.double() - right.double(), right.double()) for left, right in zip(made.held, exact.held, strict=True)
        ]
        return np.array([[float(part.square().sum()) for part in pair] for pair in pairs])
    sums = np.zeros((len(made.first), 2))
    if not made.heads * made.dim:
        return sums
    jobs = Jobs(transform_ir.ERRORS, len(sums))
    for name, sides in (("made", made), ("exact", exact)):
        jobs.set(**{name: sides.first, f"{name}_token": sides.token, f"{name}_head": sides.head})
    places = address(sums) + np.arange(len(sums)) * sums.strides[0]
    jobs.set(heads=made.heads, dim=made.dim, rows=made.rows, sums=places)
    jobs.keep(made.rows > 0)  # a kernel's loops run once at least
    jobs.run(kernel)
    return sums
