"""The process of a server: its sockets, its signals, its end."""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import logging
import math
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from kvtool.core.common.types import Warn
from kvtool.core.errors import EXIT_TERMINATED, KvtoolError
from kvtool.serve.beside import leave
from kvtool.serve.engine import Engine
from kvtool.serve.options import ServeOptions
from kvtool.serve.protocol import patient

_BACKLOG = 128
_HEADER_BYTES = 64 * 1024
_LAST_RESORT = 10.0  # seconds behind its own deadline
_GRACE = 30.0  # seconds that an end may take after its answers: a batch of an ingest, a layer of a prompt


@dataclass(frozen=True, slots=True)
class Listener:
    """An application, and the bound socket at which it is reached.

    Attributes
    ----------
    tls : what https is spoken with.
    beside : the path of a socket beside a store.
    patience : seconds that a client may take over the head of a request, and over reading.
    """

    app: ASGIApp
    socket: socket.socket
    tls: ssl.SSLContext | None = None
    beside: Path | None = None
    patience: float = 60.0

    def close(self) -> None:
        """Let go of the address."""
        self.socket.close()
        if self.beside is not None:
            leave(self.beside)


def bind(options: ServeOptions) -> socket.socket:
    """Take the address before anything is loaded. Raises KvtoolError where it cannot be had."""
    try:
        family, *_, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        hint = "another server may be running; name another --port, or 0 for a free one" if taken else "check --host"
        # Python's words repeat the address; those of names that are not found have numbers below 0, and are good
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror or str(error)
        raise KvtoolError(f"cannot listen at {options.host}:{options.port}: {why.lower()}", hint) from error


def address_of(bound: socket.socket, tls: bool) -> str:
    """The URL at which clients reach a socket."""
    host, port = bound.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def serve(engine: Engine, listeners: Sequence[Listener], drain: float, ready: Callable[[], None], warn: Warn) -> None:
    """Answer until a signal ends it: begun answers are finished, for so many seconds at most.

    Parameters
    ----------
    ready : called when clients are answered.
    """
    servers = [server_of(listener, drain) for listener in listeners]
    watchdog = Watchdog(drain + _GRACE, warn)
    with _told(warn):
        asyncio.run(_until_signalled(engine, servers, [each.socket for each in listeners], ready, watchdog))


class _Server(uvicorn.Server):
    """A server among several in a process, which leaves the process's signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _until_signalled(
    engine: Engine,
    servers: Sequence[uvicorn.Server],
    sockets: Sequence[socket.socket],
    ready: Callable[[], None],
    watchdog: Watchdog,
) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def end() -> None:
        if stop.is_set():  # once more: at once
            for server in servers:
                server.force_exit = True
        stop.set()

    def signalled(number: int, frame: object) -> None:
        watchdog.start()  # here, not in the loop: that may be what does not come back
        loop.call_soon_threadsafe(end)

    before = {number: signal.signal(number, signalled) for number in (signal.SIGINT, signal.SIGTERM)}
    running = [asyncio.ensure_future(server.serve([bound])) for server, bound in zip(servers, sockets, strict=True)]
    try:
        while not all(server.started for server in servers):
            await asyncio.sleep(0.01)
        ready()
        await stop.wait()
        engine.refuse()
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*running)
    finally:
        engine.halt()  # whatever still runs would be waited for
        for number, handler in before.items():
            signal.signal(number, handler)


class Watchdog:
    """A deadline for the end of the process: whatever holds it up then, the process ends, with a line that says so.

    The bounds of requests (`wire`) keep the interpreter from being held for long. This one does not trust them: its
    last resort is a thread of `faulthandler`, which needs no interpreter.

    Parameters
    ----------
    seconds : that an end may take.
    """

    def __init__(self, seconds: float, warn: Warn) -> None:
        self._seconds, self._warn = seconds, warn
        self._started = False

    def start(self) -> None:
        """Count from now on; once more changes nothing."""
        if self._started:
            return
        self._started = True
        faulthandler.dump_traceback_later(self._seconds + _LAST_RESORT, exit=True, file=2)
        threading.Thread(target=self._run, name="kvtool-watchdog", daemon=True).start()

    def _run(self) -> None:
        time.sleep(self._seconds)
        what = f"the server has not come to its end in {self._seconds:g} s after the request"
        self._warn(f"{what}: it is ended", "what was answered or ingested so far is kept")
        os._exit(EXIT_TERMINATED)


def server_of(listener: Listener, drain: float) -> uvicorn.Server:
    """Return the server for one socket; at its end, begun answers may take `drain` seconds."""
    config = uvicorn.Config(
        listener.app,
        http=patient(listener.patience),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        timeout_graceful_shutdown=math.ceil(drain),
    )
    config.load()
    config.ssl = listener.tls
    return _Server(config)


@contextmanager
def _told(warn: Warn) -> Iterator[None]:
    """Report the HTTP library's own errors as warnings."""

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            failed = record.exc_info[1] if record.exc_info else None
            warn(record.getMessage() + (f": {failed!r}" if failed else ""), "")

    log, handler = logging.getLogger("uvicorn"), Told(logging.ERROR)
    before = log.propagate
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = before
