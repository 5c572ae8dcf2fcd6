"""A prompt whose chunks are read exactly: what a report on fusion measures is then reuse, not the codec's rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvtool.core.codec.base import LayerKV
from kvtool.core.codec.levels import RAW, level_of
from kvtool.core.errors import KvtoolError
from kvtool.core.fusion.plan import Segment, build_plan
from kvtool.core.fusion.source import KVSource, MemorySource, ReadStats
from kvtool.core.model.prefill import ChunkKV, PrefillItem, prefill_chunks
from kvtool.core.session.lead_in import open_lead_in

if TYPE_CHECKING:
    from kvtool.core.common.types import Ids
    from kvtool.core.query.layout import Asked
    from kvtool.core.session.session import Session


@dataclass(frozen=True, slots=True)
class Exactly:
    """Reads chunks of which nothing exact is stored from memory, others where they are stored."""

    stored: KVSource
    computed: dict[bytes, ChunkKV] = field(default_factory=dict)

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        """See KVSource."""
        here = [one for one in segments if one.source.chunk_id in self.computed]
        there = [one for one in segments if one.source.chunk_id not in self.computed]
        read = MemorySource(self.computed).read(here, layer, stats)
        read += self.stored.read(there, layer, stats) if there else []
        found = dict(zip((one.start for one in (*here, *there)), read, strict=True))
        return [found[segment.start] for segment in segments]


def exactly(session: Session, prompts: Sequence[Asked]) -> tuple[list[Asked], Exactly]:
    """Prompts with every chunk at an exact level, and where to read them.

    What is only stored at lossy levels is computed as ingest would, behind the chunk's own lead-in. What is not stored
    at all is a hole, as it is to a question.

    Parameters
    ----------
    prompts : laid out `exactly`: at exact levels where there are any.

    Raises
    ------
    KvtoolError : a chunk stands behind a lead-in that the store does not have any more.
    """
    source = Exactly(session.source)
    return [_exact(session, asked, source) for asked in prompts], source


def _exact(session: Session, asked: Asked, source: Exactly) -> Asked:
    prefix, *_, question = asked.plan.segments
    chunks = []
    for hit, segment in zip(asked.hits, asked.plan.chunks, strict=True):
        candidate = segment.source
        if candidate.level is not None and not level_of(candidate.level).lossless:
            if candidate.chunk_id not in source.computed:
                before = _before(session, segment, hit.passage.source, hit.passage.start)
                lead_in = open_lead_in(session.store, session.decoder, session.identity.lead_in)
                made = prefill_chunks(session.decoder, lead_in, [PrefillItem(segment.ids, before)])
                source.computed[candidate.chunk_id] = made[0]
            candidate = replace(candidate, level=RAW, reason="")
        chunks.append(candidate)
    return replace(asked, plan=build_plan(prefix.source, chunks, question.ids))


def _before(session: Session, segment: Segment, source: str, start: int) -> Ids:
    """The chunk's own part of its lead-in: of a `neighbour` store the chunk before it in its document."""
    identity, lead_in = session.identity, segment.source.lead_in
    if lead_in == identity.lead_in.digest():
        return ()
    document = session.store.document(source)
    earlier = [ref.chunk_id for ref in document.chunks if ref.end <= start] if document is not None else []
    info = session.store.chunk_info(earlier[-1]) if earlier else None
    if info is None or lead_in != identity.lead_in.digest(info.token_ids):
        raise KvtoolError(
            f"chunk {segment.source.chunk_id.hex()[:12]} of {source} is not stored exactly, and what it was prefilled "
            "behind is not known any more",
            "name a level that it is stored at, such as --level 2, or ingest its document again",
        )
    return info.token_ids
