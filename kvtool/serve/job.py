"""A question on its way through a server: what was asked, what comes of it, and what may go wrong on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kvtool.core.common.machine import is_out_of_memory
from kvtool.core.errors import KvtoolError
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Reply, ReplyChunk, Request

if TYPE_CHECKING:
    from kvtool.core.model.generate import AnswerSequence, Generated
    from kvtool.core.query.answer import PreparedAnswer
    from kvtool.core.query.conversation import Conversation
    from kvtool.core.session.session import Session


class BusyError(KvtoolError):
    """The server takes no more questions just now.

    Parameters
    ----------
    retry_after : seconds after which it may be worth asking again.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message, f"ask again in {retry_after} s")
        self.retry_after = retry_after


class TooSlowError(KvtoolError):
    """An answer has taken as long as one may take."""


class LeftError(KvtoolError):
    """Whoever asked has left."""


class EndedError(KvtoolError):
    """The server ends before the work is done."""


Turns = tuple[tuple[str, str], ...]
Client = tuple[str, str]
"""Who asks: an address, and the `user` that it names, "" where it names none."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A question with its options.

    Attributes
    ----------
    stop : texts that end the answer.
    turns : questions and answers before it; None: it is a single question, and none will follow.
    client : whose it is: clients come to their turns one after another.
    """

    request: Request
    options: QueryOptions
    stop: tuple[str, ...] = ()
    turns: Turns | None = None
    client: Client = ("", "")


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, without what it was made with in memory.

    Attributes
    ----------
    finish : how it ended, as the API has it: `stop`, or `length` where it was cut off; `facts` tell a repetition.
    chunks : what was loaded for it. `places`: where it is from, best first, what stood of earlier turns included.
    facts : what `kvtool query --json` says of it.
    steps, generate_ms, stepper : tokens behind the first, the time that they took among others', and how.
    queue_ms : how long the question waited for its turn. `others_ms`: how long its prompt stood still for answers that
        were being written.
    warnings : texts and hints of what should be known although there is an answer.
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

    @classmethod
    def of(cls, reply: Reply, job: Job) -> Answer:
        """The answer of a reply, whose prompt can be let go of."""
        said = reply.generated
        finish: Literal["stop", "length"] = "stop" if said.finish == "repeat" else said.finish
        return cls(
            text=reply.answer,
            finish=finish,
            chunks=tuple(reply.chunks),
            places=tuple(reply.places),
            facts=reply.to_json(),
            steps=said.steps,
            stepper=said.stepper,
            queue_ms=job.queue_ms,
            others_ms=job.others_ms,
            warnings=tuple(job.warnings),
        )


Event = str | Answer | KvtoolError
"""What comes of a question: pieces of its answer's text, then the whole answer, or an error."""

Tell = Callable[[Event], None]


@dataclass(slots=True)
class Talk:
    """A question on its way, with the conversation that it belongs to.

    Attributes
    ----------
    kept : rows that stood before. `reason`: why not all turns stood; "": they did, or there are none.
    ms : what bringing those turns back has taken. `gone_through`: of them, those that had to be.
    """

    talk: Conversation
    begun: PreparedAnswer
    kept: int
    reason: str
    ms: float
    gone_through: Sequence[PreparedAnswer]

    def reply(self, said: Generated) -> Reply:
        """Return the reply of the answer, which becomes a turn."""
        reply = self.talk.take(self.begun, said)
        stands = reply.tokens["standing"]
        kept = min(self.kept, stands)
        reply.turn |= {"number": len(self.talk.said), "kept": kept, "renewed": stands - kept}
        if self.reason:
            reply.turn["reason"] = self.reason
        reply.timing_ms["earlier"] = self.ms
        reply.timing_ms["ttft"] += self.ms
        return reply

    def keep(self) -> None:
        """Store what was missing in the store."""
        for begun in self.gone_through:
            begun.keep(again=True)
        self.begun.keep()


@dataclass(eq=False, slots=True)
class Job:
    """A question, from its arrival to its end.

    Attributes
    ----------
    tell : called with each event, in the answering thread; it must not wait. Raises LeftError if the client has left.
    arrived : by `time.monotonic()`.
    steps : bring it to the first token, over `session`; None before the first of them. `aside`: when the last one
        ended, by `time.monotonic()`.
    begun, sequence : once its prompt is there; `talk`: the conversation that it is a turn of.
    left : the client does not wait any more.
    failed : the error of `tell`; `ended`: no more events follow.
    """

    ask: Ask
    tell: Tell
    patience: float
    arrived: float = field(default_factory=time.monotonic)
    queue_ms: float = 0.0
    others_ms: float = 0.0
    warnings: list[tuple[str, str]] = field(default_factory=list)
    steps: Generator[PreparedAnswer | None] | None = None
    session: Session | None = None
    aside: float = 0.0
    begun: PreparedAnswer | None = None
    sequence: AnswerSequence | None = None
    talk: Talk | None = None
    left: bool = False
    failed: KvtoolError | None = None
    ended: bool = False

    @property
    def lost(self) -> KvtoolError | None:
        """Why it need not go on; None: it has to."""
        if self.failed is not None:
            return self.failed
        if self.left:
            return LeftError("the client has left")
        if time.monotonic() - self.arrived > self.patience:
            hint = "ask for fewer tokens or chunks, or start the server with a longer --request-timeout"
            return TooSlowError(f"the answer took longer than {self.patience:g} s", hint)
        return None


def as_error(error: Exception) -> KvtoolError:
    """Whatever went wrong, as a client is told it."""
    if isinstance(error, KvtoolError):
        return error
    if is_out_of_memory(error):
        return KvtoolError("out of memory", "ask for fewer chunks, or serve with a smaller --parallel")
    return KvtoolError(f"unexpected {type(error).__name__}: {error}", "this is a bug in kvtool")
