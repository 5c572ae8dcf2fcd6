"""What one layer keeps of a token: how many heads, and how many numbers of each are its key and its value."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of a layer's keys and values: `[heads, tokens, key_dim]` and `[heads, tokens, value_dim]`.

    Attributes
    ----------
    joint : keys and values stand in one row of the prompt's buffers, values first, and attention takes the whole row as
        the key (latents, mla.py).
    """

    heads: int
    key_dim: int
    value_dim: int
    joint: bool = False

    @property
    def numbers(self) -> int:
        """Numbers of one token, keys and values together."""
        return self.heads * (self.key_dim + self.value_dim)

    @property
    def channels(self) -> int:
        """Numbers of the wider side of a token."""
        return self.heads * max(self.key_dim, self.value_dim)

    @property
    def attended(self) -> int:
        """Numbers of a key as attention takes it."""
        return self.key_dim + (self.value_dim if self.joint else 0)

    @property
    def is_plain(self) -> bool:
        """Whether keys are as wide as values and stand apart from them, as fast paths expect."""
        return self.key_dim == self.value_dim and not self.joint

    def empty(self, tokens: int, dtype: torch.dtype, pinned: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for keys and values of so many tokens, in one piece on the CPU; what it holds is undefined."""
        room = torch.empty(self.numbers * tokens, dtype=dtype, pin_memory=pinned)
        keys, values = room.split([self.heads * tokens * dim for dim in (self.key_dim, self.value_dim)])
        return keys.view(self.heads, tokens, self.key_dim), values.view(self.heads, tokens, self.value_dim)
