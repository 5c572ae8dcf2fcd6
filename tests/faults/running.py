"""Starting `storework` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WORK = Path(__file__).with_name("storework.py")


def command(store: Path, *words: object) -> list[str]:
    return [sys.executable, "-W", "error", str(WORK), str(store), *map(str, words)]


def run(store: Path, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run to its end."""
    environment = {**os.environ, **variables}
    return subprocess.run(
        command(store, *words), capture_output=True, text=True, env=environment, timeout=60, check=False
    )


def start(store: Path, *words: object, **variables: str) -> subprocess.Popen[str]:
    """Start; its first line has been said when this returns."""
    child = subprocess.Popen(
        command(store, *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )
    assert child.stdout is not None
    assert child.stdout.readline(), child.communicate()[1]
    return child
