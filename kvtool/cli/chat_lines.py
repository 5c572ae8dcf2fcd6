"""Where a chat's lines come from: a terminal with history and several lines at a time, or a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvtool.cli import spinner
from kvtool.cli.out import Out
from kvtool.core.common.places import data_dir
from kvtool.core.common.private import make_folder
from kvtool.core.errors import KvtoolError, UsageError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

HISTORY = "chat-history"
_PROMPT = "> "
_PRIVATE = 0o600


class Lines(Protocol):
    """Gives what is typed.

    Attributes
    ----------
    is_terminal : a person types it.
    """

    is_terminal: bool

    def next(self) -> str | None:
        """The next line, or several that belong together; None: there is none. Raises UsageError."""


def is_on_terminal(out: Out) -> bool:
    """Whether a person sits before stdin and stdout."""
    return out.human and all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def lines_for(out: Out) -> Lines:
    """A terminal's lines where there is one, else those of stdin.

    Raises
    ------
    UsageError : stdin is closed.
    """
    if is_on_terminal(out):
        return TerminalLines(out)
    if sys.stdin is None:
        raise UsageError("there is no stdin to read questions from", "start it in a terminal, or give lines on stdin")
    return PipedLines(sys.stdin.buffer)


class PipedLines:
    """One question a line; empty lines are passed over."""

    is_terminal = False

    def __init__(self, stream: Iterable[bytes]) -> None:
        self._stream = iter(stream)

    def next(self) -> str | None:
        for line in self._stream:
            try:
                text = line.decode("utf-8-sig").strip()
            except UnicodeDecodeError as error:
                raise UsageError("a question on stdin is not UTF-8", "convert it, such as with iconv") from error
            if text:
                return text
        return None


class TerminalLines:
    """What is typed at a prompt: Enter sends, Alt-Enter begins another line, Ctrl-C drops it, Ctrl-D ends.

    Parameters
    ----------
    console : `input` and `output` of `prompt_toolkit`; the process's own terminal without them.
    """

    is_terminal = True

    def __init__(self, out: Out, **console: Any) -> None:
        self._out = out
        self._session = _prompt_session(out, **console)

    def next(self) -> str | None:
        with spinner.aside(until_new_words=True):
            pass
        while True:
            try:
                text: str = self._session.prompt(_PROMPT)
            except KeyboardInterrupt:
                self._out.status("Ctrl-D ends the chat")
                continue
            except EOFError:
                return None
            if text.strip():
                return text.strip()


def _prompt_session(out: Out, **console: Any) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.key_binding import KeyBindings

    from kvtool.cli.chat_turns import completions

    class Commands(Completer):
        def get_completions(self, document: Any, complete_event: Any) -> Iterator[Completion]:
            typed = document.text_before_cursor
            for word in completions(typed):
                yield Completion(word, start_position=-len(typed.rpartition(" ")[2]))

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def another_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        history=_history(out),
        multiline=True,
        prompt_continuation="  ",
        key_bindings=keys,
        completer=Commands(),
        complete_while_typing=False,
        **console,
    )


def _history(out: Out) -> Any:
    """What was typed in earlier chats, in a file that is the user's alone; for this chat only where there is none."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class PrivateHistory(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a full disk ends no conversation
                super().store_string(string)

    try:
        return PrivateHistory(str(_private_file(data_dir() / HISTORY)))
    except (OSError, KvtoolError) as error:
        out.detail(f"no history is kept: {error}")
        return InMemoryHistory()


def _private_file(path: Path) -> Path:
    make_folder(path.parent)
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, _PRIVATE)
    os.close(file)
    path.chmod(_PRIVATE)
    return path
