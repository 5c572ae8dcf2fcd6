"""A conversation: each question sees the turns before it, and extends the prompt cache that they left.

What the cache holds is neither read nor computed again. After it come, as the model's chat template has them: the end
of the answer's turn, the passages that are new, the question. So a turn computes its own text and what its mode
computes of the new passages, as `--defer` does in a later round (fusion/engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, TypeVar

from kvtool.core.common.types import Ids, Warn
from kvtool.core.errors import ContextFullError, DamagedError, KvtoolError, UsageError
from kvtool.core.fusion.engine import copied
from kvtool.core.fusion.plan import Candidate, Plan, as_resident
from kvtool.core.fusion.selectors import REFERENCE
from kvtool.core.model.decoder import is_recurrent
from kvtool.core.model.generate import Generated
from kvtool.core.model.prompt import RESULT, question_tokens, said_tokens, turn_header
from kvtool.core.query.answer import Check, OnText, PreparedAnswer, load_and_fuse
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import (
    OTHER_TEXT,
    CachedPrefix,
    Marks,
    PromptLayout,
    lay_out,
    parts_for,
    plan_marks,
    record_marks,
)
from kvtool.core.query.reply import Reply, Request

if TYPE_CHECKING:
    from kvtool.core.model.hf.states import Marked
    from kvtool.core.model.prompt_cache import PromptCache
    from kvtool.core.retrieval.finder import Finder
    from kvtool.core.session.session import Session


@dataclass(slots=True)
class Trial:
    """Adds up the lengths of a prompt's turns. `skipped`: turns before the last start over, for the reason `full`."""

    session: Session
    options: QueryOptions
    tokens: int = 0
    chunks: Mapping[bytes, int] = field(default_factory=dict)
    skipped: int = 0
    full: ContextFullError | None = None
    _added: int = 0

    def add(self, request: Request, answer: str = "") -> None:
        """Add a turn. Raises as `lay_out` does for a first turn that is too long by itself."""
        try:
            layout = self._laid_out(request)
        except ContextFullError as error:
            self.full, self.skipped, self.tokens, self.chunks = error, self._added, 0, {}
            layout = self._laid_out(request)
        self._added += 1
        self.chunks = {**self.chunks, **chunks_of(layout)}
        tokenizer = self.session.tokenizer
        self.tokens = layout.plan.length + len(said_tokens(tokenizer, answer)) + len(turn_header(tokenizer))

    def _laid_out(self, request: Request) -> PromptLayout:
        prefix = None
        if self.tokens:
            check_room(self.session, self.tokens)
            prefix = CachedPrefix(Candidate((0,) * self.tokens), self.session.decoder.new_cache(0), self.chunks)
        return lay_out(self.session, request, self.options, prefix=prefix, must_find=False)


def chunks_of(layout: PromptLayout) -> dict[bytes, int]:
    sources = [segment.source for segment in layout.plan.chunks]
    return {one.chunk_id: len(one.ids) for one in sources if one.chunk_id}


def check_room(session: Session, tokens: int) -> None:
    if session.model.is_loaded and tokens >= session.decoder.context:
        raise ContextFullError(
            f"the conversation has {tokens} tokens, the model takes {session.decoder.context}",
            "start a new one, or shorten what was said in it",
        )


Origin = tuple[Candidate, Marks]
"""Origin of a segment's KV: the segment as it was looked up, without its rank among the passages, and the marks of the
records of each layer; none where none was read."""


def _is_stored(session: Session, origin: Origin) -> bool:
    """Return whether the store still has these records, or, where none was read, a chunk of these ids."""
    wanted, marks = origin
    if not wanted.chunk_id:
        return True
    if marks and wanted.level is not None:
        return marks == record_marks(session, wanted.chunk_id, wanted.level)
    try:
        info = session.store.chunk_info(wanted.chunk_id)
    except DamagedError:
        return False
    return info is not None and info.token_ids == wanted.ids


@dataclass(frozen=True, slots=True)
class TurnLayout:
    """The segments that a turn added to its conversation's prompt. `known`: chunks that the prompt held before; None:
    it was the first turn. `is_as_laid`: all segments were read as they were laid out."""

    request: Request
    known: Mapping[bytes, int] | None
    origins: tuple[Origin, ...]
    is_as_laid: bool
    revision: int

    @classmethod
    def of(cls, prepared: PreparedAnswer) -> TurnLayout:
        layout, fused = prepared.layout, prepared.outcome.fused
        # Else a record was damaged, or slow.
        is_as_laid = is_recurrent(fused.cache) or _levels(fused.plan) == _levels(layout.plan)
        marks = prepared.marks if is_as_laid else [()] * len(layout.plan.segments)
        known = None if layout.prefix is None else layout.prefix.chunks
        return cls(layout.request, known, _origins(layout.plan, marks), is_as_laid, layout.revision)

    def finds_the_same(self, session: Session, options: QueryOptions, cache: PromptCache) -> bool:
        """Return whether the store as it is now would give the same layout, of the same records."""
        if not self.is_as_laid or self.revision == session.store.revision():
            return self.is_as_laid
        prefix = None if self.known is None else CachedPrefix(Candidate(()), cache, self.known)
        try:
            layout = lay_out(session, self.request, options, prefix=prefix, must_find=False)
        except KvtoolError:  # a chunk or document that it names is gone
            return False
        return _origins(layout.plan, plan_marks(session, layout.plan)) == self.origins

    def has_all_records(self, session: Session, options: QueryOptions) -> bool:
        if self.revision == session.store.revision():
            return True
        parts, (*first, question) = parts_for(session, options.system), self.origins
        if question[0].ids != question_tokens(session.tokenizer, self.request.question, parts, self.request.prefill):
            return False
        if self.known is None and first[0][0].ids != parts.prefix:
            return False
        return all(_is_stored(session, origin) for origin in first)


def _origins(plan: Plan, marks: Sequence[Marks]) -> tuple[Origin, ...]:
    return tuple(
        (replace(segment.source, relevance=0.0), mark)
        for segment, mark in zip(plan.segments, marks, strict=True)
        if segment.status != "resident"
    )


def _levels(plan: Plan) -> list[tuple[object, ...]]:
    return [(one.source.ids, one.source.level if one.cached else None) for one in plan.segments]


@dataclass(frozen=True, slots=True)
class Turn:
    question: str
    answer: str
    places: tuple[str, ...]
    tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class ConversationState:
    """State of a conversation between two questions. `states`: recurrent ones, after the rows of `prefix`. `pending`:
    tokens after it without a row. `is_whole`: nothing was written after the rows of `prefix`."""

    session: Session
    system: str | None
    prefix: CachedPrefix
    states: Marked | None
    pending: Ids
    is_whole: bool = True

    @classmethod
    def after(
        cls, prepared: PreparedAnswer, said: Sequence[int], answer: Ids, checked: Check | None = None
    ) -> ConversationState:
        """Return the state after a turn. Rows of its answer are kept if they were computed from the same tokens.
        `said`: the tokens whose rows the cache holds after the prompt, and maybe more. `answer`: those to keep."""
        fused, before = prepared.outcome.fused if checked is None else checked.exact, prepared.layout.prefix
        is_exact = (checked is not None or not prepared.selector.uses_cache) and (before is None or before.is_exact)
        computed = fused.cache.buffers[0].length - fused.plan.length
        pairs = zip(said[:computed], answer, strict=False)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if alike < computed and is_recurrent(fused.cache):
            alike = 0  # where its states are marked
        if alike < computed:
            fused.cache.set_length(fused.plan.length + alike)
        named = [one for one in fused.plan.chunks if one.source.chunk_id and one.source.reason != OTHER_TEXT]
        chunks = {one.source.chunk_id: len(one.source.ids) for one in named}
        tokens = as_resident(fused.plan.segments, answer[:alike])
        if before is not None:
            chunks = {**before.chunks, **chunks}
        pending = (*answer[alike:], *turn_header(prepared.session.tokenizer))
        prefix = CachedPrefix(tokens, fused.cache, chunks, is_exact)
        return cls(prepared.session, prepared.options.system, prefix, marked(fused.cache), pending)

    def whole(self) -> ConversationState:
        if self.is_whole:
            return self
        cache, rows = self.prefix.cache, len(self.prefix.tokens.rows)
        if is_recurrent(cache):
            assert self.states is not None
            cache.go_back(self.states)
            return replace(self, is_whole=True)
        # A thread that reads a slow record may still write into the old one.
        prefix = replace(self.prefix, cache=copied(self.session.decoder, cache, rows))
        return replace(self, prefix=prefix, is_whole=True)

    def settled(self) -> ConversationState:
        if not self.pending:
            return self
        tokens, cache = self.prefix.tokens, self.prefix.cache
        self.session.decoder.append(self.pending, cache)
        grown = range(len(tokens.ids), len(tokens.ids) + len(self.pending))
        stored_rows = None if tokens.stored_rows is None else (*tokens.stored_rows, *grown)
        prefix = replace(self.prefix, tokens=Candidate((*tokens.ids, *self.pending), stored_rows=stored_rows))
        return replace(self, prefix=prefix, states=marked(cache), pending=())


def marked(cache: PromptCache) -> Marked | None:
    return cache.mark() if is_recurrent(cache) else None


FORGOTTEN = "earlier turns were dropped from the prompt but still guide retrieval"
T = TypeVar("T")
Lend = Callable[[], AbstractContextManager["Session"]]


class Conversation:
    """Questions to one store that see each other; one is answered at a time. Several conversations may share a session.
    `by_text`: answers are kept as the tokens of their text, not as the generated ones."""

    def __init__(self, lend: Lend, options: QueryOptions | None = None, by_text: bool = False) -> None:
        self._lend, self._by_text = lend, by_text
        self.options = options or QueryOptions()
        self._now = _Now()

    @classmethod
    def over(cls, session: Session, options: QueryOptions | None = None, by_text: bool = False) -> Conversation:
        return cls(lambda: nullcontext(session), options, by_text)

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self._now.turns

    @property
    def said(self) -> tuple[Turn, ...]:
        return (*self._now.earlier, *self._now.turns)

    @property
    def tokens(self) -> int:
        """Return the number of text tokens that the next question's prompt begins with."""
        state = self._now.state
        return 0 if state is None else len(state.prefix.tokens.ids) + len(state.pending)

    @property
    def rows(self) -> int:
        """Return how many of these have rows in the prompt cache: the others are computed with the next question."""
        return 0 if self._now.state is None else len(self._now.state.prefix.tokens.rows)

    @property
    def nbytes(self) -> int:
        return 0 if self._now.state is None else self._now.state.prefix.cache.nbytes

    def reset(self) -> None:
        self._now = _Now()

    def start_over(self) -> None:
        """Drop the turns and their cache. The next question sees no turn, but earlier ones still guide its search."""
        self._now = _Now(earlier=self.said)

    def restarting(self, turn: Callable[[], T], warn: Warn) -> T:
        """Do a turn; if the context is full, start over with a warning, and do it again."""
        try:
            return turn()
        except ContextFullError as error:
            if not self.turns:
                raise
            warn(f"{error.message}: it starts over", FORGOTTEN)
            self.start_over()
            return turn()

    def ask(
        self,
        question: str | Request,
        options: QueryOptions | None = None,
        on_text: OnText | None = None,
        going: Callable[[], bool] = lambda: True,
    ) -> Reply:
        """Answer a question that follows the turns so far; after a failure the conversation is unchanged. `going` is
        called before each token of the answer but the first; False ends the answer there. Raises ContextFullError:
        `start_over` empties the context; UsageError: another `system` instruction, or this one is to be verified and
        earlier turns were not; KvtoolError: see `answer`."""
        with self._lend() as session, session.lock, session.store.view():
            prepared = self.begin(session, question, options)
            generated, checked = prepared.generate(on_text, going)
            prepared.store_chunks()
            return self.take(prepared, generated, checked)

    def begin(
        self,
        session: Session,
        question: str | Request,
        options: QueryOptions | None = None,
        must_find: bool = True,
    ) -> PreparedAnswer:
        """Do the first half of `ask`, up to the first token. The conversation stays as it was until `take`."""
        options = options or self.options
        request = Request(question) if isinstance(question, str) else question
        with session.lock, session.store.view():
            request = searched(session, request, [turn.question for turn in self.said])
            prefix = self._behind(session, options)
            layout = lay_out(session, request, options, prefix=prefix, must_find=must_find)
            if self._now.state is not None:
                self._set_state(replace(self._now.state, is_whole=False))
            prepared = load_and_fuse(session, layout, options, marked=True)
            if self._by_text:
                marked(prepared.outcome.fused.cache)  # where the answer begins
            return prepared

    def take(self, prepared: PreparedAnswer, said: Generated, checked: Check | None = None) -> Reply:
        """Do the second half of `ask`: the answer becomes a turn; `checked`: of a verified answer."""
        reply = prepared.reply(said, checked)
        request = prepared.layout.request
        reply.turn = {"number": len(self.turns) + 1, "search": request.search or request.question}
        turn = Turn(reply.question, reply.answer, tuple(reply.places), reply.tokens)
        ids = self._ids_of(prepared, reply.answer) if self._by_text else said.ids
        self._add(turn, prepared, ConversationState.after(prepared, said.ids, ids, checked))
        return reply

    def give(self, session: Session, question: Request, answer: str) -> PreparedAnswer:
        """Add a turn whose answer is known. If answers are verified, it is computed in full: the next one has to follow
        exact rows."""
        exactly = self.options.verify and not session.identity.keeps_states
        options = replace(self.options, fusion=REFERENCE) if exactly else None
        prepared = self.begin(session, question, options, must_find=False)
        counts = prepared.outcome.fused.tokens.to_json()
        places = tuple(dict.fromkeys(chunk.place for chunk in prepared.chunks))
        ids = self._ids_of(prepared, answer)
        self._add(
            Turn(question.question, answer, places, counts),
            prepared,
            ConversationState.after(prepared, prepared.known, ids),
        )
        return prepared

    def finds_the_same(self, session: Session) -> bool:
        """Return True if its questions would be answered from the same passages now, at the same levels."""
        state = self._now.state
        if state is None or state.session is not session:
            return False
        with session.lock, session.store.view():
            return all(laid.finds_the_same(session, self.options, state.prefix.cache) for laid in self._now.laid)

    def skip(self, turns: Sequence[tuple[str, str]]) -> None:
        """Start over, and note further turns that the next question will not see either: they only guide its search."""
        self._now = _Now(earlier=(*self.said, *(Turn(question, answer, (), {}) for question, answer in turns)))

    def trial(self, session: Session, options: QueryOptions) -> Trial:
        state = self._now.state
        return Trial(session, options, self.tokens, {} if state is None else state.prefix.chunks)

    def _ids_of(self, prepared: PreparedAnswer, answer: str) -> Ids:
        return tuple(said_tokens(prepared.session.tokenizer, answer))

    def _add(self, turn: Turn, prepared: PreparedAnswer, state: ConversationState) -> None:
        now = self._now
        self._now = replace(now, turns=(*now.turns, turn), laid=(*now.laid, TurnLayout.of(prepared)), state=state)

    def _behind(self, session: Session, options: QueryOptions) -> CachedPrefix | None:
        """Return the cached prefix of the question, with the user's turn begun; None for the first question."""
        state = self._now.state
        if state is None:
            return None
        if state.session is not session:
            session.warn("the store was opened anew: the conversation starts over", "")
            self.start_over()
            return None
        if options.system != state.system:
            raise UsageError("a conversation keeps the instruction that it began with", "start a new one")
        if options.verify and not state.prefix.is_exact and not session.identity.keeps_states:
            raise UsageError("earlier turns of the conversation were not verified", "start a new one")
        session.refresh()
        if not all(laid.has_all_records(session, options) for laid in self._now.laid):
            self._go_through_anew(session)
            return self._behind(session, options)
        check_room(session, self.tokens)
        state = state.whole()
        self._set_state(replace(state, is_whole=False))
        state = state.settled()
        self._set_state(state)
        return state.prefix

    def _go_through_anew(self, session: Session) -> None:
        """Compute the turns again from the store as it is now; where that fails, the conversation starts over."""
        before = self._now
        session.warn("the store has another instruction or other records now: all turns are computed again", "")
        self._now = _Now(earlier=before.earlier)
        try:
            for turn, laid in zip(before.turns, before.laid, strict=True):
                self.give(session, laid.request, turn.answer)
        except BaseException as error:
            self._now = before
            if not isinstance(error, KvtoolError):
                raise
            session.warn(f"the conversation starts over: {error.message}", error.hint)
            self.start_over()

    def _set_state(self, state: ConversationState) -> None:
        self._now = replace(self._now, state=state)


@dataclass(frozen=True, slots=True)
class _Now:
    """All state of a conversation. Changing it is one assignment, so Ctrl-C finds it before or after. `earlier`: turns
    that were dropped from the cache, and still guide the search."""

    turns: tuple[Turn, ...] = ()
    earlier: tuple[Turn, ...] = ()
    laid: tuple[TurnLayout, ...] = ()
    state: ConversationState | None = None


# A vague follow-up is searched with the questions before it, as samples/results/retrieval.md measured. Answers
# are left out: those of small models mislead the search.
RARE = 0.05  # maximum share of the chunks that a rare word occurs in
ENOUGH = 4  # rare words of a question that is searched without those before it
NAMES = 3  # rare words of a question that says what is talked about
BACK = 16  # questions back at most: looking through all of them at each turn is quadratic


def searched(session: Session, request: Request, before: Sequence[str]) -> Request:
    """Return a request with the text that it is searched by, where it names no passages itself: no result of a tool."""
    if request.chunks or request.documents or request.search:
        return request
    questions = [text for text in (*before, request.question) if not text.startswith(RESULT)] or [request.question]
    return replace(request, search=search_text(questions[-1], questions[:-1], session.finder))


def search_text(question: str, before: Sequence[str], finder: Finder) -> str:
    """Return the text that a question is searched by. With fewer than `ENOUGH` rare words it is joined with those
    before it, back to the last that has them. It counts twice, so that a new subject is found next to the old one."""
    if not before or finder.rare_words(question, RARE) >= ENOUGH:
        return question
    context: list[str] = []
    for earlier in before[: -BACK - 1 : -1]:
        context.insert(0, earlier)
        if finder.rare_words(earlier, RARE) >= NAMES:
            break
    return " ".join([*context, question, question])
