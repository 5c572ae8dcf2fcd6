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

from kvtool.core.kernels.triton_jit import jit

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
