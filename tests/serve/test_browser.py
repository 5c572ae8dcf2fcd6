"""A real browser: pages of other origins that stream from the server, one that may and one that may not."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli.working import QUESTION
from tests.serve.conftest import KEY, PATIENCE, Served, serving, turned, wait_until

PAGE = """<!doctype html><title>A page</title><script>
const tell = (what) => fetch("/told", {method: "POST", body: JSON.stringify(what)});
async function ask(body, signal) {
  const messages = [{role: "user", content: "QUESTION"}];
  const reply = await fetch("SERVER/v1/chat/completions", {
    method: "POST", signal, body: JSON.stringify({stream: true, messages, ...body}),
    headers: {"Authorization": "Bearer KEY", "Content-Type": "application/json"},
  });
  await tell({status: reply.status, id: reply.headers.get("x-request-id")});
  return reply.body.pipeThrough(new TextDecoderStream()).getReader();
}
async function run() {
  let text = "", told = false;
  const whole = await ask({max_tokens: 8});
  for (let part; !(part = await whole.read()).done;) {
    text += part.value;
    if (!told && text.includes('"content"')) { told = true; await tell({begun: text}); }
  }
  await tell({text});
  const leaving = new AbortController();
  await (await ask({max_tokens: 1500}, leaving.signal)).read();
  leaving.abort();
  await tell({left: true});
}
run().catch((error) => tell({error: error.name}));
</script>"""
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-proxy-server", "--remote-debugging-port=0")


class Origin:
    def __init__(self) -> None:
        self.page, self._told = "", queue.SimpleQueue[dict[str, Any]]()
        origin = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200 if self.path == "/" else 404, origin.page.encode())

            def do_POST(self) -> None:
                origin._told.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self._send(200, b"")

            def _send(self, status: int, data: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def told(self) -> dict[str, Any]:
        return self._told.get(timeout=PATIENCE)


@contextmanager
def origins() -> Iterator[tuple[Origin, Origin]]:
    both = Origin(), Origin()
    threads = [threading.Thread(target=each.server.serve_forever) for each in both]
    for thread in threads:
        thread.start()
    try:
        yield both
    finally:
        for each, thread in zip(both, threads, strict=True):
            each.server.shutdown()
            each.server.server_close()
            thread.join()


@contextmanager
def browsing(profile: Path, *urls: str) -> Iterator[None]:
    browser = subprocess.Popen(
        ["chromium", *_FLAGS, f"--user-data-dir={profile}", *urls],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()


def posts(served: Served) -> list[int]:
    return [row["status"] for row in served.log if row["method"] == "POST"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed (apt-get install chromium)")
def test_pages_of_other_origins(ready: Path, tmp_path: Path) -> None:
    with origins() as (friend, stranger), serving(ready, cors_origin=(friend.url,)) as served:
        page = PAGE.replace("SERVER", served.url).replace("QUESTION", QUESTION).replace("KEY", KEY)
        friend.page = stranger.page = page
        with turned(served) as permits, browsing(tmp_path / "profile", friend.url):
            permits.release(3)  # of eight tokens some cannot be there yet
            head, begun = friend.told(), friend.told()
            assert (head["status"], bool(head["id"])) == (200, True)
            assert "[DONE]" not in begun["begun"]
            permits.release(20)  # the rest of it, and a little of 1,500 tokens
            assert friend.told()["text"].endswith("data: [DONE]\n\n")
            assert friend.told()["status"] == 200
            assert friend.told() == {"left": True}
            # One more turn at a time: on a busy machine all of them may end before the server sees that the page left.
            # Whether the browser asks again if it may is its own affair.
            wait_until(lambda: permits.release() or len(posts(served)) == 2)
            assert posts(served) == [200, 499]
            wait_until(lambda: served.engine.scheduler.running == 0)
        count = len(served.log)
        with browsing(tmp_path / "another", stranger.url):
            assert stranger.told() == {"error": "TypeError"}
        refused = served.log[count:]
    assert [(row["method"], row["status"]) for row in refused] == [("OPTIONS", 403)]
    assert served.warnings == []
