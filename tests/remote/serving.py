"""A real Redis and an S3 of the tests' own, and a link to it that can be slow or dead."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtool.core.remote import send
from kvtool.core.remote.blobs import Blobs, open_blobs
from kvtool.core.remote.catalogue import records_wanted
from kvtool.core.remote.catalogue_io import read_catalogue

AMAZON = {"AWS_ACCESS_KEY_ID": "AKIAZQXWVA", "AWS_SECRET_ACCESS_KEY": "zqxwvb", "AWS_REGION": "us-east-1"}


def wreck(url: str, chunk: str, level: str, *layers: int) -> None:
    """Flip a bit of a chunk's records at a level, in packs or not; no layer: of all."""
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
    """Put every chunk at a level into a pack of its own."""
    monkeypatch.setattr(send, "PACK_BYTES", 1)


@pytest.fixture
def no_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put every record into a value of its own, as if it were too large for a pack."""
    monkeypatch.setattr(send, "MOST_BYTES", 0)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Service:
    """A program that serves a loopback port."""

    def __init__(self, port: int, *command: object) -> None:
        self.port = port
        self._child = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(3000):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            time.sleep(0.02)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()


class RedisServer(Service):
    """`redis-server`, without persistence."""

    def __init__(self, folder: Path, *more: str) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            pytest.skip("redis-server is not installed (apt-get install redis-server)")
        port = free_port()
        options = ("--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder, *more)
        super().__init__(port, program, *options)
        self.url = f"redis://127.0.0.1:{port}/0"


class S3Server(Service):
    """moto's S3. It knows no users, so whatever signs a request is let in."""

    def __init__(self) -> None:
        port = free_port()
        super().__init__(port, sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port)
        self._folders = itertools.count()
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
        urllib.request.urlopen(asked, timeout=30).close()

    def folder(self) -> str:
        return f"s3://bucket/team/kv{next(self._folders)}"


class Link:
    """A TCP proxy before a port: what comes back is let through at `rate` bytes a second; 0: nothing, with the
    connection open."""

    def __init__(self, port: int, rate: float = 1e12) -> None:
        self.rate, self.sent, self.port = rate, 0, 0
        self._to = port
        self._then: tuple[float, Callable[[], object]] | None = None
        self._open: list[socket.socket] = []
        self._turn = threading.RLock()
        self.open()
        self.url = self.home = f"redis://127.0.0.1:{self.port}/0"

    def after(self, count: float, then: Callable[[], object]) -> None:
        """Do something when so many bytes more have come, such as one of the following."""
        self._then = self.sent + count, then

    def heal(self) -> None:
        with self._turn:
            self._then, self.rate = None, 1e12
            self.close()
            self.open()

    def stop(self) -> None:
        self.rate = 0

    def crawl(self) -> None:
        self.rate = 100

    def close(self) -> None:
        with self._turn:
            _end(self._server)
            self._accepting.join(30)  # nobody holds the port then, and nobody comes
            self._server.close()
            for one in self._open:
                _end(one)
                one.close()
            self._open = []

    def open(self) -> None:
        """Let connections in; after it was closed, at the same port again."""
        for _ in range(1000):  # somebody's own end of a line may have got the port meanwhile
            try:
                self._server = socket.create_server(("127.0.0.1", self.port))
                break
            except OSError:
                time.sleep(0.02)
        self.port = int(self._server.getsockname()[1])
        self._accepting = threading.Thread(target=self._accept, args=(self._server,), daemon=True)
        self._accepting.start()

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                self._open.append(client)
                there = socket.create_connection(("127.0.0.1", self._to))
                self._open.append(there)
                threading.Thread(target=self._forward, args=(client, there), daemon=True).start()
                threading.Thread(target=self._forward_slowly, args=(there, client), daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def _forward_slowly(self, there: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := there.recv(4096):
                left = len(data)
                while left > 0:  # at the rate that holds by then
                    pause = 0.01 if self.rate <= 0 else min(left / self.rate, 0.1)
                    time.sleep(pause)
                    left -= int(pause * self.rate) + 1 if self.rate > 0 else 0
                client.sendall(data)
                self.sent += len(data)
                if self._then is not None and self.sent >= self._then[0]:
                    (_, then), self._then = self._then, None
                    then()
            client.shutdown(socket.SHUT_WR)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    import redis

    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.kill()


@pytest.fixture
def s3_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_server.port}")
    for name, value in AMAZON.items():
        monkeypatch.setenv(name, value)
    return s3_server.folder()


@pytest.fixture
def blobs(url: str) -> Iterator[Blobs]:
    with contextlib.closing(open_blobs(url)) as opened:
        yield opened
