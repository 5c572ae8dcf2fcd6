"""The process of a server: its sockets, its signals, its shutdown."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvtool.core.common.types import Warn
from kvtool.core.errors import KvtoolError
from kvtool.serve.engine import Engine
from kvtool.serve.options import ServeOptions
from kvtool.serve.unix_socket import leave

_BACKLOG = 128
_HEADER_BYTES = 64 * 1024
_GRACE = 30.0  # seconds for the shutdown after its answers: a batch of an ingest, a layer of a prompt


@dataclass(frozen=True, slots=True)
class Listener:
    """An application with its bound socket, perhaps at a `path`. `timeout`: seconds that a client may be idle."""

    app: ASGIApp
    socket: socket.socket
    path: Path | None = None
    timeout: float = 60.0

    def close(self) -> None:
        self.socket.close()
        if self.path is not None:
            leave(self.path)


def bind(options: ServeOptions) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        hint = "another server may be running; name another --port, or 0 for a free one" if taken else "check --host"
        # Python's message repeats the address; messages of names that are not found have numbers below 0
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror or str(error)
        raise KvtoolError(f"cannot listen at {options.host}:{options.port}: {why.lower()}", hint) from error


def address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(engine: Engine, listeners: Sequence[Listener], drain: float, ready: Callable[[], None], warn: Warn) -> None:
    """Answer until a signal. `drain`: seconds to finish answers."""
    servers = {server_of(listener, drain): listener.socket for listener in listeners}
    with _warning(warn):
        asyncio.run(_until_signalled(engine, servers, ready, drain + _GRACE))


def limit_shutdown(seconds: float) -> None:
    """End the process by SIGALRM after so many seconds. The kernel does it, even if no thread can run."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


class _Server(uvicorn.Server):
    """Server that installs no signal handlers: a process has several."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _until_signalled(
    engine: Engine, servers: Mapping[uvicorn.Server, socket.socket], ready: Callable[[], None], limit: float
) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def end() -> None:
        if stop.is_set():  # a second signal: at once
            for server in servers:
                server.force_exit = True
        stop.set()

    def signalled(number: int, frame: object) -> None:
        limit_shutdown(limit)
        loop.call_soon_threadsafe(end)

    before = {number: signal.signal(number, signalled) for number in (signal.SIGINT, signal.SIGTERM)}
    running = [asyncio.ensure_future(server.serve([bound])) for server, bound in servers.items()]
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
        engine.halt()  # asyncio would wait for a running ingest
        for number, handler in before.items():
            signal.signal(number, handler)


def server_of(listener: Listener, drain: float) -> uvicorn.Server:
    config = uvicorn.Config(
        listener.app,
        http=type("Protocol", (TimeoutProtocol,), {"timeout": listener.timeout}),
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
    return _Server(config)


@contextmanager
def _warning(warn: Warn) -> Iterator[None]:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            failed = record.exc_info[1] if record.exc_info else None
            warn(record.getMessage() + (f": {failed!r}" if failed else ""), "")

    log, handler = logging.getLogger("uvicorn"), Handler(logging.ERROR)
    before = log.propagate
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = before


class TimeoutProtocol(H11Protocol):
    """HTTP/1.1 connection that is closed if the client takes too long: to send a head, to continue a body, or to read.

    A connection whose last response is not read ends, too.
    """

    timeout: float  # seconds, set by `server_of`
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._restart_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:  # else it is a part of a head, which is timed as a whole
            self._restart_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._restart_timer()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`: the client reads too slowly."""
        super().pause_writing()
        self._restart_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._restart_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _restart_timer(self) -> None:
        self._stop_timer()
        if not self._is_answering or self.cycle.more_body or self.flow.write_paused:
            self._timer = self.loop.call_later(self.timeout, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
