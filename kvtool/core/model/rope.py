"""Rotary position embedding (RoPE) of stored keys: taken off, and applied again at a chunk's place in the prompt."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch

from kvtool.core.errors import ModelError
from kvtool.core.kernels import rope_triton as triton_place
from kvtool.core.kernels.rope import CopyWithRope, CosSin, RopeTables, copy_with_rope, rotate_halves_torch
from kvtool.core.kernels.rope_triton import Piece, Side
from kvtool.core.kernels.triton_jit import has_triton
from kvtool.core.model.kinds import LayerKind, Sample, angles_of, rotary_of
from kvtool.core.native.isa import isa_here

_MOVED = {torch.float32: 1e-3, torch.bfloat16: 0.03, torch.float16: 0.01}  # of a key's length
_TRIED = (0, 1, 77, 511)  # positions that machine code is tried at, few enough for every model
Apply = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Copy: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # where to, and what
RopeJob: TypeAlias = "tuple[torch.Tensor, torch.Tensor, RopeTables]"  # where to, keys, and the table of their positions


class Rotary:
    """Rotates keys `[batch, kv_heads, tokens, head_dim]` with the model's own function, so that interleaved and
    partial rotations come out as the model does them. Its cos and sin are rounded to `dtype`, in which it computes.
    """

    def __init__(
        self,
        base: Any,
        attentions: list[Any],
        kinds: Sequence[LayerKind],
        samples: Mapping[int, Sample],
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self._emb = rotary_of(base)
        self._parts: dict[tuple[int, int], int | None] = {}
        self._kinds = kinds
        self.names = sorted({kind.rotation for kind in kinds if kind.rotation is not None})
        self._dtype = dtype
        self._isa = isa_here()
        self._device = device  # packed weights do not show it
        self._apply: Apply = self._found(attentions, samples)
        self._check(samples)

    def _found(self, attentions: list[Any], samples: Mapping[int, Sample]) -> Apply:
        """Find the function that rotates keys: the model's own, of queries and keys. Where it has none, or keys belong
        to latents, layers are tried at two positions."""
        own = _model_function(attentions[0])
        if own is not None and not any(kind.shape.joint for kind in self._kinds):
            return own
        for apply in (_by_halves, _by_pairs):
            if all(self._moves(apply, layer, sample) for layer, sample in samples.items()):
                return apply
        needed = "that would need to be known which of a key's numbers rotate together"
        raise ModelError(
            f"{type(attentions[0]).__name__} rotates its keys in a way that is not known here; {needed}",
            "use a causal language model with ordinary rotary attention",
        )

    def _moves(self, apply: Apply, layer: int, sample: Sample) -> bool:
        name = self._kinds[layer].rotation
        if name is None:
            return True
        first, second = sample.keys[None, :, :2].to(self._device).split(1, 2)
        angles = CosSin(*(side.float() for side in self._at(name, sample.positions[:2], self._dtype)))
        here, there = angles[:1].inverse(), angles[1:]
        if here.cos.shape[-1] != first.shape[-1]:
            return False
        plain = apply(first[:, :0], first, here.cos, here.sin)[1]
        moved = apply(plain[:, :0], plain, there.cos, there.sin)[1]
        return bool((moved - second).norm() <= 8 * torch.finfo(self._dtype).eps * second.norm())

    def _at(self, name: str, positions: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        like = torch.empty(0, dtype=dtype, device=self._device)
        return angles_of(self._emb, name, like, torch.tensor(positions, device=self._device))

    def table(self, positions: torch.Tensor) -> RopeTables:
        if not len(positions):  # a RoPE that depends on the prompt's length fails without one
            return self.table(positions.new_zeros(1))[:0]
        like = torch.empty(0, dtype=self._dtype, device=positions.device)
        return RopeTables({name: self._angles(name, like, positions) for name in self.names})

    def _angles(self, name: str, like: torch.Tensor, positions: torch.Tensor) -> CosSin:
        cos, sin = (side.float() for side in angles_of(self._emb, name, like, positions))
        return CosSin(cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)) if self._by_half else CosSin(cos, sin)

    @cached_property
    def _by_half(self) -> bool:
        """Try whether the model's angles are those of half a rotation, and serve its other half, too (gpt-oss)."""
        kind = next((kind for kind in self._kinds if kind.rotation is not None), None)
        if kind is None or kind.rotation is None:
            return False
        cos, sin = self._at(kind.rotation, _TRIED, torch.float32)
        if 2 * cos.shape[-1] != kind.shape.key_dim:
            return False
        keys = _drawn(kind.shape.key_dim).to(self._device)
        expected = rotate_halves_torch(keys, CosSin(cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)))
        try:
            return torch.allclose(self._apply(keys[:, :0], keys, cos, sin)[1], expected, atol=1e-5)
        except RuntimeError:  # other sizes than it takes
            return False

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
            return self._by_model(keys, angles)
        out = torch.empty_like(keys)
        self.place([(out, keys, table)], [], layer)
        return out

    def place(self, jobs: Sequence[RopeJob], copies: Sequence[Copy], layer: int) -> None:
        """Rotate keys to their places, and copy other tensors as they are: on a CPU in one call of machine code, since
        torch would wake threads that a pass computes with."""
        turned = [(out, keys, self.angles(table, layer)) for out, keys, table in jobs]
        if self.halves and self._isa is not None and all(len(out) == 1 for out, *_ in jobs):
            moves = [CopyWithRope(out[0], keys[0], angles) for out, keys, angles in turned]
            if copy_with_rope([*moves, *(CopyWithRope(out[0], numbers[0]) for out, numbers in copies)], self._isa):
                return
        for out, keys, angles in turned:
            same = keys if keys.dtype == out.dtype else out.copy_(keys)
            out.copy_(same if angles is None else self._by_model(same, angles))
        for out, numbers in copies:
            out.copy_(numbers)

    @property
    def by_halves(self) -> dict[str, Any] | None:
        """Describe a RoPE that rotates all layers' keys by halves; None: the model has another one.

        `frequencies`: radians a position, of each pair; `scaling`: the factor of rotated keys.
        """
        if not self.is_single or not all(map(self.rotates, range(len(self._kinds)))):
            return None
        tried = torch.tensor(_TRIED, device=self._device)
        like = torch.empty(0, dtype=torch.float32, device=self._device)
        table = self._angles(self.names[0], like, tried)
        cos, sin = (side[0, :, : side.shape[-1] // 2].double() for side in (table.cos, table.sin))
        frequencies = torch.atan2(sin[1], cos[1])
        scaling, angles = cos[0].mean(), tried[:, None] * frequencies
        keys = _drawn(head_dim := self._kinds[0].shape.key_dim).to(self._device)
        expected = CosSin(*((scaling * side).float().repeat(1, 2)[None] for side in (angles.cos(), angles.sin())))
        if not torch.allclose(self._by_model(keys, table), rotate_halves_torch(keys, expected), atol=1e-3):
            return None
        return {"head_dim": head_dim, "frequencies": frequencies.tolist(), "scaling": float(scaling)}

    def rotates(self, layer: int) -> bool:
        return self._kinds[layer].rotation is not None

    @cached_property
    def by_kernel(self) -> bool:
        """Try whether one launch on a GPU (`rope_triton.py`) gives what the model's own function does."""
        if not self._device.startswith("cuda") or not has_triton() or not self.is_single:
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
        return torch.equal(placed[0], self._by_model(keys, table)) and torch.equal(placed[1], keys)

    def _by_model(self, keys: torch.Tensor, angles: CosSin) -> torch.Tensor:
        """Rotate by the model's own function; of a head that is rotated in part, it may take only that part (Phi)."""
        wide, width = keys.float(), angles.cos.shape[2] // (2 if self._by_half else 1)
        cos, sin = angles.cos[..., :width], angles.sin[..., :width]
        part = self._part(keys.shape[-1], cos)
        if part is None:
            return self._apply(wide[:, :0], wide, cos, sin)[1].to(keys.dtype)
        turned = self._apply(wide[:, :0, :, :part], wide[..., :part], cos, sin)[1]
        return torch.cat([turned, wide[..., part:]], -1).to(keys.dtype)

    def _part(self, key_dim: int, cos: torch.Tensor) -> int | None:
        width = cos.shape[-1]
        if (key_dim, width) not in self._parts:
            whole = torch.zeros((1, 1, 1, key_dim), device=cos.device, dtype=torch.float32)
            try:
                self._apply(whole, whole, cos[:, :1], cos[:, :1])
                self._parts[key_dim, width] = None
            except RuntimeError:  # a head is wider than what is rotated of it
                self._parts[key_dim, width] = width
        return self._parts[key_dim, width]

    def _check_sections(self) -> None:
        """Check that a text's position of three equal parts (M-RoPE) gives what one number gives."""
        if not hasattr(self._emb, "mrope_section"):
            return
        at = torch.tensor(_TRIED, device=self._device)
        like = torch.empty(0, dtype=torch.float32, device=self._device)
        one, three = self._emb(like, at[None]), self._emb(like, at[None, None].expand(3, 1, -1))
        if not all(torch.equal(*sides) for sides in zip(one, three, strict=True)):
            needed = "that would need all numbers of a position kept with each token"
            what = "the model rotates a text's positions otherwise than by one number"
            raise ModelError(f"{what}; {needed}", "use another model")

    def _check(self, samples: Mapping[int, Sample]) -> None:
        """Refuse a model whose keys are not moved by rotating them back and on, such as HunYuan, which norms rotated
        keys."""
        self._check_sections()
        for layer, sample in samples.items():
            keys = sample.keys[None].to(self._device)
            angles = self.angles(self.table(torch.tensor(sample.positions, device=self._device)), layer)
            if angles is None:
                continue
            bare = self._by_model(keys[:, :, :1], angles[:1].inverse())
            moved = self._by_model(bare.expand_as(keys), angles)
            off = (moved - keys).square().mean().sqrt() / keys.square().mean().sqrt()
            if not float(off) <= _MOVED[self._dtype]:
                raise ModelError(
                    f"keys of layer {layer} cannot be moved: rotated to another place they are off by {float(off):.2g}",
                    "this would need the keys as they are before what the model does after its rotation",
                )

    @cached_property
    def halves(self) -> bool:
        """Try with each RoPE whether the model rotates by halves, bit for bit as machine code here does."""
        if self._isa is None or self._device != "cpu":
            return False
        tried = {(kind.rotation, kind.shape.key_dim) for kind in self._kinds if kind.rotation is not None}
        table = self.table(torch.tensor(_TRIED))
        for name, key_dim in tried:
            angles, keys = table.by_name[name], _drawn(key_dim)
            out = torch.empty_like(keys)
            alike = all(torch.equal(*side.chunk(2, -1)) for side in (angles.cos, angles.sin))
            if not alike or not copy_with_rope([CopyWithRope(out[0], keys[0], angles)], self._isa):
                return False
            if not torch.equal(out, self._by_model(keys, angles)):
                return False
        return True


def _drawn(key_dim: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn((1, 2, len(_TRIED), key_dim), generator=draw, dtype=torch.float32)


def _by_halves(
    query: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return query, rotate_halves_torch(keys, CosSin(cos, sin))


def _by_pairs(
    query: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    turned = torch.stack([-keys[..., 1::2], keys[..., ::2]], -1).flatten(-2)
    return query, keys * cos[:, None] + turned * sin[:, None]


def _model_function(attention: torch.nn.Module) -> Apply | None:
    apply: Apply | None = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if apply is None or [*inspect.signature(apply).parameters][:2] != ["q", "k"]:
        return None
    return apply
