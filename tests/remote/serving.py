"""A real Redis of the tests' own, and a link to it that can be slow or dead."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtool.core.remote import packing, send
from kvtool.core.remote.entries import records_wanted
from kvtool.core.remote.reading import read_catalogue
from kvtool.core.remote.urls import open_blobs

PASSWORD = "open sesame"


def wreck(url: str, chunk: str, level: str, *layers: int) -> None:
    """Flip a bit of a chunk's records at a level, wherever they stand; no layer: of all."""
    with contextlib.closing(open_blobs(url)) as blobs:
        described = read_catalogue(blobs).chunks[chunk]
        for layer in layers or range(described.layers):
            wanted = records_wanted(chunk, described, level)[layer]
            name = wanted.pack or wanted.name
            value = bytearray(blobs.get([name])[0] or b"")
            value[wanted.start + 100] ^= 8
            blobs.put({name: bytes(value)})


@pytest.fixture
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack for every chunk at a level."""
    monkeypatch.setattr(packing, "PACK_BYTES", 1)


@pytest.fixture
def no_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value for every record, as older versions pushed them."""
    monkeypatch.setattr(send, "MOST_BYTES", 0)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class RedisServer:
    """`redis-server` on a loopback port, without persistence."""

    def __init__(self, folder: Path, *more: str) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            pytest.skip("redis-server is not installed (apt-get install redis-server)")
        self.port = free_port()
        command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *more]
        self._child = subprocess.Popen([*command, "--dir", str(folder)], stdout=subprocess.DEVNULL)
        self._wait()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()

    def _wait(self) -> None:
        for _ in range(500):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.02)
        raise AssertionError("redis-server did not start")


class Link:
    """A TCP proxy in front of a port: what comes back is let through at so many bytes a second.

    Attributes
    ----------
    rate : bytes a second towards the client; 0: nothing any more, with the connection kept open.
    cut_after : bytes towards the client after which both ends are closed, and new connections refused.
    crawl_after : bytes towards the client after which it lets through a hundred bytes a second.
    """

    def __init__(self, port: int, rate: float = 1e12, cut_after: float = 1e15) -> None:
        self.rate, self.cut_after = rate, cut_after
        self.crawl_after = 1e15
        self.sent = 0
        self._to = port
        self._open: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def close(self) -> None:
        for one in (self._server, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                there = socket.create_connection(("127.0.0.1", self._to))
                self._open += [client, there]
                threading.Thread(target=self._forward, args=(client, there), daemon=True).start()
                threading.Thread(target=self._forward_slowly, args=(there, client), daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)

    def _forward_slowly(self, there: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := there.recv(4096):
                while self.rate <= 0:
                    time.sleep(0.01)
                time.sleep(len(data) / (self.rate if self.sent < self.crawl_after else 100))
                client.sendall(data)
                self.sent += len(data)
                if self.sent >= self.cut_after:
                    self.close()
                    return


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """An empty database."""
    import redis

    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


# A tier of each kind: the fixture of a server's URL, or the URL of a place below the test's own folder.
TIERS = {"file": "file://{folder}/shared", "redis": "redis_url"}


@pytest.fixture(params=TIERS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty tier of each kind."""
    tier = TIERS[request.param]
    return tier.format(folder=tmp_path) if "://" in tier else str(request.getfixturevalue(tier))
