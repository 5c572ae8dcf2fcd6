"""A chunk computed from its text while others are on their way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, PrefillStopped, prefill_chunks
from kvtool.core.query.fill import stands_alone

if TYPE_CHECKING:
    from kvtool.core.fusion.plan import Segment
    from kvtool.core.session.session import Session


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """Computes what ingest would store: on the CPU the same bits. For one thread at a time."""

    session: Session

    def __call__(self, segment: Segment, going: Callable[[], bool]) -> ChunkKV | None:
        """A segment's KV behind the store's lead-in; None: it needs the chunk before it, or it was stopped.

        Raises
        ------
        DamagedError : the learned lead-in is damaged or lost.
        """
        session = self.session
        if not stands_alone(segment, session.identity):
            return None
        is_prefix = segment.source.chunk_id == session.identity.prefix_id
        lead_in = LeadIn(session.decoder, ()) if is_prefix else session.lead_in
        try:
            return prefill_chunks(session.decoder, lead_in, [PrefillItem(segment.ids)], going=going)[0]
        except PrefillStopped:
            return None
