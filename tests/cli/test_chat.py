"""`kvtool chat`: from a pipe, at a prompt, its commands, Ctrl-C, and in a real terminal."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from kvtool.cli import chat as module
from kvtool.cli.chat import COMMANDS, Chat, piped_lines, prompt_session, typed_lines
from kvtool.cli.out import Out
from kvtool.core.cache.store import Store
from kvtool.core.query.conversation import Conversation
from kvtool.core.query.options import QueryOptions
from kvtool.core.session.session import Session
from tests.cli.working import QUESTION, environment, kvtool

SHORT = ("--max-tokens", "4", "--top-k", "2")


@pytest.mark.slow
def test_lines_of_a_pipe_are_questions_that_see_each_other(store: Path) -> None:
    asked = f"{QUESTION}\n\n/mode epic\nAnd when?\n/quit\nnever asked\n"
    done = kvtool("chat", "--store", store, *SHORT, "--json", stdin=asked.encode()).fine()
    first, second = done.lines
    assert (first["turn"]["number"], second["turn"]["number"]) == (1, 2)
    assert first["tokens"]["resident"] == 0
    assert second["tokens"]["resident"] > first["tokens"]["prompt"]
    assert second["fusion"] == "epic"
    assert QUESTION in second["turn"]["search"]


def test_answers_are_on_stdout_and_the_rest_on_stderr(store: Path) -> None:
    done = kvtool("chat", "--store", store, *SHORT, stdin=f"{QUESTION}\nAnd when?\n".encode()).fine()
    assert "sources: " not in done.out
    assert done.err.count("sources: ") == 2
    assert done.err.count("tokens kept") == 1
    assert "Ctrl" not in done.err  # stdin is no terminal


def test_a_chat_cites_after_each_answer(store: Path, says: Callable[[str], None]) -> None:
    says("Baker D has built it in 1783.")
    out = kvtool("chat", "--store", store, "--cite", "--max-tokens", "80", stdin=f"{QUESTION}\n".encode()).fine().out
    answer, cited = out.splitlines()
    assert answer == "Baker D has built it in 1783. [1]"
    assert cited.startswith("[1] ")


def test_a_line_that_fails_stops_no_other(store: Path) -> None:
    done = kvtool("chat", "--store", store, *SHORT, "--json", stdin=f"zzyzx\n{QUESTION}\n/nope\n".encode())
    assert done.code == 3
    failed, answered, unknown = done.lines
    assert failed["type"] == unknown["type"] == "error"
    assert failed["question"] == "zzyzx"
    assert answered["turn"]["number"] == 1
    kvtool("chat", "--store", store, *SHORT, stdin=b"zzyzx\n").failed(1, "no chunk matches")
    kvtool("chat", "--store", store, stdin=b"").fine()


def test_what_is_no_text_or_no_store_is_said(store: Path, tmp_path: Path) -> None:
    kvtool("chat", "--store", store, stdin=b"\xff\xfe\xff\n").failed(2, "not UTF-8")
    kvtool("chat", "--store", tmp_path / "none", stdin=b"x\n").failed(10)


def test_settings_for_single_questions_are_left_aside(store: Path, tmp_path: Path) -> None:
    config = tmp_path / "kvtool.toml"
    config.write_text("[query]\ndefer = true\naudit = 1.0\n", "utf-8")
    done = kvtool("chat", "--store", store, *SHORT, "--config", config, "--json", stdin=QUESTION.encode()).fine()
    assert "rounds" not in done.json


class Screen:
    def __init__(self, session: Session, aloud: bool = True) -> None:
        self.stdout, self.stderr = io.StringIO(), io.StringIO()
        self.out = Out(stdout=self.stdout, stderr=self.stderr)
        self.talk = Conversation.over(session, QueryOptions(max_tokens=6, top_k=2))
        self.chat = Chat(self.out, session, self.talk, aloud=aloud)

    def says(self, line: str) -> str:
        self.stderr.seek(0)
        self.stderr.truncate()
        assert self.chat.take(line)
        return self.stderr.getvalue()


@pytest.fixture
def screen(store: Path) -> Iterator[Screen]:
    with Store.open(store) as opened:
        yield Screen(Session.open(opened))


def test_commands(screen: Screen) -> None:
    assert all(name in screen.says("/help") for name in COMMANDS)
    assert "nothing was answered yet" in screen.says("/sources")
    assert "sources: " in screen.says(QUESTION)
    assert "mode: union" in screen.says("/mode")
    assert "earlier turns stay as they are" in screen.says("/mode reuse")
    assert "'foo' is none of" in screen.says("/mode foo")
    assert "for a question: 1" in screen.says("/top-k 1")
    assert "top_k" in screen.says("/top-k nought")
    assert screen.talk.options.top_k == 1
    assert "mill2.md" in screen.says("/sources")
    assert "baker" in screen.stderr.getvalue()  # the passage itself
    again = screen.says("And when?")
    assert "reuse: first token" in again
    assert "tokens kept" in again
    assert "did you mean '/reset'" in screen.says("/rest")
    assert "new conversation" in screen.says("/reset")
    assert screen.talk.tokens == 0
    assert all(not screen.chat.take(word) for word in ("/quit", "quit", "Exit", "/exit"))


def test_words_that_are_commands_elsewhere_are_no_questions(screen: Screen) -> None:
    screen.says(QUESTION)
    assert "a new conversation begins" in screen.says("clear")
    assert not screen.talk.said
    screen.says(QUESTION)
    for command in ("/mode reuse", "/top-k 1", "/nope"):
        screen.says(command)
    screen.says("And when?")
    assert screen.chat._last.turn["search"] == f"{QUESTION} And when? And when?"


def test_a_chat_says_what_it_answers_from(screen: Screen, store: Path, tiny: Path) -> None:
    screen.chat.greet(store)
    assert f"6 documents of the store {store}, answered by {tiny}" in screen.stderr.getvalue()


def test_ctrl_c_ends_an_answer_and_not_the_chat(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    before, printed = signal.getsignal(signal.SIGINT), screen.out.print

    def interrupting(text: str = "", end: str = "\n") -> None:
        printed(text, end)
        if text:
            signal.raise_signal(signal.SIGINT)
            monkeypatch.setattr(screen.out, "print", printed)

    monkeypatch.setattr(screen.out, "print", interrupting)
    assert "ended by Ctrl-C" in screen.says(QUESTION)
    assert signal.getsignal(signal.SIGINT) is before
    (turn,) = screen.talk.turns
    assert 0 < turn.tokens["generated"] < 6
    assert "tokens kept" in screen.says("And when?")


def test_ctrl_c_before_the_first_word_drops_the_question(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    def fuse(*args: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("kvtool.core.query.answer.fuse_prompt", fuse)
        assert "the question is dropped" in screen.says(QUESTION)
    assert not screen.talk.turns
    assert "sources: " in screen.says(QUESTION)


def test_a_full_context_starts_over_with_a_word(screen: Screen) -> None:
    screen.says(QUESTION)
    with screen.talk._lend() as session:
        before = session.decoder.context
        session.decoder.context = screen.talk.tokens + 28  # less than two turns, more than one
        try:
            told = screen.says(f"{QUESTION} And when was that? And who says so, and why?")
            session.decoder.context = 10
            refused = screen.says("/reset") + screen.says(QUESTION)
            assert "error: the prompt has" in refused
            assert "are the question's own: ask a shorter one" in refused  # fewer passages would not suffice
        finally:
            session.decoder.context = before
    assert "it starts over" in told
    assert "tokens kept" not in told
    assert "sources: " in told


def typed(keys: str) -> list[str]:
    """What lines a terminal gives for these keys, up to its end."""
    with create_pipe_input() as keyboard:
        keyboard.send_text(keys)
        return list(typed_lines(Out(stderr=io.StringIO()), input=keyboard, output=DummyOutput()))


@pytest.mark.slow
def test_keys() -> None:
    assert typed("one\r  \r두 번째 질문\r\x04") == ["one", "두 번째 질문"]
    assert typed("two\x1b\rlines\r\x04") == ["two\nlines"]
    assert typed("dropped\x03kept\r\x04") == ["kept"]
    assert typed("\x1b[200~pasted\nlines\x1b[201~\r\x04") == ["pasted\nlines"]


def test_commands_are_completed() -> None:
    with create_pipe_input() as keyboard:
        completer = prompt_session(input=keyboard, output=DummyOutput()).completer
    for words, completed in (("/m", "/mode"), ("/mode e", "/mode epic"), ("mode", None)):
        found = [each.text for each in completer.get_completions(Document(words), CompleteEvent())]
        assert found[:1] == ([completed] if completed else [])


def test_a_query_without_a_question_chats_in_a_terminal(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kvtool("query", "--store", store).failed(2, "no question was given")
    monkeypatch.setattr("kvtool.cli.out.Out.is_interactive", True)
    monkeypatch.setattr(module, "lines_for", lambda out: piped_lines(sys.stdin.buffer))
    done = kvtool("query", "--store", store, *SHORT, "--json", stdin=QUESTION.encode()).fine()
    assert json.loads(done.out)["turn"]["number"] == 1
    kvtool("query", "--store", store, "--compare", "reuse").failed(2, "no question was given")


class Tmux:
    def __init__(self, name: str) -> None:
        self._server = ["tmux", "-L", name, "-f", os.devnull]

    def tmux(self, *words: str) -> str:
        env = environment(PYTHONPATH=str(Path(__file__).parents[2]))
        return subprocess.run([*self._server, *words], capture_output=True, text=True, check=True, env=env).stdout

    def until(self, text: str) -> None:
        """Wait for a text on the screen, whose wrapped lines are joined."""
        over = time.monotonic() + 300
        while text not in (shown := self.tmux("capture-pane", "-p", "-J", "-S", "-200")):
            assert time.monotonic() < over, shown
            time.sleep(0.1)


@pytest.fixture
def terminal() -> Iterator[Tmux]:
    made = Tmux(f"kvtool-{os.getpid()}")
    yield made
    made.tmux("kill-server")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux")
def test_a_question_of_several_lines_and_the_end(store: Path, terminal: Tmux) -> None:
    line = shlex.join([sys.executable, "-m", "kvtool", "chat", "--store", str(store), "--max-tokens", "8"])
    shell = f"env LANG=C.UTF-8 sh -c {shlex.quote(f'{line}; echo ended with $?; sleep 1000')}"
    terminal.tmux("new-session", "-d", "-x", "100", "-y", "40", shell)
    terminal.until("Enter asks")
    terminal.until("\n>")
    terminal.tmux("send-keys", "Who built", "M-Enter", "the third mill?")
    terminal.until("> Who built\n  the third mill?")
    terminal.tmux("send-keys", "Enter")
    terminal.until("sources: ")
    terminal.tmux("send-keys", "C-d")
    terminal.until("ended with 0")
