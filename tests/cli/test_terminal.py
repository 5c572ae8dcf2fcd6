"""The chat in a real terminal: a tmux of its own, over a tiny model."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.working import environment

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux")


class Terminal:
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
def terminal() -> Iterator[Terminal]:
    made = Terminal(f"kvtool-{os.getpid()}")
    yield made
    made.tmux("kill-server")


@pytest.mark.slow
def test_a_question_of_several_lines_and_the_end(store: Path, terminal: Terminal) -> None:
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
