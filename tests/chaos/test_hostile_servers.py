"""Servers that mean to harm their clients: a Redis and an S3 that answer what no such server would, and peers of
`rediss://` and `https://` that show a certificate of another, an old one, their own, or none.

Whatever comes, a command ends with an error that names the place, takes no memory for what is only claimed, and loses
nothing of the store that is here."""

from __future__ import annotations

import datetime
import gzip
import itertools
import os
import resource
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import trustme

from kvtool.core.cache.backend import BlobRequest
from kvtool.core.cache.store import Store
from kvtool.core.errors import EXIT_DAMAGED, EXIT_FAILED, KvtoolError
from kvtool.core.remote import object_store, redis
from kvtool.core.remote.blobs import open_blobs
from kvtool.core.remote.prefetch import Prefetcher
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from tests.remote.object_stub import Answer, HttpServer, Request, Serve, TcpServer
from tests.remote.serving import AMAZON
from tests.stores import check_file, make_store

NOW, DAY = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
PATIENCE = 0.5
SMALL = 300 * 2**20  # bytes that a command may have more than an idle one

Reply = Callable[[list[bytes]], Iterator[bytes]]


class HostileRedis(TcpServer):
    """Speaks the protocol with each client as far as `answers` says; what it does not answer itself is `+OK`."""

    def __init__(self, **answers: Reply) -> None:
        self._answers = answers
        super().__init__()
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def serve(self, client: socket.socket) -> None:
        with client.makefile("rb") as lines:
            while line := lines.readline():
                words = [lines.read(int(lines.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
                name = words[0].decode().lower()
                answer = self._answers.get(name, _hello if name == "hello" else _ok)
                for piece in answer(words):
                    client.sendall(piece)


def _hello(words: list[bytes]) -> Iterator[bytes]:
    yield b"%3\r\n$6\r\nserver\r\n$5\r\nredis\r\n$5\r\nproto\r\n:3\r\n$4\r\nmode\r\n$10\r\nstandalone\r\n"


def _ok(words: list[bytes]) -> Iterator[bytes]:
    yield b"+OK\r\n"


def always(*pieces: bytes) -> Reply:
    return lambda words: iter(pieces)


def endless(first: bytes, piece: bytes) -> Reply:
    return lambda words: itertools.chain([first], itertools.repeat(piece))


def dripping(words: list[bytes]) -> Iterator[bytes]:
    """Yield a byte at a time, with long pauses, of an answer that never ends."""
    yield b"$4000\r\n"
    while True:
        threading.Event().wait(PATIENCE / 4)
        yield b"x"


REDIS: dict[str, Reply] = {
    "a bulk of 2^60": endless(b"$%d\r\n" % 2**60, b"x" * 2**20),
    "a bulk of 2^60 and silence": always(b"$%d\r\n" % 2**60),
    "a bulk of 2^30 that comes": endless(b"$%d\r\n" % 2**30, b"x" * 2**20),
    "a length of minus ten": always(b"$-10\r\n"),
    "a length that is no number": always(b"$12x\r\nabc\r\n"),
    "a length too short": always(b"$3\r\nabcdefgh\r\n"),
    "an array of 2^28": always(b"*%d\r\n" % 2**28),
    "an array of 2^60": always(b"*%d\r\n" % 2**60),
    "an array without an end": endless(b"*%d\r\n" % 10**8, b"$1\r\na\r\n" * 10_000),
    "arrays in arrays": endless(b"", b"*1\r\n" * 10_000),
    "a map in its place": always(b"%1\r\n+a\r\n+b\r\n"),
    "a number in its place": always(b":42\r\n"),
    "a double in its place": always(b",1.5e999\r\n"),
    "a big number in its place": always(b"(" + b"9" * 100_000 + b"\r\n"),
    "a line without an end": endless(b"+", b"x" * 2**20),
    "an error without an end": endless(b"-ERR ", b"x" * 2**20),
    "nothing": always(b"_\r\n"),
    "pushes that nobody asked for": endless(b"", b">2\r\n+message\r\n+hi\r\n" * 1000),
    "no protocol at all": always(b"HTTP/1.1 200 OK\r\n\r\n"),
    "zeros": endless(b"", bytes(2**16)),
    "a drip": dripping,
}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "store")


def unharmed(store: Path) -> None:
    with Store.open(store) as opened:
        for name in ("f0", "f1"):
            check_file(opened, name)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def refused(work: Callable[[], object], perhaps: bool = False) -> KvtoolError | None:
    """Return the user's error, caught in bounded time and memory; `perhaps`: an answer instead is fine, too."""
    caught: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            caught.append(error)

    before, worker = peak(), threading.Thread(target=run, daemon=True)
    worker.start()
    worker.join(60)
    assert not worker.is_alive(), "it never ends"
    assert peak() - before < SMALL
    if perhaps and not caught:
        return None
    assert caught, "nobody noticed"
    assert isinstance(caught[0], KvtoolError), repr(caught[0])
    assert caught[0].exit_code in (EXIT_FAILED, EXIT_DAMAGED)
    return caught[0]


def both_ways(url: str, store: Path) -> None:
    for job in (pull, _push):
        with closing(open_blobs(url, PATIENCE)) as blobs:
            error = refused(lambda job=job, blobs=blobs: job(store, blobs))  # type: ignore[misc]
            assert blobs.url in error.message or error.exit_code == EXIT_DAMAGED
    unharmed(store)


def _push(store: Path, blobs: object) -> None:
    with Store.open(store) as opened:
        push(opened, blobs)  # type: ignore[arg-type]


@pytest.mark.some(1)
@pytest.mark.some(4)
@pytest.mark.parametrize("name", REDIS)
def test_hostile_redis_answers(name: str) -> None:
    commands = ("strlen", "scan", "unlink", "time", "zrangebyscore", "get", "getrange", "zrem")
    with closing(HostileRedis(**dict.fromkeys(commands, REDIS[name]))) as server:
        for ask in (
            lambda blobs: blobs.sizes(["head"]),
            lambda blobs: list(blobs.names()),
            lambda blobs: blobs.held(),
            lambda blobs: blobs.hold("push-1"),
            lambda blobs: blobs.get(["head"]),
        ):
            with closing(open_blobs(server.url, PATIENCE)) as blobs:
                perhaps = name in ("a length too short", "a number in its place", "a big number in its place")
                refused(lambda ask=ask, blobs=blobs: ask(blobs), perhaps)  # type: ignore[misc]


@pytest.mark.slow
def test_push_and_pull_of_a_redis_with_a_hostile_hello(store: Path) -> None:
    for hello in (REDIS["a bulk of 2^60"], REDIS["arrays in arrays"], REDIS["a number in its place"], dripping):
        with closing(HostileRedis(hello=hello, client=hello, select=hello)) as server:
            both_ways(server.url, store)


def test_endless_redis_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis, "MOST_NAMES", 50_000)
    page = b"*2\r\n$1\r\n7\r\n*1\r\n$13\r\nkvtool/\x1b[2J..\r\n"
    with closing(HostileRedis(scan=always(page))) as server, closing(open_blobs(server.url, PATIENCE)) as blobs:
        assert "without an end" in refused(lambda: list(blobs.names())).message


# ---- S3 ----------------------------------------------------------------------------------------------------------


_DATE = {"Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT", "ETag": '"x"'}
_NUMBERS = itertools.count()
_XML = b"<?xml version='1.0'?>"
_BOMB = (
    _XML
    + b"<!DOCTYPE l [<!ENTITY a 'aaaaaaaaaa'>"
    + b"".join(b"<!ENTITY %c '%s'>" % (98 + n, b"&%c;" % (97 + n) * 50) for n in range(8))
)
_ENTITY = _XML + b"<!DOCTYPE l [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><Error><Code>&a;</Code></Error>"
S3: dict[str, Callable[[Request], Answer | None]] = {
    "sent to a file": lambda request: Answer(307, headers={"Location": "file:///etc/passwd"}),
    "sent to itself for ever": lambda request: Answer(301, headers={"Location": f"/x{next(_NUMBERS)}"}),
    "sent to nobody": lambda request: Answer(302, headers={"Location": "http://127.0.0.1:1/"}),
    "sent to a scheme that is none": lambda request: Answer(308, headers={"Location": "gopher://x\r\n/"}),
    "a length of 2^60": lambda request: Answer(200, b"x", {**_DATE, "Content-Length": str(2**60)}),
    "a length of minus one": lambda request: Answer(200, b"x", {**_DATE, "Content-Length": "-1"}),
    "a length and silence": lambda request: Answer(200, b"x", {**_DATE, "Content-Length": "100"}),
    "packed ten thousand to one": lambda request: Answer(
        200, gzip.compress(bytes(2**26)), {**_DATE, "Content-Encoding": "gzip"}
    ),
    "entities in entities": lambda request: Answer(500, _BOMB + b"]><Error><Code>&i;</Code></Error>"),
    "an entity of a file": lambda request: Answer(403, _ENTITY),
    "nested by the million": lambda request: Answer(500, b"<Error>" * 10**6),
    "another tag each time": lambda request: Answer(
        200, os.urandom(64), {**_DATE, "ETag": f'"{next(_NUMBERS)}"', "Content-Length": "64"}
    ),
    "no date": lambda request: Answer(200, b"x" * 64, {"ETag": '"x"', "Last-Modified": "yesterday"}),
    "a date of a far year": lambda request: Answer(
        200, b"x" * 64, {"ETag": '"x"', "Last-Modified": "Wed, 21 Oct 999999 07:28:00 GMT"}
    ),
    "heads by the thousand": lambda request: Answer(200, b"x", {**_DATE, **{f"X-{n}": "y" * 1000 for n in range(500)}}),
}


S3_URL = "s3://bucket/team/kv"


def point_at(patch: pytest.MonkeyPatch, port: int) -> None:
    for name, value in {**AMAZON, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
        patch.setenv(name, value)


@pytest.fixture
def s3(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Serve:
    def start(say: Callable[[Request], Answer | None]) -> HttpServer:
        server = serve(say)
        point_at(monkeypatch, server.port)
        return server

    return start


@pytest.mark.some(6)
@pytest.mark.parametrize("name", S3)
def test_push_and_pull_of_a_hostile_s3(name: str, store: Path, s3: Serve) -> None:
    server = s3(S3[name])
    both_ways(S3_URL, store)
    assert len(server.asked) < 200


def test_redirect_gets_no_signature(store: Path, s3: Serve) -> None:
    """Check that a request is made again elsewhere without what was signed for the first host, or not at all."""
    thief = s3(lambda request: Answer(404))
    s3(lambda request: Answer(307, headers={"Location": f"http://127.0.0.1:{thief.port}/bucket/head"}))
    with closing(open_blobs(S3_URL, PATIENCE)) as blobs, suppress(KvtoolError):
        pull(store, blobs)
    assert not [request for request in thief.asked if "authorization" in request.headers]
    assert AMAZON["AWS_SECRET_ACCESS_KEY"] not in str(thief.asked)


def _page(*keys: str, more: bool) -> bytes:
    rows = "".join(
        f"<Contents><Key>{key}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
        for key in keys
    )
    token = f"<NextContinuationToken>{next(_NUMBERS)}</NextContinuationToken>" if more else ""
    return f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}</ListBucketResult>".encode()


def test_endless_s3_list(s3: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "MOST_NAMES", 100)
    monkeypatch.setattr(object_store, "_MANY", 1)
    s3(lambda request: Answer(200, _page("team/kv/pack/a", "team/kv/pack/a", more=True)))
    with closing(open_blobs(S3_URL, PATIENCE)) as blobs:
        assert "without an end" in refused(lambda: list(blobs.names())).message
        assert "without an end" in refused(lambda: blobs.sizes(["pack/a", "pack/b", "pack/c"])).message


@pytest.mark.parametrize("key", ["../../etc/passwd", "team/kv/../x", "team/kv//x", "team/kv/\x01", "/x", "", "other"])
def test_hostile_names_in_an_s3_list(key: str, s3: Serve) -> None:
    server = s3(lambda request: Answer(200, _page(key, more=False)))
    with closing(open_blobs(S3_URL, PATIENCE)) as blobs, suppress(KvtoolError):
        names = list(blobs.names())
        blobs.delete(names)
    for request in server.asked:
        assert request.method in ("GET", "POST") or request.path.startswith("/bucket/team/kv/")
        assert b"/../" not in request.body


class RawServer(TcpServer):
    """A server that sends the same bytes to every client, then repeats a piece without an end."""

    def __init__(self, first: bytes, piece: bytes, pause: float = 0.0) -> None:
        self._first, self._piece, self._seconds = first, piece, pause
        self._over = threading.Event()
        super().__init__()

    def serve(self, client: socket.socket) -> None:
        with client:
            client.recv(65536)
            client.sendall(self._first)
            while self._piece and not self._over.wait(self._seconds):
                client.sendall(self._piece)

    def close(self) -> None:
        self._over.set()
        super().close()


_HEAD = b'HTTP/1.1 200 OK\r\nETag: "x"\r\nLast-Modified: Wed, 21 Oct 2026 07:28:00 GMT\r\n'
RAW: dict[str, tuple[bytes, bytes, float]] = {
    "a head without an end": (b"HTTP/1.1 200 OK\r\nX: ", b"y" * 65536, 0.0),
    "heads without an end": (b"HTTP/1.1 200 OK\r\n", b"X-Y: z\r\n" * 1000, 0.0),
    "a value that drips": (_HEAD + b"Content-Length: 4000\r\n\r\n", b"x", PATIENCE / 4),
    "a head that drips": (b"HTTP/1.1 200 OK\r\nX: ", b"y", PATIENCE / 4),
    "in pieces, without an end": (
        _HEAD + b"Content-Length: 10\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"100000\r\n" + b"x" * 2**20 + b"\r\n",
        0.0,
    ),
    "interim answers without an end": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, 0.0),
    "nothing": (b"", b"", 0.0),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("name", RAW)
def test_push_and_pull_over_a_hostile_http_connection(name: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(RawServer(*RAW[name])) as server:
        point_at(monkeypatch, server.port)
        both_ways(S3_URL, store)


def test_range_longer_than_requested(store: Path, s3: Serve) -> None:
    part = b'HTTP/1.1 206 Partial Content\r\nETag: "x"\r\nLast-Modified: Wed, 21 Oct 2026 07:28:00 GMT\r\n'
    first = part + b"Content-Range: bytes 0-99/100\r\nContent-Length: %d\r\n\r\n" % 2**40
    with closing(RawServer(first, b"x" * 2**20)) as server, pytest.MonkeyPatch.context() as patch:
        point_at(patch, server.port)
        with closing(open_blobs(S3_URL, PATIENCE)) as blobs, closing(Prefetcher(blobs)) as reader:
            reader.ask([BlobRequest("kv/x", 100, "pack/x", 0)])

            def taken() -> None:
                value = reader.take(PATIENCE).value
                assert value is not None
                assert len(value) <= 100
                raise KvtoolError("as much as was asked for")

            refused(taken)
            threading.Event().wait(0.3)
            assert reader._untaken <= 100


# ---- TLS -----------------------------------------------------------------------------------------------------------


class Peer(TcpServer):
    """Shakes hands as its context does and keeps what clients say to it afterwards, or answers in plain bytes."""

    def __init__(self, answer: ssl.SSLContext | bytes) -> None:
        self.said = bytearray()
        self._answer = answer
        super().__init__()

    def serve(self, client: socket.socket) -> None:
        if isinstance(self._answer, bytes):
            client.recv(65536)
            client.sendall(self._answer)
        else:
            client = self._answer.wrap_socket(client, server_side=True)
            self.said += client.recv(65536)
            client.close()


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


CERTIFICATES = ("wrong name", "expired", "not yet", "self-signed", "old protocol", "plain text", "silence", "good")


@pytest.fixture(params=CERTIFICATES)
def peer(request: pytest.FixtureRequest, authority: trustme.CA) -> Iterator[tuple[str, Peer]]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made = {
        "wrong name": lambda: authority.issue_cert("elsewhere.example"),
        "expired": lambda: authority.issue_cert("127.0.0.1", not_before=NOW - 2 * DAY, not_after=NOW - DAY),
        "not yet": lambda: authority.issue_cert("127.0.0.1", not_before=NOW + DAY, not_after=NOW + 2 * DAY),
        "self-signed": lambda: trustme.CA().issue_cert("127.0.0.1"),
    }
    made.get(request.param, lambda: authority.issue_cert("127.0.0.1"))().configure_cert(context)
    if request.param == "old protocol":
        context.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    said = {"plain text": b"-ERR no TLS here\r\nHTTP/1.1 200 OK\r\n\r\n", "silence": b""}
    with closing(Peer(said.get(request.param, context))) as opened:
        yield request.param, opened


@pytest.mark.parametrize(
    "url", ["rediss://:secret@127.0.0.1:{port}/0?ssl_ca_certs={trusted}", "https://127.0.0.1:{port}/kv"]
)
def test_certificates_of_redis_and_https(
    url: str, peer: tuple[str, Peer], authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kind, server), trusted = peer, tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(trusted)
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    with closing(open_blobs(url.format(port=server.port, trusted=trusted), PATIENCE)) as blobs:
        with pytest.raises(KvtoolError) as caught:
            blobs.get(["head"])
        assert caught.value.exit_code == 1
        assert caught.value.hint
        if kind in CERTIFICATES[:4] and url.startswith("https"):
            assert "certificate" in caught.value.message
            assert "SSL_CERT_FILE" in caught.value.hint
    assert bool(server.said) == (kind == "good")
