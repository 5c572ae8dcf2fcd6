"""Turns of a conversation: their layouts, a trial of these without a model, and what stays in the prompt cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from kvtool.core.common.types import Ids
from kvtool.core.errors import ContextFullError, DamagedError, KvtoolError
from kvtool.core.fusion.engine import copied
from kvtool.core.fusion.plan import Candidate, Plan, as_resident
from kvtool.core.model.prompt import question_tokens, turn_header
from kvtool.core.model.states import Marked, StateCache
from kvtool.core.model.tokens import encode
from kvtool.core.query.answer import PreparedAnswer
from kvtool.core.query.layout import (
    OTHER_TEXT,
    CachedPrefix,
    Marks,
    PromptLayout,
    lay_out,
    parts_for,
    plan_marks,
    record_marks,
)
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request

if TYPE_CHECKING:
    from kvtool.core.model.prompt_cache import PromptCache
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.query.reply import Request
    from kvtool.core.session.session import Session


@dataclass(slots=True)
class Trial:
    """Lengths of a prompt's turns, added up as a conversation would lay them out.

    Parameters
    ----------
    tokens : that stand already. `chunks`: those among them, with the tokens of each.

    Attributes
    ----------
    full : why the conversation has to start over before the turn that was added last; None: it goes on.
    """

    session: Session
    options: QueryOptions
    tokens: int = 0
    chunks: Mapping[bytes, int] = field(default_factory=dict)
    full: ContextFullError | None = None

    def add(self, request: Request, answer: str = "") -> None:
        """Add a turn. Raises as `lay_out` does of a first turn that is too long by itself."""
        self.full = None
        try:
            asked = self._laid_out(request)
        except ContextFullError as error:
            self.full, self.tokens, self.chunks = error, 0, {}
            asked = self._laid_out(request)
        self.chunks = {**self.chunks, **chunks_of(asked)}
        tokenizer = self.session.tokenizer
        self.tokens = asked.plan.length + len(encode(tokenizer, answer)) + len(turn_header(tokenizer))

    def _laid_out(self, request: Request) -> PromptLayout:
        behind = None
        if self.tokens:
            check_room(self.session, self.tokens)
            behind = CachedPrefix(Candidate((0,) * self.tokens), self.session.decoder.new_cache(0), self.chunks)
        return lay_out(self.session, request, self.options, behind=behind, must_find=False)


def chunks_of(asked: PromptLayout) -> dict[bytes, int]:
    """Return the chunks that a turn brings, with the tokens of each."""
    sources = [segment.source for segment in asked.plan.chunks]
    return {one.chunk_id: len(one.ids) for one in sources if one.chunk_id}


def check_room(session: Session, tokens: int) -> None:
    """Refuse to go on behind so many tokens where they fill the model's context. Raises ContextFullError."""
    if session.is_loaded and tokens >= session.decoder.context:
        raise ContextFullError(
            f"the conversation has {tokens} tokens, the model takes {session.decoder.context}",
            "start a new one, or shorten what was said in it",
        )


@dataclass(frozen=True, slots=True)
class Start:
    """The turn at which a conversation starts over for the last time: the turns skipped before it, and why."""

    skipped: int = 0
    full: ContextFullError | None = None


def last_start(trial: Trial, turns: Iterable[tuple[Request, str]]) -> Iterator[Start]:
    """Add turns, the question behind them the last, and yield after each what is known so far."""
    found = Start()
    for number, (request, answer) in enumerate(turns):
        trial.add(request, answer)
        if trial.full is not None:
            found = Start(number, trial.full)
        yield found


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of one segment's KV: its ids, its chunk, the level, and the very records that were read.

    Attributes
    ----------
    wanted : the segment as it was looked up, without its rank among the passages.
    marks : of the records of each layer; empty where none was read.
    """

    wanted: Candidate
    marks: Marks

    def is_stored(self, session: Session) -> bool:
        """Return whether the store still has these records, or, where none was read, a chunk of these ids."""
        chunk_id, level = self.wanted.chunk_id, self.wanted.level
        if not chunk_id:
            return True
        if self.marks and level is not None:
            return self.marks == record_marks(session, chunk_id, level)
        try:
            info = session.store.chunk_info(chunk_id)
        except DamagedError:
            return False
        return info is not None and info.token_ids == self.wanted.ids


@dataclass(frozen=True, slots=True)
class TurnLayout:
    """The segments that a turn added to its conversation's prompt, and how they were found.

    Attributes
    ----------
    known : chunks that stood before the turn; None: it was the first.
    origins : of its segments, the question last.
    is_as_laid : all of them were read as they were laid out, and none was computed in its place.
    revision : of the store, at which all of it was looked up.
    """

    request: Request
    known: Mapping[bytes, int] | None
    origins: tuple[Origin, ...]
    is_as_laid: bool
    revision: int

    @classmethod
    def of(cls, begun: PreparedAnswer) -> TurnLayout:
        """Note the layout of an answer's prompt."""
        asked, fused = begun.asked, begun.outcome.fused
        # Else a record was damaged, or slow.
        is_as_laid = isinstance(fused.cache, StateCache) or _levels(fused.plan) == _levels(asked.plan)
        marks = begun.marks if is_as_laid else [()] * len(asked.plan.segments)
        known = None if asked.behind is None else asked.behind.chunks
        return cls(asked.request, known, _origins(asked.plan, marks), is_as_laid, asked.revision)

    def is_so(self, session: Session, options: QueryOptions, cache: PromptCache) -> bool:
        """Return whether the store as it is now would give the same layout, of the same records."""
        if not self.is_as_laid or self.revision == session.store.revision():
            return self.is_as_laid
        behind = None if self.known is None else CachedPrefix(Candidate(()), cache, self.known)
        try:
            asked = lay_out(session, self.request, options, behind=behind, must_find=False)
        except KvtoolError:  # what it names is gone
            return False
        return _origins(asked.plan, plan_marks(session, asked.plan)) == self.origins

    def still_stands(self, session: Session, options: QueryOptions) -> bool:
        """Return whether the store still has all that the turn was made of, whatever its question would find now."""
        if self.revision == session.store.revision():
            return True
        parts, (*first, question) = parts_for(session, options), self.origins
        if question.wanted.ids != question_tokens(session.tokenizer, self.request.question, parts):
            return False
        if self.known is None and first[0].wanted.ids != parts.prefix:
            return False
        return all(origin.is_stored(session) for origin in first)


def _origins(plan: Plan, marks: Sequence[Marks]) -> tuple[Origin, ...]:
    return tuple(
        Origin(replace(segment.source, relevance=0.0), mark)
        for segment, mark in zip(plan.segments, marks, strict=True)
        if segment.status != "resident"
    )


def _levels(plan: Plan) -> list[tuple[object, ...]]:
    return [(one.source.ids, one.source.level if one.cached else None) for one in plan.segments]


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and what came of it.

    Attributes
    ----------
    places : where the passages stand that it was answered from, the best first.
    tokens : as in its reply.
    """

    question: str
    answer: str
    places: tuple[str, ...]
    tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class ConversationState:
    """State of a conversation between two questions.

    Attributes
    ----------
    states : recurrent states of the model, if it has any, after the rows of `standing`.
    pending : tokens after those of `standing` that have no row yet: the answer's last token, and the template's between
        two turns.
    is_whole : nothing was written after the rows of `standing`; else a question may have been begun there and given up.
    """

    session: Session
    system: str | None
    standing: CachedPrefix
    states: Marked | None
    pending: Ids
    is_whole: bool = True

    @classmethod
    def after(cls, begun: PreparedAnswer, said: Sequence[int], answer: Ids) -> ConversationState:
        """Return the state after a turn. Rows of its answer are kept if they were computed from the same tokens.

        Parameters
        ----------
        said : the tokens whose rows the cache holds after the prompt, and maybe more. `answer`: those to keep.
        """
        fused, before = begun.outcome.fused, begun.asked.behind
        computed = fused.cache.buffers[0].length - fused.plan.length
        pairs = zip(said[:computed], answer, strict=False)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if alike < computed and isinstance(fused.cache, StateCache):
            alike = 0  # where its states are marked
        if alike < computed:
            fused.cache.set_length(fused.plan.length + alike)
        named = [one for one in fused.plan.chunks if one.source.chunk_id and one.source.reason != OTHER_TEXT]
        chunks = {one.source.chunk_id: len(one.source.ids) for one in named}
        tokens = as_resident(fused.plan.segments, answer[:alike])
        if before is not None:
            chunks = {**before.chunks, **chunks}
        pending = (*answer[alike:], *turn_header(begun.session.tokenizer))
        stands = CachedPrefix(tokens, fused.cache, chunks)
        return cls(begun.session, begun.options.system, stands, marked(fused.cache), pending)

    def whole(self) -> ConversationState:
        """The same without what is behind the rows that stand."""
        if self.is_whole:
            return self
        cache, rows = self.standing.cache, len(self.standing.tokens.rows)
        if isinstance(cache, StateCache):
            assert self.states is not None
            cache.go_back(self.states)
            return replace(self, is_whole=True)
        # A thread that reads a slow record may still write into the old one.
        return replace(
            self, standing=replace(self.standing, cache=copied(self.session.decoder, cache, rows)), is_whole=True
        )

    def settled(self) -> ConversationState:
        """The same with its cache brought to where the next question begins; it has to be whole."""
        if not self.pending:
            return self
        tokens, cache = self.standing.tokens, self.standing.cache
        self.session.decoder.append(self.pending, cache)
        grown = range(len(tokens.ids), len(tokens.ids) + len(self.pending))
        kept = None if tokens.kept is None else (*tokens.kept, *grown)
        stands = replace(self.standing, tokens=Candidate((*tokens.ids, *self.pending), kept=kept))
        return replace(self, standing=stands, states=marked(cache), pending=())


def marked(cache: object) -> Marked | None:
    """Mark where states can be set back to."""
    return cache.mark() if isinstance(cache, StateCache) else None
