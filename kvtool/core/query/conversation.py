"""A conversation: each question sees the turns before it, and goes on from the prompt cache that they left.

What stands in the cache is neither read nor computed again. Behind it come, as the model's chat template has them: the
end of the answer's turn, the passages that are new, the question. So a turn computes its own text and what its mode
computes of the new passages, as `--defer` does in a later round (fusion/engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtool.core.common.types import Ids
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.model.generate import Generated, generate
from kvtool.core.model.tokens import encode
from kvtool.core.query.answer import OnText, PreparedAnswer, begin_answer
from kvtool.core.query.layout import CachedPrefix, lay_out
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Reply, Request
from kvtool.core.query.turns import ConversationState, Trial, Turn, TurnLayout, check_room, marked

if TYPE_CHECKING:
    from kvtool.core.query.reply import Request
    from kvtool.core.retrieval.finder import Finder
    from kvtool.core.session.session import Session


Lend = Callable[[], AbstractContextManager["Session"]]


class Conversation:
    """Questions to one store that see each other. It holds its prompt cache until it is let go of or starts over.

    One question is answered at a time. Several conversations may share a session: each has a cache of its own.

    Parameters
    ----------
    lend : gives the session for one question.
    options : of all questions that bring none of their own.
    by_text : answers stand as their text is tokenised, not as they were generated: so they do where nothing but the
        text is left of them.
    """

    def __init__(self, lend: Lend, options: QueryOptions | None = None, by_text: bool = False) -> None:
        self._lend, self._by_text = lend, by_text
        self.options = options or QueryOptions()
        self._now = _Now()

    @classmethod
    def over(cls, session: Session, options: QueryOptions | None = None, by_text: bool = False) -> Conversation:
        """A conversation over a session that stays open."""
        return cls(lambda: nullcontext(session), options, by_text)

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
        """Return the number of text tokens that the next question's prompt begins with."""
        stands = self._now.stands
        return 0 if stands is None else len(stands.standing.tokens.ids) + len(stands.pending)

    @property
    def rows(self) -> int:
        """Return how many of these have rows in the prompt cache: the others are computed with the next question."""
        return 0 if self._now.stands is None else len(self._now.stands.standing.tokens.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the prompt cache that it holds."""
        return 0 if self._now.stands is None else self._now.stands.standing.cache.nbytes

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

    def begin(
        self,
        session: Session,
        question: str | Request,
        options: QueryOptions | None = None,
        must_find: bool = True,
    ) -> PreparedAnswer:
        """The first half of `ask`, up to the first token. The conversation stays as it was until `take`.

        Parameters
        ----------
        must_find : the first question needs passages.
        """
        options = options or self.options
        request = Request(question) if isinstance(question, str) else question
        with session.lock, session.store.view():
            request = searched(session, request, [turn.question for turn in self.said])
            behind = self._behind(session, options)
            asked = lay_out(session, request, options, behind=behind, must_find=must_find)
            if self._now.stands is not None:
                self._stand_on(replace(self._now.stands, is_whole=False))
            begun = begin_answer(session, asked, options, marked=True)
            if self._by_text:
                marked(begun.outcome.fused.cache)  # where the answer begins
            return begun

    def take(self, begun: PreparedAnswer, said: Generated) -> Reply:
        """The second half of `ask`: the answer becomes a turn."""
        reply = begun.reply(said)
        request = begun.asked.request
        reply.turn = {"number": len(self.turns) + 1, "search": request.search or request.question}
        turn = Turn(reply.question, reply.answer, tuple(reply.places), reply.tokens)
        ids = self._ids_of(begun, reply.answer) if self._by_text else said.ids
        self._add(turn, begun, ConversationState.after(begun, said.ids, ids))
        return reply

    def give(self, session: Session, question: Request, answer: str) -> PreparedAnswer:
        """Add a turn whose answer is known: as if it had been said. It need not have found anything."""
        begun = self.begin(session, question, must_find=False)
        counts = begun.outcome.fused.tokens.to_json()
        places = tuple(dict.fromkeys(chunk.place for chunk in begun.chunks))
        ids = self._ids_of(begun, answer)
        self._add(
            Turn(question.question, answer, places, counts), begun, ConversationState.after(begun, begun.known, ids)
        )
        return begun

    def finds_the_same(self, session: Session) -> bool:
        """Return True if its questions would be answered from the same passages now, at the same levels."""
        stands = self._now.stands
        if stands is None or stands.session is not session:
            return False
        with session.lock, session.store.view():
            return all(laid.is_so(session, self.options, stands.standing.cache) for laid in self._now.laid)

    def skip(self, turns: Sequence[tuple[str, str]]) -> None:
        """Let go of what stands, and note further turns that will not stand either: they say what is talked about."""
        self._now = _Now(earlier=(*self.said, *(Turn(question, answer, (), {}) for question, answer in turns)))

    def trial(self, session: Session, options: QueryOptions) -> Trial:
        """Return a trial of what would follow the turns that stand."""
        stands = self._now.stands
        return Trial(session, options, self.tokens, {} if stands is None else stands.standing.chunks)

    def _ids_of(self, begun: PreparedAnswer, answer: str) -> Ids:
        return tuple(encode(begun.session.tokenizer, answer))

    def _add(self, turn: Turn, begun: PreparedAnswer, stands: ConversationState) -> None:
        now = self._now
        self._now = replace(now, turns=(*now.turns, turn), laid=(*now.laid, TurnLayout.of(begun)), stands=stands)

    def _behind(self, session: Session, options: QueryOptions) -> CachedPrefix | None:
        """Return the cached prefix of the question, with the user's turn begun; None for the first question."""
        stands = self._now.stands
        if stands is None:
            return None
        if stands.session is not session:
            session.warn("the store was opened anew: the conversation starts over", "")
            self.start_over()
            return None
        if options.system != stands.system:
            raise UsageError("the instruction is at the beginning of the conversation", "start a new one")
        session.refresh()
        if not all(laid.still_stands(session, options) for laid in self._now.laid):
            self._go_through_anew(session)
            return self._behind(session, options)
        check_room(session, self.tokens)
        stands = stands.whole()
        self._stand_on(replace(stands, is_whole=False))
        stands = stands.settled()
        self._stand_on(stands)
        return stands.standing

    def _go_through_anew(self, session: Session) -> None:
        """Replace what stands by the same turns over the store as it is now; where that fails, the conversation starts
        over."""
        before = self._now
        session.warn("the store has another instruction or other records now: the turns are gone through anew", "")
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

    def _stand_on(self, stands: ConversationState) -> None:
        self._now = replace(self._now, stands=stands)


@dataclass(frozen=True, slots=True)
class _Now:
    """All that a conversation is at one moment. What changes it is one assignment, so Ctrl-C finds it before or after.

    Attributes
    ----------
    turns : those that stand. `earlier`: they stand no more, and still say what is talked about.
    laid : how those that stand were laid out.
    """

    turns: tuple[Turn, ...] = ()
    earlier: tuple[Turn, ...] = ()
    laid: tuple[TurnLayout, ...] = ()
    stands: ConversationState | None = None


# A vague follow-up is searched with the questions before it, as `samples/benchmarks/follow_ups.py` measured. Answers
# are left out: those of small models mislead the search.
RARE = 0.05  # share of the chunks that a rare word stands in at most
ENOUGH = 4  # rare words of a question that is searched alone
NAMES = 3  # rare words of a question that says what is talked about
BACK = 16  # questions back at most: looking through all of them at each turn is quadratic


def searched(session: Session, request: Request, before: Sequence[str]) -> Request:
    """Return a request with the text that it is searched by, where it names no passages itself."""
    if request.chunks or request.documents or request.search:
        return request
    return replace(request, search=search_text(request.question, before, session.finder))


def search_text(question: str, before: Sequence[str], finder: Finder) -> str:
    """The text that a question is searched by.

    One that has fewer than `ENOUGH` rare words is searched together with those before it, back to the last that says
    what is talked about. It counts twice, so that a new subject is found beside the old one.

    Parameters
    ----------
    before : the questions before it, the last one last.
    """
    if not before or finder.rare_words(question, RARE) >= ENOUGH:
        return question
    context: list[str] = []
    for earlier in before[: -BACK - 1 : -1]:
        context.insert(0, earlier)
        if finder.rare_words(earlier, RARE) >= NAMES:
            break
    return " ".join([*context, question, question])
