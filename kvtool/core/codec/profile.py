"""What a store knows about a model's KV: means, transforms, tables. Fitted once; records name it by its digest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import save

from kvtool.core.codec.entropy.columns import Columns, columns_of
from kvtool.core.codec.entropy.tables import TableSet
from kvtool.core.codec.layout import BLOCK, SIDES, Layout
from kvtool.core.codec.nested import NESTED
from kvtool.core.codec.transform_kernels import Weights
from kvtool.core.errors import DamagedError
from kvtool.core.native.gemm import Tile

FORMAT = 1
DIGEST_BYTES = 16
MOST_BYTES = 2**31
_CPU = torch.device("cpu")
_WIDENING = 3  # steps of a level over those of the finer one: odd, so that each bin splits into whole bins
_NAMES = ("means", "basis", "active", "ids", "fine_ids", "tables")


@dataclass(frozen=True, slots=True)
class CodedColumns:
    """What a level codes of a layer.

    Attributes
    ----------
    alone : columns of a record that stands alone.
    fine : columns of a record that refines the next coarser level; None: there is none.
    widths : how many columns each group has, its first ones: K's groups, then V's.
    others : first columns of the blocks that are not coded, int32.
    """

    alone: Columns
    fine: Columns | None
    widths: tuple[int, ...]
    others: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Profile:
    """A fitted transform of un-rotated keys and of values, and the tables of what comes out.

    A group of a layer's side is `x = mean + y @ basis`, with y in steps of the finest level: level n quantises y to
    whole multiples of 3 ** (n - 1). C = groups * size channels a side, S = the layout's stride.

    Parameters
    ----------
    means : float32 `[layers, 2, C]`.
    basis : bfloat16 `[layers, 2, groups, size, size]`, a coefficient a row, the largest first.
    active : uint8 `[levels, layers, 2 * groups]`: blocks of 32 coefficients that are coded.
    ids : uint16 `[levels, layers, S]`: table of each column where a level stands alone.
    fine_ids : uint16 `[levels - 1, layers, S]`: first of three tables of each column where a level refines the next.
    tables : frequencies.
    about : what it was fitted on, for people.
    """

    means: torch.Tensor
    basis: torch.Tensor
    active: npt.NDArray[np.uint8]
    ids: npt.NDArray[np.uint16]
    fine_ids: npt.NDArray[np.uint16]
    tables: TableSet
    about: dict[str, Any]

    def __post_init__(self) -> None:
        layers, sides, groups, size, also = self.basis.shape
        layout = self.layout
        levels = len(NESTED)
        fits = (
            sides == SIDES
            and size == also
            and self.means.shape == (layers, SIDES, groups * size)
            and self.active.shape == (levels, layers, SIDES * groups)
            and self.ids.shape == (levels, layers, layout.stride)
            and self.fine_ids.shape == (levels - 1, layers, layout.stride)
        )
        if not fits or (self.active > layout.padded // BLOCK).any():
            raise DamagedError("a codec profile whose parts do not fit each other")
        if int(self.ids.max()) >= len(self.tables) or int(self.fine_ids.max()) + 2 >= len(self.tables):
            raise DamagedError("a codec profile that names a table it does not have")
        if not (torch.isfinite(self.means).all() and torch.isfinite(self.basis.float()).all()):
            raise DamagedError("a codec profile with numbers that are not finite")

    @cached_property
    def layout(self) -> Layout:
        """Groups and their size."""
        return Layout(self.basis.shape[2], self.basis.shape[3])

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return int(self.basis.shape[0])

    def coded(self, level: str, layer: int) -> CodedColumns:
        """The columns that are coded."""
        coded = self._coded.get((level, layer))
        if coded is None:
            at, groups = NESTED.index(level), SIDES * self.layout.groups
            places = self.layout.places(self.active[at, layer])
            columns = columns_of(places)
            widths = np.bincount(places // self.layout.padded, minlength=groups) * BLOCK
            alone = Columns(self.ids[at, layer, columns], self.tables, places)
            fine = None
            if at < len(self.fine_ids):
                fine = Columns(self.fine_ids[at, layer, columns], self.tables, places, refines=True)
            others = np.setdiff1d(self.layout.places(), places)
            coded = CodedColumns(alone, fine, tuple(widths.tolist()), others)
            self._coded[level, layer] = coded
        return coded

    # ---- the transform -------------------------------------------------------------------------------------------

    def forward(self, layer: int) -> torch.Tensor:
        """float32 `[2, groups, size, size]`: `y = (x - mean) @ forward`. Raises DamagedError where there is none."""
        forward = self._forward.get(layer)
        if forward is None:
            forward = inverted(self.basis[layer])
            if forward is None:
                raise DamagedError(f"a codec profile whose transform of layer {layer} has no inverse")
            self._forward[layer] = forward
        return forward

    def backward(
        self, layer: int, level: str, dtype: torch.dtype, device: torch.device = _CPU
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[2, groups, padded, size]`, and means `[2, groups, size]`: numbers times the one, plus the other."""
        key = (layer, level, dtype, device)
        backward = self._backward.get(key)
        if backward is None:
            steps = float(_WIDENING ** NESTED.index(level))
            bases = torch.zeros((*self.basis.shape[1:3], self.layout.padded, self.layout.size), dtype=dtype)
            bases[:, :, : self.layout.size] = (self.basis[layer].float() * steps).to(dtype)
            means = self.means[layer].to(dtype).view(SIDES, self.layout.groups, self.layout.size)
            backward = bases.to(device), means.to(device)
            self._backward[key] = backward
        return backward

    def forward_weights(self, layer: int, tile: Tile) -> Weights:
        """`forward` and means, as a kernel with such tiles takes them. Raises DamagedError where there is none."""
        key = (layer, tile)
        weights = self._laid.get(key)
        if weights is None:
            groups, size = self.layout.groups, self.layout.size
            matrices, means = self.forward(layer).flatten(0, 1), self.means[layer].reshape(SIDES * groups, size)
            weights = self._laid[key] = Weights.of(list(matrices), means, tile)
        return weights

    def backward_weights(self, layer: int, level: str, dtype: torch.dtype, tile: Tile) -> Weights:
        """`backward` of the columns that a level codes, rounded to `dtype`, as a kernel with such tiles takes it."""
        key = (layer, level, dtype, tile)
        weights = self._laid.get(key)
        if weights is None:
            bases, means = (part.flatten(0, 1) for part in self.backward(layer, level, dtype))
            widths = self.coded(level, layer).widths
            matrices = [basis[:width] for basis, width in zip(bases, widths, strict=True)]
            weights = self._laid[key] = Weights.of(matrices, means, tile)
        return weights

    @cached_property
    def _laid(self) -> dict[tuple[object, ...], Weights]:
        return {}

    @cached_property
    def _coded(self) -> dict[tuple[str, int], CodedColumns]:
        return {}

    @cached_property
    def _forward(self) -> dict[int, torch.Tensor]:
        return {}

    @cached_property
    def _backward(self) -> dict[tuple[int, str, torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]]:
        return {}

    # ---- bytes ---------------------------------------------------------------------------------------------------

    @cached_property
    def data(self) -> bytes:
        """The profile as a safetensors file."""
        parts = {
            "means": self.means,
            "basis": self.basis,
            "active": torch.from_numpy(self.active),
            "ids": torch.from_numpy(self.ids),
            "fine_ids": torch.from_numpy(self.fine_ids),
            "tables": torch.from_numpy(self.tables.frequencies),
        }
        about = json.dumps(self.about, sort_keys=True)
        made: bytes = save(
            {name: part.contiguous() for name, part in parts.items()}, {"kvtool_profile": str(FORMAT), "about": about}
        )
        return _in_order(made)

    @cached_property
    def digest(self) -> bytes:
        """Name of the profile, 16 bytes: blake2b-128 of its file."""
        return digest_of(self.data)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Profile:
        """Read what `data` has written.

        Raises
        ------
        DamagedError : no profile, another format, or parts that do not fit.
        """
        whole = bytes(data)
        try:
            parts, metadata = _load(whole)
            if metadata.get("kvtool_profile") != str(FORMAT):
                raise DamagedError(f"a codec profile of another format than {FORMAT}")
            about = json.loads(metadata["about"])
            if not isinstance(about, dict):
                raise ValueError("what it says about itself is no object")
            arrays = {name: parts[name].numpy() for name in _NAMES[2:]}
            _check_types(parts)
            made = cls(
                means=parts["means"],
                basis=parts["basis"],
                active=arrays["active"],
                ids=arrays["ids"],
                fine_ids=arrays["fine_ids"],
                tables=TableSet(arrays["tables"]),
                about=about,
            )
        except (SafetensorError, KeyError, ValueError, TypeError, IndexError, RecursionError) as error:
            raise DamagedError(f"a codec profile that cannot be read: {error}") from error
        made.__dict__["data"] = whole
        return made


def digest_of(data: bytes | memoryview) -> bytes:
    """blake2b-128 of a profile's bytes."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _in_order(data: bytes) -> bytes:
    """A safetensors file with its header's keys in order: safetensors shuffles them, and a digest must not change."""
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def _load(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file in memory."""
    from safetensors.torch import load

    size = int.from_bytes(data[:8], "little")
    if size > len(data) - 8:
        raise ValueError("cut off")
    header = json.loads(data[8 : 8 + size])
    return load(data), header.get("__metadata__", {})


def _check_types(parts: dict[str, torch.Tensor]) -> None:
    wanted = (torch.float32, torch.bfloat16, torch.uint8, torch.uint16, torch.uint16, torch.uint16)
    for name, dtype in zip(_NAMES, wanted, strict=True):
        if parts[name].dtype != dtype:
            raise ValueError(f"{name} is {parts[name].dtype}")
    if parts["basis"].ndim != 5:
        raise ValueError("the basis has another number of dimensions")


def inverted(matrices: torch.Tensor) -> torch.Tensor | None:
    """Invert `[..., size, size]`; float32, and None where one of them has no inverse.

    In float64, so that all machines round the same numbers; one by one, as oneMKL's threads fail at several.
    """
    inverses = [torch.linalg.inv_ex(matrix) for matrix in matrices.double().flatten(0, -3)]
    if any(singular.any() for _, singular in inverses):
        return None
    return torch.stack([inverse for inverse, _ in inverses]).float().view(matrices.shape)
