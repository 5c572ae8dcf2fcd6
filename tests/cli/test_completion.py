"""Completion, installed into and asked of real shells."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHELLS = ("bash", "zsh", "fish")
INSTALLED = {
    "bash": ".bash_completions/kvtool.sh",
    "zsh": ".zfunc/_kvtool",
    "fish": ".config/fish/completions/kvtool.fish",
}
PROMPT = "ready> "
READY = {"bash": PROMPT, "zsh": "\x1b[?2004h"}  # zsh drops what is typed before its line editor has begun
LONG = 120


class Home:
    """A user's folder, with `kvtool` on its path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        script = folder / "bin" / "kvtool"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvtool "$@"\n', "utf-8")
        script.chmod(0o755)
        for name in (".bashrc", ".zshrc"):
            (folder / name).write_text(f"PS1='{PROMPT}'\n", "utf-8")
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "ZDOTDIR"))},
            "HOME": str(folder),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            "TERM": "xterm",
        }

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, env=self.environ, capture_output=True, text=True, timeout=LONG)

    def typed(self, shell: str, keys: str) -> str:
        leader, follower = pty.openpty()
        shown, left = b"", keys.encode()
        with subprocess.Popen(
            [shell, "-i"], stdin=follower, stdout=follower, stderr=follower, env=self.environ, start_new_session=True
        ) as process:
            os.close(follower)
            try:
                while piece := os.read(leader, 4096):
                    shown += piece
                    if left and READY[shell].encode() in shown:
                        os.write(leader, left)
                        left = b""
            except OSError:  # it has ended
                pass
            process.wait(LONG)
        os.close(leader)
        return shown.decode(errors="replace")

    @property
    def installed(self) -> list[str]:
        return [shell for shell, path in INSTALLED.items() if (self.folder / path).is_file()]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def needed(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_it_completes_in_a_real_shell(home: Home, shell: str) -> None:
    needed(shell)
    done = home.run(shell, "-c", "kvtool --install-completion; true")
    assert f"{shell} completion installed in" in done.stdout
    assert home.installed == [shell]
    if shell == "fish":
        assert home.run(shell, "-c", "complete -C 'kvtool insp'").stdout.startswith("inspect")
    else:  # to the line's beginning, and what was completed is said
        first = "kvtool insp\t\x15" if shell == "zsh" else ""  # typer's script for zsh completes from the second Tab on
        shown = home.typed(shell, f"{first}kvtool insp\t\x01echo said \nexit\n")
        assert "said kvtool inspect" in shown
        assert "starting" not in shown  # nobody waits for a command
