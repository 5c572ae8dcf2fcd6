"""A chat in a real terminal, scene by scene: what is typed, and the screen afterwards.

`kvtool chat` runs in a tmux of its own. A scene ends with an error where its screen lacks what it should have.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
PROMPT = "\n>"
PATIENCE_S = 300.0
WIDTH, HEIGHT = 100, 40


class Terminal:
    """A terminal with one command in it, run by a shell, which says afterwards how it ended."""

    def __init__(self, command: str, folder: Path) -> None:
        self._server = ["tmux", "-L", f"kvtool-{os.getpid()}-{time.monotonic_ns()}", "-f", os.devnull]
        line = f"{command}; echo ended with $?; sleep 1000"
        size = ("-x", str(WIDTH), "-y", str(HEIGHT))
        self._tmux("new-session", "-d", *size, "-c", str(folder), f"env LANG=C.UTF-8 sh -c {shlex.quote(line)}")

    def _tmux(self, *words: str) -> str:
        return subprocess.run([*self._server, *words], capture_output=True, text=True, check=True).stdout

    def close(self) -> None:
        subprocess.run([*self._server, "kill-server"], capture_output=True)

    def types(self, text: str, *keys: str) -> None:
        if text:
            self._tmux("send-keys", "-l", text)
        if keys:
            self._tmux("send-keys", *keys)

    def resized(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def screen(self) -> str:
        """Return the text on the screen, wrapped lines joined, without the empty lines below."""
        return self._tmux("capture-pane", "-p", "-J", "-S", "-200").rstrip()

    def until(self, text: str, times: int = 1) -> str:
        over = time.monotonic() + PATIENCE_S
        while (shown := self.screen()).count(text) < times:
            if time.monotonic() > over:
                raise TimeoutError(f"{text!r} does not come:\n{shown}")
            time.sleep(0.1)
        return shown


Scene = Callable[[Terminal], None]


def narrow(terminal: Terminal) -> None:
    terminal.types("a line that is longer than forty columns are, and is typed on")
    terminal.resized(40, 20)
    terminal.types(" in a narrow window")
    terminal.until("narrow")
    terminal.resized(WIDTH, HEIGHT)
    terminal.types(" and a wide one")
    terminal.until("typed on in a narrow window and a wide one")


def korean(terminal: Terminal) -> None:
    """Wide characters: Backspace and the arrows go by whole ones."""
    terminal.types("달여섬 등대에", "BSpace", "Left", "Left", "BSpace")
    terminal.types("의 ", "End")
    terminal.types("는 누가?")
    terminal.until("달여섬의 등대는 누가?")


def several_lines(terminal: Terminal) -> None:
    """Of which Enter makes one question."""
    terminal.types("Who founded", "M-Enter")
    terminal.types("the observatory at Kellhaven?")
    terminal.until("> Who founded\n  the observatory at Kellhaven?")
    terminal.types("", "Enter")
    terminal.until("sources: ")


def ends(terminal: Terminal) -> None:
    terminal.types("", "C-d")
    terminal.until("ended with 0")


SCENES: dict[str, Scene] = {"narrow": narrow, "korean": korean, "several-lines": several_lines, "ends": ends}


def played(name: str, store: Path, folder: Path, *more: str) -> str:
    command = shlex.join([sys.executable, "-m", "kvtool", "chat", "--store", str(store.absolute()), *more])
    terminal = Terminal(f"PYTHONPATH={shlex.quote(str(HERE))} {command}", folder)
    try:
        terminal.until("Enter asks")
        terminal.until(PROMPT)
        SCENES[name](terminal)
        return terminal.screen()
    finally:
        terminal.close()
