"""Child processes that end with this one: a Python without the working directory on its path, and other programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

_PATIENCE = 120.0  # seconds for a busy machine to start a process and to end it
HOME = Path(__file__).absolute().parents[3]  # where this kvtool is imported from


def python(program: str, *args: str) -> list[str]:
    """Make the command line of an isolated Python that runs `program`, with `args` as `sys.argv[1:]`.

    `python -c` would put the working directory first on its search path, and run a `json.py` in a folder of documents.
    The child is given this process's search path, so that it runs the same kvtool.
    """
    return [sys.executable, "-I", "-c", f"import sys\nsys.path[:] = {search_path()!r}\n{program}", *args]


def started(
    words: Sequence[str],
    *,
    stdin: int,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    env: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own, so that Ctrl-C reaches only this process. The group ends when this process
    ends for any reason, and at the latest when the returned object is garbage-collected.

    On Linux the kernel does that: it holds the reading end of a pipe whose writing end is here, and kills the group
    once no process can write any more. (`PR_SET_PDEATHSIG` would kill it with the thread that has started it.)
    Elsewhere a process that outlives this one has to notice that its stdin has ended.
    """
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            words,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            start_new_session=True,
            pass_fds=(reading,) if os.name == "posix" else (),
        )
        _kill_with(reading, process.pid)
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    weakref.finalize(process, os.close, writing)
    return process


def output_of(program: str, request: bytes, seconds: int, memory: int) -> bytes:
    """Return what a Python program makes of a request on stdin; its `sys.argv[1:]` are the limits (`limit_process`)."""
    process = started(
        python(program, str(seconds), str(memory)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    try:
        output, _ = process.communicate(request, timeout=seconds + _PATIENCE)
    except subprocess.TimeoutExpired:
        output = b""
    finally:
        process.kill()
        process.communicate()
    return output


def limit_process(memory: int, seconds: int | None = None) -> None:
    """Limit this process to these bytes of address space, and to these further seconds of a processor."""
    with suppress(ImportError, ValueError, OSError):  # no such limits on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if seconds is not None:
            _, most = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + seconds, most))


def _kill_with(reading: int, group: int) -> None:
    if sys.platform == "linux":
        import fcntl

        fcntl.fcntl(reading, fcntl.F_SETOWN, -group)
        fcntl.fcntl(reading, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reading, fcntl.F_SETFL, fcntl.fcntl(reading, fcntl.F_GETFL) | os.O_ASYNC)


def search_path() -> list[str]:
    """Return this process's search path without the working directory, unless kvtool or Python itself is there."""
    allowed = {os.path.realpath(folder) for folder in (str(HOME), *sysconfig.get_paths().values())}
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # it was removed: no relative entry means anything
        return [entry for entry in sys.path if os.path.isabs(entry)]
    return [os.path.abspath(entry) for entry in sys.path if os.path.realpath(entry) != here or here in allowed]
