"""Cache of conversations between requests. A client sends all turns each time; the prompt of cached turns is reused.

A cached conversation answers as an uncached one does: turns that are not cached are computed again, each with the
chunks that its question finds and the answer that the client sends.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from kvtool.core.model.options import SamplingOptions
from kvtool.core.options.option import options_of
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.serve.job import Ask, CachedConversation, Turns

if TYPE_CHECKING:
    from kvtool.core.query.conversation import Conversation
    from kvtool.core.session.session import Session

# Not more precise: a client with the same key could find out by guesses which questions others have asked.
_NOT_HELD = "none is held with these turns and options"
# Options that do not change the prompt.
_FREE = ({*options_of(SamplingOptions)} - {"max_tokens"}) | {"explain", "token_ids"}


@dataclass(frozen=True, slots=True)
class _Key:
    """Inputs of a conversation's prompt, except for the store and the model; and its owner, as in `Request`."""

    owner: str | None
    options: QueryOptions
    chunks: tuple[str, ...]
    documents: tuple[str, ...]
    turns: Turns

    @classmethod
    def of(cls, options: QueryOptions, request: Request, turns: Turns) -> _Key:
        plain = QueryOptions()
        free = {name: getattr(plain, name) for name in _FREE}
        return cls(request.owner, replace(options, **free), request.chunks, request.documents, turns)

    def begins(self, other: _Key) -> bool:
        turns = other.turns[: len(self.turns)]
        return self.turns == turns and replace(other, turns=turns) == self


class ConversationCache:
    """Least recently used conversations, up to `limit` bytes, of one thread; others may read its length and bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[_Key, tuple[Conversation, int]] = OrderedDict()
        self._session: Session | None = None
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def begin(self, session: Session, ask: Ask) -> Iterator[CachedConversation | None]:
        """Bring a question with earlier turns to its first token. Yields None after each turn, for other work.

        If that fails, or is closed, the conversation is cached all the same.
        """
        if session is not self._session:
            self.clear()
            self._session = session
        turns, options = ask.turns or (), ask.options
        if turns and (options.defer or options.slo_ms is not None):
            session.warn("`defer` and `slo_ms` apply to a first question only, and are ignored after other turns", "")
            options = replace(options, defer=False, slo_ms=None)
        clock = _Clock()
        conversation, reason = self._longest(session, _Key.of(options, ask.request, turns))
        rows, restored = conversation.rows, []
        try:
            if ahead := turns[len(conversation.said) :]:
                yield from clock.paused(_skip_forgotten(session, conversation, ask.request, ahead, options))
            for question, answer in turns[len(conversation.said) :]:
                request = replace(ask.request, question=question, prefill="")
                give = partial(conversation.give, session, request, answer)
                restored.append(conversation.restarting(give, session.warn))
                yield from clock.paused([None])
            ms = clock.ms
            begin = partial(conversation.begin, session, ask.request, options, ask.must_find)
            prepared = conversation.restarting(begin, session.warn)
        except BaseException:
            self.hold(conversation, ask.request)
            raise
        yield CachedConversation(conversation, prepared, rows, reason, ms, restored)

    def hold(self, conversation: Conversation, request: Request) -> None:
        """Cache a conversation. `request`: its last one, whose chunks or documents apply to the whole conversation."""
        size, options = conversation.nbytes, conversation.options
        if request.prefill:  # its turn has the answer without its beginning
            return
        if not conversation.turns or size > self._limit or options.defer or options.slo_ms is not None:
            return
        key = _Key.of(options, request, tuple((turn.question, turn.answer) for turn in conversation.said))
        self._take(key)
        self._held[key] = conversation, size
        self.nbytes += size
        while self.nbytes > self._limit:
            self._take(next(iter(self._held)))

    def clear(self) -> None:
        self._held.clear()
        self.nbytes = 0

    def _longest(self, session: Session, key: _Key) -> tuple[Conversation, str]:
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
        conversation, size = self._held.pop(key, (None, 0))
        self.nbytes -= size
        return conversation


def _skip_forgotten(
    session: Session, conversation: Conversation, request: Request, turns: Turns, options: QueryOptions
) -> Iterator[None]:
    """Skip the turns that the context will not hold in the end, found by their lengths."""
    from kvtool.core.query.conversation import FORGOTTEN, searched

    said = [turn.question for turn in conversation.said]
    asked = [*said, *(question for question, _ in turns)]
    trial = conversation.trial(session, options)
    for number, (question, answer) in enumerate([*turns, (request.question, "")]):
        trial.add(searched(session, replace(request, question=question), asked[: len(said) + number]), answer)
        yield
    if trial.full is not None:
        session.warn(f"{trial.full.message}: it starts over", FORGOTTEN)
        conversation.skip(turns[: trial.skipped])


class _Clock:
    def __init__(self) -> None:
        self._done, self._since = 0.0, time.perf_counter()

    @property
    def ms(self) -> float:
        return (self._done + time.perf_counter() - self._since) * 1e3

    def paused(self, steps: Iterable[None]) -> Iterator[None]:
        """Yield between some steps; the time until the caller continues does not count."""
        for _ in steps:
            self._done += time.perf_counter() - self._since
            yield
            self._since = time.perf_counter()
