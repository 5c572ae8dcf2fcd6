"""Row selection for the levels that drop rows of a store's chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvtool.core.codec.levels import level_of
from kvtool.core.common.types import Ids
from kvtool.core.records.heavy_hitters import heaviest, repeated

if TYPE_CHECKING:
    import torch

    from kvtool.core.session.session import Session

_TOGETHER = 4  # chunks of a pass


class HeavyRows:
    """Chooses rows, each chunk's worth measured once."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._worth: dict[bytes, torch.Tensor] = {}

    def learn(self, chunks: Sequence[tuple[bytes, Ids]], advance: Callable[[int], None] = lambda chunks: None) -> None:
        """Measure what the rows of some chunks are worth, as far as it is not known yet."""
        left = [(chunk, ids) for chunk, ids in dict(chunks).items() if chunk not in self._worth]
        for first in range(0, len(left), _TOGETHER):
            some = left[first : first + _TOGETHER]
            made = repeated(self._session.decoder, self._session.lead_in, [ids for _, ids in some])
            self._worth.update(zip((chunk for chunk, _ in some), made, strict=True))
            advance(len(some))

    def of(self, chunk: bytes, ids: Ids, level: str) -> Ids:
        """The rows of a chunk that stay at a level, ascending."""
        self.learn([(chunk, ids)])
        return heaviest(self._worth[chunk], level_of(level).share)
