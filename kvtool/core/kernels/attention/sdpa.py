"""The `sdpa` backend: torch's scaled dot product attention, in blocks of rows with a mask each."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvtool.core.kernels.attention.params import AttentionCall, AttentionParams, KeyRanges

# A block needs a mask of [BLOCK, keys up to its last row] only, and skips every later key.
BLOCK = 256
_GROUPED = 32  # rows; so few fill torch's kernel on the CPU only with the heads of a group below each other
# Where matrix products pay, a prefill of so many rows is still left to torch's flash kernel: one block's scores then no
# longer fit the cache. Measured on 2 cores of an AMD EPYC, ms a layer, products and torch's: 4,096 rows 184 and 237
# (Qwen2.5-0.5B's heads), 156 and 157 (SmolLM2-135M's); 7,800 rows 811 and 808, 685 and 556. Scattered rows are faster
# at any length.
LONG_PREFILL = 6144

name = "sdpa"


def declines(call: AttentionCall) -> str:
    """On a CPU without AMX torch's kernel is slower than matrix products (samples/results/speed.md)."""
    if call.is_shaped:
        return "torch's fused kernel knows neither a softcap nor sinks"
    if call.batch > 1 and not (call.causal and call.key_dim == call.value_dim):
        return "rows that do not see all before them are taken from one prompt"
    if call.rows == 1 or call.batch > 1 or call.window is not None or call.is_asked or call.device != "cpu":
        return ""
    is_long_prefill = call.causal and call.key_dim == call.value_dim and call.rows >= LONG_PREFILL
    if not is_long_prefill and not has_tiles(call.dtype):
        return "matrix products are faster on this CPU, which has no AMX tiles for these numbers"
    return ""


def has_tiles(dtype: torch.dtype) -> bool:
    """Whether torch's fused kernel uses AMX tiles: on an Intel Xeon it then took half of the time of products."""
    return dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams, ranges: KeyRanges
) -> torch.Tensor:
    scale, (rows, keys) = params.scale, (query.shape[2], key.shape[2])
    # Of values of another width torch's own keeps all scores.
    shared = query.shape[1] > key.shape[1]
    if ranges.are_causal(rows, keys, params) and key.shape[3] == value.shape[3]:
        return F.scaled_dot_product_attention(query, key, value, scale=scale, is_causal=True, enable_gqa=shared)
    if ranges.on_device:
        return _grouped(query, key, value, ranges.device_mask(keys, query.dtype), scale)
    if rows == 1:
        seen = slice(ranges.begin(0), ranges.last[0] + 1)
        return _grouped(query, key[:, :, seen], value[:, :, seen], None, scale)
    # Rows before heads: the model needs them so, and its own transposition then copies nothing.
    out = query.new_empty((1, rows, query.shape[1], value.shape[3])).transpose(1, 2)
    for begin in range(0, rows, BLOCK):
        block = slice(begin, min(begin + BLOCK, rows))
        seen = slice(ranges.begin(begin), ranges.last[block.stop - 1] + 1)
        is_cpu = query.device.type == "cpu"  # where torch's kernel would convert a mask of booleans for every head
        keys_of = block, seen.start, seen.stop
        mask = ranges.mask(*keys_of, query.dtype) if is_cpu else ~ranges.hidden(*keys_of)
        part = query[:, :, block], key[:, :, seen], value[:, :, seen]
        if is_cpu and block.stop - begin > _GROUPED:
            out[:, :, block] = F.scaled_dot_product_attention(*part, mask[None, None], scale=scale, enable_gqa=shared)
        else:
            out[:, :, block] = _grouped(*part, mask, scale)
    return out


def _grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attend with the query heads that share a key below each other as rows: with a mask CUDA's fused kernels take no
    grouped heads, and keys would be copied for every block."""
    heads, rows, head_dim = query.shape[1:]
    kv_heads, groups = key.shape[1], heads // key.shape[1]
    part = query.reshape(1, kv_heads, groups * rows, head_dim)
    if mask is not None:
        mask = mask.expand(groups, -1) if rows == 1 else mask.repeat(groups, 1)
    out = F.scaled_dot_product_attention(part, key, value, attn_mask=mask, scale=scale)
    return out.reshape(1, heads, rows, value.shape[3])
