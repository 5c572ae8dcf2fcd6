"""Pages of other origins in a browser: one that is let in, and one that is not."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cli.working import QUESTION
from tests.serve.conftest import KEY, Served, serving, turned, wait_until
from tests.serve.test_page_browser import _FLAGS

ASK = """async ({url, key, ...body}) => {
  window.leaving = new AbortController();
  const reply = await fetch(`${url}/v1/chat/completions`, {
    method: "POST", signal: window.leaving.signal, body: JSON.stringify({stream: true, ...body}),
    headers: {"Authorization": `Bearer ${key}`, "Content-Type": "application/json"},
  });
  window.text = "";
  window.reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  return [reply.status, reply.headers.get("x-request-id")];
}"""
READ = """async (end) => {
  while (!window.text.includes(end)) window.text += (await window.reader.read()).value;
  return window.text;
}"""


@contextmanager
def origin(folder: Path) -> Iterator[str]:
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def posts(served: Served) -> list[int]:
    return [row["status"] for row in served.log if row["method"] == "POST"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed (apt-get install chromium)")
def test_pages_of_other_origins(ready: Path, tmp_path: Path) -> None:
    api = pytest.importorskip("playwright.sync_api")
    with (
        origin(tmp_path) as one,
        origin(tmp_path) as other,
        serving(ready, cors_origin=(one,)) as served,
        api.sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=[*_FLAGS])
        friend, stranger = browser.new_page(), browser.new_page()
        friend.goto(one)
        stranger.goto(other)
        question = {"url": served.url, "key": KEY, "messages": [{"role": "user", "content": QUESTION}]}
        with turned(served) as permits:
            permits.release(3)  # of eight tokens some cannot be there yet
            status, name = friend.evaluate(ASK, question | {"max_tokens": 8})
            assert (status, bool(name)) == (200, True)
            assert "[DONE]" not in friend.evaluate(READ, '"content"')
            permits.release(20)  # the rest of it, and a little of 1,500 tokens
            assert friend.evaluate(READ, "[DONE]").endswith("data: [DONE]\n\n")
            assert friend.evaluate(ASK, question | {"max_tokens": 1500})[0] == 200
            friend.evaluate("() => window.leaving.abort()")
            # One more turn at a time: on a busy machine all of them may end before the server sees that the page left.
            wait_until(lambda: permits.release() or len(posts(served)) == 2)
            assert posts(served) == [200, 499]
            wait_until(lambda: served.engine.scheduler.running == 0)
        count = len(served.log)
        with pytest.raises(api.Error):
            stranger.evaluate(ASK, question)
        refused = served.log[count:]
        browser.close()
    assert [(row["method"], row["status"]) for row in refused] == [("OPTIONS", 403)]
    assert served.warnings == []
