"""Hostile requests: strangers, malformed and oversized bodies, clients that leave or do not read."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
from starlette.types import Receive, Scope, Send

from kvtool.cli.out import Out
from kvtool.cli.serve import warning_to
from kvtool.core.agent.options import key_of, read_keys
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.query.options import QueryOptions
from kvtool.serve.answers import Answers
from kvtool.serve.engine import Engine
from kvtool.serve.metrics import logged
from kvtool.serve.options import ServeOptions
from tests.cli.working import QUESTION
from tests.serve.conftest import KEY, PATIENCE, Served, serving, turned, wait_until
from tests.wording import refused

CHAT = "/v1/chat/completions"
PAGE = "http://localhost:3000"


def body(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": QUESTION}], **more}


def raw(served: Served, *lines: str, data: bytes = b"", key: str = KEY) -> socket.socket:
    """Return a connection on which a request has been sent exactly as given."""
    made = served.connect()
    host = f"Host: {served.url.removeprefix('http://')}"
    head = "\r\n".join([*lines, host, f"Authorization: Bearer {key}", "", ""])
    made.sendall(head.encode() + data)
    return made


def posted(served: Served, value: dict[str, Any]) -> socket.socket:
    data = json.dumps(value).encode()
    lines = (f"POST {CHAT} HTTP/1.1", "Content-Type: application/json", f"Content-Length: {len(data)}")
    return raw(served, *lines, data=data)


def still_answers(served: Served) -> None:
    with served.client as client:
        assert client.post(CHAT, json=body(max_tokens=2)).status_code == 200


@pytest.mark.parametrize("key", ["", "Bearer", "Bearer kv-another", f"Basic {KEY}", f"Bearer {KEY}x"])
def test_the_key_is_asked_for_everywhere_but_of_health(served: Served, key: str) -> None:
    with httpx2.Client(base_url=served.url, headers={"Authorization": key}, timeout=PATIENCE) as stranger:
        health = stranger.get("/health").json()
        assert health["status"] == "ok"
        assert "learning" not in health  # it tells that somebody has sent something twice
        for answer in (
            stranger.post(CHAT, json=body()),
            stranger.get("/v1/models"),
            stranger.get("/metrics"),
            stranger.get("/v1/documents"),
            stranger.delete("/v1/documents?source=mill0.md"),
            stranger.get("/nowhere"),
        ):
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        answer = stranger.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


def test_a_page_of_an_origin_that_is_let_in(ready: Path) -> None:
    with serving(ready, cors_origin=(PAGE,)) as served, served.client as client:
        asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        preflight = httpx2.options(
            f"{served.url}{CHAT}", headers=asked | {"Access-Control-Request-Headers": "authorization,content-type"}
        )
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        answer = client.post(CHAT, json=body(max_tokens=1), headers={"Origin": PAGE})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert httpx2.options(f"{served.url}{CHAT}", headers=asked | {"Origin": "http://evil"}).status_code == 403
        assert client.post(CHAT, json=body(), headers={"Origin": "http://evil"}).status_code == 403


def test_without_a_key_no_page_asks_unseen(ready: Path) -> None:
    with serving(ready, key=None) as served:
        assert httpx2.get(f"{served.url}/v1/models").status_code == 200
        for headers in (
            {"Host": "evil.example"},
            {"Host": "{a}.evil.example"},
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
        ):
            assert httpx2.get(f"{served.url}/v1/models", headers=headers).status_code == 403


def test_no_server_that_anybody_could_use() -> None:
    for wrong in ({"host": "0.0.0.0"}, {"host": "example.org"}, {"cors_origin": ("*",)}):
        with pytest.raises(UsageError):
            ServeOptions(key=False, **wrong)  # type: ignore[arg-type]
    assert ServeOptions(key=False, host="::1").is_local


def test_the_key_is_made_once_and_kept_from_others(home: Path) -> None:
    path = ServeOptions().key_path
    (key,) = read_keys(path)
    assert read_keys(path) == (key,)
    assert len(key) > 40
    assert path.stat().st_mode & 0o777 == 0o600
    assert key_of(key, ["kv-another", key]) == key
    for given in ("", key[:-1], "🔑"):
        assert key_of(given, ["kv-another", key]) is None
    path.chmod(0o644)
    with refused(KvtoolError):
        read_keys(path)


def test_a_line_of_a_key_file_is_a_key_a_comment_or_an_error(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_text(f"# alice\n  {KEY}  \n\n  # bob\r\nkv-of-another-client")
    assert read_keys(path) == (KEY, "kv-of-another-client")
    many = [f"{KEY}-{number}" for number in range(1000)]  # more than 4,096 bytes
    path.write_text("\n".join(many))
    assert [*read_keys(path)] == many
    phrase, large = "correct horse battery staple", "\n".join(many * 4)
    for wrong in (" \n# none\n", f"{KEY}\n{KEY} # alice\n", phrase, f"{KEY[:15]}\n", large):
        path.write_text(wrong)
        with refused(UsageError, numbers=True) as caught:
            read_keys(path)
        assert "horse" not in str(caught.value)


ASKED = b'{"messages": [{"role": "user", "content": "x"}], '
MALFORMED: tuple[bytes, ...] = (
    *(b"", b"{", b"[]", b"\xff\xfe{}", b'{"a":' * 5000, b"[" * 100_000, b'{"messages": NaN}', b'{"messages": [1]}'),
    *(b'{"messages": "all of them"}', b'{"messages": [{"role": "tool", "content": "x"}]}'),
    b'{"messages": [{"role": "user", "content": {"a": 1}}]}',
    *(ASKED + rest for rest in (b'"stream": "yes"}', b'"kvtool": []}', b'"kvtool": {"embedder": "/x"}}')),
    *(ASKED + rest for rest in (b'"temperature": 2.5}', b'"\\ud800": 1}')),
)
FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("kind", "data", "status"),
    [
        *(("application/json", data, 400) for data in MALFORMED),
        *(("text/plain", b"{}", 415), (FORM, b"a=b", 400), ("", b"a=b", 400)),
    ],
)
def test_a_malformed_body_is_told_what_is_wrong(client: httpx2.Client, kind: str, data: bytes, status: int) -> None:
    answer = client.post(CHAT, content=data, headers={"Content-Type": kind})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_other_addresses_and_methods(client: httpx2.Client) -> None:
    assert client.get("/v1/nowhere").json()["error"]["message"] == "there is no such address"
    assert client.get(CHAT).status_code == 405
    for path, methods in (("/v1/documents", "DELETE, GET, HEAD, POST"), ("/v1/responses/x", "DELETE, GET, HEAD")):
        assert client.put(path).headers["allow"] == methods
    assert client.post("/v1/embeddings", json={"input": "x"}).status_code == 404


@pytest.mark.parametrize(
    "rubbish",
    [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"A" * 200_000, b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n"],
    ids=["tls", "half a line", "one long line", "no length"],
)
def test_no_http_at_all(served: Served, rubbish: bytes) -> None:
    with served.connect() as made, suppress(OSError):  # whether it hears all before it hangs up is a matter of luck
        made.sendall(rubbish)
        made.shutdown(socket.SHUT_WR)
        while made.recv(4096):
            pass
    still_answers(served)


@pytest.mark.parametrize("begun", [False, True])
def test_what_the_server_does_not_wait_for_any_more(begun: bool) -> None:
    sent, rows = list[Any](), list[dict[str, Any]]()

    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await never()

    async def send(message: Any) -> None:
        sent.append(message)

    async def main() -> None:
        scope = {"type": "http", "headers": [], "method": "POST", "path": "/"}
        request = asyncio.create_task(logged(app, rows.append)(scope, never, send))
        await asyncio.sleep(0)
        request.cancel()
        await asyncio.wait([request])
        assert request.cancelled() == begun

    asyncio.run(main())
    assert [message.get("status") for message in sent] == ([200] if begun else [503, None])
    (row,) = rows
    assert row["status"] == 503
    assert "the server ends" in row["error"]


def test_a_warning_that_nobody_hears(tmp_path: Path) -> None:
    """It is said in the thread that answers, which has to go on."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as broken:
        warning_to(Out("jsonl", stdout=broken))("a warning", "a hint")


def test_plain_questions_wait_for_no_schema_that_is_compiled() -> None:
    compiled, engine = threading.Event(), cast(Engine, SimpleNamespace(model_name=""))

    def read(value: Mapping[str, Any]) -> Any:
        assert not value or compiled.wait(PATIENCE)
        return SimpleNamespace(model="", ask=lambda options, strict: None)

    async def main() -> None:
        answers = Answers(engine, QueryOptions(), ServeOptions())
        schemas = [asyncio.ensure_future(answers.parsed({"format": "json"}, read)) for _ in range(64)]
        await asyncio.wait_for(answers.parsed({}, read), PATIENCE / 2)
        compiled.set()
        await asyncio.gather(*schemas)

    asyncio.run(main())


def test_an_answer_that_nobody_waits_for_is_given_up(ready: Path) -> None:
    with serving(ready, asking=QueryOptions(max_tokens=1500), parallel=1) as served, turned(served) as permits:
        scheduler = served.engine.scheduler
        going = posted(served, body(stream=True))
        wait_until(lambda: scheduler.waiting == 1)
        permits.release(2)
        wait_until(lambda: scheduler.running == 1)
        waiting = posted(served, body())
        wait_until(lambda: scheduler.waiting == 1)
        jobs = scheduler._jobs()
        waiting.close()
        wait_until(lambda: jobs[1].left)
        permits.release(10)
        wait_until(lambda: scheduler.waiting == 0)
        assert b"200 OK" in going.recv(4096)
        going.close()
        wait_until(lambda: jobs[0].left)
        permits.release(10)
        wait_until(lambda: scheduler.running == 0)
        permits.release(10**6)
        still_answers(served)
        lines = served.logged(3)
    assert [line["status"] for line in lines] == [499, 499, 200]
    assert served.warnings == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long(ready: Path, stream: bool) -> None:
    with serving(ready, request_timeout=0.001) as served, served.client as client:
        assert client.post(CHAT, json=body(stream=stream)).status_code == 504


def test_an_end_tells_whoever_waits(ready: Path) -> None:
    with serving(ready) as served, turned(served) as permits:
        waiting = posted(served, body())
        wait_until(lambda: served.engine.scheduler.waiting == 1)
        served.engine.refuse()
        with served.client as client:
            assert client.post(CHAT, json=body()).status_code == 429
        permits.release(10**6)
        with waiting:
            assert b"200 OK" in waiting.recv(4096)
