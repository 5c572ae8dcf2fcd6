"""The process of a server: its sockets, its signals, its end."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from kvtool.core.common.types import Warn
from kvtool.core.errors import KvtoolError
from kvtool.serve.beside import leave
from kvtool.serve.engine import Engine
from kvtool.serve.options import ServeOptions
from kvtool.serve.protocol import patient

_BACKLOG = 128
_HEADER_BYTES = 64 * 1024


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
    with _told(warn):
        asyncio.run(_until_signalled(engine, servers, [each.socket for each in listeners], ready))


class _Server(uvicorn.Server):
    """One of several in a process, whose signals it leaves alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _until_signalled(
    engine: Engine, servers: Sequence[uvicorn.Server], sockets: Sequence[socket.socket], ready: Callable[[], None]
) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def end() -> None:
        if stop.is_set():  # once more: at once
            for server in servers:
                server.force_exit = True
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
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
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def server_of(listener: Listener, drain: float) -> uvicorn.Server:
    """What answers at one socket; begun answers may take `drain` seconds at its end."""
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
    """What the HTTP library has to say of its own errors is told as warnings."""

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
