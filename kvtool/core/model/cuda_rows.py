"""Which kernel attends with scattered rows on CUDA: blocks of torch's fused one, unless the environment says another.

`python samples/gpu.py --stage attention` measures all three on a GPU; until one has been met nothing else is chosen.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from kvtool.core.errors import UsageError

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, torch.Tensor], torch.Tensor]
CHOICE = "KVTOOL_ATTENTION"
KERNELS = ("fused", "triton", "flex")


def asked_kernel(*among: str) -> Attend | None:
    """The kernel that the environment asks for; None: torch's fused one, block by block.

    It takes query `[1, heads, rows, head_dim]`, key and value `[1, kv_heads, keys, head_dim]`, the scale, and the rows'
    positions (int64, ascending, on the device).

    Parameters
    ----------
    among : names of those that will do; none: all.

    Raises
    ------
    UsageError : there is no such kernel on CUDA.
    """
    asked = os.environ.get(CHOICE, "")
    if asked not in ("", *KERNELS):
        raise UsageError(f"{CHOICE}={asked!r} is no kernel on CUDA", ", ".join(KERNELS))
    if among and asked not in among:
        return None
    if asked == "triton":
        from kvtool.core.model.triton_rows import attend

        return attend
    if asked == "flex":
        from kvtool.core.model.flex_rows import attend as attend_flexibly

        return attend_flexibly
    return None
