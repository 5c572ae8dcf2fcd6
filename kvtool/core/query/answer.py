"""Answering of one question, from its text to its answer: lay out, choose, fetch, fuse, generate, keep.

`answer` reads top to bottom in the order in which things happen; kvtool/docs/trips.md lists the files on the way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kvtool.core.codec.levels import RAW
from kvtool.core.common.timeline import add_span
from kvtool.core.evaluate.scoring import score
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.selectors import AUTO, WEIGHED, selector_for
from kvtool.core.fusion.source import ChunkCache
from kvtool.core.model.decode.native import prepare_compiled_model
from kvtool.core.model.generate import Generated, Sampling, first_token, generate
from kvtool.core.query.auto import Choice, choose
from kvtool.core.query.chains import answer_chain, keep
from kvtool.core.query.explain import explain, explain_attention
from kvtool.core.query.fill import fill_holes
from kvtool.core.query.layout import Marks, PromptLayout, lay_out, plan_marks
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Reply, ReplyChunk, Request
from kvtool.core.query.rounds import Outcome, fuse_in_rounds, fuse_on
from kvtool.core.query.since import with_changes
from kvtool.core.query.streaming import Streamed, stream_prompt

if TYPE_CHECKING:
    from kvtool.core.fusion.plan import Plan, Segment
    from kvtool.core.fusion.selectors.base import Selector
    from kvtool.core.session.session import Session

OnText = Callable[[str], None]


def answer(
    session: Session,
    request: Request,
    options: QueryOptions | None = None,
    on_text: OnText | None = None,
    again: bool = False,
) -> Reply:
    """Answer one request.

    The answer is of one revision of the store, taken now: what is found, what stands there and what is read. One
    question is answered at a time, whichever thread asks.

    Parameters
    ----------
    on_text : told pieces of the answer as they come.
    again : the same question was answered just now in another mode, and counts once in what the store has served.

    Raises
    ------
    GateError : the gate refuses this model.
    KvtoolError : nothing was found to answer from; see also `lay_out`.
    """
    options = options or QueryOptions()
    with session.lock, session.store.view():
        return answer_asked(session, lay_out(session, request, options), options, on_text, again)


def answer_asked(
    session: Session, asked: PromptLayout, options: QueryOptions, on_text: OnText | None = None, again: bool = False
) -> Reply:
    """Answer a request whose prompt is laid out."""
    with session.lock, session.store.view():
        begun = begin_answer(session, asked, options)
        started, (first, *more) = time.perf_counter(), begun.known
        said = generate(session.decoder, begun.outcome.fused.cache, first, begun.sampling, on_text, more)
        add_span(session.timeline, "generate", started, tokens=len(said.ids))
        begun.keep(again)
        return begun.reply(said)


@dataclass(frozen=True, slots=True)
class PreparedAnswer:
    """An answer whose first token is known: its prompt is in memory, and nothing of the store is held.

    Attributes
    ----------
    known : the first tokens; the prompt's cache holds all of them but the last.
    sampling : how those were chosen, and the others are to be.
    marks : of the records that were read, by segment of the prompt's plan.
    """

    session: Session
    asked: PromptLayout
    options: QueryOptions
    choice: Choice | None
    selector: Selector
    streamed: Streamed
    outcome: Outcome
    chunks: list[ReplyChunk]
    again: list[ReplyChunk]
    fuse_ms: float
    known: Sequence[int]
    sampling: Sampling
    marks: Sequence[Marks] = ()

    def reply(self, said: Generated) -> Reply:
        """Return the reply: the answer, with all that led to it."""
        return _reply(self, said, _timing(self, said))

    def keep(self, again: bool = False) -> None:
        """Note what was used, and store what was missing; `again`: see `answer`."""
        if not self.selector.uses_cache:
            return
        if self.outcome.chained is not None:
            keep(self.session, self.outcome.chained, self.options.state_cache_size, again)
        else:
            _keep(self.session, self.outcome.fused, self.streamed.holes, again)


def begin_answer(
    session: Session, asked: PromptLayout, options: QueryOptions, *, marked: bool = False
) -> PreparedAnswer:
    """Bring a request whose prompt is laid out to the first token of its answer.

    Parameters
    ----------
    marked : note the marks of the records that are read, by which they are recognised later.

    Raises
    ------
    GateError : the gate refuses this model.
    """
    with session.lock, session.store.view():
        options = replace(options, fusion=options.fusion or session.identity.default_mode)
        session.identity.check_modes([str(options.fusion)], options.defer)
        asked, options, choice = _choose(session, asked, options)
        selector = selector_for(options, str(options.fusion))
        goes_on_from_states = asked.behind is not None and session.identity.keeps_states
        if (selector.uses_cache or goes_on_from_states) and not options.force:
            session.check_gate([segment.source.chunk_id for segment in asked.plan.cached])
        streamed = _fetch(session, asked, options, selector)
        prepare_compiled_model(session.decoder)
        started = time.perf_counter()
        outcome = _fuse(session, asked, streamed, selector, options)
        sampling = Sampling(options.max_tokens, options.temperature, options.seed, stop_repeats=options.stop_repeats)
        known = _first_tokens(outcome, sampling)
        fuse_ms = add_span(session.timeline, f"fuse: {options.fusion}", started) * 1e3
        chunks, again = reply_chunks(session, asked, outcome.fused.plan), _standing_chunks(session, asked)
        marks = plan_marks(session, asked.plan) if marked else ()
        session.store.end_view()  # all is read: whoever writes need not wait for the answer, nor do we when we write
        return PreparedAnswer(
            session, asked, options, choice, selector, streamed, outcome, chunks, again, fuse_ms, known, sampling, marks
        )


# ---- before the first token ----


def _choose(
    session: Session, asked: PromptLayout, options: QueryOptions
) -> tuple[PromptLayout, QueryOptions, Choice | None]:
    """Resolve `auto` to a fusion mode. A remote backend and an extended prompt cannot be weighed in advance: they get
    the mode that loses a little."""
    if options.fusion != AUTO:
        return asked, options, None
    if asked.behind is not None or _streams(session, options):
        return asked, replace(options, fusion=WEIGHED), None
    choice = choose(session, asked, options)
    return choice.asked, choice.options, choice


def _streams(session: Session, options: QueryOptions) -> bool:
    """Return True if the TTFT has a target, and the store a remote backend to fetch from within it."""
    return options.slo_ms is not None and session.store.link is not None and not session.identity.keeps_states


def _fetch(session: Session, asked: PromptLayout, options: QueryOptions, selector: Selector) -> Streamed:
    """Fetch what the prompt lacks, as far as an objective allows; without one it is read as it is needed."""
    if asked.behind is not None or not _streams(session, options) or not selector.reads(asked.plan, session.layers):
        return Streamed(asked.plan, session.source)
    return stream_prompt(session, asked, options, selector)


def _fuse(
    session: Session, asked: PromptLayout, streamed: Streamed, selector: Selector, options: QueryOptions
) -> Outcome:
    """The whole prompt in one pass, or in rounds; or what comes behind one that stands."""
    if asked.behind is not None:
        return fuse_on(session, asked.behind, asked.plan, selector, options)
    if session.identity.keeps_states:
        chained = answer_chain(session, streamed.plan, selector, options)
        return Outcome(chained.fused, None, [], chained)
    if options.defer:
        return fuse_in_rounds(session, streamed.plan, selector, streamed.source, options)
    decoder, plan, source = session.decoder, streamed.plan, streamed.source
    fused = fuse(decoder, plan, selector, source, options.max_tokens, session.timeline, options.load_timeout)
    return Outcome(fused, None, [])


def _first_tokens(outcome: Outcome, sampling: Sampling) -> Sequence[int]:
    """The first tokens that are shown: those that a round was judged by, unless sampling is to choose others."""
    if outcome.begun is not None:
        if sampling.temperature <= 0:
            return outcome.begun.ids
        outcome.fused.cache.set_length(outcome.fused.plan.length)
    return [first_token(outcome.fused.logits, sampling)]


def reply_chunks(session: Session, asked: PromptLayout, plan: Plan) -> list[ReplyChunk]:
    """Return the reply's entry of each chunk that was loaded."""
    hits = asked.hits[: len(plan.chunks)]
    return [
        ReplyChunk.of(
            session.store,
            hit,
            tokens=len(segment.source.ids),
            status=segment.status,
            reason=segment.reason if segment.status == "miss" else "",
        )
        for hit, segment in zip(hits, plan.chunks, strict=True)
    ]


def _standing_chunks(session: Session, asked: PromptLayout) -> list[ReplyChunk]:
    """Return the reply's entry of each retrieved chunk that was in the prompt cache already."""
    if asked.behind is None:
        return []
    tokens = asked.behind.chunks
    return [
        ReplyChunk.of(session.store, hit, tokens=tokens[hit.passage.chunk_id], status="standing") for hit in asked.again
    ]


# ---- after the answer ----


def _keep(session: Session, fused: Fused, computed: Sequence[Segment], again: bool) -> None:
    """Note what was used, and store what was missing."""
    cached = fused.plan.cached_chunks
    if session.recent_chunks is not None:
        for segment in cached:
            session.recent_chunks.use(segment.source.chunk_id, session.decoder.kv_bytes(len(segment.ids)))
    missed = len(fused.plan.chunks) - len(cached)
    session.store.note_access([one.source.chunk_id for one in cached], missed, again)
    holes = [segment for segment in fused.plan.segments[:-1] if segment.status == "miss" and segment.ids]
    known = {segment.position for segment in holes}
    holes += [segment for segment in computed if segment.position not in known]
    if holes:
        fill_holes(session, holes)


def _timing(begun: PreparedAnswer, said: Generated) -> dict[str, float]:
    """Milliseconds; `ttft` runs from the question's text to the first token's id."""
    asked, choice, streamed = begun.asked, begun.choice, begun.streamed
    decide_ms = choice.decide_ms if choice is not None else 0.0
    return {
        "retrieve": asked.retrieve_ms,
        **asdict(begun.outcome.fused.timing),
        "ttft": asked.retrieve_ms + decide_ms + streamed.ms + begun.fuse_ms,
        "generate": said.milliseconds,
        "model_load": begun.session.decoder.loaded.load_ms,
        "stream": streamed.ms,
        **({"decide": choice.decide_ms, "profile": choice.profile_ms} if choice is not None else {}),
    }


def _bytes_spared(begun: PreparedAnswer) -> int:
    """Return the bytes of the records that were skipped because no row could see them; records in memory count 0."""
    session, source = begun.session, begun.streamed.source

    def sizes(segment: Segment) -> Sequence[int]:
        held = source.held_layers(segment) if isinstance(source, ChunkCache) else set[int]()
        read = session.store.payload_sizes(segment.source.chunk_id, segment.source.level or RAW)
        return [0 if layer in held else size for layer, size in enumerate(read)]

    return begun.outcome.fused.read_set.bytes_skipped(sizes)


def _reply(begun: PreparedAnswer, said: Generated, timing: dict[str, float]) -> Reply:
    session, asked, options, choice = begun.session, begun.asked, begun.options, begun.choice
    fused, slo_ms = begun.outcome.fused, options.slo_ms
    text = said.text.strip()
    return Reply(
        question=asked.request.question,
        answer=text,
        finish=said.finish,
        fusion=str(options.fusion),
        chunks=with_changes(session.store, begun.chunks),
        revision=asked.revision,
        tokens=_tokens(fused, said),
        timing_ms=timing,
        bytes_read=fused.bytes_read + begun.streamed.bytes_read,
        bytes_spared=_bytes_spared(begun),
        controller={} if choice is None else choice.decision.to_json(),
        stream=begun.streamed.rows,
        slo={} if slo_ms is None else {"slo_ms": slo_ms, "met": timing["ttft"] <= slo_ms},
        generated=said,
        fused=fused,
        selector=begun.selector,
        segments=_segments(session, fused.plan) if options.token_ids else None,
        explained=explain(fused, session.tokenizer) if options.explain else [],
        backends=explain_attention(session.decoder, fused) if options.explain else [],
        again=with_changes(session.store, begun.again),
        scores=asdict(score(text, asked.request.answers)) if asked.request.answers else {},
        rounds=begun.outcome.rounds,
        cut=asked.cut,
        left=len(asked.hits) - len(fused.plan.chunks),
        resolved={
            "device": session.decoder.device,
            "dtype": session.decoder.loaded.arithmetic.dtype,
            "store_dtype": session.identity.dtype,
            "model": session.identity.model,
            "stepper": said.stepper,
            "forward": session.decoder.forward,
            "weights": session.decoder.loaded.weights,
        },
    )


def _segments(session: Session, plan: Plan) -> dict[str, Any]:
    """The prompt's token ids, by what they are."""
    return {
        "prefix": list(plan.segments[0].ids),
        "lead_in": list(session.identity.lead_in.ids),
        "chunks": [list(segment.source.ids) for segment in plan.chunks],
        "question": list(plan.segments[-1].ids),
    }


def _tokens(fused: Fused, said: Generated) -> dict[str, int]:
    shifted = int(fused.shifted.rows.sum())
    return fused.tokens.to_json() | {"shifted": shifted, "generated": len(said.ids)}
