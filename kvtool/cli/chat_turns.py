"""What a chat does with a line: a question is answered, a line that begins with `/` is a command of its own, and so
is one of the words that end or begin a conversation elsewhere."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from kvtool.cli.answered import show_end
from kvtool.cli.explaining import show_explained
from kvtool.cli.json_out import error_json
from kvtool.cli.keyboard import typed_ahead
from kvtool.cli.out import Out
from kvtool.cli.sources import cited, show_sources
from kvtool.core.common.sizes import counted
from kvtool.core.errors import ContextFullError, GateError, KvtoolError, UsageError, did_you_mean
from kvtool.core.fusion.selectors import FUSIONS
from kvtool.core.query.options import QueryOptions

if TYPE_CHECKING:
    from kvtool.core.query.conversation import Conversation
    from kvtool.core.query.reply import Reply
    from kvtool.core.session.session import Session

COMMANDS = {
    "/mode": "how cached passages are fused from now on: /mode epic; alone: say which it is",
    "/top-k": "how many passages are found for a question: /top-k 3",
    "/sources": "the passages of the last answer, with their text",
    "/explain": "which tokens of them were computed again, and why",
    "/reset": "forget the conversation, and begin a new one, as the word clear does",
    "/save": "write the conversation into a file: /save talk.md",
    "/help": "this list",
    "/quit": "end the chat, as Ctrl-D and the words quit and exit do",
}
_WORDS = {"exit": "/quit", "quit": "/quit", "clear": "/reset"}  # asked as questions, they would steer later searches
_KEYS = "Enter asks, Alt-Enter begins another line, Ctrl-C ends an answer, Ctrl-D the chat"


def completions(typed: str) -> list[str]:
    """Words that what is typed may become."""
    command, space, rest = typed.partition(" ")
    if not space:
        return [name for name in COMMANDS if typed and name.startswith(typed)]
    return [mode for mode in FUSIONS if mode.startswith(rest)] if command == "/mode" else []


class Chat:
    """A conversation with its commands; it writes to `out`.

    Parameters
    ----------
    aloud : say how it is used, and confirm what was set: a person reads it.

    Attributes
    ----------
    answered, failed : how many questions were.
    """

    def __init__(self, out: Out, session: Session, talk: Conversation, *, aloud: bool = False) -> None:
        self._out, self._session, self._talk, self._aloud = out, session, talk, aloud
        self._last: Reply | None = None
        self.answered = self.failed = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "/mode": self._mode,
            "/top-k": self._top_k,
            "/sources": self._sources,
            "/explain": self._explain,
            "/reset": self._reset,
            "/save": self._save,
            "/help": self._help,
        }

    def greet(self, place: Path | str) -> None:
        """Say on a terminal what is asked, the store at `place`, and how it goes."""
        if self._aloud:
            documents = counted(len(self._session.store.sources()), "document")
            self._out.status(f"{documents} of the store {place}, answered by {self._session.identity.model}")
            self._out.status(f"{_KEYS}; /help lists what else there is")

    def take(self, line: str) -> bool:
        """Do what a line says; False: it ends the chat.

        Raises
        ------
        GateError : the gate refuses the model, as it would for every question.
        """
        line = _WORDS.get(line.removeprefix("/").casefold(), line)
        name, _, rest = line.partition(" ")
        if name == "/quit":
            return False
        try:
            if not line.startswith("/"):
                self._ask(line)
            elif name in self._commands:
                self._commands[name](rest.strip())
            else:
                raise UsageError(f"there is no command {name}", did_you_mean(name, COMMANDS) or "/help lists them")
        except GateError:
            raise
        except KvtoolError as error:
            self._fail(line, error)
        return True

    def _fail(self, line: str, error: KvtoolError) -> None:
        self.failed += 1
        if self._out.human:
            self._out.error(error)
        else:
            self._out.json({"type": "error", "question": line, "error": error_json(error)})

    # ---- questions ----

    def _ask(self, question: str) -> None:
        with typed_ahead() if self._aloud else nullcontext(), _Interrupts(self._aloud) as interrupts:
            try:
                reply = self._answered(question, interrupts)
            except KeyboardInterrupt:
                if not self._aloud:
                    raise
                self._out.status("interrupted before the answer began: the question is dropped")
                return
        self._last, self.answered = reply, self.answered + 1
        self._tell(reply)
        if interrupts.is_asked:
            self._out.status("ended by Ctrl-C: what was said of the answer stands in the conversation")

    def _answered(self, question: str, interrupts: _Interrupts) -> Reply:
        try:
            return self._answer(question, interrupts)
        except ContextFullError as error:
            if not self._talk.turns:
                raise
            self._out.warning(
                f"{error.message}: it starts over",
                "the model sees none of the turns before; they still steer the search",
            )
            self._talk.start_over()
            return self._answer(question, interrupts)

    def _answer(self, question: str, interrupts: _Interrupts) -> Reply:
        self._out.doing("answering")

        def show(piece: str) -> None:
            interrupts.ends_answer = True
            self._out.print(piece, end="")

        return self._talk.ask(question, on_text=show, going=lambda: not interrupts.is_asked)

    def _tell(self, reply: Reply) -> None:
        """The answer's end, what it cost, and where it is from."""
        if not self._out.human:
            self._out.json(reply.to_json())
            return
        if reply.answer:
            self._out.end_line()
        else:
            self._out.print()
        show_end(self._out, {"finish": reply.finish, "tokens": reply.tokens})
        counts, kept = reply.tokens, f"{reply.tokens['standing']:,} tokens kept, " if reply.tokens["standing"] else ""
        computed = counts["recomputed"] + counts["fresh"]
        self._out.status(
            f"{reply.fusion}: first token after {reply.timing_ms['ttft']:.0f} ms; {kept}{counts['reused']:,} reused, "
            f"{computed:,} computed ({counts['recomputed']:,} of passages, {counts['fresh']:,} new)"
        )
        show_sources(self._out, reply.sources)

    # ---- commands ----

    def _set(self, **changes: object) -> None:
        options = QueryOptions.of(vars(self._talk.options) | changes)
        options.check_of(self._session.identity)
        self._talk.options = options

    def _mode(self, name: str) -> None:
        if name:
            self._set(fusion=name)
        mode = self._talk.options.mode(self._session.identity.keeps_states)
        self._confirm(
            f"mode: {mode}", "what stands of earlier turns stays as it is" if name and self._talk.turns else ""
        )

    def _top_k(self, count: str) -> None:
        if count:
            self._set(top_k=int(count) if count.isdecimal() else count)
        self._confirm(f"passages for a question: {self._talk.options.top_k}")

    def _confirm(self, text: str, more: str = "") -> None:
        if self._aloud:
            self._out.status(f"{text} ({more})" if more else text)

    def _answered_last(self) -> Reply:
        if self._last is None:
            raise UsageError("nothing was answered yet", "ask something first")
        return self._last

    def _sources(self, _: str) -> None:
        reply = self._answered_last()
        show_sources(self._out, reply.sources, passages=bool(reply.sources))

    def _explain(self, _: str) -> None:
        from kvtool.core.query.explain import explain, explain_attention

        reply = self._answered_last()
        reply.explained = explain(reply.fused, self._session.tokenizer)
        reply.backends = explain_attention(self._session.decoder, reply.fused)
        show_explained(self._out, reply)
        if reply.turn["search"] != reply.question:
            self._out.status(f"searched by: {reply.turn['search']}")
        if reply.again:
            places = ", ".join(dict.fromkeys(map(cited, reply.again)))
            self._out.status(f"found, and kept from earlier turns: {places}")

    def _reset(self, _: str) -> None:
        self._talk.reset()
        self._last = None
        self._confirm("a new conversation begins")

    def _save(self, name: str) -> None:
        path = Path(name or time.strftime("chat-%Y%m%d-%H%M%S.md")).expanduser()
        if not self._talk.said:
            raise UsageError("nothing was said yet", "ask something first")
        parts = [
            f"**{turn.question}**\n\n{turn.answer}\n\n" + "".join(f"- {place}\n" for place in turn.places)
            for turn in self._talk.said
        ]
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write("\n".join(parts))
        except FileExistsError:
            raise UsageError(f"{path} exists", "name another file: /save NAME.md") from None
        except OSError as error:
            raise KvtoolError(
                f"{path} cannot be written: {error.strerror}", "name another file: /save NAME.md"
            ) from error
        self._out.status(f"saved as {path}")

    def _help(self, _: str) -> None:
        for name, line in COMMANDS.items():
            self._out.status(f"{name:9} {line}")
        self._out.status(_KEYS)


class _Interrupts:
    """Ctrl-C while a question is answered: before the first word it drops the question, then it ends the answer.

    A second one is raised in any case.

    Parameters
    ----------
    wanted : a person may press it; else it is left to whoever handles it now.

    Attributes
    ----------
    ends_answer : it ends the answer. `is_asked`: it did.
    """

    def __init__(self, wanted: bool) -> None:
        self.ends_answer = self.is_asked = False
        self._wanted = wanted and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> _Interrupts:
        if self._wanted:
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *error: object) -> None:
        if self._wanted:
            signal.signal(signal.SIGINT, self._before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self.ends_answer or self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True
