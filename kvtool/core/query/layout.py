"""A question's prompt, laid out from a store: which chunks, which tokens, what of it is cached. Runs no model."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from kvtool.core.cache.identity import ids_digest
from kvtool.core.cache.layout import REPAIR
from kvtool.core.cache.store import Store
from kvtool.core.common.timeline import Timeline, add_span
from kvtool.core.common.types import Ids, Warn, warn_nobody
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.plan import Candidate, Plan, build_plan
from kvtool.core.model.prompt import PromptParts, chunk_tokens, prompt_parts, question_tokens
from kvtool.core.query.choose import Chooser
from kvtool.core.query.defer import spans
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.core.retrieval.finder import How
from kvtool.core.retrieval.passages import Hit, Passage, in_order, stands_in
from kvtool.core.session.identity import StoreIdentity
from kvtool.core.session.levels import MeasuredLosses, smallest_allowed


@dataclass(frozen=True, slots=True)
class Asked:
    """A request with its chunks found and its prompt laid out; `retrieve_ms` is what that took.

    Attributes
    ----------
    revision : of the store, at which all of it was looked up.
    """

    request: Request
    hits: Sequence[Hit]
    plan: Plan
    retrieve_ms: float
    revision: int = 0


class Layout:
    """Lays prompts out.

    Parameters
    ----------
    layers : of the model: a chunk stored with another number is not its own.
    """

    def __init__(
        self,
        store: Store,
        identity: StoreIdentity,
        tokenizer: Any,
        layers: int,
        warn: Warn = warn_nobody,
    ) -> None:
        self._store, self._identity, self._tokenizer, self._layers = store, identity, tokenizer, layers
        self._warn = warn
        self._chooser = Chooser(store, warn)
        self._losses = MeasuredLosses(store)

    @property
    def parts(self) -> PromptParts:
        """The store's own beginning and answer header."""
        return PromptParts(self._identity.prefix, self._identity.answer_header)

    def lay_out(self, request: Request, options: QueryOptions, timeline: Timeline | None = None) -> Asked:
        """Find the chunks and lay the prompt out, from the store as it is now; no KV is read yet."""
        started = time.perf_counter()
        with self._store.view():
            self._losses = MeasuredLosses(self._store)
            hits, plan = self._laid_out(request, options)
            revision = self._store.revision()
        return Asked(request, hits, plan, add_span(timeline, "retrieve", started) * 1e3, revision)

    def _laid_out(self, request: Request, options: QueryOptions) -> tuple[list[Hit], Plan]:
        how = How(options.retriever, options.embedder, options.only, options.offline)
        hits = self._chooser.choose(request, options.top_k, how)
        if not (request.chunks or request.documents):
            rounds = spans(len(hits), options.defer_first if options.defer else len(hits))
            hits = [hit for start, stop in rounds for hit in in_order(hits[start:stop], options.order)]
        parts = self._parts(options)
        question = question_tokens(self._tokenizer, request.question, parts)
        there = [(hit, found) for hit in hits if (found := self._candidate(hit, options)) is not None]
        if not there:
            raise DamagedError("nothing is left of the chunks to answer from", REPAIR)
        return [hit for hit, _ in there], build_plan(self._prefix(parts), [found for _, found in there], question)

    def lay_out_at(self, asked: Asked, options: QueryOptions, level: str) -> Asked:
        """The same prompt with its chunks read at another level."""
        options = replace(options, level=level)
        prefix, *_, question = asked.plan.segments
        chunks = [found for hit in asked.hits if (found := self._candidate(hit, options)) is not None]
        return replace(asked, plan=build_plan(prefix.source, chunks, question.ids))

    def follow(self, identity: StoreIdentity) -> None:
        """The store is made with this now."""
        self._identity = identity

    def prefer(self, warm: Container[bytes]) -> None:
        """Of chunks with equal scores, find these first."""
        self._chooser.warm = warm

    def keywords(self, passage: Passage) -> list[str]:
        """The words that tell a chunk from the store's others."""
        return self._chooser.finder.keywords(passage)

    def line_of(self, passage: Passage) -> int | None:
        """The line of its document, from 1, on which a chunk begins; None where the document is gone or damaged."""
        with suppress(DamagedError):
            document = self._store.document(passage.source)
            if document is not None:
                own = document.text[passage.start :]
                return document.text.count("\n", 0, passage.start + len(own) - len(own.lstrip())) + 1
        return None

    def _parts(self, options: QueryOptions) -> PromptParts:
        """The store's own beginning and answer header, unless another instruction is asked for."""
        if options.system is None or options.system == self._identity.system:
            return self.parts
        return prompt_parts(self._tokenizer, options.system)

    def _prefix(self, parts: PromptParts) -> Candidate:
        if not parts.prefix:
            return Candidate((), lead_in=ids_digest([]), reason="empty")
        if parts.prefix != self._identity.prefix:
            return Candidate(parts.prefix, reason="another instruction than the store's")
        found = self._stored(parts.prefix, self._identity.prefix_id, ids_digest([]), "auto", 0.0)
        return replace(found, relevance=math.inf)

    def _candidate(self, hit: Hit, options: QueryOptions) -> Candidate | None:
        """The chunk as it is wanted: its ids come from the store, or from its text where the store lost them. None:
        its document holds it no more, so nothing is left of it."""
        info = self.info(hit.passage.chunk_id)
        if info is None:
            document = self._store.document(hit.passage.source)
            if document is None or not stands_in(document, hit.passage):
                what = f"chunk {hit.passage.chunk_id.hex()[:12]} of {hit.passage.source}"
                self._warn(f"{what} is left out: its description is lost, and so is its place", REPAIR)
                return None
            return Candidate(
                chunk_tokens(self._tokenizer, [document.text[hit.passage.start : hit.passage.end]])[0],
                hit.passage.chunk_id,
                reason="its description is lost or damaged",
            )
        found = self._stored(info.token_ids, hit.passage.chunk_id, info.lead_in, options.level, options.max_loss)
        return replace(found, relevance=0.0 if math.isnan(hit.score) else hit.score)

    def _stored(self, ids: Ids, chunk_id: bytes, lead_in: bytes, level: str, max_loss: float) -> Candidate:
        info = self.info(chunk_id)
        if info is None:
            return Candidate(ids, chunk_id, lead_in, reason="not stored")
        if info.token_ids != ids:
            return Candidate(ids, chunk_id, lead_in, reason="the stored token ids differ")
        if info.layers != self._layers:
            return Candidate(ids, chunk_id, lead_in, reason="stored with another number of layers")
        levels = self._store.levels(chunk_id)
        found: str | None = level
        if level == "auto":
            found = smallest_allowed(levels, self._losses.of(chunk_id, levels), max_loss)
        if found is None or found not in levels:
            return Candidate(
                ids, chunk_id, lead_in, reason=_why_not(level, bool(levels), max_loss), stored=bool(levels)
            )
        return Candidate(ids, chunk_id, lead_in, found, sensitivity=info.sensitivity)

    def info(self, chunk_id: bytes) -> Any:
        """The chunk's description; None where it is lost or damaged."""
        try:
            return self._store.chunk_info(chunk_id)
        except DamagedError:
            return None


def _why_not(level: str, stored: bool, max_loss: float) -> str:
    """Why what is stored of a chunk does not serve."""
    if level != "auto":
        return f"not stored at level {level}"
    return f"no stored level is known to lose at most {max_loss:g} nats a token" if stored else "not stored"
