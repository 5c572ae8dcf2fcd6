"""A conversation: each question sees the turns before it, and goes on from the prompt cache that they left.

What stands in the cache is neither read nor computed again. Behind it come, as the model's chat template has them: the
end of the answer's turn, the passages that are new, the question. So a turn computes its own text and what its mode
computes of the new passages, as `--defer` does in a later round (fusion/rounds.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtool.core.common.types import Ids
from kvtool.core.errors import UsageError
from kvtool.core.fusion.plan import Candidate, standing
from kvtool.core.fusion.rounds import copied
from kvtool.core.model.generate import Generated, generate
from kvtool.core.model.prompt import turn_header
from kvtool.core.model.states import Marked, StateCache
from kvtool.core.query.answer import Begun, OnText, begin_answer
from kvtool.core.query.follow_up import search_text
from kvtool.core.query.layout import Standing, lay_out
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Reply, Request

if TYPE_CHECKING:
    from kvtool.core.session.session import Session

Lend = Callable[[], AbstractContextManager["Session"]]


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


class Conversation:
    """Questions to one store that see each other. It holds its prompt cache until it is let go of or starts over.

    One question is answered at a time. Several conversations may share a session: each has a cache of its own.

    Parameters
    ----------
    lend : gives the session for one question.
    options : of all questions that bring none of their own.

    """

    def __init__(self, lend: Lend, options: QueryOptions | None = None) -> None:
        self._lend = lend
        self.options = options or QueryOptions()
        self._now = _Now()

    @classmethod
    def over(cls, session: Session, options: QueryOptions | None = None) -> Conversation:
        """A conversation over a session that stays open."""
        return cls(lambda: nullcontext(session), options)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns that stand, the first one first."""
        return self._now.turns

    @property
    def said(self) -> tuple[Turn, ...]:
        """All turns since the conversation began, those before it started over among them."""
        return (*self._now.earlier, *self._now.turns)

    @property
    def tokens(self) -> int:
        """How many tokens of text stand: the next question's prompt begins with them."""
        stands = self._now.stands
        return 0 if stands is None else len(stands.standing.tokens.ids) + len(stands.pending)

    def reset(self) -> None:
        """Forget all turns, and what they were about."""
        self._now = _Now()

    def start_over(self) -> None:
        """Let go of what stands. The next question sees no turn, but is still searched by what was talked about."""
        self._now = _Now(earlier=self.said)

    def ask(
        self,
        question: str | Request,
        options: QueryOptions | None = None,
        on_text: OnText | None = None,
        going: Callable[[], bool] = lambda: True,
    ) -> Reply:
        """Answer a question behind the turns before it.

        A question that fails, or is interrupted, leaves the conversation as it was.

        Parameters
        ----------
        options : for this question; by default the conversation's.
        on_text : told pieces of the answer as they come.
        going : asked before each token of the answer but the first; False ends it there; what was said stands.

        Raises
        ------
        ContextFullError : the model's context is full; `start_over` makes room.
        UsageError : another instruction (`system`) than the one that stands.
        KvtoolError : as `answer` has it.
        """
        with self._lend() as session, session.lock, session.store.view():
            begun = self.begin(session, question, options)
            first, *more = begun.known
            cache = begun.outcome.fused.cache
            said = generate(session.decoder, cache, first, begun.sampling, on_text, more, going)
            begun.keep()
            return self.take(begun, said)

    def begin(self, session: Session, question: str | Request, options: QueryOptions | None = None) -> Begun:
        """The first half of `ask`, up to the first token. The conversation stays as it was until `take`."""
        options = options or self.options
        request = Request(question) if isinstance(question, str) else question
        with session.lock, session.store.view():
            if not (request.chunks or request.documents or request.search):
                before = [turn.question for turn in self.said]
                request = replace(request, search=search_text(request.question, before, session.finder))
            behind = self._behind(session, options)
            asked = lay_out(session, request, options, behind=behind)
            if self._now.stands is not None:
                self._stand_on(replace(self._now.stands, is_whole=False))
            return begin_answer(session, asked, options)

    def take(self, begun: Begun, said: Generated) -> Reply:
        """The second half of `ask`: the answer becomes a turn."""
        reply = begun.reply(said)
        request = begun.asked.request
        reply.turn = {"number": len(self.turns) + 1, "search": request.search or request.question}
        turn = Turn(reply.question, reply.answer, tuple(reply.places), reply.tokens)
        self._now = replace(self._now, turns=(*self.turns, turn), stands=_Stands.after(begun, reply))
        return reply

    def _behind(self, session: Session, options: QueryOptions) -> Standing | None:
        """What the question comes behind, with the user's turn begun; None: it is the first."""
        stands = self._now.stands
        if stands is None:
            return None
        if stands.session is not session:
            session.warn("the store was opened anew: the conversation starts over", "")
            self.start_over()
            return None
        if options.system != stands.system:
            raise UsageError("the instruction stands at the beginning of the conversation", "start a new one")
        stands = stands.whole()
        self._stand_on(replace(stands, is_whole=False))
        stands = stands.settled()
        self._stand_on(stands)
        return stands.standing

    def _stand_on(self, stands: _Stands) -> None:
        self._now = replace(self._now, stands=stands)


@dataclass(frozen=True, slots=True)
class _Stands:
    """What a conversation holds between two questions.

    Attributes
    ----------
    states : of a model that keeps some, as they are behind the rows of `standing`.
    pending : tokens behind those of `standing` that no row was computed for yet: the answer's last one, and what the
        template has between two turns.
    is_whole : nothing was written behind the rows that stand; else a question may have been begun there, and came to
        nothing.
    """

    session: Session
    system: str | None
    standing: Standing
    states: Marked | None
    pending: Ids
    is_whole: bool = True

    @classmethod
    def after(cls, begun: Begun, reply: Reply) -> _Stands:
        """What a reply leaves. Its answer's rows are those that it was generated by."""
        fused, said, before = reply.fused, reply.generated.ids, begun.asked.behind
        computed = fused.cache.buffers[0].length - fused.plan.length
        chunks = {one.source.chunk_id: len(one.source.ids) for one in fused.plan.chunks if one.source.chunk_id}
        tokens = standing(fused.plan.segments, said[:computed])
        known = {**before.chunks, **chunks} if before is not None else chunks
        pending = (*said[computed:], *turn_header(begun.session.tokenizer))
        stands = Standing(tokens, fused.cache, known)
        return cls(begun.session, begun.options.system, stands, _marked(fused.cache), pending)

    def whole(self) -> _Stands:
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

    def settled(self) -> _Stands:
        """The same with its cache brought to where the next question begins; it has to be whole."""
        if not self.pending:
            return self
        tokens, cache = self.standing.tokens, self.standing.cache
        self.session.decoder.append(self.pending, cache)
        grown = range(len(tokens.ids), len(tokens.ids) + len(self.pending))
        kept = None if tokens.kept is None else (*tokens.kept, *grown)
        stands = replace(self.standing, tokens=Candidate((*tokens.ids, *self.pending), kept=kept))
        return replace(self, standing=stands, states=_marked(cache), pending=())


def _marked(cache: object) -> Marked | None:
    """Where states can be set back to."""
    return cache.mark() if isinstance(cache, StateCache) else None


@dataclass(frozen=True, slots=True)
class _Now:
    """All that a conversation is at one moment. What changes it is one assignment, so Ctrl-C finds it before or after.

    Attributes
    ----------
    turns : those that stand. `earlier`: they stand no more, and still say what is talked about.
    """

    turns: tuple[Turn, ...] = ()
    earlier: tuple[Turn, ...] = ()
    stands: _Stands | None = None
