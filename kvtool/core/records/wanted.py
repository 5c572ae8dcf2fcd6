"""What has to be known of a chunk before its records can be made; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.core.cache.entries import ChunkInfo
from kvtool.core.common.arithmetic import Arithmetic
from kvtool.core.common.types import Ids


@dataclass(frozen=True, slots=True)
class WantedChunk:
    """Describes a chunk to make records of.

    Attributes
    ----------
    before : token ids that stand between the store's lead-in and this chunk alone (the lead-in `neighbour`).
    lead_in : digest of all that the chunk is prefilled behind.
    """

    chunk_id: bytes
    ids: Ids
    before: Ids
    lead_in: bytes

    def info(self, layers: int, sensitivity: bytes = b"", arithmetic: Arithmetic | None = None) -> ChunkInfo:
        """Make the chunk's description; `sensitivity` is as records/sensitivity.py gives it, or empty."""
        return ChunkInfo(self.ids, self.lead_in, layers, sensitivity, arithmetic)
