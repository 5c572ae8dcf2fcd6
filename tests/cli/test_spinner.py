"""Words on the terminal while a command is silent: shown after half a second, and removed before output."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from kvtool.cli import progress
from kvtool.cli.app import load_command
from kvtool.cli.out import Out
from kvtool.cli.terminal import SafeStream
from tests.cli.working import QUESTION, SHORT, in_terminal


class Terminal:
    def __init__(self, encoding: str = "utf-8") -> None:
        self.encoding, self.text = encoding, ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def fileno(self) -> int:
        raise OSError("no file stands behind it")

    def flush(self) -> None:
        return None

    @property
    def line(self) -> str:
        return self.text.rsplit("\n", 1)[-1].rsplit("\r\x1b[2K", 1)[-1]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """One on which a spinner says "starting" at once."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    monkeypatch.setattr(progress, "_FRAME_EVERY_S", 0.001)
    terminal = Terminal()
    with progress.spinning("starting", SafeStream(terminal)):  # type: ignore[arg-type]
        wait_for(terminal, "starting")
        yield terminal


def wait_for(terminal: Terminal, words: str) -> None:
    until = time.monotonic() + 5
    while not terminal.line.endswith(words):
        assert time.monotonic() < until, terminal.text
        time.sleep(0.001)


def test_words_change_and_come_back_behind_a_warning(terminal: Terminal) -> None:
    out = Out(stderr=terminal, stdout=Terminal())  # type: ignore[arg-type]
    out.doing("reading a\nfile")
    wait_for(terminal, "reading a file")
    out.warning("mind the gap")
    assert "\x1b[2K" in terminal.text.partition("mind the gap")[0][-30:]
    wait_for(terminal, "reading a file")


def test_an_answer_takes_the_line_away_until_there_are_new_words(terminal: Terminal) -> None:
    out = Out(stdout=terminal, stderr=terminal)  # type: ignore[arg-type]
    out.print("An ans", end="")
    time.sleep(0.02)
    assert terminal.line == "An "  # the word may not fit on the line
    out.print("wer")
    out.doing("sorting")
    wait_for(terminal, "sorting")


def test_nothing_is_left_of_it(terminal: Terminal) -> None:
    with progress.hide_activity(until_new_words=True):
        terminal.write("the end")
    time.sleep(0.02)
    assert terminal.line == "the end"


def test_nothing_stands_before_a_help_that_was_waited_for(terminal: Terminal) -> None:
    compress = load_command("compress")
    compress.get_help(compress.make_context("compress", [], resilient_parsing=True))
    time.sleep(0.02)
    assert terminal.line == ""


def test_a_terminal_without_utf_8_has_plain_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    terminal = Terminal("ascii")
    with progress.spinning("starting", SafeStream(terminal)):  # type: ignore[arg-type]
        wait_for(terminal, "starting")
    assert "?" not in terminal.text
    assert terminal.line == ""


@pytest.mark.slow
def test_a_question_on_a_terminal_is_never_silent_for_long(store: Path) -> None:
    done = in_terminal("query", QUESTION, "--store", store, *SHORT, "--json", stdout=PIPE).fine()
    assert done.json["question"] == QUESTION
    shown = done.err
    assert "starting" in shown
    assert re.search(r"loading the model|answering", shown)
    last = shown.rsplit("\r\x1b[2K", 1)[1]
    assert "starting" not in last
    assert "first token after" in shown


@pytest.mark.parametrize(("verbosity", "term", "patience"), [(-1, "xterm", 0.0), (0, "dumb", 0.0), (0, "xterm", 60.0)])
def test_quiet_a_dumb_terminal_and_a_quick_command_have_none(
    verbosity: int, term: str, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(progress, "PATIENCE_S", patience)
    terminal = Terminal()
    with Out("human", verbosity, stderr=terminal).spinning("starting"):  # type: ignore[arg-type]
        time.sleep(0.02)
    assert terminal.text == ""
