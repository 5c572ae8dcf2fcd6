"""Process of an engine that stays loaded for a store (`kept_engine.py` starts it) and only listens at its socket.

It ends some time after the last question, at SIGTERM, and when its store, socket or log is removed or replaced.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from kvtool.core.cache.layout import read_uuid
from kvtool.core.errors import KvtoolError
from kvtool.core.model.options import ModelOptions
from kvtool.serve.app import local_app
from kvtool.serve.engine import Engine
from kvtool.serve.kept_engine import KeptEngine, code_stamp
from kvtool.serve.metrics import AccessLog
from kvtool.serve.options import ServeOptions
from kvtool.serve.server import Listener, serve
from kvtool.serve.unix_socket import KEEP_HEADER, listen, socket_path

_LOOK_EVERY = 0.5  # seconds
_DRAIN = 30.0  # seconds to finish answers
_UNLIMITED = 1e9  # seconds


def shell_engine(place: Path, model: ModelOptions, memory_cache: int) -> Engine:
    options = ServeOptions(memory_cache=memory_cache, keep_conversations=0, request_timeout=_UNLIMITED)
    return Engine(place, model, _warn, options)


class Resident:
    """An engine that stays so many seconds after a question that names no time."""

    def __init__(self, record: KeptEngine, seconds: float) -> None:
        self._record, self._seconds = record, seconds
        self._place = Path(record.store)
        self._socket = socket_path(self._place)
        self._watching: asyncio.Task[None] | None = None

    def run(self, model: ModelOptions, memory_cache: int) -> None:
        self._record.write()
        self._uuid = read_uuid(self._place)
        engine, listeners = shell_engine(self._place, model, memory_cache), list[Listener]()
        try:
            engine.start()
            if (bound := listen(self._socket)) is None:
                raise KvtoolError("a server of this store answers already")
            self._inode = os.stat(self._socket).st_ino
            inner = local_app(engine, AccessLog(engine, lambda row: _log(json.dumps(row))))
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
        before = self._record
        begun, ends = before.requests + max(0, running), time.time() + self._seconds
        self._record = replace(before, running=before.running + running, requests=begun, ends=ends)
        with suppress(OSError):  # of a full disk: it is for others to see, and answers go on
            self._record.write()

    def _watch(self) -> None:
        async def watch() -> None:
            while self._is_reachable() and (self._record.running or time.time() < self._record.ends):
                await asyncio.sleep(_LOOK_EVERY)
            _log("no question came" if self._is_reachable() else "its store, socket or log is gone or replaced")
            signal.raise_signal(signal.SIGTERM)

        self._watching = asyncio.get_running_loop().create_task(watch())

    def _is_reachable(self) -> bool:
        """Return True if questions of the store come here, and `kvtool stop` finds this process by its log."""
        try:
            is_same = read_uuid(self._place) == self._uuid
            return is_same and os.lstat(self._socket).st_ino == self._inode and os.path.exists(self._record.log)
        except (OSError, KvtoolError):
            return False


def main() -> None:
    """Run an engine whose options are the program's one argument, as JSON. It holds the descriptor `lock`."""
    wanted: Mapping[str, Any] = json.loads(sys.argv[1])
    os.set_inheritable(wanted["lock"], False)
    record = KeptEngine(store=wanted["store"], pid=os.getpid(), log=wanted["log"], code=code_stamp())
    try:
        Resident(record, wanted["keep_alive"]).run(ModelOptions(**wanted["model"]), wanted["memory_cache"])
    except Exception as error:
        _log(f"error: {error.message if isinstance(error, KvtoolError) else repr(error)}")
    os._exit(0)  # taking torch down takes a second


def _warn(text: str, hint: str) -> None:
    _log(f"warning: {text}" + (f" ({hint})" if hint else ""))


def _log(line: str) -> None:
    with suppress(OSError):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
