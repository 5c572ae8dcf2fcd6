"""What one process takes: seconds of the clock and of the processor, memory, what it reads and writes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MOST_S = 3600.0
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Taken:
    """What a process and its children took.

    Attributes
    ----------
    own : the most MiB of memory that is no mapped file's.
    peak : the most MiB in all: pages of mapped files can be dropped at any time.
    reads, read : calls that read, and MB that came by them (pages of the store, files; not what is mapped).
    """

    seconds: float
    cpu: float
    own: float
    peak: float
    reads: int
    read: float


def watched(command: Sequence[str], environment: dict[str, str], log: Path, until: str | None = None) -> Taken:
    """Run a command to its end; a service, until it has said `until`, and then end it.

    Raises
    ------
    SystemExit : it failed, or never said so.
    """
    started, own, said = time.perf_counter(), 0.0, b""
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.PIPE)
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    while not _ended(process.pid):
        own = max(own, _own_memory(process.pid))
        if select.select([process.stderr], [], [], _LOOK_S)[0]:
            said += process.stderr.read() or b""
        if until is not None and until.encode() in said:
            break
        if time.perf_counter() - started > _MOST_S:
            process.kill()
    seconds, (reads, read) = time.perf_counter() - started, _reads(process.pid)
    if until is not None:
        process.send_signal(signal.SIGINT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    said += process.stderr.read() or b""
    process.stderr.close()
    if (until is None and process.returncode) or (until is not None and until.encode() not in said):
        raise SystemExit(f"{' '.join(command)} failed:\n{said.decode()[-2000:]}")
    return Taken(seconds, usage.ru_utime + usage.ru_stime, own, usage.ru_maxrss / 1024, reads, read / 1e6)


def _ended(process: int) -> bool:
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _own_memory(process: int) -> float:
    """MiB of a process and its children."""
    total = 0.0
    for each in (process, *_children(process)):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{each}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    total += int(line.split()[1]) / 1024
    return total


def _children(process: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def _reads(process: int) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        rows = dict(line.split(": ") for line in Path(f"/proc/{process}/io").read_text().splitlines())
        return int(rows["syscr"]), int(rows["rchar"])
    return 0, 0
