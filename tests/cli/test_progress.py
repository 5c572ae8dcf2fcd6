"""Bars, spinners, and lines in a pipe while a command works."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from kvtool.cli import progress
from kvtool.cli.app import load_command
from kvtool.cli.out import Out
from kvtool.cli.progress import Log
from tests.cli.conftest import Make, Terminal
from tests.cli.working import QUESTION, SHORT, in_terminal


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """One on which a spinner says "starting" at once."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    monkeypatch.setattr(progress, "_FRAMES_PER_S", 1000.0)
    terminal = Terminal(tty=True)
    with Out(stderr=terminal).spinning("starting"):
        wait_for(terminal, "starting")
        yield terminal


def line_of(terminal: Terminal) -> str:
    return re.split(r"\n|\x1b\[2K", re.sub(r"\x1b\[\?25[lh]", "", terminal.text))[-1]


def wait_for(terminal: Terminal, words: str) -> None:
    until = time.monotonic() + 5
    while not line_of(terminal).endswith(words):
        assert time.monotonic() < until, terminal.text
        time.sleep(0.001)


def test_words_change_and_come_back_behind_a_warning(terminal: Terminal) -> None:
    out = Out(stderr=terminal, stdout=Terminal(tty=True))
    out.doing("reading a\nfile")
    wait_for(terminal, "reading a file")
    out.warning("mind the gap")
    assert "\x1b[2K" in terminal.text.partition("mind the gap")[0][-30:]
    wait_for(terminal, "reading a file")


def test_an_answer_takes_the_line_away_until_there_are_new_words(terminal: Terminal) -> None:
    out = Out(stdout=terminal, stderr=terminal)
    out.print("An ans", end="")
    time.sleep(0.02)
    assert line_of(terminal) == "An "  # the word may not fit on the line
    out.print("wer")
    out.doing("sorting")
    wait_for(terminal, "sorting")


def test_nothing_is_left_of_it(terminal: Terminal) -> None:
    with progress.hide_activity(until_new_words=True):
        terminal.write("the end")
    time.sleep(0.02)
    assert line_of(terminal) == "the end"


def test_nothing_stands_before_a_help_that_was_waited_for(terminal: Terminal) -> None:
    compress = load_command("compress")
    compress.get_help(compress.make_context("compress", [], resilient_parsing=True))
    time.sleep(0.02)
    assert line_of(terminal) == ""


def test_a_terminal_without_utf_8_has_plain_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    terminal = Terminal("ascii", tty=True)
    with Out(stderr=terminal).spinning("starting"):
        wait_for(terminal, "starting")
    assert "?" not in terminal.text.replace("\x1b[?25", "")
    assert line_of(terminal) == ""


@pytest.mark.slow
def test_a_question_on_a_terminal_is_never_silent_for_long(store: Path) -> None:
    done = in_terminal("query", QUESTION, "--store", store, *SHORT, "--json", stdout=PIPE).fine()
    assert done.json["question"] == QUESTION
    shown = done.err
    assert "starting" in shown
    assert re.search(r"loading the model|answering", shown)
    last = shown.rsplit("\x1b[2K", 1)[1]
    assert "starting" not in last
    assert "first token after" in shown


@pytest.mark.parametrize(("verbosity", "term", "patience"), [(-1, "xterm", 0.0), (0, "dumb", 0.0), (0, "xterm", 60.0)])
def test_quiet_a_dumb_terminal_and_a_quick_command_have_none(
    verbosity: int, term: str, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(progress, "PATIENCE_S", patience)
    terminal = Terminal(tty=True)
    with Out("human", verbosity, stderr=terminal).spinning("starting"):
        time.sleep(0.02)
    assert terminal.text == ""


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_bar_on_a_terminal(encoding: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, stdout, stderr = make(encoding=encoding, tty=True)
    with out.spinning("starting"), out.progress("prefill [x]", total=100) as bar:
        bar.advance(60)
        out.warning("odd [red]name[/red]")
    assert "60/100 tokens, " in stderr.text
    assert "tokens/s" in stderr.text
    warning = stderr.text.partition("odd [red]name[/red]")[0].rpartition("\x1b[2K")[2]
    assert "tokens" not in warning  # the bar was taken away
    assert stdout.text == ""


def test_a_step_within_a_step_has_no_bar(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, _, stderr = make(tty=True)
    with out.spinning("starting"), out.progress("questions", total=2), out.progress("tokens", total=3) as inner:
        inner.advance(3)
    assert "0/2" in stderr.text
    assert "/3" not in stderr.text


def test_a_result_does_not_stand_behind_a_bar(terminal: Terminal) -> None:
    out = Out(stdout=terminal, stderr=terminal)
    with out.progress("questions", total=2) as bar:
        bar.advance(1)
        out.json({"answer": "x" * 200})
    line = next(line for line in terminal.text.splitlines() if "answer" in line)
    assert json.loads(line.split("\x1b[2K")[-1])["answer"] == "x" * 200


def test_a_slow_bar_does_not_seem_to_stand() -> None:
    for speed, shown in ((None, ""), (0.0, ""), (0.034, "0.03 t/s"), (0.4, "0.4 t/s"), (1234.5, "1,234 t/s")):
        assert progress.speed_text(speed, "t") == shown


@pytest.mark.parametrize(("mode", "verbosity", "tty"), [("human", 0, False), ("human", -1, True), ("json", 0, False)])
def test_no_bar_where_nobody_watches(mode: str, verbosity: int, tty: bool, make: Make) -> None:
    out, stdout, stderr = make(mode, verbosity, tty=tty)
    with out.progress("prefill", total=2) as bar:
        bar.advance(2)
    assert stdout.text == stderr.text == ""


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def test_a_line_now_and_then_at_v(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    out, _, stderr = make(verbosity=1)
    with out.progress("prefill", total=400) as bar:
        for clock.now in (5.0, 10.0, 11.0, 25.0):
            bar.advance(100)
    assert stderr.text == ("prefill: 200/400 tokens, 20 tokens/s, 0:00:10 left\nprefill: 400/400 tokens, 16 tokens/s\n")


def test_no_time_is_foretold_by_the_first_steps_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is slow, as the model has to warm up: it would say two hours."""
    clock = Clock(monkeypatch)
    with Log(lambda text, facts: None, 1.0).bar("KV", 8000, "tokens") as bar:
        assert bar.text() == "KV: 0/8,000 tokens"
        for clock.now in (20.0, 21.0, 22.0):
            bar.advance(100)
            assert "left" not in bar.text()
        bar.advance(100)
        assert bar.text() == "KV: 400/8,000 tokens, 18 tokens/s, 0:06:58 left"


def test_a_speed_is_known_where_each_step_takes_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with Log(lambda text, facts: None, 1.0).bar("KV", 4000, "tokens") as bar:
        for step in range(1, 9):
            clock.now = 140.0 * step
            bar.advance(500)
            assert bar.task.speed == pytest.approx(500 / 140)


def test_a_job_says_its_pace_in_a_pipe(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    out, _, stderr = make()
    with out.job() as events:
        events.step("computing KV", 500, "tokens")
        for _ in range(11):
            clock.now += 6
            events.advance(20)
    assert [line.split(", ")[0] for line in stderr.text.splitlines()] == [
        f"computing KV: {count}/500 tokens" for count in (100, 200)
    ]


def test_phases_are_events_in_jsonl_and_words_beside_the_bar(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

    def run(out: Out) -> None:
        with out.job() as events:
            events.step("computing KV", 4, "tokens")
            events.advance(4)
            events.status("trying the model")

    out, stdout, _ = make("jsonl")
    run(out)
    assert "trying the model" in [json.loads(line)["message"] for line in stdout.text.splitlines()]
    out, _, stderr = make(tty=True)
    with out.spinning("starting"):
        run(out)
    assert "trying the model" in stderr.text


def test_status_events_in_jsonl(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    out, stdout, _ = make("jsonl")
    with out.progress("prefill", total=10, unit="chunks") as bar:
        clock.now = 2.0
        bar.advance(4)
    event = json.loads(stdout.text)
    assert (event["type"], event["done"], event["per_second"], event["unit"]) == ("status", 4, 2, "chunks")
    assert event["seconds_left"] == 3
