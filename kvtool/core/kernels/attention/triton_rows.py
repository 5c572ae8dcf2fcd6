"""The `triton` backend: attention of scattered rows on a GPU, in one kernel.

Each block of rows reads keys up to its last position. Rows are sorted by position, so that a block's rows see nearly
the same keys and only the last of them need a mask. The heads of a group are adjacent rows and share the reading of
their keys. Where there are too few blocks to fill the GPU (a question's rows, or the one row of decoding) the keys are
split between several programs, whose parts are joined by their log-sum-exp. Softmax in one pass over the keys is
Milakov and Gimelshein's (arXiv 1805.02867), its tiling FlashAttention's (arXiv 2205.14135), the splitting of keys
Flash-Decoding's.

No position is read on the host: how far a row sees stands in memory of the device, so that a captured graph may be
replayed for other lengths. With `TRITON_INTERPRET=1` the same kernel runs on the CPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from kvtool.core.common.installing import install_line
from kvtool.core.kernels.attention.params import AttentionCall, AttentionParams, KeyRanges
from kvtool.core.kernels.attention.triton_rows_kernel import joining, kernel
from kvtool.core.kernels.machine import has_triton

_LOG2_E = 1.4426950408889634
_LEAST = 16  # rows and numbers of a product on tensor cores
_MOST_SPLITS = 32

name = "triton"


@dataclass(frozen=True, slots=True)
class Tile:
    """How the work is cut.

    Attributes
    ----------
    rows : query rows of a program, those of a group's heads counted apart; a power of two, 16 at least.
    keys : read at a time; likewise.
    warps, stages : of threads, and of the pipeline that reads ahead.
    """

    rows: int
    keys: int
    warps: int
    stages: int


_LARGE_MEMORY = 160 * 1024


def tile_for(rows: int, head_dim: int, dtype: torch.dtype, memory: int = 100 * 1024) -> Tile:
    """What fits a block's shared memory and fills it.

    Measured on an H100, 4,096 rows of Llama-3.1-8B's heads, ms: 128 x 128 in two stages .43, 128 x 64 in three .46.

    Parameters
    ----------
    memory : bytes that a block may have; every GPU since Ampere has 100 kB.
    """
    height = min(128, max(_LEAST, _power(rows)))
    if dtype == torch.float32:
        return Tile(min(height, 64), 32, 4, 2)
    if head_dim > 128:
        return Tile(min(height, 64), 32, 4, 2)
    if height == 128 and memory >= _LARGE_MEMORY:
        return Tile(128, 128, 8, 2)
    return Tile(height, 64, 8 if height == 128 and head_dim > 64 else 4, 3)


def splits_for(blocks: int, keys: int, tile: Tile, multiprocessors: int) -> int:
    """Parts into which the keys are split: as many as give each multiprocessor two programs, 1 if blocks do so."""
    wanted = -(-2 * multiprocessors // max(blocks, 1))
    most = max(1, keys // (4 * tile.keys))  # a part of fewer keys is not worth its join
    return max(1, min(wanted, most, _MOST_SPLITS))


def declines(call: AttentionCall) -> str:
    """Return why this backend does not serve a call, or an empty string."""
    if call.device != "cuda":
        return "it runs on CUDA"
    if not has_triton():
        return f"Triton is not installed ({install_line('triton')})"
    return "" if call.key_dim == call.value_dim else "keys are latents, wider than their values"


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: AttentionParams,
    ranges: KeyRanges,
    tile: Tile | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Attend: see `AttentionBackend`. No position is read on the host.

    Parameters
    ----------
    query : float32, bfloat16 or float16.
    key, value : of the same dtype. No key after the last row's is read.
    ranges : `at` and `begins` are contiguous, and each less than `keys`: that is the caller's to know, the kernel does
        not look.
    splits : None: as many as fill the GPU.

    Returns
    -------
    `[1, heads, rows, head_dim]`, laid out with rows before heads.
    """
    _check(query, key, value, params, ranges)
    _, heads, rows, head_dim = query.shape
    kv_heads = key.shape[1]
    if tile is None:
        tile = tile_for(rows * (heads // kv_heads), head_dim, query.dtype, _shared_memory(query.device))
    blocks = -(-rows * (heads // kv_heads) // tile.rows)
    if splits is None:
        splits = splits_for(blocks * kv_heads, key.shape[2], tile, _multiprocessors(query.device))
    out = query.new_empty((1, rows, heads, head_dim)).transpose(1, 2)
    if not rows:
        return out
    if splits == 1:
        _launch(query, key, value, params, ranges, out[None], None, tile, splits)
        return out
    parts = query.new_empty((splits, 1, rows, heads, head_dim), dtype=torch.float32).transpose(2, 3)
    sums = query.new_empty((splits, heads, rows), dtype=torch.float32)
    _launch(query, key, value, params, ranges, parts, sums, tile, splits)
    _join(parts, sums, out)
    return out


def _check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams, ranges: KeyRanges
) -> None:
    """Check everything that the kernel relies upon to stay inside its arrays, but the positions' own size."""
    at = ranges.at
    if query.ndim != 4 or key.shape != value.shape or key.ndim != 4 or len(query) != 1 or len(key) != 1:
        raise ValueError("queries, keys and values are [1, heads, rows, head_dim], those of one length")
    if query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3]:
        raise ValueError("the heads of keys do not fit those of queries")
    if at.shape != query.shape[2:3] or at.dtype != torch.int64 or not at.is_contiguous():
        raise ValueError("a position (int64) is needed for every row")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError("queries, keys and values of different dtypes")
    if len({query.device, key.device, value.device, at.device}) > 1:
        raise ValueError("queries, keys, values and positions on different devices")
    if any(side.stride(3) != 1 for side in (query, key, value)):
        raise ValueError("a head's numbers are adjacent")
    for name, given, like in (("begins", ranges.begins, at), ("sinks", params.sinks, query[0, :, 0, 0])):
        if given is not None and (given.shape != like.shape or given.device != at.device or given.stride() != (1,)):
            raise ValueError(f"{name} do not fit {tuple(like.shape)}")
    if ranges.begins is not None and ranges.begins.dtype != torch.int64:
        raise ValueError("begins are int64 numbers")


def _join(parts: torch.Tensor, sums: torch.Tensor, out: torch.Tensor) -> None:
    """One result `[1, heads, rows, head_dim]` of those of the parts of the keys, by their log2-sum-exps."""
    splits, _, heads, rows, head_dim = parts.shape
    joining()[(rows, heads)](
        parts, sums, out, rows, splits,
        parts.stride(0), parts.stride(2), parts.stride(3), out.stride(1), out.stride(2),
        SIZE=_power(_MOST_SPLITS), DIM=head_dim, WIDTH=_power(head_dim), num_warps=4,
    )  # fmt: skip


def _launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: AttentionParams,
    ranges: KeyRanges,
    out: torch.Tensor,
    sums: torch.Tensor | None,
    tile: Tile,
    splits: int,
) -> None:
    """Run the kernel over `out` `[splits, 1, heads, rows, head_dim]`."""
    _, heads, rows, head_dim = query.shape
    kv_heads, at = key.shape[1], ranges.at
    blocks = -(-rows * (heads // kv_heads) // tile.rows)
    kernel()[(blocks, kv_heads, splits)](
        query, key, value, out, out if sums is None else sums, at,
        at if ranges.begins is None else ranges.begins, at if params.sinks is None else params.sinks,
        params.scale * _LOG2_E, (params.softcap or 1.0) * _LOG2_E, rows,
        query.stride(1), query.stride(2), key.stride(1), key.stride(2), value.stride(1), value.stride(2),
        out.stride(0), out.stride(2), out.stride(3),
        **constants(
            heads // kv_heads, head_dim, tile, splits, query.dtype, params,
            windowed=ranges.begins is not None, interpreted=not query.is_cuda,
        ),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def constants(
    groups: int,
    head_dim: int,
    tile: Tile,
    splits: int,
    dtype: torch.dtype,
    params: AttentionParams,
    *,
    windowed: bool = False,
    interpreted: bool = False,
) -> dict[str, Any]:
    """Return what a kernel is compiled for."""
    return {
        "WINDOWED": windowed,
        "CAPPED": params.softcap is not None,
        "SUNK": params.sinks is not None,
        "GROUPS": groups,
        "DIM": head_dim,
        "WIDTH": max(_LEAST, _power(head_dim)),
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "PARTS": splits > 1,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",  # the latter says nothing of 16-bit numbers
        "WIDEN": interpreted and dtype == torch.bfloat16,  # whose products triton's interpreter does not know
    }


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a block may have; where torch does not tell, what every GPU has."""
    known = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(known, "shared_memory_per_block_optin", 0)) or 100 * 1024
