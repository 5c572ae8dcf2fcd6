"""Reused rows moved by parts of what they truly lack: what a better shift could give at most."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvtool.core.model.prompt_cache import PromptCache
from restoring.case import BOTH, Case, sides_of

Part = Callable[[torch.Tensor], torch.Tensor]  # of a chunk's change in one layer and side, [rows, width]


def mean(change: torch.Tensor) -> torch.Tensor:
    return change.mean(0).expand_as(change)


def by_segment(tokens: int) -> Part:
    return lambda change: torch.cat([mean(some) for some in change.split(tokens)])


def rank(count: int) -> Part:
    """The nearest change of this rank: its rows' projections on the first directions of all."""

    def part(change: torch.Tensor) -> torch.Tensor:
        wide = change.double()  # in float32 it does not always converge
        directions = torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -count:].float()
        return change @ directions @ directions.T

    return part


PARTS: dict[str, Part] = {
    "mean of the chunk": mean,
    "mean of 64 tokens": by_segment(64),
    "rank 1": rank(1),
    "rank 4": rank(4),
    "rank 8": rank(8),
}


class Lacking:
    """What the still reused rows of a prompt lack, keys without their positions, layer by layer and side by side.

    Parameters
    ----------
    still : bool `[length]`.
    """

    def __init__(self, case: Case, reused: PromptCache, still: torch.Tensor) -> None:
        self._case, self._reused = case, reused
        self._rows = still.nonzero()[:, 0]
        self._counts = [int(still[segment.start : segment.stop].sum()) for segment in case.plan.cached_chunks]
        self._table = case.decoder.rotary.table(case.plan.positions[self._rows])

    def moved(self, base: PromptCache, part: Part) -> PromptCache:
        """Make a mixture whose still reused rows take a part of what they lack; other rows are those of `base`."""
        mixture = self._case.mixed(base)
        for layer in range(len(mixture.buffers)):
            for side in BOTH:
                old = sides_of(self._reused, layer)[side][0][:, self._rows].float()
                change = sides_of(self._case.full, layer)[side][0][:, self._rows].float() - old
                if side == 0:
                    change = self._case.decoder.rotary.rotate(change[None], self._table.inverse(), layer)[0]
                move = self._by_chunk(change, part)
                if side == 0:
                    move = self._case.decoder.rotary.rotate(move[None], self._table, layer)[0]
                target = sides_of(mixture, layer)[side]
                target.index_copy_(2, self._rows, (old + move)[None].to(target.dtype))
        return mixture

    def _by_chunk(self, change: torch.Tensor, part: Part) -> torch.Tensor:
        heads, count, width = change.shape
        flat = change.transpose(0, 1).reshape(count, heads * width)
        parts = [part(some) if len(some) else some for some in flat.split(self._counts)]
        return torch.cat(parts).view(count, heads, width).transpose(0, 1).contiguous()
