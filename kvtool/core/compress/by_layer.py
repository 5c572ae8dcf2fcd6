"""Size and error of a compression scheme, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtool.core.codec.base import LayerKV
from kvtool.core.codec.profile import SIDES
from kvtool.core.codec.transform_kernels import squares_of


@dataclass(slots=True)
class Toll:
    """Size and error of a scheme at one layer, summed over chunks.

    Attributes
    ----------
    bytes : all included; elements : the numbers of K and V that they encode, dropped rows included.
    wrong : sum of squared differences of the keys and of the values; size : sum of squares of the exact ones.
    """

    bytes: int = 0
    elements: int = 0
    wrong: tuple[float, float] = (0.0, 0.0)
    size: tuple[float, float] = (0.0, 0.0)

    def __add__(self, other: Toll) -> Toll:
        return Toll(
            self.bytes + other.bytes,
            self.elements + other.elements,
            _pair([a + b for a, b in zip(self.wrong, other.wrong, strict=True)]),
            _pair([a + b for a, b in zip(self.size, other.size, strict=True)]),
        )

    @property
    def bits(self) -> float:
        """Return the bits for each number of K or V."""
        return 8 * self.bytes / self.elements if self.elements else 0.0

    def to_json(self) -> dict[str, Any]:
        """Tell the bits, and the norm of the error over that of the exact keys and values."""
        errors = [(wrong / size) ** 0.5 if size else 0.0 for wrong, size in zip(self.wrong, self.size, strict=True)]
        return {"bits_per_element": self.bits, "k_relative_error": errors[0], "v_relative_error": errors[1]}


def tolls(exact: Sequence[LayerKV], lossy: Sequence[LayerKV], sizes: Sequence[int], tokens: int) -> list[Toll]:
    """Measure the layers of one chunk of so many tokens, of which these rows are stored in so many bytes."""
    right, wrong = ([side for kv in kvs for side in kv] for kvs in (exact, lossy))
    sums = squares_of(wrong, right).reshape(-1, SIDES, 2).tolist()
    return [
        Toll(size, sum(tokens * side[:, 0].numel() for side in kv), (keys[0], values[0]), (keys[1], values[1]))
        for kv, size, (keys, values) in zip(exact, sizes, sums, strict=True)
    ]


def _pair(values: list[float]) -> tuple[float, float]:
    keys, own_values = values
    return keys, own_values
