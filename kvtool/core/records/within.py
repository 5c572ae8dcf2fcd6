"""Whether computed numbers fit the format that a store keeps.

bfloat16 has float32's range; float16 ends at 65504, and what is beyond would be kept as infinity.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvtool.core.errors import ModelError


def check_within(kept: Iterable[torch.Tensor]) -> None:
    """Refuse what has left the range of float16; other formats are not looked at.

    Raises
    ------
    ModelError : a number is infinite, or none.
    """
    for tensor in kept:
        if tensor.dtype == torch.float16 and not bool(torch.isfinite(tensor).all()):
            raise ModelError(
                "keys or values of the model leave the range of float16, which the store keeps",
                "make another store with --store-dtype bfloat16",
            )
