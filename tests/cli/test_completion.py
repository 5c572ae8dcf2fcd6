"""Completion, installed into and asked of real shells."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROMPT = "ready> "
READY = {"bash": PROMPT, "zsh": "\x1b[?2004h"}  # zsh drops what is typed before its line editor has begun
LONG = 120


def typed(shell: str, keys: str, environ: dict[str, str]) -> str:
    leader, follower = pty.openpty()
    shown, left = b"", keys.encode()
    with subprocess.Popen(
        [shell, "-i"], stdin=follower, stdout=follower, stderr=follower, env=environ, start_new_session=True
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


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_it_completes_in_a_real_shell(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    script = tmp_path / "kvtool"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvtool "$@"\n', "utf-8")
    script.chmod(0o755)
    for name in (".bashrc", ".zshrc"):
        (tmp_path / name).write_text(f"PS1='{PROMPT}'\n", "utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "ZDOTDIR"))}
    environ |= {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "TERM": "xterm"}
    environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])

    def run(line: str) -> str:
        return subprocess.run([shell, "-c", line], env=environ, capture_output=True, text=True, timeout=LONG).stdout

    assert f"{shell} completion installed in" in run("kvtool --install-completion; true")
    if shell == "fish":
        assert run("complete -C 'kvtool insp'").startswith("inspect")
    else:  # to the line's beginning, and what was completed is said
        first = "kvtool insp\t\x15" if shell == "zsh" else ""  # typer's script for zsh completes from the second Tab on
        shown = typed(shell, f"{first}kvtool insp\t\x01echo said \nexit\n", environ)
        assert "said kvtool inspect" in shown
        assert "starting" not in shown  # nobody waits for a command
