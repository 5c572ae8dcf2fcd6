"""Attention of scattered rows by torch's `flex_attention`, which its compiler makes a kernel of.

Which blocks of keys a block of rows looks at, and which of them need no mask, follows from the rows' positions, on the
device: no rows × keys mask is made and nothing is waited for.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

BLOCK = 128  # rows and keys of a block
_last: list[tuple[torch.Tensor, int, Any]] = []  # positions, keys and mask of the pass that asked last


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, at: torch.Tensor) -> torch.Tensor:
    """Attend with rows of which row i sees the keys 0 … at[i]: as `triton_rows.attend`."""
    grouped = query.shape[1] != key.shape[1]
    mask = block_mask(at, key.shape[2])
    out: torch.Tensor = _compiled()(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out


@functools.cache
def _compiled() -> Any:
    """One kernel for all lengths."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def block_mask(at: torch.Tensor, keys: int) -> Any:
    """The mask of rows at ascending positions (int64 `[rows]`) over so many keys.

    A pass asks for the same one at every layer: it is kept until another is asked for.
    """
    for positions, number, mask in tuple(_last):
        if positions is at and number == keys:
            return mask
    made = _block_mask(at, keys)
    _last[:] = [(at, keys, made)]
    return made


def _block_mask(at: torch.Tensor, keys: int) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    rows, blocks = len(at), -(-keys // BLOCK)
    begins = torch.arange(0, rows, BLOCK, device=at.device)
    ends = (begins + BLOCK).clamp(max=rows) - 1
    whole = (at[begins] + 1) // BLOCK  # blocks of keys that every row of a block of rows sees
    partial = at[ends] // BLOCK + 1 - whole
    number = torch.arange(blocks, device=at.device)
    behind = ((number + whole[:, None]) % blocks).to(torch.int32)
    return BlockMask.from_kv_blocks(
        partial[None, None].to(torch.int32),
        behind[None, None],
        whole[None, None].to(torch.int32),
        number.to(torch.int32).expand(len(begins), -1).contiguous()[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=_seen_by(at),
        seq_lengths=(rows, keys),
    )


def _seen_by(at: torch.Tensor) -> Any:
    def seen(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return key <= at[row]

    return seen
