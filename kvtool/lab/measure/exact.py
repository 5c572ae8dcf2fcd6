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
from kvtool.core.query.prompt import lay_out

if TYPE_CHECKING:
    from kvtool.core.common.types import Ids
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.query.prompt import PromptLayout
    from kvtool.core.query.reply import Request
    from kvtool.core.session.session import Session

AUTO = "auto"
EXACTLY = "exact"  # raw or lossless records; computed where only lossy ones are stored


@dataclass(frozen=True, slots=True)
class Exactly:
    """Reads chunks of which nothing exact is stored from memory, others where they are stored."""

    stored: KVSource
    computed: dict[bytes, ChunkKV] = field(default_factory=dict)

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        """Read as a KVSource does."""
        computed = [segment for segment in segments if segment.source.chunk_id in self.computed]
        stored = [segment for segment in segments if segment.source.chunk_id not in self.computed]
        read = MemorySource(self.computed).read(computed, layer, stats)
        read += self.stored.read(stored, layer, stats) if stored else []
        by_start = dict(zip((segment.start for segment in (*computed, *stored)), read, strict=True))
        return [by_start[segment.start] for segment in segments]


@dataclass(frozen=True, slots=True)
class LaidOut:
    """The prompts of questions, for a report on fusion.

    Attributes
    ----------
    level : at which their chunks are read: EXACTLY if nothing else was asked for.
    question : the first one.
    resolved : the model and how it is used.
    """

    asked: list[PromptLayout]
    source: KVSource
    level: str
    question: str
    resolved: dict[str, str]

    @property
    def facts(self) -> dict[str, object]:
        """Return the facts that every report states first."""
        return {"question": self.question, "resolved": self.resolved, "level": self.level}

    @property
    def read_at(self) -> str:
        """Return the words for the level in a report's title."""
        return "from exact records" if self.level == EXACTLY else f"chunks read at level {self.level}"


def lay_out_exactly(session: Session, requests: Sequence[Request], options: QueryOptions) -> LaidOut:
    """Lay prompts out whose chunks are read exactly, so that no codec's loss is counted as reuse's; or at the level
    that is asked for.

    What is only stored at lossy levels is computed as ingest would, behind the chunk's own lead-in. What is not stored
    at all is a hole, as it is to a question.

    Raises
    ------
    KvtoolError : a chunk stands behind a lead-in that the store does not have any more.
    """
    for request in requests:  # what cannot be found is told before the model is loaded
        options.find(session.finder, request)
    _ = session.decoder  # whose context the prompts have to fit
    exactly = options.level == AUTO
    prompts = [lay_out(session, request, options, exactly=exactly, answered=False) for request in requests]
    source, level = session.source, options.level
    if exactly:
        source, level = Exactly(source), EXACTLY
        prompts = [_computed(session, asked, source) for asked in prompts]
    identity = session.identity
    resolved = {"model": identity.model, "dtype": session.arithmetic.dtype, "lead_in": identity.lead_in.mode}
    return LaidOut(prompts, source, level, requests[0].question, resolved)


def _computed(session: Session, asked: PromptLayout, source: Exactly) -> PromptLayout:
    """Compute the chunks that are stored at lossy levels alone into `source`, and read the prompt from there."""
    prefix, *_, question = asked.plan.segments
    chunks = []
    for hit, segment in zip(asked.hits, asked.plan.chunks, strict=True):
        candidate = segment.source
        if candidate.level is not None and not level_of(candidate.level).lossless:
            if candidate.chunk_id not in source.computed:
                before = _before(session, segment, hit.passage.source, hit.passage.start)
                item = PrefillItem(segment.ids, before)
                source.computed[candidate.chunk_id] = prefill_chunks(session.decoder, session.lead_in, [item])[0]
            candidate = replace(candidate, level=RAW, kept=None, reason="")
        chunks.append(candidate)
    return replace(asked, plan=build_plan(prefix.source, chunks, question.ids))


def _before(session: Session, segment: Segment, source: str, start: int) -> Ids:
    """Find the chunk's own part of its lead-in: in a `neighbour` store the chunk before it in its document."""
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
