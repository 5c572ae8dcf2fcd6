"""Trains the rows of a warm passage: the model is frozen, what it gives for chunks behind them is compared."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from kvtool.core.errors import DamagedError
from kvtool.core.fit.teacher import Target
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.modules import cache_name
from kvtool.core.model.prefill import LeadIn

_WARM_UP = 20
_BETAS = (0.9, 0.98)

Layers = list[tuple[torch.Tensor, torch.Tensor]]


class Training:
    """Moves rows behind a fixed beginning, with their optimiser.

    Parameters
    ----------
    lead_in : the warm one; its first `fixed` rows stay as they are.
    variance : of keys and values, `[2, layers]`: what an error of a layer is measured by.
    steps : of the whole training; the rate falls to zero over them.
    """

    def __init__(
        self, decoder: Decoder, lead_in: LeadIn, fixed: int, variance: torch.Tensor, steps: int, rate: float
    ) -> None:
        self._decoder, self._variance, self._steps, self._rate = decoder, variance, steps, rate
        self._length = len(lead_in)
        sides = [torch.stack([layer[side][0] for layer in lead_in.layers]).float() for side in (0, 1)]
        self._fixed = [side[:, :, :fixed].clone() for side in sides]
        self._base = [side[:, :, fixed:].clone() for side in sides]
        # A step moves all rows of a layer by the same share of their size.
        self._scale = [base.square().mean((1, 2, 3), keepdim=True).sqrt() for base in self._base]
        self._moved = [torch.zeros_like(base, requires_grad=True) for base in self._base]
        self._adam = torch.optim.Adam(self._moved, lr=rate, betas=_BETAS)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Join the lead-in's keys (rotated) and values, `[layers, kv_heads, rows, head_dim]` in the model's dtype."""
        keys, values = (
            torch.cat([fixed, base + scale * moved], 2).to(self._decoder.dtype)
            for fixed, base, scale, moved in zip(self._fixed, self._base, self._scale, self._moved, strict=True)
        )
        return keys, values

    def step(self, number: int, batch: Sequence[Target]) -> float:
        """Take one step. Returns the loss before it."""
        for group in self._adam.param_groups:
            group["lr"] = (
                self._rate * min(1.0, (number + 1) / _WARM_UP) * (1 + math.cos(math.pi * number / self._steps)) / 2
            )
        with self._decoder.plain_attention(), torch.enable_grad():
            loss = self._loss(batch)
            self._adam.zero_grad()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self._moved, 1.0)
        self._adam.step()
        return float(loss.detach())

    @torch.no_grad()
    def losses(self, made: Sequence[Target]) -> list[float]:
        """Measure the loss of each target by itself."""
        with self._decoder.plain_attention():
            return [float(self._loss([target])) for target in made]

    def _loss(self, batch: Sequence[Target]) -> torch.Tensor:
        """Average the squared error, in variances of the layer, over tokens, keys and values, and layers from the
        second on: those of the first depend on nothing before."""
        keys, values = self._behind(batch)
        errors = []
        for layer in range(min(1, len(keys) - 1), len(keys)):
            for side, got in enumerate((keys[layer], values[layer])):
                for number, target in enumerate(batch):
                    wanted = (target.keys, target.values)[side][layer].float()
                    error = (got[number, :, : len(target.ids)].float() - wanted).square().mean((0, 2)).sum()
                    errors.append(error / self._variance[side, layer])
        return torch.stack(errors).sum() / (len(errors) / len(batch)) / sum(len(target.ids) for target in batch)

    def _behind(self, batch: Sequence[Target]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Compute each layer's un-rotated keys and values `[batch, kv_heads, tokens, head_dim]`, the targets padded."""
        decoder, longest = self._decoder, max(len(target.ids) for target in batch)
        ids = torch.tensor(
            [[*target.ids, *[0] * (longest - len(target.ids))] for target in batch], device=decoder.device
        )
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(zip(*self.rows(), strict=True)):
            cache.update(*(side[None].expand(len(batch), -1, -1, -1) for side in (keys, values)), layer)
        positions = torch.arange(self._length, self._length + longest, device=decoder.device)
        placed = positions[None].expand(len(batch), -1)
        decoder.base(ids, position_ids=placed, use_cache=True, **{cache_name(decoder.base): cache})
        undo, kept = decoder.rotary.table(positions).inverse(), cache.layers
        sides: list[Any] = [(layer.keys[:, :, self._length :], layer.values[:, :, self._length :]) for layer in kept]
        return [decoder.rotary.rotate(k.float(), undo, n) for n, (k, _) in enumerate(sides)], [v for _, v in sides]

    # ---- a checkpoint ----

    def state(self) -> bytes:
        """Pack all that a later run needs to go on as if it had not been stopped."""
        file = io.BytesIO()
        torch.save({"moved": [moved.detach() for moved in self._moved], "adam": self._adam.state_dict()}, file)
        return file.getvalue()

    def restore(self, data: bytes) -> None:
        """Go on from what `state` packed. Raises DamagedError."""
        try:
            kept = torch.load(io.BytesIO(data), weights_only=True, map_location=self._decoder.device)
            with torch.no_grad():
                for moved, saved in zip(self._moved, kept["moved"], strict=True):
                    moved.copy_(saved)
            self._adam.load_state_dict(kept["adam"])
        except Exception as error:  # torch.load raises anything
            raise DamagedError(f"the checkpoint of a fit cannot be read: {error}") from error
