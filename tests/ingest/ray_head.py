"""A Ray cluster for tests, which admits only clients with its token, and the running processes that a test started."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtool
from tests.remote.serving import free_port

PATIENCE = 300.0  # seconds, for what is started or ended on a machine that does much else


class Head:
    """`ray start --head` on a free port.

    Attributes
    ----------
    address : of the cluster; `variables`: by which a process is let in.
    """

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        here = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(Path(kvtool.__file__).parents[1])}
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus", "2"]
        command += ["--port", self.address.rpartition(":")[2], "--include-dashboard", "false"]
        command += ["--object-store-memory", str(10**8), "--temp-dir", str(folder)]
        self._log = folder / "started.log"
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | self.variables | here, start_new_session=True
            )
        self._wait()

    @property
    def is_up(self) -> bool:
        return self._child.poll() is None

    def close(self) -> None:
        self._child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(PATIENCE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while "Ray runtime started" not in self._log.read_text():
            if not self.is_up or time.monotonic() > deadline:
                self.close()
                raise AssertionError(f"Ray did not start: {self._log.read_text()}")
            time.sleep(0.05)


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # names of sockets have to be short
        started = Head(Path(folder))
        try:
            yield started
        finally:
            started.close()


def running(mark: str, called: str = "") -> list[str]:
    """Commands of the processes that have the mark in their environment, and this in their command."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another's
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return [command for command in found if called in command]


def left_of(mark: str, called: str = "") -> list[str]:
    deadline = time.monotonic() + 30
    while (found := running(mark, called)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
