"""Rotary position embedding (RoPE) of stored keys: taken off, and applied again at a chunk's place in the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch

from kvtool.core.errors import ModelError
from kvtool.core.kernels import placing_triton as triton_place
from kvtool.core.kernels.placing_triton import Piece, Side
from kvtool.core.kernels.rope import CopyWithRope, CosSin, RopeTables, copy_with_rope, rotate_halves_torch
from kvtool.core.model.prompt_cache import LayerKind, Sample, angles_of, rotary_of
from kvtool.core.native.isa import isa_here
from kvtool.core.native.jit import has_triton

_MOVED = {torch.float32: 1e-3, torch.bfloat16: 0.03, torch.float16: 0.01}  # of a key's length
_TRIED = (0, 1, 77, 511)  # positions that machine code is tried at, few enough for every model
Copy: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # where to, and what
RopeJob: TypeAlias = "tuple[torch.Tensor, torch.Tensor, RopeTables]"  # where to, keys, and the table of their positions


@dataclass(frozen=True, slots=True)
class Layout:
    """Which numbers of a key rotate together, i and i + width / 2 or (`in_pairs`) 2 i and 2 i + 1, and how a model's
    angles become one for each number (`spread`)."""

    in_pairs: bool
    spread: Callable[[CosSin], CosSin]

    def rotate(self, keys: torch.Tensor, angles: CosSin) -> torch.Tensor:
        """Rotate the first numbers of keys `[batch, heads, rows, head_dim]`, as many as there are angles; computed in
        float32, rounded once."""
        if not self.in_pairs:
            return rotate_halves_torch(keys, angles)
        width = angles.cos.shape[-1]
        wide = keys[..., :width].float()
        crossed = torch.stack([-wide[..., 1::2], wide[..., ::2]], -1).flatten(-2)
        rotated = wide * angles.cos[:, None] + crossed * angles.sin[:, None]
        return torch.cat([rotated.to(keys.dtype), keys[..., width:]], -1)


def _each(spread: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[CosSin], CosSin]:
    return lambda angles: CosSin(spread(angles.cos), spread(angles.sin))


HALVES = Layout(False, lambda angles: angles)
PAIRS = Layout(True, lambda angles: angles)
_PAIRS_OF_HALVES = Layout(True, _each(lambda side: side.chunk(2, -1)[0].repeat_interleave(2, -1)))
# By model type, where it is not that of Llama.
_LAYOUTS = {
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe", "deepseek_v2", "glm4v_text", "llama4_text"), PAIRS),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium"), _PAIRS_OF_HALVES),  # angles as for halves
    "gpt_oss": Layout(False, _each(lambda side: side.repeat(1, 1, 2))),  # each angle is given once
    "nanochat": Layout(False, CosSin.transposed),  # the other way round
}


def layout_of(model_type: str) -> Layout:
    return _LAYOUTS.get(model_type, HALVES)


class Rotary:
    """Rotates keys `[batch, kv_heads, tokens, head_dim]` as the model does, by its own cos and sin, which are rounded
    to `dtype`, in which it computes. `samples`: keys of a layer of each kind, by its number.

    Raises ModelError: the layout does not move a sample to the positions at which the model itself has computed it, as
    where keys are normed after their rotation (HunYuan).
    """

    def __init__(
        self,
        base: Any,
        kinds: Sequence[LayerKind],
        layout: Layout,
        samples: Mapping[int, Sample],
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self._emb = rotary_of(base)
        self._kinds = kinds
        self.names = sorted({kind.rotation for kind in kinds if kind.rotation is not None})
        self._layout = layout
        self._dtype = dtype
        self._isa = isa_here()
        self._device = device  # packed weights do not show it
        self._check_sections()
        for layer, sample in samples.items():
            if not (error := self._error(layer, sample)) <= _MOVED[dtype]:
                raise ModelError(
                    f"keys of layer {layer} cannot be moved: rotated to another place they are off by {error:.2g}",
                    "this would need keys before what the model does after its rotation, or the layout of its rotation",
                )

    def _error(self, layer: int, sample: Sample) -> float:
        """Move a key from the first of a sample's positions to the others; return the error as a share of its size."""
        if (name := self._kinds[layer].rotation) is None:
            return 0.0
        positions, keys = torch.tensor(sample.positions, device=self._device), sample.keys[None].to(self._device)
        angles = self._spread(name, positions)
        if angles.cos.shape[-1] > keys.shape[-1] or angles.cos.shape[-1] % 2:
            return float("inf")
        bare = self._layout.rotate(keys[:, :, :1], angles[:1].inverse())
        moved = self._layout.rotate(bare.expand_as(keys), angles)
        return float((moved - keys).square().mean().sqrt() / keys.square().mean().sqrt())

    def _spread(self, name: str, positions: torch.Tensor, dtype: torch.dtype | None = None) -> CosSin:
        like = torch.empty(0, dtype=dtype or self._dtype, device=positions.device)
        return self._layout.spread(CosSin(*(side.float() for side in angles_of(self._emb, name, like, positions))))

    def table(self, positions: torch.Tensor) -> RopeTables:
        if not len(positions):  # a RoPE that depends on the prompt's length fails without one
            return self.table(positions.new_zeros(1))[:0]
        return RopeTables({name: self._spread(name, positions) for name in self.names})

    @property
    def in_pairs(self) -> bool:
        return self._layout.in_pairs

    @property
    def is_single(self) -> bool:
        shapes = {kind.shape for kind in self._kinds}
        return len(self.names) == len(shapes) == 1 and self._kinds[0].shape.is_plain

    def angles(self, table: RopeTables, layer: int) -> CosSin | None:
        """Return a table's cos and sin for one layer; None: its keys have no positions."""
        name = self._kinds[layer].rotation
        return None if name is None else table.by_name[name]

    def rotate(self, keys: torch.Tensor, table: RopeTables, layer: int) -> torch.Tensor:
        """Put positions on un-rotated keys; computed in float32, rounded once to the dtype of `keys`."""
        angles = self.angles(table, layer)
        if angles is None:
            return keys
        if keys.requires_grad:
            return self._layout.rotate(keys, angles)
        out = torch.empty_like(keys)
        self.place([(out, keys, table)], [], layer)
        return out

    def place(self, jobs: Sequence[RopeJob], copies: Sequence[Copy], layer: int) -> None:
        """Rotate keys to their places, and copy other tensors as they are: on a CPU in one call of machine code, since
        torch would wake threads that a pass computes with."""
        rotations = [(out, keys, self.angles(table, layer)) for out, keys, table in jobs]
        if self.halves and self._isa is not None and all(len(out) == 1 for out, *_ in jobs):
            moves = [CopyWithRope(out[0], keys[0], angles) for out, keys, angles in rotations]
            if copy_with_rope([*moves, *(CopyWithRope(out[0], numbers[0]) for out, numbers in copies)], self._isa):
                return
        for out, keys, angles in rotations:
            same = keys if keys.dtype == out.dtype else out.copy_(keys)
            out.copy_(same if angles is None else self._layout.rotate(same, angles))
        for out, numbers in copies:
            out.copy_(numbers)

    @property
    def by_halves(self) -> dict[str, Any] | None:
        """Describe a RoPE that rotates all layers' keys by halves; None: the model has another one.

        `frequencies`: radians a position, of each pair; `scaling`: the factor of rotated keys.
        """
        if self._layout.in_pairs or not self.is_single or not all(map(self.rotates, range(len(self._kinds)))):
            return None
        positions = torch.tensor(_TRIED, device=self._device)
        table = self._spread(self.names[0], positions, torch.float32)
        cos, sin = (side[0, :, : side.shape[-1] // 2].double() for side in (table.cos, table.sin))
        frequencies, scaling = torch.atan2(sin[1], cos[1]), cos[0].mean()
        angles = positions[:, None] * frequencies
        if not all(
            torch.allclose(*pair, atol=1e-3) for pair in ((scaling * angles.cos(), cos), (scaling * angles.sin(), sin))
        ):
            return None
        head_dim = self._kinds[0].shape.key_dim
        return {"head_dim": head_dim, "frequencies": frequencies.tolist(), "scaling": float(scaling)}

    def rotates(self, layer: int) -> bool:
        return self._kinds[layer].rotation is not None

    @cached_property
    def by_kernel(self) -> bool:
        """Try whether one launch on a GPU (`rope_triton.py`) gives what torch gives."""
        if not self._device.startswith("cuda") or not has_triton() or not self.is_single or self._layout.in_pairs:
            return False
        table = self.table(torch.tensor(_TRIED, device=self._device)).by_name[self.names[0]]
        keys = _drawn(self._kinds[0].shape.key_dim).to(self._dtype).to(self._device)
        placed = torch.empty((2, *keys.shape), dtype=keys.dtype, device=keys.device)
        pieces = triton_place.described([Piece(Side.of(keys[0]), Side.of(keys[0]), 0, 4)])
        there = torch.from_numpy(pieces).to(keys.device)
        try:
            with torch.cuda.device(keys.device):
                triton_place.place(pieces, there, placed[0], placed[1], table.cos[0], table.sin[0])
        except Exception:  # it compiles nothing: no compiler, or a GPU that it does not know
            return False
        return torch.equal(placed[0], self._layout.rotate(keys, table)) and torch.equal(placed[1], keys)

    @cached_property
    def halves(self) -> bool:
        """Whether machine code rotates keys: it knows halves, and the widths of this model's."""
        if self._isa is None or self._device != "cpu" or self._layout.in_pairs:
            return False
        widths = {(kind.rotation, kind.shape.key_dim) for kind in self._kinds if kind.rotation is not None}
        table = self.table(torch.tensor(_TRIED))
        for name, key_dim in widths:
            angles, keys = table.by_name[name], _drawn(key_dim)
            out = torch.empty_like(keys)
            alike = all(torch.equal(*side.chunk(2, -1)) for side in (angles.cos, angles.sin))
            if not alike or not copy_with_rope([CopyWithRope(out[0], keys[0], angles)], self._isa):
                return False
        return True

    def _check_sections(self) -> None:
        """Check that a text's position of three equal parts (M-RoPE) gives what one number gives."""
        if not hasattr(self._emb, "mrope_section"):
            return
        at = torch.tensor(_TRIED, device=self._device)
        like = torch.empty(0, dtype=torch.float32, device=self._device)
        single, triple = self._emb(like, at[None]), self._emb(like, at[None, None].expand(3, 1, -1))
        if not all(torch.equal(*sides) for sides in zip(single, triple, strict=True)):
            needed = "that would need all numbers of a position kept with each token"
            reason = "the model rotates a text's positions otherwise than by one number"
            raise ModelError(f"{reason}; {needed}", "use another model")


def _drawn(key_dim: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn((1, 2, len(_TRIED), key_dim), generator=draw, dtype=torch.float32)
