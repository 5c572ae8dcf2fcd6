"""Codec profiles: means, transforms and frequency tables of a model's keys and values; records name their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from kvtool.core.codec.levels import NESTED
from kvtool.core.codec.rans.tables import BLOCK, Columns, TableSet, columns_of
from kvtool.core.errors import DamagedError, StoreFormatError

FORMAT = 1
SIDES = 2  # K, V
_CPU = torch.device("cpu")
_WIDENING = 3  # steps of a level over those of the finer one: odd, so that each bin splits into whole bins
_DTYPES = {
    "means": torch.float32,
    "basis": torch.bfloat16,
    "active": torch.uint8,
    "ids": torch.uint16,
    "fine_ids": torch.uint16,
    "tables": torch.uint16,
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of coefficients in a row: K's groups, then V's, each padded to whole blocks of 32."""

    groups: int  # parts of a side that are transformed separately: 1 (the whole layer) or one a KV head
    size: int  # channels of a group

    @property
    def padded(self) -> int:
        return -(-self.size // BLOCK) * BLOCK

    @property
    def stride(self) -> int:
        return SIDES * self.groups * self.padded

    @property
    def channels(self) -> int:
        return self.groups * self.size

    def start(self, side: int, group: int) -> int:
        return (side * self.groups + group) * self.padded

    def places(self, active: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
        """First columns of the coded blocks, an even number of them, ascending.

        `active`: blocks of each group, uint8 `[2 * groups]`, K's groups first. Where the sum is odd one more is taken:
        all blocks together are even in number.
        """
        most, counts = self.padded // BLOCK, active.astype(np.int64)
        if counts.sum() % 2:
            counts[int(np.flatnonzero(counts < most)[0])] += 1
        blocks = [group * self.padded + BLOCK * np.arange(count) for group, count in enumerate(counts)]
        return np.concatenate(blocks).astype(np.int32)


@dataclass(frozen=True, slots=True)
class CodedColumns:
    alone: Columns  # of a record that refines no other
    fine: Columns | None  # of a record that refines the next coarser level; None: no level is coarser
    widths: tuple[int, ...]  # columns of each group, its first ones: K's groups, then V's


@dataclass(frozen=True, eq=False)
class Profile:
    """A fitted transform of un-rotated keys and of values, and the tables of what comes out.

    A group of a layer's side is `x = mean + y @ basis`, with y in steps of the finest level: level n quantises y to
    whole multiples of 3 ** (n - 1). C = groups * size channels a side, S = the layout's stride.
    """

    means: torch.Tensor  # float32 `[layers, 2, C]`
    basis: torch.Tensor  # bfloat16 `[layers, 2, groups, size, size]`, a coefficient a row, the largest first
    active: npt.NDArray[np.uint8]  # `[levels, layers, 2 * groups]`: blocks of 32 coefficients that are coded
    ids: npt.NDArray[np.uint16]  # `[levels, layers, S]`: table of each column where a record refines no other
    fine_ids: npt.NDArray[np.uint16]  # `[levels - 1, layers, S]`: first of three tables where a level refines
    tables: TableSet
    about: dict[str, Any]  # description of the texts that it was fitted to
    _memo: dict[tuple[object, ...], Any] = field(default_factory=dict, init=False, repr=False)

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
        return Layout(self.basis.shape[2], self.basis.shape[3])

    @property
    def layers(self) -> int:
        return int(self.basis.shape[0])

    def memo(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        made: T | None = self._memo.get(key)
        if made is None:
            made = self._memo[key] = make()
        return made

    def coded(self, level: str, layer: int) -> CodedColumns:
        def make() -> CodedColumns:
            at, groups = NESTED.index(level), SIDES * self.layout.groups
            places = self.layout.places(self.active[at, layer])
            columns = columns_of(places)
            widths = np.bincount(places // self.layout.padded, minlength=groups) * BLOCK
            alone = Columns(self.ids[at, layer, columns], self.tables, places)
            fine = None
            if at < len(self.fine_ids):
                fine = Columns(self.fine_ids[at, layer, columns], self.tables, places, refines=True)
            return CodedColumns(alone, fine, tuple(widths.tolist()))

        return self.memo(("coded", level, layer), make)

    def forward(self, layer: int) -> torch.Tensor:
        """float32 `[2, groups, size, size]`: `y = (x - mean) @ forward`. Raises DamagedError: no inverse."""

        def make() -> torch.Tensor:
            forward = inverted(self.basis[layer])
            if forward is None:
                raise DamagedError(f"a codec profile whose transform of layer {layer} has no inverse")
            return forward

        return self.memo(("forward", layer), make)

    def backward(
        self, layer: int, level: str, dtype: torch.dtype, device: torch.device = _CPU
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `[2, groups, padded, size]` and means `[2, groups, size]`: numbers times the one, plus the other."""

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            steps = float(_WIDENING ** NESTED.index(level))
            bases = torch.zeros((*self.basis.shape[1:3], self.layout.padded, self.layout.size), dtype=dtype)
            bases[:, :, : self.layout.size] = (self.basis[layer].float() * steps).to(dtype)
            means = self.means[layer].to(dtype).view(SIDES, self.layout.groups, self.layout.size)
            return bases.to(device), means.to(device)

        return self.memo(("backward", layer, level, dtype, device), make)

    @cached_property
    def data(self) -> bytes:
        arrays = map(torch.from_numpy, (self.active, self.ids, self.fine_ids, self.tables.frequencies))
        parts = dict(zip(_DTYPES, (self.means, self.basis, *arrays), strict=True))
        metadata = {"kvtool_profile": str(FORMAT), "about": json.dumps(self.about, sort_keys=True)}
        return _in_order(save({name: part.contiguous() for name, part in parts.items()}, metadata))

    @cached_property
    def digest(self) -> bytes:
        return digest_of(self.data)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Profile:
        """Read a file that `data` has written. Raises DamagedError; StoreFormatError if it has another format."""
        whole = bytes(data)
        try:
            parts, metadata = _load(whole)
            if (number := int(metadata["kvtool_profile"])) != FORMAT:
                raise StoreFormatError(
                    f"the codec profile has format {number}, this kvtool reads format {FORMAT}",
                    "make it anew with `kvtool compress --fit`",
                )
            about = json.loads(metadata["about"])
            if not isinstance(about, dict):
                raise ValueError("what it says about itself is no object")
            active, ids, fine_ids, tables = (parts[name].numpy() for name in ("active", "ids", "fine_ids", "tables"))
            made = cls(parts["means"], parts["basis"], active, ids, fine_ids, TableSet(tables), about)
        except (SafetensorError, KeyError, ValueError, TypeError, IndexError, RecursionError) as error:
            raise DamagedError(f"a codec profile that cannot be read: {error}") from error
        made.__dict__["data"] = whole
        return made


def digest_of(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _in_order(data: bytes) -> bytes:
    """Sort the keys of a safetensors file's header: safetensors shuffles them, and a digest must not change."""
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def _load(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    size = int.from_bytes(data[:8], "little")
    if size > len(data) - 8:
        raise ValueError("cut off")
    header = json.loads(data[8 : 8 + size])
    parts = load(data)
    for name, dtype in _DTYPES.items():
        if parts[name].dtype != dtype:
            raise ValueError(f"{name} is {parts[name].dtype}")
    if parts["basis"].ndim != 5:
        raise ValueError("the basis has another number of dimensions")
    return parts, header.get("__metadata__", {})


def inverted(matrices: torch.Tensor) -> torch.Tensor | None:
    """Invert `[..., size, size]` to float32; None: one of them has no inverse.

    Computed in float64, so that all machines round the same numbers; one by one, as oneMKL's threads fail at several.
    """
    inverses = [torch.linalg.inv_ex(matrix) for matrix in matrices.double().flatten(0, -3)]
    if any(singular.any() for _, singular in inverses):
        return None
    return torch.stack([inverse for inverse, _ in inverses]).float().view(matrices.shape)
