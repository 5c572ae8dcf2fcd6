"""Prompts of a report on reuse: chunks read exactly, caches of one prompt for comparison, the question's queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.codec.levels import RAW, level_of
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.loader import KVSource, MemorySource, ReadStats
from kvtool.core.fusion.plan import Plan, Segment, build_plan
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.kernels.attention.eager import attention_weights
from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.passes import OnLayer
from kvtool.core.model.prefill import ChunkKV, PrefillItem, prefill_chunks
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.query.prompt import lay_out
from kvtool.core.query.retrieve import find_chunks

if TYPE_CHECKING:
    from kvtool.core.common.types import Ids
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.query.prompt import PromptLayout
    from kvtool.core.query.reply import Request
    from kvtool.core.session.session import Session

Watch = Callable[[int, torch.Tensor, torch.Tensor, AttentionParams], None]
"""Called with a layer's number, queries, keys and parameters of attention."""
EXACT = "exact"  # raw or lossless records; computed where only lossy ones are stored


@dataclass(frozen=True, slots=True)
class Chosen(Selector):
    name: ClassVar[str] = "chosen"
    rows_chosen: torch.Tensor

    def rows(self, plan: Plan, attention: torch.Tensor | None = None) -> torch.Tensor:
        return self.rows_chosen


@dataclass(frozen=True, slots=True)
class ReusedPrompt:
    """A prompt whose records are all there, some of them not what full prefill gives."""

    decoder: Decoder
    plan: Plan
    source: KVSource
    hits: torch.Tensor  # positions, ascending, of rows that are reused and not exact: int64 `[hits]`

    @classmethod
    def of(cls, decoder: Decoder, plan: Plan, source: KVSource) -> ReusedPrompt:
        """Check a prompt. Raises UsageError if nothing of it is reused, or rows of it are not stored."""
        if any(segment.source.stored_rows is not None for segment in plan.segments):
            raise UsageError(
                "some rows of this prompt are not stored, so that they cannot be compared", "name a level of all rows"
            )
        hits = plan.hit_rows().nonzero()[:, 0]
        if not len(hits):
            raise UsageError(
                "nothing of this prompt is reused from another place", "take more chunks (--top-k, --documents)"
            )
        return cls(decoder, plan, source, hits)

    def full(self) -> PromptCache:
        return self.decoder.prefill(self.plan.ids)[1]

    def fused(self, selector: Selector) -> Fused:
        return fuse(self.decoder, self.plan, selector, self.source)

    def recomputing(self, rows: torch.Tensor) -> PromptCache:
        return self.fused(Chosen(rows)).cache

    def watch_question(self, cache: PromptCache, watch: Watch) -> None:
        question = self.plan.segments[-1]
        watch_rows(self.decoder, question.ids, question.start, cache, watch)

    def queries(self, cache: PromptCache) -> Queries:
        """Return the question's queries, whose keys and values are then in the cache."""
        layers: list[tuple[torch.Tensor, AttentionParams]] = []
        self.watch_question(cache, lambda layer, query, key, scoring: layers.append((query[0].clone(), scoring)))
        sources = [layer if kind.source is None else kind.source for layer, kind in enumerate(self.decoder.kinds)]
        rows = torch.arange(self.plan.segments[-1].start, self.plan.length)
        return Queries(QueryRows.of(rows, self.decoder.device), layers, sources)


@dataclass(frozen=True, slots=True)
class Queries:
    rows: QueryRows
    layers: list[tuple[torch.Tensor, AttentionParams]]
    sources: list[int]

    def attention(self, cache: PromptCache) -> Iterator[torch.Tensor]:
        for (query, scoring), source in zip(self.layers, self.sources, strict=True):
            keys = cache.buffers[source].view()[0][0]
            yield attention_weights(query, keys, self.rows.seen(scoring.window), scoring)


def watch_rows(decoder: Decoder, ids: Sequence[int], start: int, cache: PromptCache, watch: Watch) -> None:
    """Compute a prompt's rows from `start` into their places in the cache, and show each layer's queries and keys."""
    rows = QueryRows.of(torch.arange(start, start + len(ids)), decoder.device)
    decoder.fill_cache(ids, rows, cache, on_layer=_Watching(watch))


@dataclass(frozen=True, slots=True)
class _Watching(OnLayer):
    watch: Watch

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> bool:
        self.watch(layer, query, keys, params)
        return False


# ---- prompts of questions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExactSource(KVSource):
    stored: KVSource
    computed: dict[bytes, ChunkKV] = field(default_factory=dict)

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        found: dict[int, LayerKV] = {}
        for source, inside in ((MemorySource(self.computed), True), (self.stored, False)):
            if own := [segment for segment in segments if (segment.source.chunk_id in self.computed) is inside]:
                found |= zip((segment.start for segment in own), source.read(own, layer, stats), strict=True)
        return [found[segment.start] for segment in segments]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of questions; `level` is the one at which chunks are read, EXACT by default."""

    asked: list[PromptLayout]
    source: KVSource
    facts: dict[str, object]

    @property
    def read_at(self) -> str:
        level = self.facts["level"]
        return "from exact records" if level == EXACT else f"chunks read at level {level}"


def lay_out_exactly(session: Session, requests: Sequence[Request], options: QueryOptions) -> PromptSet:
    """Build prompts whose chunks are read exactly, so that no codec's loss is counted as reuse's.

    If a level is asked for, they are read at that level. A chunk that is stored only at lossy levels is computed as
    ingest would, after the chunk's own lead-in. A chunk that is not stored is a hole, as it is to a question.
    KvtoolError: the lead-in of such a chunk is lost.
    """
    for request in requests:  # a chunk that cannot be found is reported before the model is loaded
        find_chunks(session.finder, request, options)
    _ = session.decoder  # whose context the prompts have to fit
    exactly = options.level == "auto"
    prompts = [lay_out(session, request, options, exactly=exactly, answered=False) for request in requests]
    source, level = session.source, options.level
    if exactly:
        source, level = ExactSource(source), EXACT
        prompts = [_computed(session, asked, source) for asked in prompts]
    identity = session.identity
    resolved = {"model": identity.model, "dtype": session.model.arithmetic.dtype, "lead_in": identity.lead_in.mode}
    return PromptSet(prompts, source, {"question": requests[0].question, "resolved": resolved, "level": level})


def _computed(session: Session, asked: PromptLayout, source: ExactSource) -> PromptLayout:
    prefix, *_, question = asked.plan.segments
    chunks = []
    for hit, segment in zip(asked.hits, asked.plan.chunks, strict=True):
        candidate = segment.source
        if candidate.level is not None and not level_of(candidate.level).lossless:
            if candidate.chunk_id not in source.computed:
                before = _before(session, segment, hit.passage.source, hit.passage.start)
                item = PrefillItem(segment.ids, before)
                source.computed[candidate.chunk_id] = prefill_chunks(session.decoder, session.lead_in, [item])[0]
            candidate = replace(candidate, level=RAW, stored_rows=None, reason="")
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
