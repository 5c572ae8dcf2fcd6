"""Answer one question: search, lay out the prompt, load and fuse its KV, generate, store what was computed, reply."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kvtool.core.common.types import add_span
from kvtool.core.evaluate.measures import score
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.options import selector_for
from kvtool.core.fusion.plan import build_plan, extend_plan
from kvtool.core.fusion.selectors import AUTO, WEIGHED
from kvtool.core.fusion.selectors.full import Full
from kvtool.core.model.constraint import Constraint
from kvtool.core.model.decode.native import prepare_compiled_model
from kvtool.core.model.generate import Generated, Sampling, first_token, follow, generate, stop_ids
from kvtool.core.query.auto import Decision, choose
from kvtool.core.query.explain import cite, explain
from kvtool.core.query.fuse_prompt import Outcome, fuse_prompt, store_checkpoints, store_chunks
from kvtool.core.query.options import LoadOptions, QueryOptions
from kvtool.core.query.prompt import Marks, PromptLayout, PromptSource, lay_out, lay_out_messages, plan_marks
from kvtool.core.query.reply import Reply, ReplyChunk, Request, Verified
from kvtool.core.query.retrieve import Retrieved, retrieve, with_changes
from kvtool.core.query.streaming import fetch_prompt

if TYPE_CHECKING:
    from kvtool.core.fusion.plan import Plan
    from kvtool.core.fusion.selectors.base import Selector
    from kvtool.core.session.session import Session


OnText = Callable[[str], None]


def answer(
    session: Session,
    request: Request,
    options: QueryOptions | None = None,
    on_text: OnText | None = None,
    again: bool = False,
    retrieved: Retrieved | None = None,
) -> Reply:
    """Answer one request, from one revision of the store. One question is answered at a time, whichever thread asks.
    `again`: the question was just answered in another mode, and counts once in the store's totals. Raises GateError:
    the gate refuses this model; KvtoolError: nothing was found; see also `lay_out`, with `retrieved`."""
    options = options or QueryOptions()
    with session.lock, session.store.view():
        layout = lay_out_messages(session, request, options)
        if layout is None:
            request, prefer = replace(request, messages=()), session.recent_chunks
            retrieved = retrieved or retrieve(session.store, session.finder, request, options, prefer, session.timeline)
            layout = lay_out(session, request, options, retrieved=retrieved)
        prepared = load_and_fuse(session, layout, options)
        generated, checked = prepared.generate(on_text)
        prepared.store_chunks(again)
        return prepared.reply(generated, checked)


def load_and_fuse(
    session: Session, layout: PromptLayout, options: QueryOptions, *, marked: bool = False
) -> PreparedAnswer:
    """Load and fuse the KV of a laid-out prompt, up to the first token of the answer. Raises GateError. `marked`: note
    the marks of the records that are read."""
    with session.lock, session.store.view():
        options = replace(options, fusion=options.mode(session.identity.keeps_states))
        session.identity.check_modes([str(options.fusion)], options.defer)
        layout, options, decision = _choose(session, layout, options)
        selector = selector_for(options, str(options.fusion))
        keeps_states, reused = session.identity.keeps_states, layout.plan.cached
        goes_on_from_states = layout.prefix is not None and keeps_states
        is_reusing = selector.uses_cache and (keeps_states or bool(reused))  # without KV all is full prefill
        if (is_reusing or goes_on_from_states) and not options.force:
            session.check_gate([segment.source.chunk_id for segment in reused])
        if options.clamp:
            left = session.decoder.context - layout.plan.length
            options = replace(options, max_tokens=max(1, min(options.max_tokens, left)))
        source = PromptSource(layout.plan, session.source)
        is_given = layout.prefix is not None or layout.request.messages  # no level of its rows can be chosen
        if _fetches(session, options) and not is_given and selector.reads(layout.plan, session.layers):
            source = fetch_prompt(session, layout, options, selector)
        prepare_compiled_model(session.decoder)
        started = time.perf_counter()
        outcome = fuse_prompt(session, layout.prefix, source, selector, options)
        constraint = Constraint(options.grammar, session.tokenizer) if options.grammar else None
        sampling = Sampling(options, ends=tuple(stop_ids(session.decoder)), constraint=constraint)
        first = _first_tokens(outcome, sampling)
        ms = add_span(session.timeline, f"fuse: {options.fusion}", started) * 1e3
        chunks, resident = reply_chunks(session, layout, outcome.fused.plan), _resident_chunks(session, layout)
        marks = plan_marks(session, layout.plan) if marked else ()
        session.store.end_view()  # all is read: no writer, this answer included, has to wait for it
        return PreparedAnswer(
            session, layout, options, decision, selector, source, outcome, chunks, resident, ms, first, sampling, marks
        )


def _choose(
    session: Session, layout: PromptLayout, options: QueryOptions
) -> tuple[PromptLayout, QueryOptions, Decision | None]:
    """Resolve `auto` to a fusion mode. A remote backend and an extended prompt cannot be weighed in advance: they get
    the mode that loses a little."""
    if layout.request.messages:  # their text is as it is: nothing of it is left out, or read at another level
        options = replace(options, defer=False, fusion=WEIGHED if options.fusion == AUTO else options.fusion)
    if options.fusion != AUTO:
        return layout, options, None
    if layout.prefix is not None or _fetches(session, options):
        return layout, replace(options, fusion=WEIGHED), None
    return choose(session, layout, options)


def _fetches(session: Session, options: LoadOptions) -> bool:
    """Return True if chunks are fetched from a shared store within a time objective, before anything is fused."""
    return options.slo_ms is not None and session.store.link is not None and not session.identity.keeps_states


def _first_tokens(outcome: Outcome, sampling: Sampling) -> Sequence[int]:
    """Return the first tokens that are shown: those that a round was judged by, unless sampling is to choose others."""
    if outcome.beginning is not None:
        if sampling.options.is_greedy and sampling.options.top_logprobs is None:
            return outcome.beginning.ids
        outcome.fused.cache.set_length(outcome.fused.plan.length)
    return [first_token(outcome.fused.logits, sampling)]


@dataclass(frozen=True, slots=True)
class PreparedAnswer:
    """An answer up to its first token. `known`: its first tokens; the prompt's cache has the rows of all but the last.
    The view of the store is released. `marks`: of the records that were read, by segment."""

    session: Session
    layout: PromptLayout
    options: QueryOptions
    decision: Decision | None
    selector: Selector
    source: PromptSource
    outcome: Outcome
    chunks: list[ReplyChunk]
    resident_chunks: list[ReplyChunk]
    fuse_ms: float
    known: Sequence[int]
    sampling: Sampling
    marks: Sequence[Marks] = ()

    @property
    def is_draft(self) -> bool:
        """A model that keeps states reuses a prompt's beginning only, and exactly: its answers need no check."""
        return self.options.verify and self.selector.uses_cache and not self.session.identity.keeps_states

    def check(self, draft: Generated, sampling: Sampling, since: float | None = None) -> Check:
        """Prefill the draft's prompt in full, over the fused cache, and follow the draft as long as that agrees.
        `sampling`: how the draft was chosen, greedily. `since`: when it ended; None: now."""
        session, cache, started = self.session, self.outcome.fused.cache, time.perf_counter()
        with session.lock:
            plan = _in_full(self.outcome.fused.plan, self.layout.prefix is not None)
            exact = fuse(session.decoder, plan, Full(), session.source, timeline=session.timeline, cache=cache)
            prefill_ms = add_span(session.timeline, "verify: full prefill", started) * 1e3
            known = follow(session.decoder, exact.cache, exact.logits, draft.script, sampling)
        return Check(draft, exact, known, started if since is None else since, prefill_ms)

    def generate(
        self, on_text: OnText | None = None, going: Callable[[], bool] = lambda: True
    ) -> tuple[Generated, Check | None]:
        """Generate the final answer, and check it; a draft that needs no check is final. `going`: see `generate`."""
        decoder, sampling, started = self.session.decoder, self.sampling, time.perf_counter()
        first, *more = self.known
        draft = generate(decoder, self.outcome.fused.cache, first, sampling, on_text, more, going)
        add_span(self.session.timeline, "generate", started, tokens=len(draft.ids))
        if not self.is_draft:
            return draft, None
        if not going():  # as many tokens of full prefill, which then ends as the draft did
            shorter = replace(sampling.options, max_tokens=max(1, len(draft.ids)))
            sampling, going = replace(sampling, options=shorter), lambda: True
        checked = self.check(draft, sampling)
        first, *more = checked.known
        final = generate(decoder, checked.exact.cache, first, sampling, None, more, going)
        if final.finish == "length" and len(final.ids) < self.options.max_tokens:
            final = replace(final, finish=draft.finish)
        return final, checked

    def store_chunks(self, again: bool = False) -> None:
        """Note what was used, and store what the store lacks of it. `again`: see `answer`."""
        if not self.selector.uses_cache:
            return
        if self.outcome.chained is not None:
            store_checkpoints(self.session, self.outcome.chained, self.options.state_cache_size, again)
        else:
            store_chunks(self.session, self.outcome.fused, self.source.holes, again, self.layout.learned)

    def _timing(self, generated: Generated) -> dict[str, float]:
        layout, fetch_ms = self.layout, self.source.fetch_ms
        decision_ms = {} if self.decision is None else self.decision.timing_ms
        return {
            "retrieve": layout.retrieve_ms,
            **asdict(self.outcome.fused.timing),
            "ttft": layout.retrieve_ms + decision_ms.get("decide", 0.0) + fetch_ms + self.fuse_ms,
            "generate": generated.milliseconds,
            "model_load": self.session.decoder.loaded.load_ms,
            "stream": fetch_ms,
            **decision_ms,
        }

    def reply(self, generated: Generated, checked: Check | None = None) -> Reply:
        session, layout, options = self.session, self.layout, self.options
        if checked is not None:
            draft = checked.draft  # which was timed
            generated = replace(generated, milliseconds=draft.milliseconds, steps=draft.steps, stepper=draft.stepper)
        fused, slo_ms, timing = self.outcome.fused, options.slo_ms, self._timing(generated)
        text = generated.text.rstrip() if layout.request.prefill else generated.text.strip()
        started = time.perf_counter()
        citations = None
        if options.cite:
            passages = [*self.chunks, *self.resident_chunks]
            citations = cite(session, layout.request.question, passages, text, layout.request.search)
            timing["cite"] = add_span(session.timeline, "cite", started) * 1e3
        return Reply(
            question=layout.request.question,
            answer=text,
            finish=generated.finish,
            fusion=str(options.fusion),
            chunks=with_changes(session.store, self.chunks),
            revision=layout.revision,
            tokens=fused.tokens.to_json() | {"shifted": int(fused.shifted.rows.sum()), "generated": len(generated.ids)},
            timing_ms=timing,
            bytes_read=fused.bytes_read + self.source.bytes_read,
            controller={} if self.decision is None else self.decision.to_json(),
            stream=self.source.rows,
            slo={} if slo_ms is None else {"slo_ms": slo_ms, "met": timing["ttft"] <= slo_ms},
            generated=generated,
            fused=fused,
            selector=self.selector,
            segments=_segments(session, fused.plan) if options.token_ids else None,
            explanations=explain(fused, session.tokenizer) if options.explain else [],
            resident_chunks=with_changes(session.store, self.resident_chunks),
            scores=score(text, layout.request.answers) if layout.request.answers else {},
            rounds=self.outcome.rounds,
            chunks_omitted=layout.cut,
            corrections=layout.corrections,
            chunks_remaining=len(layout.hits) - len(fused.plan.passages),
            citations=citations,
            verified=_verified(generated, checked, timing) if options.verify else None,
            resolved={
                "device": session.decoder.device,
                "dtype": session.decoder.loaded.arithmetic.dtype,
                "store_dtype": session.identity.dtype,
                "model": session.identity.model,
                "stepper": generated.stepper,
                "forward": session.decoder.forward_name,
                "weights": session.decoder.loaded.weights,
            },
        )


@dataclass(frozen=True, slots=True)
class Check:
    """Check of a verified answer (`--verify`). What a fused cache says is a draft, shown at once. Full prefill of the
    same prompt (`exact`) then runs into the draft's buffers, and the draft's tokens follow it as far as full prefill
    would have chosen them; the rest is generated from there. All rows are those of `--fusion full`, bit by bit, so the
    final answer is its own, token by token.

    `known`: full prefill's tokens as far as the draft agrees, and the first other one; all but the last have rows.
    `since`: end of the draft (`time.perf_counter`). Draft cheaply and verify exactly is the idea of Lynx (arXiv
    2607.01831), for compressed caches.
    """

    draft: Generated
    exact: Fused
    known: Sequence[int]
    since: float
    prefill_ms: float


def _in_full(plan: Plan, has_prefix: bool) -> Plan:
    """Return the plan of the same prompt in full; the first segment is what earlier turns left, and exact, if
    `has_prefix`."""
    first, *chunks, question = plan.segments
    build = extend_plan if has_prefix else build_plan
    return build(first.source, [segment.source for segment in chunks], question.source.ids)


def _verified(generated: Generated, checked: Check | None, timing: dict[str, float]) -> Verified:
    """Return what became of a draft; without a check it is final. `generated`: by full prefill."""
    first, count = timing["ttft"], len(generated.ids)
    if checked is None:
        return Verified(count, count, None, {"first": first, "prefill": 0.0, "final": first + timing["generate"]})
    draft, text = checked.draft, checked.draft.text.strip()
    agreed = sum(ours == theirs for ours, theirs in zip(checked.known, draft.script, strict=False))
    final = first + draft.milliseconds + (time.perf_counter() - checked.since) * 1e3
    times = {"first": first, "prefill": checked.prefill_ms, "final": final}
    corrected = None if text == generated.text.strip() else text
    return Verified(min(agreed, len(draft.ids)), len(draft.ids), corrected, times)


def reply_chunks(session: Session, layout: PromptLayout, plan: Plan) -> list[ReplyChunk]:
    hits = layout.hits[: len(plan.passages)]
    return [
        ReplyChunk.of(
            session.store,
            hit,
            tokens=len(segment.source.ids),
            status=segment.status,
            reason=segment.reason if segment.status == "miss" else "",
        )
        for hit, segment in zip(hits, plan.passages, strict=True)
    ]


def _resident_chunks(session: Session, layout: PromptLayout) -> list[ReplyChunk]:
    tokens = {} if layout.prefix is None else layout.prefix.chunks
    hits = ((hit, tokens[hit.passage.chunk_id]) for hit in layout.resident_hits)
    return [ReplyChunk.of(session.store, hit, tokens=count, status="resident") for hit, count in hits]


def _segments(session: Session, plan: Plan) -> dict[str, Any]:
    return {
        "prefix": list(plan.segments[0].ids),
        "lead_in": list(session.identity.lead_in.ids),
        "chunks": [list(segment.source.ids) for segment in plan.chunks],
        "question": list(plan.segments[-1].ids),
    }
