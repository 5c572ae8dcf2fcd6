"""Processes of the fault tests: `storework`, and kvtool's own commands."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.cli.working import command as kvtool_command
from tests.cli.working import environment

WORK = Path(__file__).with_name("storework.py")
_popen = partial(subprocess.Popen, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def command(store: Path, *words: object) -> list[str]:
    return [sys.executable, "-W", "error", str(WORK), str(store), *map(str, words)]


def run(store: Path, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(store, *words), capture_output=True, text=True, env={**os.environ, **variables}, timeout=60, check=False
    )


def start(store: Path, *words: object, **variables: str) -> subprocess.Popen[str]:
    """Start; its first line has been said when this returns."""
    child = _popen(command(store, *words), env={**os.environ, **variables})
    assert child.stdout is not None
    assert child.stdout.readline(), child.communicate()[1]
    return child


def start_kvtool(*words: object, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    return _popen(kvtool_command(*words), stderr=stderr, env=environment())


def limit_files(kib: int, *words: object) -> subprocess.CompletedProcess[str]:
    """Run kvtool where no file may become larger: the very error of a full disk, from the kernel."""
    line = " ".join(f"'{word}'" for word in kvtool_command(*words))
    shell = ["bash", "-c", f"ulimit -f {kib}; trap '' XFSZ; exec {line}"]  # blocks of 1024 bytes
    return subprocess.run(shell, capture_output=True, text=True, env=environment(), timeout=120, check=False)
