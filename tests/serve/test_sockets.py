"""Clients at real sockets that read by the byte, stop in the middle, hang up, or send several requests at once."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvtool.core.query.options import QueryOptions
from tests.serve.conftest import KEY, PATIENCE, Served, serving, wait_until
from tests.serve.test_hostile import CHAT, body, posted, raw, still_answers

LONG = QueryOptions(max_tokens=1500)
SMALL = 4096  # bytes of a socket's memory; an answer of 1,500 tokens is some 300 kB of events
SHORTLY = 1.0  # seconds that clients are waited for
JSON = "Content-Type: application/json"


def streamed(served: Served, **more: Any) -> bytes:
    with served.client as client:
        answer = client.post(CHAT, json=body(stream=True, **more))
    assert answer.status_code == 200, answer.text
    return answer.content


def slow(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    made = socket.socket()
    made.settimeout(PATIENCE)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    made.connect((host, int(port)))
    data = json.dumps(body(stream=True)).encode()
    head = (f"POST {CHAT} HTTP/1.1", f"Host: {host}:{port}", f"Authorization: Bearer {KEY}", JSON)
    made.sendall("\r\n".join([*head, f"Content-Length: {len(data)}", "", ""]).encode() + data)
    return made


def is_up(served: Served) -> None:
    """Check that it answers a request that is sent at once: one whose body is awaited is not tried here."""
    with served.client as client:
        assert client.get("/health").status_code == 200


def is_closed(made: socket.socket) -> bool:
    with suppress(ConnectionError):
        while made.recv(65536):
            pass
    return True


@pytest.mark.slow
def test_a_client_that_reads_by_the_byte_delays_nobody(ready: Path) -> None:
    """Others' answers come whole while most of its own has not left the server."""
    # It reads so little that nothing more is sent to it for seconds: on a busy machine for more than a client is given.
    limits = {"parallel": 4, "client_timeout": PATIENCE}
    with serving(ready, asking=LONG, kept=SMALL, **limits) as served, slow(served) as reader:
        read = bytearray(reader.recv(1))
        with ThreadPoolExecutor(3) as pool:
            others = [pool.submit(streamed, served, max_tokens=200) for _ in range(3)]
            while wait(others, timeout=0.05).not_done:
                read += reader.recv(1)
        assert all(other.result().endswith(b"data: [DONE]\n\n") for other in others)
        assert len({other.result().count(b"data: ") for other in others}) == 1
        assert b"[DONE]" not in read
        while b"[DONE]" not in read:  # it has its answer, too, as soon as it reads
            read += reader.recv(65536)
        assert read.startswith(b"HTTP/1.1 200 OK")
        rows = served.logged(4)
    assert [row["status"] for row in rows] == [200] * 4
    assert rows[-1]["tokens"]["generated"] > 1000


@pytest.mark.slow
def test_who_does_not_read_is_given_up(ready: Path) -> None:
    with serving(ready, asking=LONG, kept=SMALL, client_timeout=SHORTLY) as served, slow(served) as reader:
        (row,) = served.logged(1)
        assert row["status"] in (200, 499)  # its answer may have been written by then
        wait_until(lambda: served.engine.scheduler.running == 0)
        assert is_closed(reader)
        is_up(served)
    assert served.warnings == []


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "half",
    [b"", b"POST /v1", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"POST / HTTP/1.1\r\nHost: x\r\n"],
    ids=["nothing", "half a line", "half a head", "no end"],
)
def test_a_head_that_does_not_come(ready: Path, half: bytes) -> None:
    whole = f"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    with serving(ready, client_timeout=SHORTLY) as served:
        for sent in (half, whole + half):
            with served.connect() as made:
                made.sendall(sent)
                assert is_closed(made)
        is_up(served)
    assert served.warnings == []


def test_a_head_that_comes_by_the_byte(ready: Path) -> None:
    with serving(ready, client_timeout=SHORTLY) as served:
        with served.connect() as made, suppress(ConnectionError):
            made.settimeout(0.02)
            made.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
            said = b"?"
            while said:
                made.sendall(b"x")
                with suppress(TimeoutError):
                    said = made.recv(1)
        is_up(served)


@pytest.mark.some(1)
@pytest.mark.parametrize("how", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_half_a_body(ready: Path, how: str) -> None:
    with serving(ready, client_timeout=SHORTLY) as served:
        with raw(served, f"POST {CHAT} HTTP/1.1", JSON, how, data=b'5\r\n{"mes') as made:
            assert is_closed(made)
        (row,) = served.logged(1)
        assert row["status"] == 499
        is_up(served)
    assert served.warnings == []


@pytest.mark.parametrize("how", ["Content-Length: 3000", "Transfer-Encoding: chunked"])
def test_a_body_that_is_too_long_is_not_waited_for(ready: Path, how: str) -> None:
    with serving(ready, max_body=2000) as served:
        some = b"c00\r\n" + b"x" * 0xC00 + b"\r\n" if "chunked" in how else b"x" * 2500
        with raw(served, f"POST {CHAT} HTTP/1.1", JSON, how, data=some) as made:
            assert made.recv(12) == b"HTTP/1.1 413"
        still_answers(served)
    assert served.warnings == []


def reset(made: socket.socket) -> None:
    """Hang up as the system of a killed process does that had not read everything."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    made.close()


@pytest.mark.parametrize("leave", [reset, socket.socket.close])
def test_ten_killed_clients(ready: Path, leave: Callable[[socket.socket], None]) -> None:
    with serving(ready, asking=LONG, parallel=11) as served, ExitStack() as stack:
        killed = [posted(served, body(stream=True)) for _ in range(10)]
        stays = stack.enter_context(posted(served, body(stream=True, max_tokens=60)))
        for made in killed:
            assert made.recv(12) == b"HTTP/1.1 200"
            leave(made)
        read = bytearray()
        while b"[DONE]" not in read:
            read += stays.recv(65536)
        wait_until(lambda: served.engine.scheduler.running == 0)
        rows = list(served.logged(11))
        still_answers(served)
    assert sorted(row["status"] for row in rows) == [200] + [499] * 10
    assert served.warnings == []


def test_requests_that_do_not_wait_for_each_others_answers(served: Served) -> None:
    data = json.dumps(body(max_tokens=2)).encode()
    ask = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n{JSON}\r\nContent-Length: {len(data)}\r\n"
    last = f"GET /nowhere HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
    with served.connect() as made:
        made.sendall((ask.encode() + b"\r\n" + data) * 3 + last.encode())
        read = bytearray()
        while part := made.recv(65536):
            read += part
    assert [part[:3] for part in read.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"200", b"404"]
    assert read.count(b'"object":"chat.completion"') == 3


WRONG = [
    '"max_tokens": 1e999',
    '"temperature": 1e999',
    f'"seed": {10**30}',
    f'"seed": {"9" * 5000}',
    f'"max_tokens": {-(10**30)}',
    '"seed": 1, "seed": 2',
    '"kvtool": {"top_k": 1, "top_k": 2}',
    f'"kvtool": {{"ratio": {10**400}}}',
    '"stop": ["' + "\\\\ud800" + '", 1]',
]
ODD = [
    f'"max_tokens": 2, "kvtool": {{"top_k": {10**30}}}',
    '"max_tokens": 2, "kvtool": {"source": ["\\ud800"]}, "stop": ["\\ud800"]',
    '"max_tokens": 2, "kvtool": {"documents": ["\\ud800"]}',
    '"max_tokens": 2, "kvtool": {"chunks": ["\\u0000", ""]}',
    f'"max_tokens": {10**30}, "stop": ["e", "a", " "]',
    '"max_tokens": 2, "messages": [{"role": "user", "content": "mill \\ud800 \\u0000 third"}]',
    f'"max_tokens": 2, "temperature": {10**300}',
    '"max_tokens": 2, "temperature": 1e-320',
]


@pytest.mark.parametrize("more", [*WRONG, *ODD])
def test_odd_values_end_in_an_answer_or_a_reason(served: Served, client: httpx2.Client, more: str) -> None:
    data = more if '"messages"' in more else f'"messages": {json.dumps(body()["messages"])}, {more}'
    answer = client.post(CHAT, content=f"{{{data}}}", headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 404) or (more in ODD and answer.status_code == 200), answer.text
    assert answer.status_code == 200 or answer.json()["error"]["message"]
    assert "bug" not in answer.text
    assert served.warnings == []


def test_letters_that_are_no_text(served: Served) -> None:
    for lines in (
        ("GET /v1/documents?source=%ff%fe HTTP/1.1",),
        ("GET /v1/documents?source=%00 HTTP/1.1",),
        ("DELETE /v1/documents?source=%ed%a0%80 HTTP/1.1",),
        ("GET /%ff HTTP/1.1",),
        ("GET /v1/models HTTP/1.1", "X-Odd: \xff"),
    ):
        with raw(served, *lines, "Connection: close") as made:
            read = b"".join(iter(lambda: made.recv(65536), b""))
        assert int(read[9:12]) in (200, 400, 404), read
    still_answers(served)
