"""Conversations between their requests: a client sends all turns each time, and what stands of them is kept here.

Kept or not, the answer is that of `Conversation` behind the same turns: where nothing is kept of them, they are gone
through anew, each with the passages that its question finds and with its answer as the client has it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from kvtool.core.errors import ContextFullError
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.serve.job import Ask, Job, Talk, Turns

if TYPE_CHECKING:
    from kvtool.core.query.answer import PreparedAnswer
    from kvtool.core.query.conversation import Conversation
    from kvtool.core.session.session import Session

# Nothing nearer: who has the key could ask by guesses which questions others have asked.
_NOT_HELD = "none is held with these turns and options"
_FREE = ("temperature", "seed", "explain", "token_ids")  # options that leave what stands as it is


@dataclass(frozen=True, slots=True)
class _Key:
    """All that what stands is made of, the store and the model aside."""

    options: QueryOptions
    chunks: tuple[str, ...]
    documents: tuple[str, ...]
    turns: Turns

    @classmethod
    def of(cls, options: QueryOptions, request: Request, turns: Turns) -> _Key:
        """The key of a conversation; what is no matter is as nobody has set it."""
        plain = QueryOptions()
        free = {name: getattr(plain, name) for name in _FREE}
        return cls(replace(options, **free), request.chunks, request.documents, turns)

    def begins(self, other: _Key) -> bool:
        """Return whether another conversation goes on from this one, or is this one."""
        turns = other.turns[: len(self.turns)]
        return self.turns == turns and replace(other, turns=turns) == self


class Talks:
    """Holds what stands of conversations, up to a number of bytes; what was not asked for longest goes first.

    One thread uses it; others may look at its length and its bytes.

    Parameters
    ----------
    limit : bytes of prompt caches; 0: nothing is held.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[_Key, tuple[Conversation, int]] = OrderedDict()
        self._session: Session | None = None
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def begin(self, session: Session, ask: Ask) -> Iterator[Talk | None]:
        """Bring a question to the first token of its answer, behind the turns before it.

        Where it fails, or is closed, what stands of the turns is held all the same.
        Raises as `Conversation.begin` does.

        Yields
        ------
        None after each turn, where something else may be done; at last the question with its conversation.
        """
        if session is not self._session:
            self.clear()
            self._session = session
        turns, options = ask.turns or (), ask.options
        if turns and (options.defer or options.slo_ms is not None):
            session.warn("`defer` and `slo_ms` are for a first question: they do not apply after other turns", "")
            options = replace(options, defer=False, slo_ms=None)
        clock = _Clock()
        talk, reason = self._taken(session, _Key.of(options, ask.request, turns))
        kept, gone_through = talk.rows, []
        try:
            if ahead := turns[len(talk.said) :]:
                yield from clock.paused(_skip_what_will_not_stand(session, talk, ask.request, ahead, options))
            for question, answer in turns[len(talk.said) :]:
                request = replace(ask.request, question=question)
                gone_through.append(_behind(session, talk, partial(talk.give, session, request, answer)))
                yield from clock.paused([None])
            ms = clock.ms
            begun = _behind(session, talk, partial(talk.begin, session, ask.request, options))
        except BaseException:
            self.hold(talk, ask.request)
            raise
        yield Talk(talk, begun, kept, reason, ms, gone_through)

    def hold(self, talk: Conversation, request: Request) -> None:
        """Hold what stands of a conversation until it goes on.

        Parameters
        ----------
        request : the last one: the chunks or documents that it names hold for the whole conversation.
        """
        size, options = talk.nbytes, talk.options
        if not talk.turns or size > self._limit or options.defer or options.slo_ms is not None:
            return
        key = _Key.of(options, request, tuple((turn.question, turn.answer) for turn in talk.said))
        self._take(key)
        self._held[key] = talk, size
        self.nbytes += size
        while self.nbytes > self._limit:
            self._take(next(iter(self._held)))

    def clear(self) -> None:
        """Let go of all."""
        self._held.clear()
        self.nbytes = 0

    def _taken(self, session: Session, key: _Key) -> tuple[Conversation, str]:
        """The conversation that stands behind these turns or the first of them, or a new one; why not behind all."""
        from kvtool.core.query.conversation import Conversation

        count = max((len(held.turns) for held in self._held if held.begins(key)), default=0)
        held = self._take(replace(key, turns=key.turns[:count])) if count else None
        reason = _NOT_HELD if key.turns else ""
        if held is not None:
            if held.finds_the_same(session):
                return held, "" if count == len(key.turns) else f"what is held ends with turn {count}"
            reason = "other passages are found now, or read otherwise"
        return Conversation.over(session, key.options, by_text=True), reason

    def _take(self, key: _Key) -> Conversation | None:
        held = self._held.pop(key, None)
        if held is None:
            return None
        self.nbytes -= held[1]
        return held[0]


def _behind(session: Session, talk: Conversation, turn: Callable[[], PreparedAnswer]) -> PreparedAnswer:
    """Begin a turn; where it is too long for the model behind the others, it starts over, as a chat does."""
    try:
        return turn()
    except ContextFullError as error:
        if not talk.turns:
            raise
        hint = "the model sees none of the turns before; they still steer the search"
        session.warn(f"{error.message}: it starts over", hint)
        talk.start_over()
        return turn()


def _skip_what_will_not_stand(
    session: Session, talk: Conversation, request: Request, turns: Turns, options: QueryOptions
) -> Iterator[None]:
    """Find by their lengths which turns will not stand behind the question, and go on without them: nothing is computed
    that the conversation would let go of. Between two turns others may go on."""
    from kvtool.core.query.conversation import searched
    from kvtool.core.query.turns import Start, last_start

    said = [turn.question for turn in talk.said]
    asked = [*said, *(question for question, _ in turns)]
    found = (
        (searched(session, replace(request, question=question), asked[: len(said) + number]), answer)
        for number, (question, answer) in enumerate([*turns, (request.question, "")])
    )
    start = Start()
    for start in last_start(talk.trial(session, options), found):  # noqa: B007 (the last one counts)
        yield
    if start.full is not None:
        hint = "the model sees none of the turns before; they still steer the search"
        session.warn(f"{start.full.message}: it starts over", hint)
        talk.skip(turns[: start.skipped])


class _Clock:
    """The milliseconds of a work that is put aside now and then."""

    def __init__(self) -> None:
        self._done, self._since = 0.0, time.perf_counter()

    @property
    def ms(self) -> float:
        """So far, without the time in which it was put aside."""
        return (self._done + time.perf_counter() - self._since) * 1e3

    def paused(self, steps: Iterable[None]) -> Iterator[None]:
        """Yield between some steps, which do not count in between."""
        for _ in steps:
            self._done += time.perf_counter() - self._since
            yield
            self._since = time.perf_counter()


def begun_for(job: Job, session: Session, talks: Talks) -> Generator[PreparedAnswer | None]:
    """Bring a job to the first token of its answer, behind the turns of its conversation if it has one.

    Yields
    ------
    None where something else may be done before it goes on; at last the answer that has begun.
    """
    from kvtool.core.query.answer import begin_answer
    from kvtool.core.query.layout import lay_out

    ask = job.ask
    if ask.turns is None:
        with session.lock, session.store.view():
            begun = begin_answer(session, lay_out(session, ask.request, ask.options), ask.options)
        yield begun
        return
    for talk in talks.begin(session, ask):
        job.talk = talk
        yield None if talk is None else talk.begun
