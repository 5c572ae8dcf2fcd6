"""A chunk computed from its text while others are on their way."""

from __future__ import annotations

from collections.abc import Callable

from kvtool.core.cache.store import Store
from kvtool.core.fusion.plan import Segment
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, PrefillStopped, prefill_chunks
from kvtool.core.query.fill import stands_alone
from kvtool.core.session.identity import StoreIdentity
from kvtool.core.session.lead_in import open_lead_in


class Meanwhile:
    """Computes what ingest would store: on the CPU the same bits. For one thread at a time."""

    def __init__(self, store: Store, decoder: Decoder, identity: StoreIdentity) -> None:
        self._store, self._decoder, self._identity = store, decoder, identity
        self._lead_in: LeadIn | None = None

    def __call__(self, segment: Segment, going: Callable[[], bool]) -> ChunkKV | None:
        """A segment's KV behind the store's lead-in; None: it needs the chunk before it, or it was stopped.

        Raises
        ------
        DamagedError : the learned lead-in is damaged or lost.
        """
        if not stands_alone(segment, self._identity):
            return None
        try:
            lead_in = self._before(segment)
            return prefill_chunks(self._decoder, lead_in, [PrefillItem(segment.ids)], going=going)[0]
        except PrefillStopped:
            return None

    def _before(self, segment: Segment) -> LeadIn:
        if segment.source.chunk_id == self._identity.prefix_id:
            return LeadIn(self._decoder, ())
        if self._lead_in is None:
            self._lead_in = open_lead_in(self._store, self._decoder, self._identity.lead_in)
        return self._lead_in
