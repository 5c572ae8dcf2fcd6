"""Engine that stays loaded after a question: its record, its start and its end.

Each store has, in the cache folder, a record of its engine, a log and a lock. The process of the engine (`resident.py`)
holds the lock as long as it lives, so a killed one blocks nothing. A record whose lock nobody holds is out of date.

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
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvtool.core.common.children import HOME, python
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
    """Record of an engine; times are seconds since 1970. While the model is loaded, `model` is empty, `ends` 0."""

    store: str
    pid: int
    log: str
    code: str = ""
    model: str = ""
    started: float = field(default_factory=time.time)
    ends: float = 0.0
    requests: int = 0
    running: int = 0

    @property
    def memory(self) -> int | None:
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE
        except (OSError, ValueError, IndexError):
            return None

    def write(self) -> None:
        """Replace the record. Only the holder of the lock may."""
        path = Path(self.log).with_suffix(".json")
        new = path.with_suffix(".new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
        new.replace(path)

    def end(self) -> None:
        """Let the process finish its answers and end; wait for that."""
        deadline, is_asked = time.monotonic() + _END_TIMEOUT, False
        while (now := _read(Path(self.log).with_suffix(".lock"))) is not None and now.pid == self.pid:
            if not is_asked:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGTERM)
                is_asked = True
            if time.monotonic() > deadline:
                raise KvtoolError(
                    f"process {self.pid} has not ended within {_END_TIMEOUT:g} s", f"`kill -9 {self.pid}` ends it"
                )
            time.sleep(_LOOK_EVERY)


def missing_package() -> str | None:
    return next((name for name in _NEEDED if find_spec(name) is None), None)


def code_stamp() -> str:
    newest = max((path.lstat().st_mtime_ns for path in (HOME / "kvtool").rglob("*.py")), default=0)
    return f"{HOME} {newest}"


def kept_engines() -> list[KeptEngine]:
    found = (_read(lock) for lock in _folder().glob("*.lock"))
    return sorted((each for each in found if each is not None), key=lambda each: each.started)


def kept_engine(place: Path) -> KeptEngine | None:
    lock = _lock(place)
    return _read(lock) if os.path.exists(lock) else None


def start_engine(place: Path, options: Mapping[str, Any]) -> socket.socket:
    """Connect to the engine of a store; start it if there is none, and wait until its model is loaded.

    Raises KvtoolError, OSError or subprocess.SubprocessError.
    """
    if not hasattr(socket, "AF_UNIX") or not hasattr(os, "fork"):
        raise KvtoolError("this system has no sockets by which an engine could be reached")
    if (package := missing_package()) is not None:
        raise KvtoolError(f"an engine that stays needs the package {package}: {extra_line('serve')}")
    make_folder(_folder())
    lock, is_started = _lock(place), False
    while (connected := connect(socket_path(place))) is None:
        with _held(lock) as handle:
            if handle is not None:
                log = lock.with_suffix(".log")
                if is_started:
                    raise KvtoolError(f"it has ended early; {log} says why")
                lock.with_suffix(".json").unlink(missing_ok=True)
                _start(log, {**options, "store": os.path.realpath(place), "log": str(log), "lock": handle})
                is_started = True
        time.sleep(_LOOK_EVERY)
    return connected


def _start(log: Path, options: Mapping[str, Any]) -> None:
    """Start the process; it takes over the lock."""
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600), "w") as said:
        subprocess.run(
            python(_PARENT, *python(_PROGRAM, json.dumps(options))),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            pass_fds=(options["lock"],),
            check=True,
        )


def _folder() -> Path:
    return cache_dir() / "engines"


def _lock(place: Path) -> Path:
    name = hashlib.sha256(f"{platform.node()}\0{os.path.realpath(place)}".encode()).hexdigest()[:16]
    return _folder() / f"{name}.lock"


def _read(lock: Path) -> KeptEngine | None:
    """Return the record of the process that holds a lock; None: no process does, or it has none yet."""
    try:
        with _held(lock, alone=False) as handle:  # others may look, too, and are no engine
            if handle is not None:
                return None
        row = json.loads(lock.with_suffix(".json").read_bytes())
        return KeptEngine(**{each.name: row[each.name] for each in fields(KeptEngine) if each.name in row})
    except (OSError, ValueError, TypeError):
        return None


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
