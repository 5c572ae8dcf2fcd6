"""What a scheme takes and spoils, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvtool.core.codec.base import LayerKV


@dataclass(slots=True)
class Toll:
    """What a scheme takes and spoils at one layer, summed over chunks.

    Attributes
    ----------
    bytes : all included; elements : numbers of K and V that they stand for.
    wrong : sum of squared differences of the keys and of the values; size : sum of squares of the exact ones.
    """

    bytes: int = 0
    elements: int = 0
    wrong: tuple[float, float] = (0.0, 0.0)
    size: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(cls, exact: LayerKV, lossy: LayerKV, size: int) -> Toll:
        """Measure one chunk, whose record takes `size` bytes."""
        pairs = [(right.float(), wrong.float()) for right, wrong in zip(exact, lossy, strict=True)]
        return cls(
            size,
            sum(right.numel() for right, _ in pairs),
            _pair([_squares(wrong - right) for right, wrong in pairs]),
            _pair([_squares(right) for right, _ in pairs]),
        )

    def __add__(self, other: Toll) -> Toll:
        return Toll(
            self.bytes + other.bytes,
            self.elements + other.elements,
            _pair([a + b for a, b in zip(self.wrong, other.wrong, strict=True)]),
            _pair([a + b for a, b in zip(self.size, other.size, strict=True)]),
        )

    @property
    def bits(self) -> float:
        """How many bits a number of K or V takes."""
        return 8 * self.bytes / self.elements if self.elements else 0.0

    def to_json(self) -> dict[str, Any]:
        """Tell the bits, and the norm of the error over that of the exact keys and values."""
        errors = [(wrong / size) ** 0.5 if size else 0.0 for wrong, size in zip(self.wrong, self.size, strict=True)]
        return {"bits_per_element": self.bits, "k_relative_error": errors[0], "v_relative_error": errors[1]}


def _squares(side: torch.Tensor) -> float:
    return float(side.square().sum(dtype=torch.float64))


def _pair(values: list[float]) -> tuple[float, float]:
    keys, own_values = values
    return keys, own_values
