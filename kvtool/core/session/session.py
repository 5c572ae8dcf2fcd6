"""A store with its model loaded, ready to answer questions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvtool.core.cache.store import Store
from kvtool.core.common.timeline import Timeline, add_span
from kvtool.core.common.types import Warn, warn_nobody
from kvtool.core.errors import ModelError, StoreNotFoundError
from kvtool.core.evaluate.scoring import score
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.hot import HotSource, Warm
from kvtool.core.fusion.plan import Plan, Segment
from kvtool.core.fusion.selectors import AUTO, WEIGHED, selector_for
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.source import KVSource, StoreSource
from kvtool.core.fusion.speeds import MEMORY
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.generate import Sampling, first_token, generate
from kvtool.core.model.load import load_model
from kvtool.core.model.prompt import PromptParts
from kvtool.core.query.auto import answer_auto
from kvtool.core.query.calibration import threshold_for
from kvtool.core.query.defer import check_defer
from kvtool.core.query.explain import explain
from kvtool.core.query.fetching import warm_up
from kvtool.core.query.fill import fill_holes
from kvtool.core.query.layout import Asked, Layout
from kvtool.core.query.meanwhile import Meanwhile
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Reply, ReplyChunk, Request
from kvtool.core.query.rounds import Outcome, answer_in_rounds
from kvtool.core.query.streaming import Streamed, stream_prompt
from kvtool.core.retrieval.passages import Hit
from kvtool.core.session.identity import StoreIdentity
from kvtool.core.session.levels import ProfileShelf
from kvtool.core.session.speeds import SpeedBook
from kvtool.core.session.verdicts import gate_store

OnText = Callable[[str], None]


def store_identity(store: Store) -> StoreIdentity:
    """What a store was made with.

    Raises
    ------
    StoreNotFoundError : nothing was ever ingested into it.
    """
    identity = StoreIdentity.from_manifest(store.manifest())
    if identity is None:
        raise StoreNotFoundError(f"the store at {store.path} is empty", "run `kvtool ingest PATH` first")
    return identity


class Session:
    """Answers questions from one store; the model is loaded once.

    A question is answered from one revision of the store, taken when it is asked: what is found, what stands there and
    what is read. Threads may share it: selectors hook into the model, so one question is answered at a time.

    Parameters
    ----------
    warn : told what the user should know although an answer is given (text, hint).

    Attributes
    ----------
    timeline : collects what ran when; None: nobody wants to know.
    speeds : how fast this machine computes and loads; its `say` is told before that is measured.
    lock : held by the thread whose question is answered; take it around other uses of the model.
    """

    def __init__(
        self, store: Store, decoder: Decoder, identity: StoreIdentity, warn: Warn, lock_wait: float = 0
    ) -> None:
        self.timeline: Timeline | None = None
        self.lock = threading.RLock()
        self.store, self.decoder, self.identity = store, decoder, identity
        self._warn = warn
        self._lock_wait = lock_wait
        self._warm: Warm | None = None
        self._tokenizer = decoder.loaded.tokenizer
        self._layout = Layout(store, identity, self._tokenizer, len(decoder.layers), warn)
        self._source: KVSource = StoreSource.of(store, decoder, ProfileShelf(store))
        self.speeds = SpeedBook(store, decoder, identity.fingerprint)
        self._meanwhile = Meanwhile(store, decoder, identity)
        self._revision = -1  # of the identity, which was read before this

    @classmethod
    def open(
        cls,
        store: Store,
        *,
        model: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        offline: bool = False,
        gradients: bool = False,
        warn: Warn = warn_nobody,
    ) -> Session:
        """Load the model that the store was built with.

        Parameters
        ----------
        gradients : they will be asked for; a model that is only run forward is laid out for speed.

        Raises
        ------
        ModelError : `model` is another one, or cannot be loaded.
        """
        from kvtool.core.model.files import resolve
        from kvtool.core.session.identity import check_same_model

        identity = store_identity(store)
        files = resolve(model or identity.model, offline=offline)
        check_same_model(files, identity, dtype)
        loaded = load_model(files, device=device, dtype=identity.dtype, packed=not gradients)
        return cls(store, Decoder(loaded), identity, warn)

    def keep_hot(self, limit: int) -> None:
        """Hold what was loaded, up to `limit` bytes, for the questions to come, and prefer it on ties of score."""
        self._source = HotSource(self._source, limit, self.store.record_mark)
        self._warm = Warm(limit)
        self._layout.prefer(self._warm)

    def holds(self, segment: Segment) -> bool:
        """Whether all of it is held in memory."""
        return isinstance(self._source, HotSource) and self._source.holds(segment, len(self.decoder.layers))

    @property
    def source(self) -> KVSource:
        """Where its records are read."""
        return self._source

    @property
    def parts(self) -> PromptParts:
        """The store's own beginning and answer header."""
        return self._layout.parts

    @property
    def tokenizer(self) -> Any:
        """The model's."""
        return self._tokenizer

    # ---- one question ----

    def ask(self, request: Request, options: QueryOptions, on_text: OnText | None = None) -> Reply:
        """Answer one request in the mode of `options`."""
        with self.lock, self.store.view():
            asked, mode = self.lay_out(request, options), options.fusion
            return self.answer(asked, options, mode, on_text)

    def lay_out(self, request: Request, options: QueryOptions) -> Asked:
        """Find the chunks and lay the prompt out; what is cached is looked up here, and nothing is read yet."""
        if options.defer:
            check_defer(options)
        with self.lock, self.store.view():
            self._follow()
            asked = self._layout.lay_out(request, options, self.timeline)
        self.decoder.check_length(
            asked.plan.length + options.max_tokens, "lower --top-k or --max-tokens, or name fewer --documents"
        )
        return asked

    def _follow(self) -> None:
        """Take in what the store says of itself now.

        Raises
        ------
        ModelError : it was made anew with another model.
        """
        revision = self.store.revision()
        if revision == self._revision:
            return
        identity = store_identity(self.store)
        if identity.fingerprint != self.identity.fingerprint:
            raise ModelError(f"the store at {self.store.path} is another model's now", "open it again")
        if identity != self.identity:
            self.identity = identity
            self._layout.follow(identity)
            self._meanwhile = Meanwhile(self.store, self.decoder, identity)
        if isinstance(self._source, HotSource):
            self._source.recheck()
        self._revision = revision

    def lay_out_at(self, asked: Asked, options: QueryOptions, level: str) -> Asked:
        """The same prompt with its chunks read at another level."""
        return self._layout.lay_out_at(asked, options, level)

    def answer(self, asked: Asked, options: QueryOptions, mode: str, on_text: OnText | None = None) -> Reply:
        """Fuse, take the first token, generate; then store what was missing."""
        with self.lock, self.store.view():
            return self._answer(asked, options, mode, on_text)

    def _answer(self, asked: Asked, options: QueryOptions, mode: str, on_text: OnText | None) -> Reply:
        if mode == AUTO and self._streams(options):  # what the link will carry nobody knows beforehand
            mode = WEIGHED
        if mode == AUTO:
            return answer_auto(self, asked, options, on_text)
        selector = selector_for(options, mode)
        if selector.uses_cache and not options.force:
            self.check_gate()
        sampling = Sampling(options.max_tokens, options.temperature, options.seed)
        streamed = self._stream(asked, options, selector)
        started = time.perf_counter()
        outcome = self._fuse(streamed, selector, options)
        fused = outcome.fused
        first, *more = _shown(outcome, sampling)
        ttft = asked.retrieve_ms + streamed.ms + add_span(self.timeline, f"fuse: {mode}", started) * 1e3
        chunks = self._chunks(asked.hits[: len(fused.plan.chunks)], fused.plan)
        self.store.end_view()  # all is read: whoever writes need not wait for the answer, nor do we when we write
        started = time.perf_counter()
        said = generate(self.decoder, fused.plan.ids, fused.cache, first, sampling, on_text, more)
        add_span(self.timeline, "generate", started, tokens=len(said.ids))
        if selector.uses_cache:
            self._after(fused, streamed.holes)
        reply = Reply(
            question=asked.request.question,
            answer=said.text.strip(),
            fusion=mode,
            chunks=chunks,
            revision=asked.revision,
            tokens=_tokens(fused, len(said.ids)),
            timing_ms=self._timing(asked, fused, ttft, said.milliseconds) | {"stream": streamed.ms},
            bytes_read=fused.bytes_read + streamed.bytes_read,
            stream=streamed.rows,
            slo={} if options.slo_ms is None else {"slo_ms": options.slo_ms, "met": ttft <= options.slo_ms},
            generated=said,
            fused=fused,
            segments=self._segments(fused.plan) if options.token_ids else None,
            explained=explain(fused, self._tokenizer) if options.explain else [],
            rounds=outcome.rounds,
            left=len(asked.hits) - len(fused.plan.chunks),
            resolved={"device": self.decoder.device, "dtype": self.identity.dtype, "model": self.identity.model},
        )
        if asked.request.answers:
            scores = score(reply.answer, asked.request.answers)
            reply.scores = {"f1": scores.f1, "exact_match": scores.exact_match, "contains": scores.contains}
        return reply

    def _streams(self, options: QueryOptions) -> bool:
        return options.slo_ms is not None and self.store.link is not None

    def _stream(self, asked: Asked, options: QueryOptions, selector: Selector) -> Streamed:
        """Fetch what the prompt lacks under the objective, where there is one and a shared tier to fetch from."""
        if not self._streams(options) or not selector.reads(asked.plan, len(self.decoder.layers)):
            return Streamed(asked.plan, self._source)
        assert self.store.link is not None
        speeds = self.speeds.speeds((MEMORY,), ())  # measuring the machine, once, is not the question's time
        warm_up(self.identity.dtype)
        started = time.perf_counter()
        since = started - asked.retrieve_ms / 1e3
        element = torch.empty((), dtype=self.decoder.dtype).element_size()
        token_bytes = 2 * len(self.decoder.layers) * self.decoder.kv_heads * self.decoder.head_dim * element
        streamed = stream_prompt(
            self.store,
            self.store.link,
            asked,
            options,
            selector,
            speeds,
            self._source,
            token_bytes,
            since,
            self._meanwhile,
        )
        streamed.ms = add_span(self.timeline, "stream", started) * 1e3
        return streamed

    def _fuse(self, streamed: Streamed, selector: Selector, options: QueryOptions) -> Outcome:
        """The whole prompt in one pass, or in rounds."""
        decoder, plan, source = self.decoder, streamed.plan, streamed.source
        if options.defer:
            threshold = threshold_for(self.store, self.identity.fingerprint, selector.name, options.defer_threshold)
            return answer_in_rounds(decoder, plan, selector, source, options, threshold, self.timeline)
        fused = fuse(decoder, plan, selector, source, options.max_tokens, self.timeline, options.load_timeout)
        return Outcome(fused, None, [])

    def check_gate(self) -> None:
        """Run the gate at a model's first meeting with the store; refuse if it failed.

        Raises
        ------
        GateError : with the measured numbers.
        """
        ids = self.store.chunk_ids()[:8]
        chunks = [info.token_ids for chunk in ids if (info := self._layout.info(chunk)) is not None]
        chunks = [chunk for chunk in chunks if chunk != self.identity.prefix]
        verdict = gate_store(self.store, self.decoder, self.identity, chunks)
        if verdict is not None:
            verdict.enforce()

    # ---- afterwards ----

    def _chunks(self, hits: Sequence[Hit], plan: Plan) -> list[ReplyChunk]:
        return [
            ReplyChunk(
                id=hit.passage.chunk_id.hex(),
                source=hit.passage.source,
                start=hit.passage.start,
                end=hit.passage.end,
                line=self._layout.line_of(hit.passage),
                score=None if hit.score != hit.score else hit.score,
                tokens=len(segment.ids),
                status=segment.status,
                reason=segment.reason if segment.status == "miss" else "",
            )
            for hit, segment in zip(hits, plan.chunks, strict=True)
        ]

    def _segments(self, plan: Plan) -> dict[str, Any]:
        return {
            "prefix": list(plan.segments[0].ids),
            "lead_in": list(self.identity.lead_in.ids),
            "chunks": [list(segment.ids) for segment in plan.chunks],
            "question": list(plan.segments[-1].ids),
        }

    def _after(self, fused: Fused, computed: Sequence[Segment]) -> None:
        found = [segment.source.chunk_id for segment in fused.plan.cached_chunks]
        if self._warm is not None:
            for segment in fused.plan.cached_chunks:
                self._warm.use(segment.source.chunk_id, self.decoder.kv_bytes(len(segment.ids)))
        self.store.note_access(found, missed=len(fused.plan.chunks) - len(found))
        holes = [segment for segment in fused.plan.segments[:-1] if segment.status == "miss" and segment.ids]
        met = {segment.start for segment in holes}
        holes += [segment for segment in computed if segment.start not in met]
        if holes:
            fill_holes(self.store, self.decoder, self.identity, holes, self._lock_wait, self._warn)

    def _timing(self, asked: Asked, fused: Fused, ttft: float, generated: float) -> dict[str, float]:
        timing = fused.timing
        parts = {name: getattr(timing, name) for name in timing.__dataclass_fields__}
        return {
            "retrieve": asked.retrieve_ms,
            **parts,
            "ttft": ttft,
            "generate": generated,
            "model_load": self.decoder.loaded.load_ms,
        }


def _shown(outcome: Outcome, sampling: Sampling) -> Sequence[int]:
    """The first tokens that are shown: those that a round was judged by, unless sampling is to choose others."""
    if outcome.begun is not None and sampling.temperature <= 0:
        return outcome.begun.ids
    outcome.fused.cache.set_length(outcome.fused.plan.length)
    return [first_token(outcome.fused.logits, sampling)]


def _tokens(fused: Fused, generated: int) -> dict[str, int]:
    counts = fused.tokens
    return {
        "prompt": counts.prompt,
        "reused": counts.reused,
        "recomputed": counts.recomputed,
        "fresh": counts.fresh,
        "generated": generated,
    }
