"""Attention of rows that see the keys up to their own: which kernel is the fast one where."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kvtool.core.errors import UsageError
from kvtool.core.model.cuda_rows import CHOICE, asked_kernel
from kvtool.core.model.products import attend_by_products

# Rows are attended in blocks: one needs a mask of [BLOCK, keys up to its last row] only, and skips every later key.
BLOCK = 256
_GROUPED = 32  # rows; so few fill torch's kernel on the CPU only with the heads of a group below each other


@functools.cache
def products_pay() -> bool:
    """Whether plain matrix products beat torch's fused kernel on this CPU; by its features, never by the clock.

    Measured in bfloat16 on 2 cores, 300 scattered rows over 2,000 keys, a layer of SmolLM2-135M, products against the
    fused kernel: AMD EPYC (AVX-512, no AMX) 1 to 1.6; Intel Xeon with AMX 1 to 0.5, and 2,000 rows of a prefill 1 to
    0.35.

    Raises
    ------
    UsageError : the environment asks for a kernel that there is not.
    """
    asked = os.environ.get(CHOICE, "")
    if asked not in ("", "products", "fused"):
        raise UsageError(f"{CHOICE}={asked!r} is no kernel", "products or fused")
    return asked == "products" if asked else not torch.cpu._is_amx_tile_supported()


def attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, last: Sequence[int], at: torch.Tensor
) -> torch.Tensor:
    """Attend with rows of which row i sees the keys 0 … last[i], in the kernel that is fast here.

    Parameters
    ----------
    query : `[1, heads, rows, head_dim]`.
    key, value : `[1, kv_heads, keys, head_dim]`.
    last : ascending, each less than `keys`; `at` is the same as an int64 tensor on the device.

    Returns
    -------
    `[1, heads, rows, head_dim]`.
    """
    if len(last) == 1:
        return attend_one(query, key[:, :, : last[0] + 1], value[:, :, : last[0] + 1], scale)
    if query.device.type == "cuda" and (kernel := asked_kernel()) is not None:
        return kernel(query, key, value, scale, at)
    if query.device.type == "cpu" and products_pay():
        return attend_by_products(query, key, value, scale, last, at)
    return attend_in_blocks(query, key, value, scale, last, at)


def attend_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend with one row that sees all keys.

    The query heads of a group stand as rows, so that each key is read once and nothing is masked.
    """
    kv_heads, head_dim = key.shape[1], query.shape[3]
    out = _sdpa(query.reshape(1, kv_heads, -1, head_dim), key, value, None, scale)
    return out.reshape(1, query.shape[1], 1, value.shape[3])


def attend_in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, last: Sequence[int], at: torch.Tensor
) -> torch.Tensor:
    """Do what :func:`attend_rows` does in the device's own fused kernel, block by block."""
    # Rows before heads: the model wants them so, and its own transposition then copies nothing.
    out = query.new_empty((1, query.shape[2], query.shape[1], value.shape[3])).transpose(1, 2)
    for begin in range(0, len(last), BLOCK):
        stop = min(begin + BLOCK, len(last))
        keys = last[stop - 1] + 1
        mask = _mask(at[begin:stop], keys, query.dtype)
        out[:, :, begin:stop] = _block(query[:, :, begin:stop], key[:, :, :keys], value[:, :, :keys], mask, scale)
    return out


def _block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    heads, rows, head_dim = query.shape[1:]
    if query.device.type == "cpu" and rows > _GROUPED:
        return _sdpa(query, key, value, mask[None, None], scale)
    # Query heads that share a key stand below each other as rows: with a mask CUDA's fused kernels take no grouped
    # heads, and keys repeated for every head would be copied for every block.
    kv_heads, groups = key.shape[1], heads // key.shape[1]
    part = query.reshape(1, kv_heads, groups * rows, head_dim)
    return _sdpa(part, key, value, mask.repeat(groups, 1), scale).view(1, heads, rows, value.shape[3])


def _mask(at: torch.Tensor, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """A mask `[rows, keys]`: truths, or on the CPU numbers, of which its kernel would make some anew for every head."""
    seen = torch.arange(keys, device=at.device) <= at[:, None]
    if at.device.type != "cpu":
        return seen
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=groups > 1)
