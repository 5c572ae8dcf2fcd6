"""Linear transform of sides to whole numbers and back in machine code, and errors: one call for all layers given.

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
from kvtool.core.codec.base import NAMES
from kvtool.core.codec.profile import SIDES, Layout, Profile
from kvtool.core.codec.rans import coder
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
    """The matrices of a layer's groups, K's first, laid out for a kernel.

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

    @classmethod
    def forward(cls, profile: Profile, layer: int, tile: Tile) -> Weights:
        """Lay out a profile's forward transform. Raises DamagedError where there is none."""

        def make() -> Weights:
            means = profile.means[layer].reshape(-1, profile.layout.size)
            return cls.of(list(profile.forward(layer).flatten(0, 1)), means, tile)

        return profile.memo(("forward weights", layer, tile), make)

    @classmethod
    def backward(cls, profile: Profile, layer: int, level: str, dtype: torch.dtype, tile: Tile) -> Weights:
        """Lay out a profile's backward transform of the columns that a level codes, rounded to `dtype`."""

        def make() -> Weights:
            bases, means = (part.flatten(0, 1) for part in profile.backward(layer, level, dtype))
            widths = profile.coded(level, layer).widths
            return cls.of([basis[:width] for basis, width in zip(bases, widths, strict=True)], means, tile)

        return profile.memo(("backward weights", layer, level, dtype, tile), make)


@dataclass(frozen=True, slots=True)
class Multiplier:
    """A kernel that multiplies, and the tiles that its weights are laid out for."""

    kernel: Function
    tile: Tile


def forward_by(layout: Layout, dtype: torch.dtype) -> Multiplier | None:
    """Return the kernel that makes numbers of sides of this dtype; None: torch does."""
    return _multiplier(transform_ir.Forward(NAMES[dtype], transform_ir.pitch_of(layout.size)))


def backward_by(layout: Layout, dtype: torch.dtype) -> Multiplier | None:
    """Return the kernel that makes sides of this dtype of numbers, the same on every CPU; None: torch does."""
    return _multiplier(transform_ir.Backward(NAMES[dtype], transform_ir.pitch_of(layout.padded)))


def reading_by(layout: Layout, dtype: torch.dtype) -> Multiplier | None:
    """Return the kernel that makes sides of this dtype of numbers fastest here; None: torch does."""
    if multiplies_pairs(dtype):
        return _multiplier(transform_ir.Backward(NAMES[dtype], transform_ir.pitch_of(layout.padded // 2), pairs=True))
    return None if torch_is_faster(dtype) else backward_by(layout, dtype)


def multiplies_pairs(dtype: torch.dtype) -> bool:
    """Return whether the kernels multiply bfloat16 as such: the CPU can, and has nothing faster for torch."""
    able = dtype == torch.bfloat16 and multiplies_bfloat16(coder.isa()) and is_fast(NAMES[dtype])
    return able and "amxbf16" not in cpu_features()


def torch_is_faster(dtype: torch.dtype) -> bool:
    """Return whether torch makes sides faster: in a narrow format that the CPU multiplies, or without machine code.

    Measured with one thread of an AMD EPYC (Zen 5): decoding to bfloat16 0.80 GB/s by torch's products, 0.60 by the
    kernels here that widen it; to float32 0.35 and 0.59.
    """
    return coder.isa() is None or (dtype != torch.float32 and is_fast(NAMES[dtype]))


def _multiplier(kind: transform_ir.Forward | transform_ir.Backward) -> Multiplier | None:
    kernel, isa = coder.kernel(kind), coder.isa()
    return None if kernel is None or isa is None else Multiplier(kernel, kind.tile(isa))


@dataclass(frozen=True, slots=True)
class Places:
    """Addresses of sides `[kv_heads, tokens, head_dim]` of one format, with a head's numbers next to each other.

    Attributes
    ----------
    first : addresses of their first numbers, int64 `[sides]`.
    head, token : bytes from head to head and from token to token.
    rows : number of tokens of each.
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
        """Take some tensors' addresses; those whose heads' numbers are not next to each other are copied."""
        kept = [side if side.stride(2) == 1 or side.shape[2] == 1 else side.contiguous() for side in sides]
        found = [(side.data_ptr(), *side.stride(), side.shape[1]) for side in kept]
        first, head, token, _, rows = np.array(found, np.int64).T
        heads, _, dim = kept[0].shape
        size = kept[0].element_size()
        return cls(heads, dim, kept[0].dtype, first, head * size, token * size, rows, kept)


# ---- there and back ----------------------------------------------------------------------------------------------


def numbers_of(layout: Layout, by: Multiplier, weights: Sequence[Weights], sides: Places, out: I16) -> bool:
    """Make numbers of the finest level, int16 `[layers, tokens, stride]`, of layers' sides, K and V in turn.

    Returns True if all keys and values are finite.
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
    """Make sides `[layers, 2, tokens, groups, size]` of numbers `[layers, tokens, stride]`.

    Parameters
    ----------
    widths : of each layer, the number of coded columns of each group; the others are not read.
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
    """Return the addresses of layers' groups in numbers `[layers, tokens, stride]`; `padded`: bytes of a group."""
    layers = address(numbers) + np.arange(len(numbers))[:, None] * numbers.strides[0]
    return np.asarray((layers + np.arange(SIDES * layout.groups) * padded).reshape(-1), np.int64)


def _laid(weights: Sequence[Weights], depth: int, size: int, tile: Tile) -> dict[str, Any]:
    """Return the fields for the weights, and for the memory of a slab's rows and their product."""
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
    """Return each side's RMS of the difference over RMS of the exact numbers.

    Parameters
    ----------
    made, exact : `[kv_heads, tokens, head_dim]`, all of one format; shapes may differ from pair to pair.

    Raises
    ------
    ValueError : shapes or formats do not fit.
    """
    counts = np.array([max(1, side.numel()) for side in made], np.int64)
    wrong, size = np.sqrt(squares_of(made, exact) / counts[:, None]).T
    errors: list[float] = (wrong / np.maximum(size, _LEAST)).tolist()
    return errors


def squares_of(made: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> Sums:
    """Sum the squares of made less exact, and of exact: float64 `[sides, 2]`; takes and raises as `errors_of`."""
    formats = {side.dtype for side in (*made, *exact)}
    if len(formats) > 1 or [side.shape for side in made] != [side.shape for side in exact]:
        raise ValueError("sides of different shapes or formats cannot be compared")
    sums, forms = np.zeros((len(made), 2)), [(side.shape[0], side.shape[2]) for side in made]
    for form in dict.fromkeys(forms):
        numbers = [number for number, own in enumerate(forms) if own == form]
        sums[numbers] = _squares_at(*(Places.of([sides[number] for number in numbers]) for sides in (made, exact)))
    return sums


def _squares_at(made: Places, exact: Places) -> Sums:
    kernel = coder.kernel(transform_ir.Errors(NAMES[made.dtype]))
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
