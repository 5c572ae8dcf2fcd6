"""The `triton` backend: attention of scattered rows on a GPU, in one kernel.

Rows are sorted by position, so that a block's rows see nearly the same keys and only the last of them need a mask. The
heads of a group are adjacent rows and share the reading of their keys. Where there are too few blocks to fill the GPU
the keys are split between programs, whose parts are joined by their log-sum-exp (Flash-Decoding). The softmax is
Milakov and Gimelshein's (arXiv 1805.02867), its tiling FlashAttention's (arXiv 2205.14135).

No position is read on the host, so that a captured graph may be replayed for other lengths.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvtool.core.common.plugins import install_line
from kvtool.core.kernels.attention.params import AttentionCall, AttentionParams, KeyRanges
from kvtool.core.native.jit import has_triton, jit

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

_LOG2_E = 1.4426950408889634
_LEAST = 16  # rows and numbers of a product on tensor cores
_MOST_SPLITS = 32

name = "triton"


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int  # query rows of a program, those of a group's heads counted separately
    keys: int  # read at a time
    warps: int
    stages: int  # of the pipeline that reads ahead


_LARGE_MEMORY = 160 * 1024


def tile_for(rows: int, head_dim: int, dtype: torch.dtype, memory: int = 100 * 1024) -> Tile:
    """Return the tile that fills a block's shared memory, in bytes; every GPU since Ampere has 100 kB.

    Measured on an H100, 4,096 rows of Llama-3.1-8B's heads, ms: 128 x 128 in two stages .43, 128 x 64 in three .46.
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
    splits = -(-2 * multiprocessors // max(blocks, 1))
    most = max(1, keys // (4 * tile.keys))  # a part of fewer keys is not worth its join
    return max(1, min(splits, most, _MOST_SPLITS))


def declines(call: AttentionCall) -> str:
    if call.device != "cuda":
        return "it runs on CUDA"
    if not has_triton():
        return f"Triton is not installed ({install_line('triton')})"
    if call.batch > 1:
        return "it takes one prompt"
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
    """Return `[1, heads, rows, head_dim]`, laid out with rows before heads. `limits` and `begins` must be contiguous
    and less than the number of keys: the kernel does not check. `splits` None: as many as fill the GPU."""
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
    parts = sums = out[None]
    if splits > 1:
        parts = query.new_empty((splits, 1, rows, heads, head_dim), dtype=torch.float32).transpose(2, 3)
        sums = query.new_empty((splits, heads, rows), dtype=torch.float32)
    at = ranges.limits
    kernel()[(blocks, kv_heads, splits)](
        query, key, value, parts, sums, at,
        at if ranges.begins is None else ranges.begins, at if params.sinks is None else params.sinks,
        params.scale * _LOG2_E, (params.softcap or 1.0) * _LOG2_E, rows,
        query.stride(1), query.stride(2), key.stride(1), key.stride(2), value.stride(1), value.stride(2),
        parts.stride(0), parts.stride(2), parts.stride(3),
        **constants(
            heads // kv_heads, head_dim, tile, splits, query.dtype, params,
            windowed=ranges.begins is not None, interpreted=not query.is_cuda,
        ),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        _join(parts, sums, out)
    return out


def _check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams, ranges: KeyRanges
) -> None:
    at = ranges.limits
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
    splits, _, heads, rows, head_dim = parts.shape
    _joining()[(rows, heads)](
        parts, sums, out, rows, splits,
        parts.stride(0), parts.stride(2), parts.stride(3), out.stride(1), out.stride(2),
        SIZE=_power(_MOST_SPLITS), DIM=head_dim, WIDTH=_power(head_dim), num_warps=4,
    )  # fmt: skip


@functools.cache
def kernel() -> Any:
    return jit(_attend, _keys_of, _begun, _read, _over, _written, unspecialized=("rows",))


@functools.cache
def _joining() -> Any:
    return jit(_joined, unspecialized=("rows", "splits"))


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
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) or 100 * 1024


# Below: Triton, which takes no numbers of this module.


def _joined(
    parts: tl.tensor, sums: tl.tensor, out: tl.tensor, rows: tl.tensor, splits: tl.tensor, part_split: tl.tensor,
    part_head: tl.tensor, part_row: tl.tensor, out_head: tl.tensor, out_row: tl.tensor, SIZE: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Join one row of one head: a part of which it sees nothing has -inf, and no share."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    split, column = tl.arange(0, SIZE).to(tl.int64), tl.arange(0, WIDTH)
    here = split < splits
    log_sums = tl.load(sums + (split * tl.num_programs(1) + head) * rows + row, mask=here, other=float("-inf"))
    share = tl.exp2(log_sums - tl.max(log_sums, 0))
    offset = split[:, None] * part_split + head * part_head + row * part_row + column[None, :]
    part = tl.load(parts + offset, mask=here[:, None] & (column < DIM)[None, :], other=0.0)
    mixed = tl.sum(part * share[:, None], 0) / tl.sum(share, 0)
    address = out + head * out_head + row * out_row + column
    tl.store(address, mixed.to(out.dtype.element_ty), mask=column < DIM)


def _attend(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, out: tl.tensor, sums: tl.tensor, at: tl.tensor,
    begins: tl.tensor, sinks: tl.tensor, scale: tl.tensor, cap: tl.tensor, rows: tl.tensor, query_head: tl.tensor,
    query_row: tl.tensor, key_head: tl.tensor, key_row: tl.tensor, value_head: tl.tensor, value_row: tl.tensor,
    out_split: tl.tensor, out_head: tl.tensor, out_row: tl.tensor, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    SUNK: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """A block of rows, a head of keys and a part of the keys a program; `scale` and `cap` are of powers of two."""
    first = tl.program_id(0) * ROWS
    kv_head = tl.program_id(1).to(tl.int64)
    member = first + tl.arange(0, ROWS)
    row = member // GROUPS
    head = (kv_head * GROUPS + member % GROUPS).to(tl.int64)
    real = row < rows
    column = tl.arange(0, WIDTH)
    inside = column < DIM
    position = tl.load(at + row, mask=real, other=-1)
    offset = row.to(tl.int64)[:, None] * query_row + head[:, None] * query_head + column[None, :]
    part = tl.load(query + offset, mask=real[:, None] & inside[None, :], other=0.0)
    since = position * 0
    if WINDOWED:
        since = tl.load(begins + row, mask=real, other=0)
    begin, masked, end, high = _keys_of(at, begins, first, rows, WINDOWED, GROUPS, ROWS, KEYS)
    most, total = _begun(sinks, head, real, SUNK, ROWS)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    keys, values = key + kv_head * key_head, value + kv_head * value_head
    most, total, mixed = _over(
        begin, masked, high, part, keys, key_row, values, value_row, position, since, scale, cap, most, total, mixed,
        False, CAPPED, DIM, WIDTH, KEYS, PRECISION, WIDEN,
    )  # fmt: skip
    most, total, mixed = _over(
        masked, end, high, part, keys, key_row, values, value_row, position, since, scale, cap, most, total, mixed,
        True, CAPPED, DIM, WIDTH, KEYS, PRECISION, WIDEN,
    )  # fmt: skip
    split = tl.program_id(2).to(tl.int64)
    offset = split * out_split + row.to(tl.int64)[:, None] * out_row + head[:, None] * out_head + column[None, :]
    sums_address = sums + (split * tl.num_programs(1) * GROUPS + head) * rows + row
    _written(out + offset, sums_address, most, total, mixed, real, inside, PARTS)


def _keys_of(
    at: tl.tensor, begins: tl.tensor, first: tl.tensor, rows: tl.tensor, WINDOWED: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The program's keys: where they begin, where they need a mask, where they end; and from where on no row sees."""
    # Below `low` every row of the block sees every key; from `high` on none does.
    low = tl.load(at + first // GROUPS) + 1
    high = tl.load(at + tl.minimum((first + ROWS - 1) // GROUPS, rows - 1)) + 1
    least = low * 0
    if WINDOWED:
        least = tl.load(begins + first // GROUPS) // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(high - least, KEYS), tl.num_programs(2)) * KEYS
    begin = least + tl.program_id(2) * share
    end = tl.minimum(begin + share, high)
    masked = tl.minimum(tl.maximum(low // KEYS * KEYS, begin), end)
    if WINDOWED:
        masked = begin
    return begin, masked, end, high


def _begun(
    sinks: tl.tensor, head: tl.tensor, real: tl.tensor, SUNK: tl.constexpr, ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The largest score and the sum of weights before any key: a sink's, which the first part counts, has no value."""
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SUNK:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        counted = tl.program_id(2) == 0
        most = tl.where(counted, sink, most)
        total = tl.where(counted, 1.0, total)
    return most, total


def _written(
    address: tl.tensor, sums: tl.tensor, most: tl.tensor, total: tl.tensor, mixed: tl.tensor, real: tl.tensor,
    inside: tl.tensor, PARTS: tl.constexpr,
) -> None:  # fmt: skip
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(address, mixed.to(address.dtype.element_ty), mask=real[:, None] & inside[None, :])
    if PARTS:
        log_sum = tl.where(total > 0, most + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(sums, log_sum, mask=real)


def _read(address: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    if MASKED:
        return tl.load(address, mask=mask, other=0.0)
    else:
        return tl.load(address)


def _over(
    begin: tl.tensor, end: tl.tensor, high: tl.tensor, part: tl.tensor, keys: tl.tensor, key_row: tl.tensor,
    values: tl.tensor, value_row: tl.tensor, position: tl.tensor, since: tl.tensor, scale: tl.tensor, cap: tl.tensor,
    most: tl.tensor, total: tl.tensor, mixed: tl.tensor, MASKED: tl.constexpr, CAPPED: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Add the keys from `begin` to `end`; return the largest score so far, the sum of weights, and the mixed values."""
    column = tl.arange(0, WIDTH)
    inside = column < DIM
    for start in range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS).to(tl.int64)
        here = at < high
        address = keys + (at * key_row)[None, :] + column[:, None]
        block = _read(address, here[None, :] & inside[:, None], MASKED or DIM != WIDTH)
        if WIDEN:
            score = tl.dot(part.to(tl.float32), block.to(tl.float32)) * scale
        else:
            score = tl.dot(part, block, input_precision=PRECISION) * scale
        if CAPPED:  # tanh(x) = 1 - 2 / (1 + e^2x), with e^2x as a power of two
            score = cap * (1 - 2 / (1 + tl.exp2(score / cap * 2.8853900817779268)))
        if MASKED:
            seen = (at[None, :] <= position[:, None]) & (at[None, :] >= since[:, None])
            score = tl.where(seen, score, float("-inf"))
        highest = tl.maximum(most, tl.max(score, 1))
        shift = tl.where(highest == float("-inf"), 0.0, highest)  # a row that has seen no key yet
        weight = tl.exp2(score - shift[:, None])
        fade = tl.exp2(most - shift)
        address = values + (at * value_row)[:, None] + column[None, :]
        block = _read(address, here[:, None] & inside[None, :], MASKED or DIM != WIDTH)
        rounded = weight.to(block.dtype)
        if WIDEN:
            mixed = mixed * fade[:, None] + tl.dot(rounded.to(tl.float32), block.to(tl.float32))
        else:
            mixed = tl.dot(rounded, block, mixed * fade[:, None], input_precision=PRECISION)
        total = total * fade + tl.sum(weight, 1)
        most = highest
    return most, total, mixed
