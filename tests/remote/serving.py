"""A real Redis and an S3 of the tests' own, and a link to it that can be slow or dead."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtool.core.remote import packing, send
from kvtool.core.remote.blobs import Blobs
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
        _wait_for(self.port)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()


class S3Server:
    """moto's S3 on a loopback port. It knows no users, so whatever signs a request is let in."""

    def __init__(self) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _wait_for(self.port)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()

    def empty(self) -> None:
        """Forget all that it holds; there is one bucket then."""
        self._call("POST", "moto-api/reset")
        self._call("PUT", "bucket")

    def _call(self, method: str, path: str) -> None:
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", method=method)
        with urllib.request.urlopen(asked, timeout=30):
            pass


def _wait_for(port: int) -> None:
    for _ in range(3000):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise AssertionError("the server did not start")


class Link:
    """A TCP proxy in front of a port: what comes back is let through at so many bytes a second.

    Attributes
    ----------
    url : of the tier behind it.
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
        self.url = f"redis://127.0.0.1:{self.port}/0"
        threading.Thread(target=self._accept, daemon=True).start()

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


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.kill()


@pytest.fixture
def s3_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of an empty bucket, with what its tools find in the environment."""
    s3_server.empty()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_server.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAZQXWVA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "zqxwvb")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return "s3://bucket/team/kv"


@pytest.fixture(params=["redis", "s3"])
def behind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    """An empty tier of each server, behind a link."""
    server = request.getfixturevalue(f"{request.param}_server")
    url = str(request.getfixturevalue(f"{request.param}_url"))
    link = Link(server.port)
    if request.param == "s3":
        link.url = url
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{link.port}")
    yield link
    link.close()


# A tier of each kind: the fixture of a server's URL, or the URL of a place below the test's own folder.
TIERS = {"file": "file://{folder}/shared", "redis": "redis_url", "s3": "s3_url"}


@pytest.fixture(params=TIERS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty tier of each kind."""
    tier = TIERS[request.param]
    return tier.format(folder=tmp_path) if "://" in tier else str(request.getfixturevalue(tier))


@pytest.fixture
def blobs(url: str) -> Iterator[Blobs]:
    """The same, opened."""
    with contextlib.closing(open_blobs(url)) as opened:
        yield opened
