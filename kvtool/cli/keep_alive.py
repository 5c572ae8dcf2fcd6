"""Keep-alive: the process that keeps a store's model loaded between questions, and the questions that it answers.

Each store has, in the cache folder, the record of its engine, a log and a lock. The engine's process holds the lock as
long as it lives, so a killed one blocks nothing; a record whose lock nobody holds is out of date. The process ends some
time after the last question, at SIGTERM, and when its store, socket or log is removed or replaced.

Most questions start no engine: at its import, this module loads neither torch nor any library.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.cli.answers import end_answer, show_numbers, show_sources
from kvtool.cli.options import Run
from kvtool.core.cache.options import StoreOptions
from kvtool.core.common.children import HOME, python
from kvtool.core.common.files import cache_dir, make_folder, new_file
from kvtool.core.common.plugins import extra_line
from kvtool.core.common.text import counted
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import ReplyChunk, Request
from kvtool.serve.options import KeepOptions, ServeOptions
from kvtool.serve.unix_socket import KEEP_HEADER, Declined, ask, connect, listen, placed, socket_path

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from kvtool.serve.engine import Engine

# A parent that ends at once: nobody has to wait for the process, which belongs to no terminal and no shell.
_PARENT = "import os, sys\nif os.fork():\n    os._exit(0)\nos.execv(sys.argv[1], sys.argv[1:])"
_PROGRAM = "from kvtool.cli.keep_alive import main\nmain()"
_NEEDED = ("starlette", "uvicorn", "pydantic")
_POLL, _WATCH = 0.05, 0.5  # seconds between two looks: of who waits for an engine, and of an engine at its files
_END_TIMEOUT = 75.0  # seconds: answers are finished, and the server's own deadline is before this
_DRAIN = 30.0  # seconds to finish answers
_UNLIMITED = 1e9  # seconds
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
_MODEL, _SERVING = ("model", "device", "dtype"), ("memory_cache", "idle", "idle_load")

# ---- questions ----


def answer_by_server(run: Run, request: Request) -> bool:
    """Have a question answered by a running server or engine of the store; False: there is none. Raises as the question
    would."""
    place, options = run.get(StoreOptions).place, run.get(QueryOptions)
    if not isinstance(place, Path) or _is_inspected(options):
        return False
    keep_alive = _keep_alive_of(run)
    if (connected := _connected(run, place, request, keep_alive)) is None:
        return False
    run.out.doing("answering")
    try:
        for event in ask(connected, _question(run, request, options), keep_alive):
            if isinstance(event, str):
                if options.is_streamed(run.out.on_terminal):
                    run.out.print(event, end="")
            else:
                _show(run, event)
    except Declined as declined:
        _explain(run, f"the server of this store was not used: {declined.why}")
        return False
    if keep_alive and not is_keep_alive_given(run):
        _announce(run, place, keep_alive)
    return True


def _is_inspected(options: QueryOptions) -> bool:
    return options.explain or options.token_ids or options.audit > 0


def _question(run: Run, request: Request, options: QueryOptions) -> dict[str, Any]:
    model = run.get(ModelOptions)
    return {
        "question": request.question,
        "chunks": request.chunks,
        "documents": request.documents,
        "folder": os.getcwd(),
        "options": vars(options) | {"embedder": placed(options.embedder)},
        "model": {name: getattr(model, name) for name in _MODEL} | {"model": placed(model.model)},
    }


def _show(run: Run, answer: Mapping[str, Any]) -> None:
    for text, hint in answer["warnings"]:
        run.out.warning(text, hint)
    facts = answer["facts"]
    run.out.result(facts, human=lambda: end_answer(run.out, facts))
    show_numbers(run.out, facts, answer["steps"], answer["stepper"])
    show_sources(run.out, [ReplyChunk(**chunk) for chunk in facts["chunks"]])


def is_keep_alive_given(run: Run) -> bool:
    return run.resolved.origin("keep_alive").layer == "flag" and run.get(KeepOptions).keep_alive > 0


def check_keep_alive(run: Run, is_plain: bool) -> None:
    """Refuse a `--keep-alive` that would do nothing. `is_plain`: one question that another process may answer."""
    if not is_keep_alive_given(run):
        return
    if not isinstance(run.get(StoreOptions).place, Path):
        raise UsageError("--keep-alive is for a store on this machine", "pull the shared store first")
    if not is_plain or _is_inspected(run.get(QueryOptions)):
        raise UsageError(
            "--keep-alive is for one question that the engine answers itself",
            "leave out --batch, --compare, --explain, --audit and --token-ids, unset KVTOOL_TIMELINE and KVTOOL_SERVER",
        )


def _keep_alive_of(run: Run) -> float:
    """How long an engine stays. By default only a person at a terminal gets one: pipes and cron start no process."""
    is_person = run.out.is_interactive and sys.stderr is not None and sys.stderr.isatty()
    return run.get(KeepOptions).keep_alive if is_keep_alive_given(run) or is_person else 0.0


def _connected(run: Run, place: Path, request: Request, keep_alive: float) -> socket.socket | None:
    """Connect to a server of the store, or start its engine if that is to stay; None: this process has to answer."""
    engine = engine_of(place)
    is_outdated = engine is not None and engine.code != code_stamp()
    connected = None if is_outdated else connect(socket_path(place))
    if connected is not None or not keep_alive:
        return connected
    from kvtool.core.cache.store import Store  # here: most questions start no engine
    from kvtool.core.query.retrieve import find_chunks
    from kvtool.core.retrieval.finder import Finder
    from kvtool.core.session.identity import model_files, store_identity

    model, asking = run.get(ModelOptions), run.get(QueryOptions)
    with Store.open(place) as store:  # errors are found before a model is loaded, and a download shows its progress
        find_chunks(Finder(store), request, asking)
        asking.check_of(store_identity(store))
        model_files(store_identity(store), model, store.made_by())
    run.out.doing("loading the model")
    options = {
        "model": asdict(model) | {"model": placed(model.model)},
        "serving": {name: getattr(run.get(ServeOptions), name) for name in _SERVING},
        "keep_alive": keep_alive,
    }
    try:
        if engine is not None and is_outdated:
            engine.end()
        return start_engine(place, options)
    except (OSError, subprocess.SubprocessError, KvtoolError) as error:
        _explain(run, f"no model stays loaded: {error}")
        return None


def _explain(run: Run, text: str) -> None:
    (run.out.status if is_keep_alive_given(run) else run.out.detail)(text)


def _announce(run: Run, place: Path, keep_alive: float) -> None:
    if run.out.verbosity < 0 or engine_of(place) is None:
        return
    with suppress(OSError):  # it is there: it was said
        new_file(cache_dir() / "engines" / "told").close()
        named = f" --store {shlex.quote(str(place))}" if run.resolved.origin("store").layer == "flag" else ""
        run.out.status(
            f"the model stays loaded for {counted(max(1, round(keep_alive / 60)), 'minute')}: "
            f"`kvtool stop{named}` unloads it, `--keep-alive 0` turns this off"
        )


# ---- records ----


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
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
        deadline, is_signalled = time.monotonic() + _END_TIMEOUT, False
        while (now := _read(Path(self.log).with_suffix(".lock"))) is not None and now.pid == self.pid:
            if not is_signalled:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGTERM)
                is_signalled = True
            if time.monotonic() > deadline:
                raise KvtoolError(
                    f"process {self.pid} has not ended within {_END_TIMEOUT:g} s", f"`kill -9 {self.pid}` ends it"
                )
            time.sleep(_POLL)


def missing_package() -> str | None:
    return next((name for name in _NEEDED if find_spec(name) is None), None)


def code_stamp() -> str:
    newest = max((path.lstat().st_mtime_ns for path in (HOME / "kvtool").rglob("*.py")), default=0)
    return f"{HOME} {newest}"


def engines() -> list[EngineRecord]:
    records = (_read(lock) for lock in _folder().glob("*.lock"))
    return sorted((each for each in records if each is not None), key=lambda each: each.started)


def engine_of(place: Path) -> EngineRecord | None:
    lock = _lock(place)
    return _read(lock) if os.path.exists(lock) else None


def start_engine(place: Path, options: Mapping[str, Any]) -> socket.socket:
    """Connect to the engine of a store; start it if there is none, and wait until its model is loaded.

    Raises KvtoolError, OSError or subprocess.SubprocessError.
    """
    if not hasattr(socket, "AF_UNIX") or not hasattr(os, "fork"):
        raise KvtoolError("this system has no sockets by which an engine could be reached")
    if (package := missing_package()) is not None:
        raise KvtoolError(f"--keep-alive needs the package {package}: {extra_line('serve')}")
    make_folder(_folder())
    lock, is_started = _lock(place), False
    while (connected := connect(socket_path(place))) is None:
        with _locked(lock) as handle:
            if handle is not None:
                log = lock.with_suffix(".log")
                if is_started:
                    raise KvtoolError(f"it has ended early; {log} says why")
                lock.with_suffix(".json").unlink(missing_ok=True)
                _start(log, {**options, "store": os.path.realpath(place), "log": str(log), "lock": handle})
                is_started = True
        time.sleep(_POLL)
    return connected


def _start(log: Path, options: Mapping[str, Any]) -> None:
    """Start the process; it takes over the lock."""
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600), "w") as output:
        subprocess.run(
            python(_PARENT, *python(_PROGRAM, json.dumps(options))),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=(options["lock"],),
            check=True,
        )


def _folder() -> Path:
    return cache_dir() / "engines"


def _lock(place: Path) -> Path:
    name = hashlib.sha256(f"{platform.node()}\0{os.path.realpath(place)}".encode()).hexdigest()[:16]
    return _folder() / f"{name}.lock"


def _read(lock: Path) -> EngineRecord | None:
    """Return the record of the process that holds a lock; None: no process does, or it has none yet."""
    try:
        with _locked(lock, exclusive=False) as handle:  # others may look, too, and are no engine
            if handle is not None:
                return None
        row = json.loads(lock.with_suffix(".json").read_bytes())
        return EngineRecord(**{each.name: row[each.name] for each in fields(EngineRecord) if each.name in row})
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def _locked(lock: Path, exclusive: bool = True) -> Iterator[int | None]:
    """Yield the descriptor of a locked file; None: another process has locked it, or, if `exclusive`, reads it."""
    import fcntl

    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield handle
    finally:
        os.close(handle)


# ---- the process ----


def shell_engine(place: Path, model: ModelOptions, **serving: Any) -> Engine:
    from kvtool.serve.engine import Engine

    options = ServeOptions(**serving, keep_conversations=0, request_timeout=_UNLIMITED)
    return Engine(place, model, _warn, options)


class EngineProcess:
    """An engine that stays so many seconds after a question that names no time."""

    def __init__(self, record: EngineRecord, seconds: float) -> None:
        self._record, self._seconds = record, seconds
        self._place = Path(record.store)
        self._socket = socket_path(self._place)
        self._watching: object = None

    def run(self, model: ModelOptions, serving: Mapping[str, Any]) -> None:
        from kvtool.serve.app import local_app
        from kvtool.serve.server import Listener, serve

        self._record.write()
        self._uuid = _uuid_of(self._place)
        engine, listeners = shell_engine(self._place, model, **serving), list[Listener]()
        try:
            engine.start()
            if (bound := listen(self._socket)) is None:
                raise KvtoolError("a server of this store answers already")
            self._inode = os.stat(self._socket).st_ino
            inner = local_app(engine, lambda row: _log(json.dumps(row)))
            listeners.append(Listener(self._counting(inner), bound, path=self._socket))
            self._record = replace(self._record, model=engine.model_name)
            self._note()
            serve(engine, listeners, _DRAIN, self._watch, _warn)
        finally:
            for listener in listeners:
                listener.close()
            engine.close()

    def _counting(self, app: ASGIApp) -> ASGIApp:
        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            self._note(running=1)
            for name, value in scope.get("headers", ()):
                if name == KEEP_HEADER.lower().encode():
                    with suppress(ValueError):
                        self._seconds = float(value)
            try:
                await app(scope, receive, send)
            finally:
                self._note(running=-1)

        return counted

    def _note(self, running: int = 0) -> None:
        record, ends = self._record, time.time() + self._seconds
        requests, running = record.requests + max(0, running), record.running + running
        self._record = replace(record, running=running, requests=requests, ends=ends)
        with suppress(OSError):  # of a full disk: it is for others to see, and answers go on
            self._record.write()

    def _watch(self) -> None:
        import asyncio

        async def watch() -> None:
            while self._is_reachable() and (self._record.running or time.time() < self._record.ends):
                await asyncio.sleep(_WATCH)
            _log("no question came" if self._is_reachable() else "its store, socket or log is gone or replaced")
            signal.raise_signal(signal.SIGTERM)

        self._watching = asyncio.get_running_loop().create_task(watch())

    def _is_reachable(self) -> bool:
        """Return True if questions of the store come here, and `kvtool stop` finds this process by its log."""
        try:
            is_same = _uuid_of(self._place) == self._uuid
            return is_same and os.lstat(self._socket).st_ino == self._inode and os.path.exists(self._record.log)
        except (OSError, KvtoolError):
            return False


def _uuid_of(store: Path) -> str:
    from kvtool.core.cache.layout import read_uuid

    return read_uuid(store)


def main() -> None:
    """Run an engine whose options are the program's one argument, as JSON. It holds the descriptor `lock`."""
    options: Mapping[str, Any] = json.loads(sys.argv[1])
    sys.argv = ["kvtool", "engine"]  # as others see who holds the store's lock
    os.set_inheritable(options["lock"], False)
    record = EngineRecord(store=options["store"], pid=os.getpid(), log=options["log"], code=code_stamp())
    try:
        EngineProcess(record, options["keep_alive"]).run(ModelOptions(**options["model"]), options["serving"])
    except Exception as error:
        _log(f"error: {error.message if isinstance(error, KvtoolError) else repr(error)}")
    os._exit(0)  # taking torch down takes a second


def _warn(text: str, hint: str) -> None:
    _log(f"warning: {text}" + (f" ({hint})" if hint else ""))


def _log(line: str) -> None:
    with suppress(OSError):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
