"""Trial layout of a conversation's turns: which of them will stand together, before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtool.core.errors import ContextFullError
from kvtool.core.fusion.plan import Candidate
from kvtool.core.model.prompt import turn_header
from kvtool.core.model.tokens import encode
from kvtool.core.query.layout import Asked, Standing, lay_out

if TYPE_CHECKING:
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

    def _laid_out(self, request: Request) -> Asked:
        behind = None
        if self.tokens:
            check_room(self.session, self.tokens)
            behind = Standing(Candidate((0,) * self.tokens), self.session.decoder.new_cache(0), self.chunks)
        return lay_out(self.session, request, self.options, behind=behind, must_find=False)


def chunks_of(asked: Asked) -> dict[bytes, int]:
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
