"""`kvtool serve` as a process: how it begins, what it says, how it ends, also in the middle of an ingest."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvtool.core.cache.integrity import verify
from kvtool.core.cache.layout import read_uuid
from kvtool.core.cache.store import Store
from kvtool.core.common.files import cache_dir
from kvtool.core.ingest import storer
from kvtool.core.ingest.storer import ChunkStorer
from kvtool.core.session.identity import store_identity
from tests.cli.working import QUESTION, command, environment, kvtool
from tests.serve.conftest import KEY, PATIENCE, serving, wait_until


@contextmanager
def running(*args: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    begun = subprocess.Popen(
        command("serve", "--port", "0", *args), text=True, encoding="utf-8", env=environment(), **pipes
    )
    try:
        assert begun.stderr is not None
        said = ""
        while not (found := re.search(r"ready on (\S+);", said)):
            line = begun.stderr.readline()
            assert line, said
            said += line
        yield begun, found[1]
    finally:
        begun.kill()
        begun.communicate()


def test_a_server_begins_answers_and_drains(store: Path, home: Path) -> None:
    with running("--store", store, "--max-tokens", "4", "--drain-timeout", "10m") as (process, url):
        key = kvtool("serve", "--show-key").fine().out.strip()
        assert (home / "data" / "serve.key").read_text().strip() == key
        asked = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 200, "stream": True}
        with (
            httpx2.Client(headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=asked) as answer,
        ):
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    (row,) = [json.loads(line) for line in out.splitlines()]
    assert (row["type"], row["status"], row["path"]) == ("request", 200, "/v1/chat/completions")
    assert row["tokens"]["generated"] > 4
    assert QUESTION not in out + err


WORDS = " ".join(f"word{number} of the harbour" for number in range(40))
LEARNED = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 1}


@pytest.mark.slow
def test_ctrl_c_ends_a_server_that_learns(store: Path) -> None:
    counts = list[int]()
    for _ in range(2):
        with running("--store", store, "--learn", "--no-key") as (process, url):
            for _ in range(2):
                assert httpx2.post(f"{url}/v1/chat/completions", json=LEARNED, timeout=PATIENCE).status_code == 200
            with Store.open(cache_dir() / "learned" / read_uuid(store)) as learned:
                wait_until(learned.sources)
                process.send_signal(signal.SIGINT)
                assert process.wait(PATIENCE) == 0
                assert verify(learned) == []
                counts.append(len(learned.sources()))
    assert 0 < counts[0] <= counts[1]


@pytest.mark.slow
def test_a_key_file_that_is_not_where_it_was_deletes_nobodys_passages(store: Path, tmp_path: Path) -> None:
    """A start makes the missing file anew, and a later one has it: none of its keys has any passage."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    with running("--store", store, "--learn", "--key-file", mine) as (_, url):
        headers = {"Authorization": f"Bearer {mine.read_text().strip()}"}
        for _ in range(2):
            assert httpx2.post(f"{url}/v1/chat/completions", json=LEARNED, headers=headers, timeout=PATIENCE).is_success
        with Store.open(cache_dir() / "learned" / read_uuid(store)) as learned:
            wait_until(learned.sources)
    for _ in range(2):
        with running("--store", store, "--learn", "--key-file", other) as (_, url):
            headers = {"Authorization": f"Bearer {other.read_text().strip()}"}
            assert httpx2.post(f"{url}/v1/chat/completions", json=LEARNED, headers=headers, timeout=PATIENCE).is_success
            with Store.open(cache_dir() / "learned" / read_uuid(store)) as learned:
                assert learned.sources()


@pytest.mark.slow
def test_on_a_terminal_it_says_that_it_is_ready_and_a_short_line_a_request(store: Path, tmp_path: Path) -> None:
    mine, its = pty.openpty()
    (tmp_path / "key").write_text("kv-of+a/terminal\n")
    (tmp_path / "key").chmod(0o600)
    asked = command("serve", "--port", "0", "--store", store, "--no-socket", "--max-tokens", "4")
    process = subprocess.Popen(
        [*asked, "--key-file", str(tmp_path / "key")], stdout=its, stderr=its, env=environment(TERM="xterm")
    )
    os.close(its)
    shown = ""

    def until(pattern: str) -> re.Match[str]:
        nonlocal shown
        while not (found := re.search(pattern, shown)):
            shown += os.read(mine, 4096).decode()
        return found

    try:
        url, page = until(r"(?s)ready on (\S+); the key is in [^;]*;.*?page\s+at\s+(\S+)\s").groups()
        assert page == f"{url}/#key=kv-of%2Ba/terminal"
        key = {"Authorization": "Bearer kv-of+a/terminal"}
        chat = {"messages": [{"role": "user", "content": QUESTION}]}
        assert httpx2.post(f"{url}/v1/chat/completions", json=chat, headers=key, timeout=PATIENCE).status_code == 200
        assert httpx2.get(f"{url}/nothing", headers=key, timeout=PATIENCE).status_code == 404
        until(r"GET /nothing 404 in .*\n")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        os.close(mine)
    told = shown[shown.index("ready on") :]
    assert "loading" not in told
    first, second = re.findall(r"(\d\d:\d\d:\d\d [A-Z].*)\r\n", told)
    assert re.fullmatch(r"\S+ POST /v1/chat/completions 200 in \d+\.\d\d s, \d+ \+ [1-4] tokens", first)
    assert re.fullmatch(r"\S+ GET /nothing 404 in \d+\.\d\d s", second)


def test_an_address_that_is_taken_is_told_before_the_model_is_loaded(store: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        told = kvtool("serve", "--store", store, "--port", port).failed(1, "cannot listen at", "--port")
    assert told.err.count(f"127.0.0.1:{port}") + told.err.count(f"{port})") == 1


@pytest.mark.slow
def test_a_store_that_does_not_exist(tiny: Path, tmp_path: Path) -> None:
    none, elsewhere = tmp_path / "none", ("--host", "203.0.113.1")  # of documentation: no machine can listen there
    kvtool("serve", "--store", none).failed(10, "there is no store at", "kvtool ingest")
    kvtool("serve", "--store", none, "--uploads", tmp_path / "sent", "--model", tmp_path / "lost").failed(12, "lost")
    (tmp_path / "file").touch()
    kvtool("serve", "--store", none, "--uploads", tmp_path / "file").failed(2, "not a folder")
    assert not none.exists()
    kvtool("serve", "--store", tmp_path / "made", "--learn", "--model", tiny, *elsewhere).failed(1, "cannot listen")
    with Store.open(tmp_path / "made") as store:
        assert store_identity(store).model == str(tiny)
    made = ("--store", none, "--uploads", tmp_path / "sent", "--model", tiny, "--no-socket", "--no-key")
    with running(*made) as (process, url):
        assert httpx2.get(f"{url}/page/state", timeout=PATIENCE).json()["model"] == "tiny"
        asked = {"messages": [{"role": "user", "content": QUESTION}]}
        reply = httpx2.post(f"{url}/v1/chat/completions", json=asked, timeout=PATIENCE)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "no_documents")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


CHAT, DOCUMENTS = "/v1/chat/completions", "/v1/documents"


def texts(count: int) -> dict[str, Any]:
    return {"documents": [{"name": f"n{n}.md", "text": f"# Number {n}\n\nWord {n} flew. " * 20} for n in range(count)]}


def held(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Semaphore]:
    """Small batches, each of which takes a permit; the event is set when the first one asks."""
    asked, permits, compute = threading.Event(), threading.Semaphore(0), ChunkStorer._compute

    def wait(self: ChunkStorer, batch: Any) -> None:
        asked.set()
        permits.acquire()
        compute(self, batch)

    monkeypatch.setitem(storer.BATCH_TOKENS, "cpu", 64)
    monkeypatch.setattr(ChunkStorer, "_compute", wait)
    return asked, permits


@pytest.mark.slow
def test_an_ingest_stops_where_the_server_ends(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its current batch; all texts are stored. The next ingest continues from there."""
    asked, permits = held(monkeypatch)
    with serving(store, uploads=tmp_path / "sent") as served, served.client as client, ThreadPoolExecutor(1) as pool:
        before = len(client.get(DOCUMENTS).json()["data"])
        done = pool.submit(client.post, DOCUMENTS, json=texts(4))
        assert asked.wait(PATIENCE)
        served.engine.refuse()
        permits.release(10**6)
        answer = done.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "ending"), answer.text
        assert "4 files were kept" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) > 0
        assert len(client.get(DOCUMENTS).json()["data"]) == before + 4
        (row,) = [row for row in served.logged(2) if row["method"] == "POST"]
        assert "the ingest has stopped" in row["error"]
    with serving(store, uploads=tmp_path / "sent") as served, served.client as client:
        report = client.post(DOCUMENTS, json=texts(4)).json()
        assert (report["documents"]["unchanged"], report["chunks"]["computed"] > 0) == (4, True)
        asked_of = {"messages": [{"role": "user", "content": "What flew with number 3?"}], "max_tokens": 2}
        assert client.post(CHAT, json=asked_of).status_code == 200


@pytest.mark.slow
def test_sigterm_ends_a_process_that_ingests(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, log, script = tmp_path / "key", tmp_path / "log", tmp_path / "read.sh"
    key.write_text(KEY)
    key.chmod(0o600)
    script.write_text(f"touch {tmp_path}/asked; until test -e {tmp_path}/go; do sleep 0.02; done; cat $1")
    monkeypatch.setenv("KVTOOL_READERS", f"slow=sh {script} {{}}")
    sent = {"documents": [{"name": name, "text": f"{name} flew."} for name in ("a.md", "b.slow", "c.md")]}
    with (
        running("--store", store, "--uploads", tmp_path / "sent", "--key-file", key, "--request-log", log) as begun,
        httpx2.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=PATIENCE) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        process, url = begun
        done = pool.submit(client.post, f"{url}{DOCUMENTS}", json=sent)
        wait_until((tmp_path / "asked").exists)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses(url))
        (tmp_path / "go").touch()
        answer = done.result()
        _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, answer.status_code) == (0, 503), err + answer.text
    (row,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert row["status"] == 503
    assert "the ingest has stopped, 1 file was kept" in row["error"]
    kvtool("store", "verify", "--store", store).fine()


def refuses(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except ConnectionRefusedError:
        return True
    return False
