"""`kvtool chat`: questions that see each other, in a terminal or line by line from a pipe."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvtool.cli.answers import end_answer, show_end, show_sources, show_verified
from kvtool.cli.options import ManyValues, Run, load_session, open_any_store, takes
from kvtool.cli.out import Out, error_json
from kvtool.core.cache.options import LockOptions, StoreOptions
from kvtool.core.common.text import counted
from kvtool.core.errors import (
    EXIT_FAILED,
    EXIT_PARTIAL,
    GateError,
    KvtoolError,
    UsageError,
    did_you_mean,
)
from kvtool.core.fusion.selectors import FUSIONS
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from kvtool.core.remote.options import RemoteOptions

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from kvtool.core.query.conversation import Conversation
    from kvtool.core.query.reply import Reply
    from kvtool.core.session.session import Session


_PROMPT = "> "


def lines_for(out: Out) -> Iterator[str]:
    """Read a terminal's lines where there is one, else those of stdin. Raises UsageError: stdin is closed."""
    if out.is_interactive:
        return typed_lines(out)
    if sys.stdin is None:
        raise UsageError("there is no stdin to read questions from", "start it in a terminal, or give lines on stdin")
    return piped_lines(sys.stdin.buffer)


def piped_lines(stream: Iterable[bytes]) -> Iterator[str]:
    for line in stream:
        try:
            text = line.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise UsageError("a question on stdin is not UTF-8", "convert it, such as with iconv") from error
        if text:
            yield text


def typed_lines(out: Out, **console: Any) -> Iterator[str]:
    """Read lines at a prompt: Enter sends, Alt-Enter begins another line, Ctrl-C drops it, Ctrl-D ends.

    `console`: `input` and `output` of `prompt_toolkit`; the process's own terminal without them.
    """
    session = prompt_session(**console)
    while True:
        out.idle()
        try:
            text: str = session.prompt(_PROMPT)
        except KeyboardInterrupt:
            out.status("Ctrl-D ends the chat")
            continue
        except EOFError:
            return
        if text.strip():
            yield text.strip()


def prompt_session(**console: Any) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    return PromptSession(
        multiline=True,
        prompt_continuation="  ",
        key_bindings=keys,
        completer=WordCompleter([*COMMANDS, *(f"/mode {mode}" for mode in FUSIONS)], sentence=True),
        complete_while_typing=False,
        **console,
    )


# Each is a method of `Chat`, except for /quit.
COMMANDS = {
    "/mode": "set the fusion mode: /mode epic; without a name, show it",
    "/top-k": "set the number of passages per question: /top-k 3",
    "/sources": "show the passages of the last answer",
    "/reset": "start a new conversation, as the word clear does",
    "/help": "show this list",
    "/quit": "end the chat, as Ctrl-D and the words quit and exit do",
}
_WORDS = {"exit": "/quit", "quit": "/quit", "clear": "/reset"}  # asked as questions, they would steer later searches
_KEYS = "Enter asks, Alt-Enter begins another line, Ctrl-C ends an answer, Ctrl-D the chat"


class Chat:
    """A conversation with its commands. `aloud`: confirm what was set, since a person reads it."""

    def __init__(self, out: Out, session: Session, talk: Conversation, *, aloud: bool = False) -> None:
        self._out, self._session, self._talk, self._aloud = out, session, talk, aloud
        self._last: Reply | None = None
        self.answered = self.failed = 0

    def greet(self, place: Path | str) -> None:
        self._out.idle()
        if self._aloud:
            documents = counted(len(self._session.store.sources()), "document")
            self._out.status(f"{documents} of the store {place}, answered by {self._session.identity.model}")
            self._out.status(f"{_KEYS}; /help lists what else there is")

    def take(self, line: str) -> bool:
        """Do what a line says; False: it ends the chat. Raises GateError: the gate refuses the model."""
        line = _WORDS.get(line.removeprefix("/").casefold(), line)
        name, _, rest = line.partition(" ")
        if name == "/quit":
            return False
        try:
            if not line.startswith("/"):
                self._ask(line)
            elif name in COMMANDS:
                getattr(self, "_" + name.removeprefix("/").replace("-", "_"))(rest.strip())
            else:
                raise UsageError(f"there is no command {name}", did_you_mean(name, COMMANDS) or "/help lists them")
        except GateError:
            raise
        except KvtoolError as error:
            self._fail(line, error)
        return True

    def _fail(self, line: str, error: KvtoolError) -> None:
        self.failed += 1
        self._out.idle()
        if self._out.human:
            self._out.error(error)
        else:
            self._out.json({"type": "error", "question": line, "error": error_json(error)})

    # ---- questions ----

    def _ask(self, question: str) -> None:
        with _Interrupts(self._aloud) as interrupts:
            try:
                reply = self._talk.restarting(partial(self._answer, question, interrupts), self._out.warning)
            except KeyboardInterrupt:
                if not self._aloud:
                    raise
                self._out.status("interrupted before the answer began: the question is dropped")
                return
        self._last, self.answered = reply, self.answered + 1
        self._tell(reply)
        if interrupts.is_asked:
            self._out.status("ended by Ctrl-C: the conversation keeps the part that was written")

    def _answer(self, question: str, interrupts: _Interrupts) -> Reply:
        self._out.doing("answering")

        def show(piece: str) -> None:
            interrupts.ends_answer = True
            if self._talk.options.is_streamed(self._out.on_terminal):
                self._out.print(piece, end="")

        return self._talk.ask(question, on_text=show, going=lambda: not interrupts.is_asked)

    def _tell(self, reply: Reply) -> None:
        facts = reply.to_json()
        if not self._out.human:
            self._out.json(facts)
            return
        end_answer(self._out, facts)
        show_end(self._out, facts)
        show_verified(self._out, facts)
        counts, kept = reply.tokens, f"{reply.tokens['resident']:,} tokens kept, " if reply.tokens["resident"] else ""
        computed = counts["recomputed"] + counts["fresh"]
        self._out.status(
            f"{reply.fusion}: first token after {reply.timing_ms['ttft']:.0f} ms; {kept}{counts['reused']:,} reused, "
            f"{computed:,} computed ({counts['recomputed']:,} of passages, {counts['fresh']:,} new)"
        )
        show_sources(self._out, reply.sources)

    # ---- commands ----

    def _set(self, **changes: Any) -> None:
        options = replace(self._talk.options, **changes)
        options.check_of(self._session.identity)
        self._talk.options = options

    def _mode(self, name: str) -> None:
        if name:
            self._set(fusion=name)
        mode = self._talk.options.mode(self._session.identity.keeps_states)
        self._confirm(f"mode: {mode}", "earlier turns stay as they are" if name and self._talk.turns else "")

    def _top_k(self, count: str) -> None:
        if count:
            self._set(top_k=int(count) if count.isdecimal() else count)
        self._confirm(f"passages for a question: {self._talk.options.top_k}")

    def _confirm(self, text: str, more: str = "") -> None:
        if self._aloud:
            self._out.status(f"{text} ({more})" if more else text)

    def _sources(self, _: str) -> None:
        if self._last is None:
            raise UsageError("nothing was answered yet", "ask something first")
        show_sources(self._out, self._last.sources, passages=bool(self._last.sources))

    def _reset(self, _: str) -> None:
        self._talk.reset()
        self._last = None
        self._confirm("a new conversation begins")

    def _help(self, _: str) -> None:
        for name, line in COMMANDS.items():
            self._out.status(f"{name:9} {line}")
        self._out.status(_KEYS)


class _Interrupts:
    """Ctrl-C while a question is answered: before the first word it drops the question, then it ends the answer.

    A second one is raised in any case. `wanted`: a person may press it; else the present handler keeps it.
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


@takes(
    QueryOptions.some(
        *("max_tokens", "cite", "verify", "system", "temperature", "seed", "force", "top_k", "source"),
        *("retriever", "embedder", "fusion", "ratio", "link_tokens", "link", "shift", "level", "set"),
    ),
    StoreOptions,
    RemoteOptions,
    ModelOptions,
    LockOptions,
    examples=("chat", "chat --fusion epic --top-k 3"),
    common="fusion ratio top_k source level max_tokens cite system temperature store model device",
    cls=ManyValues,
)
def chat(run: Run) -> int | None:
    """Hold a conversation about the stored documents."""
    return hold(run)


def hold(run: Run) -> int | None:
    # options of single questions, which a configuration file may set
    options = replace(run.get(QueryOptions), defer=False, slo_ms=None, audit=0.0, explain=False)
    with open_any_store(run) as store:
        from kvtool.core.session.identity import store_identity

        options.check_of(store_identity(store))
        at_once = store.is_front or not run.out.is_interactive  # a person does not wait for storing
        session = load_session(run, store, stores_missed=at_once)
        from kvtool.core.query.conversation import Conversation

        lines = lines_for(run.out)
        chat = Chat(run.out, session, Conversation.over(session, options), aloud=run.out.is_interactive)
        chat.greet(run.get(StoreOptions).place)
        for line in lines:
            if not chat.take(line):
                break
    if chat.failed and not run.out.is_interactive:
        return EXIT_PARTIAL if chat.answered else EXIT_FAILED
    return None
