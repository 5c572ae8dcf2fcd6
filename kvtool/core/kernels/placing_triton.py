"""Placing of a layer's keys and values in a prompt's buffers on a GPU, the keys rotated, in one launch of Triton.

A table of addresses says where the segments' numbers are. Its entries are checked on the host, before the kernel
follows them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from kvtool.core.kernels.rope import CosSin
from kvtool.core.native.jit import jit

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


FIELDS = 8  # of K: address, head's stride, row's stride; the same of V; first position, tokens
_ROWS = 32  # tokens of a program
_VECTOR = 16  # bytes that a thread reads at once
_MOST_BLOCKS = 65535  # of a grid's second dimension


@dataclass(frozen=True, slots=True)
class Side:
    """A segment's keys or values `[kv_heads, tokens, head_dim]` on the device; numbers adjacent, strides in numbers."""

    address: int
    head: int
    row: int

    @classmethod
    def of(cls, numbers: torch.Tensor, address: int | None = None) -> Side:
        return cls(numbers.data_ptr() if address is None else address, numbers.stride(0), numbers.stride(1))


@dataclass(frozen=True, slots=True)
class Piece:
    keys: Side
    values: Side
    start: int
    tokens: int


def fits(numbers: torch.Tensor, buffer: torch.Tensor) -> bool:
    return (
        numbers.ndim == 3
        and numbers.dtype == buffer.dtype
        and numbers.shape[::2] == buffer.shape[1::2]
        and (numbers.stride(2) == 1 or numbers.shape[2] == 1)
    )


def described(pieces: Sequence[Piece]) -> npt.NDArray[np.int64]:
    rows = [
        (*(number for side in (piece.keys, piece.values) for number in (side.address, side.head, side.row)),
         piece.start, piece.tokens)
        for piece in pieces
    ]  # fmt: skip
    return np.array(rows, np.int64).reshape(-1, FIELDS)


def place(
    table: npt.NDArray[np.int64],
    there: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> None:
    """Put a layer's segments into its buffers `[1, kv_heads, capacity, head_dim]`; queued on the current stream.

    Rotated is by halves, in float32, each product and sum rounded, and the result once: the bits that torch makes of x
    · cos + rotate_half(x) · sin. cos and sin are float32 `[tokens, rotary_dim]` by position, both halves alike; None:
    this layer does not rotate. `there` is the table on the device; that its addresses hold the numbers is the caller's
    to know. Raises ValueError: something does not fit; nothing was launched.
    """
    if not len(table):
        return
    _check(table, there, keys, values, cos, sin)
    _, heads, _, head_dim = keys.shape
    blocks = -(-int(table[:, 7].max()) // _ROWS)
    turned = cos if cos is not None and sin is not None else keys
    _kernel()[(len(table) * heads, blocks, 2)](
        there, keys, values, turned, keys if sin is None else sin, keys.stride(1), keys.stride(2), turned.stride(0),
        **constants(heads, head_dim, 0 if cos is None else cos.shape[1] // 2, _aligned(table, keys)),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _check(
    table: npt.NDArray[np.int64],
    there: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> None:
    if keys.ndim != 4 or len(keys) != 1 or keys.shape != values.shape or keys.dtype != values.dtype:
        raise ValueError("buffers of keys and values are [1, kv_heads, capacity, head_dim], both of one dtype")
    if keys.stride() != values.stride() or keys.stride(3) != 1:
        raise ValueError("buffers of keys and values are laid out alike, a head's numbers adjacent")
    if table.ndim != 2 or table.shape[1] != FIELDS or there.numel() < table.size or there.dtype != torch.int64:
        raise ValueError("a table of segments of the wrong shape")
    starts, tokens = table[:, 6], table[:, 7]
    stop = int((starts + tokens).max())
    if int(starts.min()) < 0 or int(tokens.min()) < 0 or stop > keys.shape[2]:
        raise ValueError("a segment outside of the buffers")
    if int(tokens.max()) > _MOST_BLOCKS * _ROWS:
        raise ValueError("a segment too long for one launch")
    if (cos is None) != (sin is None):
        raise ValueError("cos without sin")
    if cos is not None and sin is not None:
        _check_turns(cos, sin, stop, keys.shape[3])


def _check_turns(cos: torch.Tensor, sin: torch.Tensor, stop: int, head_dim: int) -> None:
    if cos.ndim != 2 or cos.shape != sin.shape or cos.stride() != sin.stride() or cos.stride(1) != 1:
        raise ValueError("cos and sin are [tokens, rotary_dim], laid out alike")
    if cos.dtype != torch.float32 or sin.dtype != torch.float32 or len(cos) < stop:
        raise ValueError("cos and sin are float32, of every position up to the last segment's end")
    if cos.shape[1] % 2 or not 0 < cos.shape[1] <= head_dim:
        raise ValueError("as many numbers are rotated as a head has, or fewer, in pairs")


def _aligned(table: npt.NDArray[np.int64], keys: torch.Tensor) -> bool:
    size = keys.element_size()
    strides = table[:, (1, 2, 4, 5)] * size
    return not (table[:, (0, 3)] % _VECTOR).any() and not (strides % _VECTOR).any()


def constants(heads: int, head_dim: int, half: int, aligned: bool) -> dict[str, Any]:
    return {
        "HEADS": heads,
        "DIM": head_dim,
        "WIDTH": 1 << max(0, head_dim - 1).bit_length(),
        "HALF": half,
        "ROWS": _ROWS,
        "ALIGNED": aligned,
    }


@functools.cache
def _kernel() -> Any:
    return jit(_place)


# Below: Triton, which takes no numbers of this module: 8 fields of a row.


def _place(
    table: tl.tensor, keys: tl.tensor, values: tl.tensor, cos: tl.tensor, sin: tl.tensor, to_head: tl.tensor,
    to_row: tl.tensor, table_row: tl.tensor, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    """A head of a segment, a block of its tokens, and one side a program."""
    job = table + tl.program_id(0) // HEADS * 8
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    side = tl.program_id(2)
    start, tokens = tl.load(job + 6), tl.load(job + 7)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.arange(0, WIDTH)
    real = (row < tokens)[:, None] & (column < DIM)[None, :]
    address = tl.load(job + 3 * side)
    from_head, from_row = tl.load(job + 3 * side + 1), tl.load(job + 3 * side + 2)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
        from_head, from_row = tl.multiple_of(from_head, 8), tl.multiple_of(from_row, 8)
    numbers = address.to(tl.pointer_type(keys.dtype.element_ty)) + head * from_head
    rows = numbers + row[:, None] * from_row
    number = tl.load(rows + column[None, :], mask=real)
    offset = head * to_head + (start + row)[:, None] * to_row + column[None, :]
    if side == 1:
        tl.store(values + offset, number, mask=real)
    else:
        if HALF > 0:
            turned = column < 2 * HALF
            partner = tl.where(column < HALF, column + HALF, column - HALF)
            both = real & turned[None, :]
            crossed = tl.load(rows + partner[None, :], mask=both, other=0.0).to(tl.float32)
            crossed = tl.where((column < HALF)[None, :], -crossed, crossed)
            angle = (start + row)[:, None] * table_row + column[None, :]
            by_cos = number.to(tl.float32) * tl.load(cos + angle, mask=both, other=0.0)
            by_sin = crossed * tl.load(sin + angle, mask=both, other=0.0)
            number = tl.where(turned[None, :], (by_cos + by_sin).to(number.dtype), number)
        tl.store(keys + offset, number, mask=real)


_HEAD_ROWS = 16  # of one program


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Root mean square norm of each head: its weight `[head_dim]`, in the model's dtype or float32."""

    weight: torch.Tensor
    epsilon: float

    def normed(self, heads: torch.Tensor) -> torch.Tensor:
        """Norm heads `[..., head_dim]`."""
        wide = heads.to(self.weight.dtype)
        return F.rms_norm(wide, self.weight.shape, self.weight, self.epsilon).to(heads.dtype)


def place_heads(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    norms: tuple[HeadNorm, HeadNorm] | None,
    table: CosSin | None,
    at: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
) -> torch.Tensor:
    """Norm and rotate heads; write keys and values to the buffers; return queries `[1, heads, rows, head_dim]`.

    Queries, keys and values are `[rows, heads · head_dim]`, rows of adjacent numbers; buffers `[1, kv_heads, capacity,
    head_dim]`. The second half of the table is like the first. `at`, int64 `[rows]`: indices of the rows in the
    buffers, each less than their capacity, which the caller has to ensure: the kernel does not check.
    """
    kv_heads, head_dim = key_buffer.shape[1], key_buffer.shape[3]
    _check_heads(queries, keys, values, table, at, key_buffer, value_buffer)
    rows, heads = len(at), queries.shape[1] // head_dim
    out = queries.new_empty((1, rows, heads, head_dim))
    if not rows:
        return out.transpose(1, 2)
    cos, sin = (table.cos, table.sin) if table is not None else (queries, queries)
    first, second = (norm.weight for norm in norms) if norms is not None else (queries, queries)
    _heads_kernel()[(-(-rows // _HEAD_ROWS), heads + 2 * kv_heads)](
        queries, keys, values, out, key_buffer, value_buffer, at, cos, sin, first, second,
        norms[0].epsilon if norms is not None else 0.0, norms[1].epsilon if norms is not None else 0.0, rows,
        queries.stride(0), keys.stride(0), values.stride(0), cos.stride(-2) if table is not None else 0,
        key_buffer.stride(1), key_buffer.stride(2), value_buffer.stride(1), value_buffer.stride(2),
        HEADS=heads, KV_HEADS=kv_heads, DIM=head_dim, WIDTH=1 << (head_dim - 1).bit_length(),
        ROTARY=0 if table is None else table.cos.shape[-1], NORMED=norms is not None, ROWS=_HEAD_ROWS,
        num_warps=4,
    )  # fmt: skip
    return out.transpose(1, 2)


def _check_heads(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: CosSin | None,
    at: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
) -> None:
    _, kv_heads, _, head_dim = key_buffer.shape
    if key_buffer.shape != value_buffer.shape or key_buffer.stride(3) != 1 or value_buffer.stride(3) != 1:
        raise ValueError("buffers are [1, kv_heads, capacity, head_dim], heads of adjacent numbers")
    if keys.shape != (len(at), kv_heads * head_dim) or keys.shape != values.shape or at.dtype != torch.int64:
        raise ValueError("keys and values are [rows, kv_heads * head_dim], with a place for every row")
    if len(queries) != len(at) or queries.shape[1] % (kv_heads * head_dim) or not at.is_contiguous():
        raise ValueError("queries are [rows, heads * head_dim]")
    if any(side.stride(1) != 1 for side in (queries, keys, values)):
        raise ValueError("a row's numbers are adjacent")
    if table is not None and (table.cos.shape != table.sin.shape or table.cos.stride() != table.sin.stride()):
        raise ValueError("cos and sin of different shapes")
    if table is not None and (table.cos.shape[:2] != (1, len(at)) or not 0 < table.cos.shape[2] <= head_dim):
        raise ValueError("cos and sin are [1, rows, rotary_dim]")


@functools.cache
def _heads_kernel() -> Any:
    return jit(_place_heads, _normed, _rotated, _turned, unspecialized=("rows",))


# Below: Triton, which takes no numbers of this module.


def _place_heads(
    queries: tl.tensor, keys: tl.tensor, values: tl.tensor, out: tl.tensor, key_buffer: tl.tensor,
    value_buffer: tl.tensor, at: tl.tensor, cos: tl.tensor, sin: tl.tensor, query_weight: tl.tensor,
    key_weight: tl.tensor, query_epsilon: tl.tensor, key_epsilon: tl.tensor, rows: tl.tensor, query_row: tl.tensor,
    key_row: tl.tensor, value_row: tl.tensor, table_row: tl.tensor, key_head_out: tl.tensor, key_row_out: tl.tensor,
    value_head_out: tl.tensor, value_row_out: tl.tensor, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr, NORMED: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    real = row < rows
    column = tl.arange(0, WIDTH)
    inside = real[:, None] & (column < DIM)[None, :]
    if head < HEADS:
        source = queries + row[:, None] * query_row + head * DIM
        number = _turned(
            source, query_weight, query_epsilon, cos, sin, row, table_row, real, column, DIM, ROTARY, NORMED
        )
        address = out + row[:, None] * (HEADS * DIM) + head * DIM + column[None, :]
        tl.store(address, number.to(out.dtype.element_ty), mask=inside)
    else:
        to = tl.load(at + row, mask=real, other=0)
        if head < HEADS + KV_HEADS:
            head -= HEADS
            source = keys + row[:, None] * key_row + head * DIM
            number = _turned(
                source, key_weight, key_epsilon, cos, sin, row, table_row, real, column, DIM, ROTARY, NORMED
            )
            address = key_buffer + head * key_head_out + to[:, None] * key_row_out + column[None, :]
            tl.store(address, number.to(key_buffer.dtype.element_ty), mask=inside)
        else:
            head -= HEADS + KV_HEADS
            source = values + row[:, None] * value_row + head * DIM
            value = tl.load(source + column[None, :], mask=inside, other=0.0)
            address = value_buffer + head * value_head_out + to[:, None] * value_row_out + column[None, :]
            tl.store(address, value, mask=inside)


def _turned(
    source: tl.tensor, weight: tl.tensor, epsilon: tl.tensor, cos: tl.tensor, sin: tl.tensor, row: tl.tensor,
    table_row: tl.tensor, real: tl.tensor, column: tl.tensor, DIM: tl.constexpr, ROTARY: tl.constexpr,
    NORMED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    number = tl.load(source + column[None, :], mask=real[:, None] & (column < DIM)[None, :], other=0.0).to(tl.float32)
    factor = number
    if NORMED:
        number, factor = _normed(number, weight, epsilon, column, DIM)
        number = number.to(source.dtype.element_ty).to(tl.float32)
    if ROTARY > 0:
        number = _rotated(number, source, factor, weight, cos, sin, row, table_row, real, column, ROTARY, NORMED)
    return number


def _normed(
    number: tl.tensor, weight: tl.tensor, epsilon: tl.tensor, column: tl.tensor, DIM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    factor = tl.rsqrt(tl.sum(number * number, 1) / DIM + epsilon)[:, None]
    by = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)
    return number * factor * by[None, :], factor


def _rotated(
    number: tl.tensor, source: tl.tensor, factor: tl.tensor, weight: tl.tensor, cos: tl.tensor, sin: tl.tensor,
    row: tl.tensor, table_row: tl.tensor, real: tl.tensor, column: tl.tensor, ROTARY: tl.constexpr,
    NORMED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    turns = column < ROTARY
    half: tl.constexpr = ROTARY // 2
    partner = tl.where(column < half, column + half, tl.where(turns, column - half, column))
    here = real[:, None] & turns[None, :]
    other = tl.load(source + partner[None, :], mask=here, other=0.0).to(tl.float32)
    if NORMED:
        by = tl.load(weight + partner, mask=turns, other=0.0).to(tl.float32)
        other = (other * factor * by[None, :]).to(source.dtype.element_ty).to(tl.float32)
    angle = row[:, None] * table_row + column[None, :]
    straight = tl.load(cos + angle, mask=here, other=1.0)
    crossed = tl.load(sin + angle, mask=here, other=0.0)
    return number * straight + tl.where((column < half)[None, :], -other, other) * crossed
