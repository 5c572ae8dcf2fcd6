"""The page of a server, without a browser: its files, their headers, and the requests that it makes."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvtool.serve.app import STATIC
from kvtool.serve.engine import IngestState
from tests.cli.working import QUESTION
from tests.serve.conftest import PATIENCE, Served, serving

MOST_BYTES = 150_000
TYPES = {"": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
ASKED = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def stranger(served: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served.url, timeout=PATIENCE) as client:
        yield client


class Elements(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        name = self.all[-1][0] if self.all else ""
        self.text[name] = self.text.get(name, "") + data.strip()


@pytest.mark.parametrize("address", STATIC)
def test_a_file_needs_no_key_and_is_guarded(stranger: httpx2.Client, address: str) -> None:
    found = stranger.get(address)
    assert found.status_code == 200
    assert found.headers["content-type"].split(";")[0] == TYPES[Path(address).suffix]
    policy = dict(rule.strip().split(" ", 1) for rule in found.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'self'"
    assert not {"script-src", "style-src", "connect-src", "img-src"} & policy.keys()
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["cross-origin-resource-policy"] == "same-origin"
    again = stranger.get(address, headers={"If-None-Match": found.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert stranger.head(address).status_code == 200
    assert stranger.post(address).status_code == 405
    assert stranger.get(address, headers={"Origin": "http://elsewhere"}).status_code == 403


def test_the_page_is_small_and_whole(stranger: httpx2.Client) -> None:
    files = {address: stranger.get(address).text for address in STATIC}
    assert sum(len(text.encode()) for text in files.values()) < MOST_BYTES
    page = Elements(files["/"])
    loaded = [value for _, names in page.all for name, value in names.items() if name in ("src", "href")]
    assert {f"/{value}" for value in loaded if value and not value.startswith("#")} <= {*STATIC}
    assert not [name for _, names in page.all for name in names if name == "style" or name.startswith("on")]
    assert not page.text.get("script")
    assert not page.text.get("style")
    assert dict(page.all)["html"]["lang"] == "en"
    ids = [names["id"] for _, names in page.all if "id" in names]
    assert len(ids) == len(set(ids))
    scripts = "".join(text for address, text in files.items() if address.endswith(".js"))
    assert set(re.findall(r'\$\("([\w-]+)"\)', scripts)) <= {*ids}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", scripts)
    for text in files.values():
        assert not re.search(r"(?<!xmlns=\")(https?:)?//[a-z]+\.", text.replace("http://www.w3.org/2000/svg", ""))
    imported = set(re.findall(r'from "\./(\w+\.js)"', scripts))
    assert {f"/page/{name}" for name in imported} <= {*STATIC}
    labelled = {names.get("for") for tag, names in page.all if tag == "label"}
    inputs = [names for tag, names in page.all if tag in ("textarea", "input")]
    assert {one["id"] for one in inputs} - labelled <= {"cite", "verify", "top-k", "max-tokens"}  # in their labels


def test_the_state_needs_the_key(served: Served, client: httpx2.Client, stranger: httpx2.Client) -> None:
    assert stranger.get("/page/state").status_code == 401
    state = client.get("/page/state").json()
    assert (state["status"], state["uploads"], state["ingest"]) == ("ok", False, None)
    assert "union" in state["fusions"]
    assert state["many"] is False
    assert [served.engine.has_documents(count) for count in (6, 7)] == [True, False]
    assert state["max_body"] == 16 * 10**6


def test_without_a_key_no_other_host_gets_the_page(ready: Path) -> None:
    with serving(ready, key=None) as served, httpx2.Client(base_url=served.url) as client:
        assert client.get("/").status_code == 200
        assert client.get("/", headers={"Host": "elsewhere.example"}).status_code == 403


def test_a_file_is_sent_as_it_is_and_its_ingest_is_watched(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, text = tmp_path / "sent", "수로는 베르겐에 있다. 제분소는 오슬로에 있다. " * 20
    with serving(store, uploads=folder) as served, served.client as client:
        state, steps = served.engine.ingesting, list[Any]()
        noted = state.noted
        monkeypatch.setattr(state, "noted", lambda: steps.append(0) or noted())
        sent = {"name": "수로.txt", "data": base64.b64encode(text.encode("euc-kr")).decode()}
        report = client.post("/v1/documents", json={"documents": [sent]}).json()
        assert report["documents"]["added"] == 1
        assert report["tokens"] > 0
        assert len(steps) == 1  # what the progress is made of is tested below
        assert state.progress is None
        assert str(folder / "수로.txt") in [row["source"] for row in client.get("/v1/documents").json()["data"]]
        question = {"messages": [{"role": "user", "content": "수로는 어디에 있습니까?"}]}
        (chunk, *_) = client.post("/v1/chat/completions", json=question).json()["kvtool"]["chunks"]
        assert "베르겐" in chunk["text"]
        assert client.get("/page/state").json()["uploads"] is True
        for row in ({"data": "?"}, {"data": "", "text": ""}):
            wrong = client.post("/v1/documents", json={"documents": [{"name": "a.txt", **row}]})
            assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "wrong_type")
    assert (folder / "수로.txt").read_bytes() == text.encode("euc-kr")


def test_progress_is_that_of_the_running_ingest() -> None:
    state = IngestState()
    with state.noted() as events:
        events.step("reading files", 3, "files")
        events.advance(1)
        assert state.progress == {"step": "reading files", "done": 1, "total": 3, "unit": "files"}
        events.step("computing KV", 100, "tokens")
        events.advance(64)
        assert state.progress == {"step": "computing KV", "done": 64, "total": 100, "unit": "tokens"}
    assert state.progress is None


def test_every_text_has_a_korean_one(stranger: httpx2.Client) -> None:
    scripts = {address: stranger.get(address).text for address in STATIC if address.endswith(".js")}
    literal = r'"((?:[^"\\]|\\.)*)"'
    rows = re.findall(rf"^  (?:{literal}|(\w+)):\s+{literal},$", scripts.pop("/page/ko.js"), re.MULTILINE)
    korean = {quoted or bare: said for quoted, bare, said in rows}
    assert len(korean) == len(rows) > 150
    code = "".join(scripts.values())
    used = {*re.findall(rf"(?<![\w.])t\(\s*{literal}", code)}
    for one, more in re.findall(rf"\bplural\([^\"]*?{literal},\s*{literal}", code):
        used |= {one, more}
    untold = r"<(code|noscript|title|h1)\b.*?</\1>|<button [^>]*lang=.*?</button>"
    page = re.sub(untold, "", stranger.get("/").text, flags=re.DOTALL)
    used |= {*re.findall(r'(?:aria-label|placeholder|title)="([^"]+)"', page)}
    used |= {" ".join(text.split()) for text in re.findall(r">([^<>]+)<", page)} - {""}
    assert used == {*korean}
    for english, said in korean.items():
        assert {*re.findall(r"\{\d\}", english)} == {*re.findall(r"\{\d\}", said)}, english
        assert re.search("[가-힣]", said) or not re.search("[a-z]{3}", english), english
