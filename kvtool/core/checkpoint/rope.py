"""Angles of rotary position embeddings (RoPE, Su et al. 2021), and the ways to stretch them that config.json names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# By the type in config.json: the settings that it has.
SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, slots=True)
class RopeSettings:
    kind: str  # a key of `SCALINGS`
    theta: float
    width: int  # how many numbers of a head are rotated
    scaling: Mapping[str, float]

    def frequencies(self) -> Any:
        """Return the radians per position of each pair, float32 `[width / 2]`."""
        import torch

        steps = torch.arange(0, self.width, 2, dtype=torch.int64).to(torch.float32) / self.width
        frequencies = 1.0 / (self.theta**steps)
        if self.kind == "linear":
            return frequencies / self.scaling["factor"]
        return frequencies if self.kind == "default" else self._by_wavelength(frequencies)

    def _by_wavelength(self, frequencies: Any) -> Any:
        """Divide frequencies whose waves are longer than the context that the model was trained with by a factor, keep
        short ones, and pass smoothly from those to these between (Llama 3.1)."""
        import torch

        factor, low, high, context = (self.scaling[name] for name in SCALINGS["llama3"])
        waves = 2 * math.pi / frequencies
        smooth = (context / waves - low) / (high - low)
        between = (1 - smooth) * frequencies / factor + smooth * frequencies
        long = torch.where(waves > context / low, frequencies / factor, frequencies)
        return torch.where((waves <= context / low) & (waves >= context / high), between, long)
