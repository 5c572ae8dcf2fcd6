"""Rotary positions: take them off stored keys, and put them on again wherever a chunk comes to stand."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch

from kvtool.core.errors import ModelError
from kvtool.core.model import triton_place
from kvtool.core.model.kernels import isa_here
from kvtool.core.model.rotation import Move, move_all, rotate_halves
from kvtool.core.model.triton_place import Piece, Side

_TRIED = (0, 1, 77, 511)  # positions that machine code is tried at, few enough for every model
Apply = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Table:
    """cos and sin of some positions, float32 `[1, tokens, rotary_dim]`, as the model itself rounds them."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __getitem__(self, rows: slice) -> Table:  # by token
        return Table(self.cos[:, rows], self.sin[:, rows])

    def inverse(self) -> Table:
        """The table that undoes this one exactly, RoPE's attention scaling and rounding included.

        A pair is rotated by the matrix [[c, -s], [s, c]]; its inverse is [[c, s], [-s, c]] / (c² + s²).
        """
        norm = self.cos.square() + self.sin.square()
        return Table(self.cos / norm, -self.sin / norm)


Copy: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # where to, and what
Turn: TypeAlias = "tuple[torch.Tensor, torch.Tensor, Table]"  # where to, keys, and the table of their positions


class Rotary:
    """Rotates keys `[batch, kv_heads, tokens, head_dim]` with the model's own function, so that interleaved and
    partial rotations come out as the model does them.

    Parameters
    ----------
    decoder : the base model that holds `rotary_emb`.
    attentions : its attention modules, in layer order. One with `use_rope` false (SmolLM3) keeps its keys unrotated.
    dtype : the dtype in which the model computes; its cos and sin are rounded to it.
    device : where keys are; packed weights do not tell.
    """

    def __init__(self, decoder: Any, attentions: list[Any], dtype: torch.dtype, device: str) -> None:
        self._emb = decoder.rotary_emb
        self._apply: Apply = _model_function(attentions[0])
        self._rotates = [bool(getattr(attention, "use_rope", True)) for attention in attentions]
        self._dtype = dtype
        self._isa = isa_here()
        self._device = device
        self._head_dim = int(attentions[0].head_dim)

    def table(self, positions: torch.Tensor) -> Table:
        """Compute cos and sin at `positions` (int64 `[tokens]`)."""
        if not len(positions):  # a RoPE that asks how long the prompt is cannot tell of nothing
            return self.table(positions.new_zeros(1))[:0]
        like = torch.empty(0, dtype=self._dtype, device=positions.device)
        cos, sin = self._emb(like, position_ids=positions[None])
        return Table(cos.float(), sin.float())

    def rotate(self, keys: torch.Tensor, table: Table, layer: int) -> torch.Tensor:
        """Put positions on un-rotated keys; computed in float32, rounded once to the dtype of `keys`."""
        if not self._rotates[layer]:
            return keys
        if keys.requires_grad:
            return self._by_model(keys, table)
        out = torch.empty_like(keys)
        self.rotate_into(out, keys, table, layer)
        return out

    def rotate_into(self, out: torch.Tensor, keys: torch.Tensor, table: Table, layer: int) -> None:
        """Write rotated keys to `out`: on a CPU on their way there, without a number in between being kept."""
        self.place([(out, keys, table)], [], layer)

    def place(self, turns: Sequence[Turn], copies: Sequence[Copy], layer: int) -> None:
        """Rotate keys to their places, and copy what goes beside them as it is: on a CPU in one call of machine code.

        torch's own copies would wake its other threads, which a pass computes with meanwhile.

        Parameters
        ----------
        turns : where to, keys, and the table of their positions; `copies`: where to, and what.
        """
        if self.halves and self._isa is not None and all(len(out) == 1 for out, *_ in turns):
            moves = [self._turned(turn, layer) for turn in turns]
            if move_all([*moves, *(Move(out[0], numbers[0]) for out, numbers in copies)], self._isa):
                return
        for out, keys, table in turns:
            self._place_one(out, keys, table, layer)
        for out, numbers in copies:
            out.copy_(numbers)

    def rotates(self, layer: int) -> bool:
        """Whether a layer's keys have positions at all."""
        return self._rotates[layer]

    @cached_property
    def by_kernel(self) -> bool:
        """Whether one launch on a GPU (`triton_place.py`) gives what the model's own function does: it is tried."""
        if not self._device.startswith("cuda") or importlib.util.find_spec("triton") is None:
            return False
        table = self.table(torch.tensor(_TRIED, device=self._device))
        keys = torch.randn((1, 2, 4, self._head_dim), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        keys = keys.to(self._dtype).to(self._device)
        placed = torch.empty((2, *keys.shape), dtype=keys.dtype, device=keys.device)
        pieces = triton_place.described([Piece(Side.of(keys[0]), Side.of(keys[0]), 0, 4)])
        there = torch.from_numpy(pieces).to(keys.device)
        try:
            with torch.cuda.device(keys.device):
                triton_place.place(pieces, there, placed[0], placed[1], table.cos[0], table.sin[0])
        except Exception:  # it compiles nothing: no compiler, or a GPU that it does not know
            return False
        return torch.equal(placed[0], self._by_model(keys, table)) and torch.equal(placed[1], keys)

    def _turned(self, turn: Turn, layer: int) -> Move:
        out, keys, table = turn
        if not self._rotates[layer]:
            return Move(out[0], keys[0])
        return Move(out[0], keys[0], table.cos[0], table.sin[0])

    def _place_one(self, out: torch.Tensor, keys: torch.Tensor, table: Table, layer: int) -> None:
        if keys.dtype != out.dtype:
            keys = out.copy_(keys)
        out.copy_(self._by_model(keys, table) if self._rotates[layer] else keys)

    def _by_model(self, keys: torch.Tensor, table: Table) -> torch.Tensor:
        wide = keys.float()
        return self._apply(wide[:, :0], wide, table.cos, table.sin)[1].to(keys.dtype)

    @cached_property
    def halves(self) -> bool:
        """Whether the model rotates by halves, bit for bit, as machine code here does: it is tried."""
        if self._isa is None or self._device != "cpu":
            return False
        table = self.table(torch.tensor(_TRIED))
        draw = torch.Generator().manual_seed(0)
        keys = torch.randn((1, 2, 4, self._head_dim), generator=draw, dtype=torch.float32)
        out = torch.empty_like(keys)
        if not Move(out[0], keys[0], table.cos[0], table.sin[0]).fits or not _both_halves_alike(table):
            return False
        try:
            rotate_halves(out[0], keys[0], table.cos[0], table.sin[0], self._isa)
        except RuntimeError:  # llvmlite has no code for this machine
            return False
        return torch.equal(out, self._by_model(keys, table))


def _both_halves_alike(table: Table) -> bool:
    return all(torch.equal(*side.chunk(2, -1)) for side in (table.cos, table.sin))


def _model_function(attention: torch.nn.Module) -> Apply:
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        raise ModelError(
            f"{type(attention).__name__} has no rotary function that keys could be moved with",
            "use a causal language model with ordinary rotary attention",
        )
    rotate: Apply = apply
    return rotate
