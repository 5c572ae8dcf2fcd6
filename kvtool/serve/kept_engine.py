"""Engine that stays loaded after a question (`kvtool query --keep-alive`): its record, its start and its end.

Each store has, in the cache folder, a record of its engine, a log and a lock. The process of the engine (`resident.py`)
holds the lock as long as it lives, so a killed one blocks nothing, and a record without a held lock is one of the past.

`kvtool query` imports this module: it must import neither torch nor any library, to start fast.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvtool.core.common.children import python
from kvtool.core.common.files import cache_dir, make_folder
from kvtool.core.common.installing import extra_line
from kvtool.core.errors import KvtoolError
from kvtool.serve.unix_socket import connect, socket_path

# A parent that ends at once: nobody has to wait for the process, which belongs to no terminal and no shell.
_PARENT = "import os, sys\nif os.fork():\n    os._exit(0)\nos.execv(sys.argv[1], sys.argv[1:])"
_PROGRAM = "from kvtool.serve.resident import main\nmain()"
_NEEDED = ("starlette", "uvicorn", "prometheus_client")
_LOOK_EVERY = 0.05  # seconds
_END_TIMEOUT = 75.0  # seconds: answers are finished, and the server's own deadline is before this
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


@dataclass(frozen=True, kw_only=True)
class KeptEngine:
    """Record of an engine.

    Attributes
    ----------
    model : empty while it is loaded.
    started, ends : seconds since 1970; `ends`: when it ends if no further question comes, 0 while the model is loaded.
    requests, running : number of questions so far, and of those that are being answered.
    log : file that the process writes.
    error : why it could not be loaded.
    """

    store: str
    pid: int
    log: str
    model: str = ""
    started: float = field(default_factory=time.time)
    ends: float = 0.0
    requests: int = 0
    running: int = 0
    error: str = ""

    @property
    def memory(self) -> int | None:
        """Return the bytes of memory that the process takes; None: the system does not say."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE
        except (OSError, ValueError, IndexError):
            return None

    def write(self) -> None:
        """Put the record in its place. The holder of the lock does."""
        path = Path(self.log).with_suffix(".json")
        new = path.with_suffix(".new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
        new.replace(path)

    def end(self) -> None:
        """Let the process finish its answers and end; wait for that. Raises KvtoolError if it does not end."""
        lock = Path(self.log).with_suffix(".lock")
        deadline, asked = time.monotonic() + _END_TIMEOUT, False
        while _is_held(lock) and (now := _read(lock)) is not None and now.pid == self.pid:
            if not asked:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGTERM)
                asked = True
            if time.monotonic() > deadline:
                raise KvtoolError(
                    f"process {self.pid} has not ended within {_END_TIMEOUT:g} s", f"`kill -9 {self.pid}` ends it"
                )
            time.sleep(_LOOK_EVERY)


def missing_package() -> str | None:
    """Return a package that a server needs and that is not installed."""
    return next((name for name in _NEEDED if find_spec(name) is None), None)


def kept_engines() -> list[KeptEngine]:
    """Return the engines of this user on this machine, the oldest first."""
    found = (_read(lock) for lock in sorted(_folder().glob("*.lock")) if _is_held(lock))
    return sorted((each for each in found if each is not None), key=lambda each: each.started)


def joined(place: Path, options: Mapping[str, Any]) -> socket.socket | KvtoolError:
    """Connect to the engine of a store; start it if there is none, and wait until its model is loaded.

    Parameters
    ----------
    options : of `resident.main`.

    Returns
    -------
    The connection, or why there is none.

    Raises
    ------
    OSError, subprocess.SubprocessError : the process cannot be started, or the cache folder not be written.
    """
    if not hasattr(socket, "AF_UNIX") or not hasattr(os, "fork"):
        return KvtoolError("this system has no sockets by which an engine could be reached")
    if (package := missing_package()) is not None:
        return KvtoolError(f"an engine that stays needs the package {package}", extra_line("serve"))
    folder = _folder()
    make_folder(folder)
    base = folder / hashlib.sha256(f"{platform.node()}\0{os.path.realpath(place)}".encode()).hexdigest()[:16]
    lock, began, is_started = base.with_suffix(".lock"), time.time(), False
    while True:
        if (made := connect(socket_path(place))) is not None:
            return made
        with _held(lock) as handle:
            if handle is not None:
                record = _read(lock)
                if record is not None and record.error and record.started >= began:
                    return KvtoolError(record.error)
                if is_started:
                    return KvtoolError("it has ended early", f"{base.with_suffix('.log')} may say why")
                if (made := connect(socket_path(place))) is not None:  # of a server that came meanwhile
                    return made
                _start(base, {**options, "store": os.path.realpath(place), "lock": handle})
                is_started = True
        time.sleep(_LOOK_EVERY)


def _start(base: Path, options: Mapping[str, Any]) -> None:
    """Start the process; it takes over the lock."""
    base.with_suffix(".json").unlink(missing_ok=True)
    log = base.with_suffix(".log")
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    try:
        subprocess.run(
            python(_PARENT, *python(_PROGRAM, json.dumps({**options, "log": str(log)}))),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            pass_fds=(options["lock"],),
            check=True,
        )
    finally:
        os.close(said)


def _folder() -> Path:
    return cache_dir() / "engines"


def _read(lock: Path) -> KeptEngine | None:
    try:
        return KeptEngine(**json.loads(lock.with_suffix(".json").read_bytes()))
    except (OSError, ValueError, TypeError):  # none yet, or another version's
        return None


def _is_held(lock: Path) -> bool:
    with _held(lock, alone=False) as handle:  # others may look, too, and are no engine
        return handle is None


@contextmanager
def _held(lock: Path, alone: bool = True) -> Iterator[int | None]:
    """Yield the descriptor of a lock file that no other process holds (`alone`: nor looks at); None: one does."""
    import fcntl

    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield handle
    finally:
        os.close(handle)
