"""Which kernel attends with scattered rows on CUDA: Triton's where there is Triton, unless the environment asks.

Measured on an H100 (`samples/gpu.py --stage attention answers`; kvtool/docs/gpu.md has the table).
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from kvtool.core.errors import UsageError
from kvtool.core.kernels.attention.params import Scoring

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, torch.Tensor], torch.Tensor]
CHOICE = "KVTOOL_ATTENTION"
KERNELS = ("fused", "triton", "flex")


def cuda_kernel(*among: str) -> Attend | None:
    """The kernel to take; None: torch's fused one, block by block.

    It takes query `[1, heads, rows, head_dim]`, key and value `[1, kv_heads, keys, head_dim]`, the scale, and the rows'
    positions (int64, ascending, on the device).

    Parameters
    ----------
    among : names of those that will do; none: all.

    Raises
    ------
    UsageError : the environment asks for a kernel that there is not on CUDA.
    """
    asked = os.environ.get(CHOICE, "")
    if asked not in ("", *KERNELS):
        raise UsageError(f"{CHOICE}={asked!r} is no kernel on CUDA", ", ".join(KERNELS))
    name = asked or ("triton" if has_triton() else "fused")
    if among and name not in among:
        return None
    if name == "triton":
        from kvtool.core.kernels.attention.triton_rows import attend

        return attend
    if name == "flex":
        from kvtool.core.kernels.attention.flex_rows import attend as attend_flexibly

        return attend_flexibly
    return None


def attend_on_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    at: torch.Tensor,
    begins: torch.Tensor | None,
    *among: str,
) -> torch.Tensor | None:
    """Attend by a kernel of scattered rows; None: there is none for these, or they are not on a GPU.

    Parameters
    ----------
    at, begins : int64 `[rows]`, the last and the first key that a row sees; `begins` None: the first of all.
    among : see `cuda_kernel`.
    """
    if query.device.type != "cuda" or key.shape[3] != value.shape[3]:  # of other widths are latents
        return None
    if scoring.is_plain:
        kernel = cuda_kernel(*among)
        return None if kernel is None else kernel(query, key, value, scoring.scale, at)
    if cuda_kernel("triton") is None:
        return None
    from kvtool.core.kernels.attention.triton_rows import Shaping, attend

    return attend(query, key, value, scoring.scale, at, more=Shaping(begins, scoring.softcap, scoring.sinks))


def has_triton() -> bool:
    """Whether there is Triton; asked for at every layer, so looked for once."""
    return _found(importlib.util.find_spec)


@functools.cache
def _found(find: Callable[[str], Any]) -> bool:
    return find("triton") is not None
