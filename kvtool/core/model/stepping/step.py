"""A step of so many sequences at once: its memory, its program, and the caches that this is bound to just now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kvtool.core.kernels.decode_program import BLOCK, HEADROOM, encode, word
from kvtool.core.model.stepping.layout import Buffers, build_program

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.model.prompt_cache import PromptCache
    from kvtool.core.model.spec import ModelSpec
    from kvtool.core.model.stepping.kept import Linear
    from kvtool.core.native.jit import Function

I64 = npt.NDArray[np.int64]
_POSITIONS = 64  # whose cos and sin are computed together
_MOST_TABLES = 64  # of so many positions each


class Step:
    """What a token of each of `sequences` sequences is computed by.

    Parameters
    ----------
    functions : each compiled function by its name.
    height : how many sequences a row of weights is multiplied with at a time.
    threads : there are at most.

    Attributes
    ----------
    program : int64 `[operations, words]`; `uses`: where in it the operations of each kind stand, layer by layer, and
        sequence by sequence within a layer.
    """

    def __init__(
        self, spec: ModelSpec[Linear], functions: Mapping[str, Function], height: int, threads: int, sequences: int
    ) -> None:
        self.buffers = Buffers(spec, threads, sequences)
        operations = build_program(spec, self.buffers, height)
        self.program = encode(operations, functions)
        kinds = sorted({one.kind for one in operations})
        self.uses = {kind: [i for i, one in enumerate(operations) if one.kind == kind] for kind in kinds}
        self._spec = spec
        self._parts = torch.empty(0, dtype=torch.float32)

    def bind(self, caches: Sequence[PromptCache], windows: Sequence[int | None]) -> None:
        """Write where keys and values lie and which of them are seen, and where attention has room for its sums.

        Parameters
        ----------
        caches : of each sequence, the token's row among those that are filled.
        windows : how many of the last keys each layer sees; None: all.
        """
        lengths = np.array([cache.buffers[0].length for cache in caches])
        capacities = np.array([cache.buffers[0].keys.shape[2] for cache in caches])
        seen = np.array([np.minimum(lengths, window or lengths) for window in windows])
        keys, values = (_addresses(caches, side) for side in ("keys", "values"))
        row = self._spec.head_dim * caches[0].buffers[0].keys.itemsize  # a window begins so many rows further on
        for kind, before in (("keys", np.zeros_like(seen)), ("attend", (lengths - seen) * row)):
            self._write(kind, "key_cache", keys + before)
            self._write(kind, "value_cache", values + before)
            self._write(kind, "capacity", capacities)
        self._write("keys", "row", lengths - 1)
        blocks = -(-capacities // BLOCK)
        parts = self._room(self._spec.heads * blocks * (HEADROOM + self._spec.head_dim))
        for kind in ("attend", "combine"):
            self._write(kind, "seen", seen)
            self._write(kind, "parts", parts)
            self._write(kind, "blocks", blocks)

    def place(self, angles: Sequence[Mapping[str | None, tuple[int, int]]], rotations: Sequence[str | None]) -> None:
        """Write where cos and sin of each sequence's position are, for the rotation that each layer has."""
        for number, side in enumerate(("cos", "sin")):
            addresses = np.array([[of[rotation][number] for of in angles] for rotation in rotations])
            for operation in ("queries", "keys"):
                self._write(operation, side, addresses)

    def _room(self, sizes: I64) -> I64:
        """Addresses of memory of so many numbers for each sequence."""
        if self._parts.numel() < sizes.sum():
            self._parts = torch.empty(int(sizes.sum()), dtype=torch.float32)
        return self._parts.data_ptr() + 4 * (np.cumsum(sizes) - sizes)

    def _write(self, kind: str, field: str, values: npt.NDArray[Any]) -> None:
        """Write a field of all operations of a kind: values `[layers, sequences]`, or `[sequences]` for all layers."""
        shape = len(self._spec.layers), values.shape[-1]
        self.program[self.uses[kind], word(kind, field)] = np.broadcast_to(values, shape).ravel()


def _addresses(caches: Sequence[PromptCache], side: str) -> I64:
    """Of keys or values, `[layers, sequences]`."""
    return np.array([[getattr(buffer, side).data_ptr() for buffer in cache.buffers] for cache in caches]).T


class Angles:
    """Cos and sin of positions, computed some at a time and kept for the next steps."""

    def __init__(self) -> None:
        self._tables: dict[int, dict[str, torch.Tensor]] = {}

    def at(self, decoder: Decoder, position: int) -> dict[str | None, tuple[int, int]]:
        """Addresses of a position's cos and sin by rotation; 0 where nothing is rotated. They stand for one step."""
        start = position // _POSITIONS * _POSITIONS
        table = self._tables.pop(start, None)
        if table is None:
            angles = decoder.rotary.table(torch.arange(start, start + _POSITIONS)).by_name
            table = {name: torch.stack([one.cos[0], one.sin[0]]).contiguous() for name, one in angles.items()}
        self._tables[start] = table  # last: those that were not used for longest go first
        while len(self._tables) > _MOST_TABLES:
            del self._tables[next(iter(self._tables))]
        found: dict[str | None, tuple[int, int]] = {None: (0, 0)}
        for name, (cos, sin) in table.items():
            found[name] = cos[position - start].data_ptr(), sin[position - start].data_ptr()
        return found
