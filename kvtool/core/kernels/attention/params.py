"""What of a layer's attention stands beside its queries, keys and values: scale, window, softcap, sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """How the scores of a layer are made, and how far back a row sees.

    Attributes
    ----------
    scale : what products of queries and keys are multiplied by.
    window : a row sees the keys of so many positions, its own the last of them; None: all up to its own.
    softcap : scores s become softcap · tanh(s / softcap) (Gemma 2, arXiv 2408.00118, section 2); None: they stay.
    sinks : float `[heads]`, one more score of each head, which has no value: it takes weight from the keys (gpt-oss,
        arXiv 2508.10925, section 2); None: there are none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether weights are the softmax of scaled products over all keys up to a row's own."""
        return self.window is None and self.is_unshaped

    @property
    def is_unshaped(self) -> bool:
        """Whether scores are scaled products and nothing else."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The keys that each of some rows sees: `first` … `last`, both ascending.

    Attributes
    ----------
    last : the last place of each row's, less than the number of keys.
    at : the same as an int64 tensor on the model's device.
    first : the first one's place; None: 0 for all.
    begins : the same as an int64 tensor on the model's device.
    """

    last: Sequence[int]
    at: torch.Tensor
    first: Sequence[int] | None = None
    begins: torch.Tensor | None = None

    @classmethod
    def run(cls, positions: range, window: int | None, device: torch.device | str) -> Seen:
        """What rows at adjacent positions see of keys that stand at theirs."""
        at = torch.arange(positions.start, positions.stop, device=device)
        if window is None:
            return cls(positions, at)
        first = [max(0, position - window + 1) for position in positions]
        return cls(positions, at, first, torch.tensor(first, device=device))

    def __getitem__(self, rows: slice) -> Seen:
        first = None if self.first is None else self.first[rows]
        return Seen(self.last[rows], self.at[rows], first, None if self.begins is None else self.begins[rows])

    def begin(self, row: int) -> int:
        """The first key that a row sees, and so none of the rows behind it an earlier one."""
        return 0 if self.first is None else self.first[row]

    def hidden(self, rows: slice, first: int, behind: int) -> torch.Tensor:
        """Bool `[rows, behind - first]`: which of the keys from `first` on some rows do not see."""
        keys = torch.arange(first, behind, device=self.at.device)
        hidden = keys > self.at[rows, None]
        return hidden if self.begins is None else hidden | (keys < self.begins[rows, None])
