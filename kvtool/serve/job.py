"""Jobs of a server: a question, its answer, the errors in between, and a fair queue of jobs."""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from kvtool.core.common.machine import is_out_of_memory
from kvtool.core.errors import KvtoolError
from kvtool.core.model.template import Tools
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Reply, ReplyChunk, Request

if TYPE_CHECKING:
    from kvtool.core.model.generate import AnswerSequence, Generated
    from kvtool.core.query.answer import Check, PreparedAnswer
    from kvtool.core.query.conversation import Conversation


RETRY_AFTER = 5  # seconds


class BusyError(KvtoolError):
    """Error of a server that takes no more questions."""

    def __init__(self, message: str) -> None:
        super().__init__(message, f"ask again in {RETRY_AFTER} s")


class TooSlowError(KvtoolError):
    """Error of an answer that took longer than `request_timeout`."""


class LeftError(KvtoolError):
    """Error of a question whose client has left."""


class EndedError(KvtoolError):
    """Error of unfinished work at the server's shutdown."""


Turns = tuple[tuple[str, str], ...]
Client = tuple[str, str]
"""An address, and the `user` that the client names; "" if none."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A question with its options. `turns`: None for a question that belongs to no conversation."""

    request: Request
    options: QueryOptions
    stop: tuple[str, ...] = ()
    turns: Turns | None = None
    must_find: bool = True
    client: Client = ("", "")
    tools: Tools = ()
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool. `partial`: JSON of arguments that were cut off."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")
    partial: str | None = None

    @property
    def json(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False) if self.partial is None else self.partial


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of a prompt, those of them whose KV was in memory or was read and reused unchanged, and of an answer."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer, without its caches.

    Attributes
    ----------
    places : sources, best first, with those of earlier turns.
    facts : the JSON object of `kvtool query --json`, which also reports a repetition.
    steps, stepper : tokens after the first, and how they were decoded.
    others_ms : time that other answers took during its prefill.
    logprobs : as in OpenAI's `logprobs.content`.
    stop : the text of `Ask.stop` that ended it.
    """

    text: str
    finish: Literal["stop", "length"]
    chunks: tuple[ReplyChunk, ...]
    places: tuple[str, ...]
    facts: dict[str, Any]
    steps: int
    stepper: str
    queue_ms: float
    others_ms: float
    warnings: tuple[tuple[str, str], ...] = ()
    logprobs: list[dict[str, Any]] | None = None
    stop: str | None = None
    calls: tuple[Call, ...] = ()

    @property
    def tokens(self) -> TokenCounts:
        tokens, turn = self.facts["tokens"], self.facts.get("turn", {})
        return TokenCounts(tokens["prompt"], tokens["reused"] + turn.get("cached", 0), tokens["generated"])

    @classmethod
    def of(cls, reply: Reply, job: Job, prepared: PreparedAnswer) -> Answer:
        generated = reply.generated
        return cls(
            text=reply.answer,
            finish="stop" if generated.finish == "repeat" else generated.finish,
            chunks=tuple(reply.chunks),
            places=tuple(reply.places),
            facts=reply.to_json(),
            steps=generated.steps,
            stepper=generated.stepper,
            queue_ms=job.queue_ms,
            others_ms=job.others_ms,
            warnings=tuple(job.warnings),
            logprobs=_logprobs(prepared, len(generated.ids)),
            stop=generated.stop if generated.stop in job.ask.stop else None,
        )


def _logprobs(prepared: PreparedAnswer, count: int) -> list[dict[str, Any]] | None:
    if prepared.options.top_logprobs is None:
        return None
    text_of = cache(lambda token: prepared.session.tokenizer.decode([token]))

    def entry(token: int, log_p: float) -> dict[str, Any]:
        text = text_of(token)
        return {
            "token": text,
            "logprob": max(log_p, -9999.0),
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }

    noted = prepared.sampling.noted[:count]
    return [entry(*chosen) | {"top_logprobs": [entry(*one) for one in best]} for chosen, best in noted]


Event = str | Answer | KvtoolError
"""Pieces of an answer's text, then the complete answer or an error."""

Tell = Callable[[Event], None]


@dataclass(slots=True)
class CachedConversation:
    """A question at its first token. `rows`: those of earlier turns that were cached. `reason`: why not all turns were.
    `restored`: turns that were computed again, in `ms`."""

    conversation: Conversation
    prepared: PreparedAnswer
    rows: int
    reason: str
    ms: float
    restored: Sequence[PreparedAnswer]

    def reply(self, generated: Generated, checked: Check | None = None) -> Reply:
        reply = self.conversation.take(self.prepared, generated, checked)
        resident = reply.tokens["resident"]
        cached = min(self.rows, resident)
        reply.turn |= {"number": len(self.conversation.said), "cached": cached, "restored": resident - cached}
        if self.reason:
            reply.turn["reason"] = self.reason
        reply.timing_ms["earlier"] = self.ms
        reply.timing_ms["ttft"] += self.ms
        return reply

    def store_chunks(self) -> None:
        for prepared in self.restored:
            prepared.store_chunks(again=True)
        self.prepared.store_chunks()


class Step(Enum):
    """What a job has come to.

    PREFILL: a turn of its prompt is computed, but not the last one. DECODE: its `sequence` is to be decoded to its end.
    VERIFY: its draft is complete, and full prefill is to check it. DONE: its `answer` is complete; what was computed
    for it is not stored yet.
    """

    PREFILL, DECODE, VERIFY, DONE = auto(), auto(), auto(), auto()


@dataclass(eq=False, slots=True)
class Job:
    """A question, from its arrival to its end.

    Attributes
    ----------
    tell : called with each event, in the engine's thread; must neither wait nor raise.
    arrived, since : times by `time.monotonic()`: of its arrival, and since when it waits.
    steps : its life (`steps_of`), once it has begun.
    sequence : its answer while that is decoded; `answer` is the complete one.
    ended : no more events follow.
    """

    ask: Ask
    tell: Tell
    timeout: float
    arrived: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.monotonic)
    queue_ms: float = 0.0
    others_ms: float = 0.0
    warnings: list[tuple[str, str]] = field(default_factory=list)
    steps: Generator[Step] | None = None
    sequence: AnswerSequence | None = None
    answer: Answer | None = None
    tokens: TokenCounts = TokenCounts()
    left: bool = False
    ended: bool = False

    @property
    def lost(self) -> KvtoolError | None:
        if self.left:
            return LeftError("the client has left")
        if time.monotonic() - self.arrived > self.timeout:
            hint = "ask for fewer tokens or chunks, or let the server allow more time (request_timeout)"
            return TooSlowError(f"the answer took longer than {self.timeout:g} s", hint)
        return None


def as_error(error: Exception) -> KvtoolError:
    if isinstance(error, KvtoolError):
        return error
    if is_out_of_memory(error):
        return KvtoolError("out of memory", "ask for fewer chunks, or let fewer questions run at once (parallel)")
    return KvtoolError(f"unexpected {type(error).__name__}: {error}", "this is a bug in kvtool")


class FairQueue:
    """Queue of jobs in which clients take turns, each client's jobs in their order. Callers use a lock.

    When the queue is full, the client with the most jobs loses its newest one, so that no client blocks the others.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._of: dict[Client, deque[Job]] = {}  # in the order of their turns; none of them is empty

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __iter__(self) -> Iterator[Job]:
        for jobs in self._of.values():
            yield from jobs

    def add(self, job: Job) -> Job | None:
        """Add a job; return the one that is removed for it, which may be the same."""
        own = self._of.setdefault(job.ask.client, deque())
        own.append(job)
        if len(self) <= self._limit:
            return None
        longest = max(self._of.values(), key=len)
        last = longest[-1] if len(longest) > len(own) else job
        self.remove(last)
        return last

    def take(self) -> Job:
        client = next(iter(self._of))
        job = self._of[client][0]
        self.remove(job)
        if client in self._of:
            self._of[client] = self._of.pop(client)
        return job

    def remove(self, job: Job) -> None:
        client = job.ask.client
        self._of[client].remove(job)
        if not self._of[client]:
            del self._of[client]
