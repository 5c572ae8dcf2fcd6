"""An end of the server in the middle of an ingest."""

from __future__ import annotations

import json
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvtool.core.ingest import storer
from kvtool.core.ingest.storer import ChunkStorer
from tests.cli.working import QUESTION, kvtool
from tests.serve.conftest import KEY, PATIENCE, serving, wait_until
from tests.serve.test_process import running

CHAT, DOCUMENTS = "/v1/chat/completions", "/v1/documents"
BODY = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 6}


def texts(count: int) -> dict[str, Any]:
    return {"documents": [{"name": f"n{n}.md", "text": f"# Number {n}\n\nWord {n} flew. " * 20} for n in range(count)]}


def held(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Semaphore]:
    """Small batches, each of which takes a permit; the event is set when the first one asks."""
    asked, permits, prefill = threading.Event(), threading.Semaphore(0), ChunkStorer._prefill

    def wait(self: ChunkStorer, batch: Any) -> Any:
        asked.set()
        permits.acquire()
        return prefill(self, batch)

    monkeypatch.setitem(storer.BATCH_TOKENS, "cpu", 64)
    monkeypatch.setattr(ChunkStorer, "_prefill", wait)
    return asked, permits


@pytest.mark.parametrize("at_once", [False, True])
def test_an_ingest_stops_where_the_server_ends(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """After its current file; without time for that, after a batch. The next ingest continues from there."""
    asked, permits = held(monkeypatch)
    with serving(store, uploads=tmp_path / "sent") as served, served.client as client, ThreadPoolExecutor(1) as pool:
        before = len(client.get(DOCUMENTS).json()["data"])
        done = pool.submit(client.post, DOCUMENTS, json=texts(4))
        assert asked.wait(PATIENCE)
        served.engine.refuse()
        if at_once:
            served.engine.halt()
        permits.release(10**6)
        answer = done.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "ending"), answer.text
        kept = 0 if at_once else 1
        assert f"{kept} {'file was' if kept == 1 else 'files were'} kept" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) > 0
        assert len(client.get(DOCUMENTS).json()["data"]) == before + kept
        (row,) = [row for row in served.logged(2) if row["method"] == "POST"]
        assert "the ingest has stopped" in row["error"]
    with serving(store, uploads=tmp_path / "sent") as served, served.client as client:
        counts = client.post(DOCUMENTS, json=texts(4)).json()["documents"]
        assert (counts["unchanged"], counts["added"]) == (kept, 4 - kept)
        asked_of = {"messages": [{"role": "user", "content": "What flew with number 3?"}], "max_tokens": 2}
        assert client.post(CHAT, json=asked_of).status_code == 200


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
