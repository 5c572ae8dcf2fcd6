"""Documents over HTTP, the server's reports of its state, and a store that others change under it."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvtool
from kvtool.core.ingest import storer
from kvtool.serve.documents import _safe_name
from kvtool.serve.wire import Refusal
from tests.cli.working import QUESTION
from tests.cli.working import kvtool as command
from tests.serve.conftest import serving, turned, wait_until

JSON = {"Content-Type": "application/json"}
CHAT, DOCUMENTS = "/v1/chat/completions", "/v1/documents"


def ask(client: httpx2.Client, question: str = QUESTION, **more: Any) -> httpx2.Response:
    return client.post(CHAT, json={"messages": [{"role": "user", "content": question}], "max_tokens": 2, **more})


def sources(client: httpx2.Client, question: str) -> list[str]:
    return [Path(place).name for place in ask(client, question).json()["kvtool"]["sources"]]


def test_documents_come_and_go(store: Path, tmp_path: Path) -> None:
    uploads = tmp_path / "sent"
    with serving(store, uploads=uploads) as served, served.client as client:
        before = client.get(DOCUMENTS).json()["data"]
        assert {Path(row["source"]).name for row in before} == {f"mill{n}.md" for n in range(6)}
        assert all(row["chunks"] and row["tokens"] and row["bytes"] for row in before)
        sent = {"documents": [{"name": "notes/zeppelin.md", "text": "# Zeppelin\n\nThe zeppelin 하늘 landed."}]}
        report = client.post(DOCUMENTS, json=sent).json()
        assert report["documents"]["added"] == 1
        assert sources(client, "Where did the zeppelin land?")[0] == "zeppelin.md:1"
        place = str(uploads / "notes" / "zeppelin.md")
        shown = client.get(DOCUMENTS, params={"source": place}).json()
        assert shown["chunks"][0]["id"]
        assert client.get(DOCUMENTS, params={"source": "zeppelin.md"}).json() == shown  # the names that DELETE takes
        several = client.get(DOCUMENTS, params={"source": "*mill[0-2].md"}).json()
        assert several["data"] == before[:3]
        assert client.post(DOCUMENTS, json=sent).json()["documents"]["unchanged"] == 1
        assert served.engine._loaded.spare is None  # a second model, held for nothing, where another store comes
        assert client.delete(DOCUMENTS, params={"source": place}).json()["deleted"] == [place]
        assert not Path(place).exists()
        assert client.get(DOCUMENTS, params={"source": place}).status_code == 404
        assert client.get(DOCUMENTS).json()["data"] == before
        for wrong in ({}, {"source": "nowhere.md"}):
            assert client.delete(DOCUMENTS, params=wrong).status_code == 400


def test_a_name_that_is_gone_is_no_pattern_of_others(store: Path, tmp_path: Path) -> None:
    uploads = tmp_path / "sent"
    with serving(store, uploads=uploads) as served, served.client as client:
        for name in ("a[1].md", "a1.md"):
            sent = {"name": name, "text": f"The kite is in {name}."}
            assert client.post(DOCUMENTS, json={"documents": [sent]}).json()["documents"]["added"] == 1
        exactly = {"source": str(uploads / "a[1].md"), "exact": "true"}
        assert client.delete(DOCUMENTS, params=exactly).json()["deleted"] == [exactly["source"]]
        again = client.delete(DOCUMENTS, params=exactly)
        assert (again.status_code, again.json()["error"]["code"]) == (404, "no_document")
        assert client.delete(DOCUMENTS, params=exactly | {"source": "*a1.md"}).status_code == 404
        assert [path.name for path in uploads.glob("*.md")] == ["a1.md"]


def test_much_is_forgotten_only_where_that_is_said(store: Path) -> None:
    with serving(store) as served, served.client as client:
        before = client.get(DOCUMENTS).json()["data"]
        for pattern in ("*", "**/*.md", str(Path(before[0]["source"]).parent), "*mill[0-3].md"):
            for more in ({}, {"all": "false"}):
                answer = client.delete(DOCUMENTS, params={"source": pattern, **more})
                assert answer.status_code == 409, answer.text
                assert "all=true" in answer.json()["error"]["hint"]
        assert client.delete(DOCUMENTS, params={"source": "*", "all": "yes"}).status_code == 400
        assert client.get(DOCUMENTS).json()["data"] == before
        assert len(client.delete(DOCUMENTS, params={"source": "*mill[0-2].md"}).json()["deleted"]) == 3
        gone = client.delete(DOCUMENTS, params={"source": "*", "all": "true"}).json()["deleted"]
        assert sorted(gone) == [row["source"] for row in before[3:]]
        assert client.get(DOCUMENTS).json()["data"] == []


def test_names_that_there_cannot_be_beside_others(store: Path, tmp_path: Path) -> None:
    uploads = tmp_path / "sent"
    (uploads / "folder.md").mkdir(parents=True)
    (uploads / "file.md").write_text("here")
    with serving(store, uploads=uploads) as served, served.client as client:
        for wrong in ({}, {"documents": []}, {"documents": [1]}, {"paths": ["/etc/passwd"]}):
            assert client.post(DOCUMENTS, json=wrong).status_code == 400
        for name in ("file.md/a.md", "folder.md", "/".join(["a" * 203] * 20)):
            answer = client.post(DOCUMENTS, json={"documents": [{"name": name, "text": "x"}]})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "wrong_name"), answer.text


@pytest.mark.parametrize(
    "name", ["../a.md", "/etc/a.md", "a/../../b.md", ".hidden", "", "a//b.md", "a\x00b", "a\\..\\b.md", "x" * 300, " "]
)
def test_names_stay_in_their_folder(name: str) -> None:
    with pytest.raises(Refusal):
        _safe_name(name)


def test_a_store_is_made_by_the_first_ingest(tiny: Path, tmp_path: Path) -> None:
    uploads = tmp_path / "sent"
    with serving(tmp_path / "new", uploads=uploads, model=str(tiny)) as served, served.client as client:
        assert client.get("/health").json()["status"] == "empty"
        assert ask(client).status_code == 503
        assert client.get("/v1/models").json()["data"] == []
        sent = {"documents": [{"name": "mill.md", "text": "The mill was built by baker Z."}]}
        assert client.post(DOCUMENTS, json=sent).json()["documents"]["added"] == 1
        assert sources(client, "Who built the mill?") == ["mill.md:1"]
        busy = {"queue": 0, "running": 0, "conversations": 1}
        assert client.get("/health").json() == {"status": "ok", "model": "tiny", **busy}


def test_what_others_ingest_is_found(store: Path, tmp_path: Path) -> None:
    (tmp_path / "airship.md").write_text("# Airship\n\nThe airship flew to Oslo.")
    with serving(store) as served, served.client as client:
        before = ask(client).json()["kvtool"]["revision"]
        with kvtool.open(store) as other:
            other.ingest(tmp_path / "airship.md")
        assert sources(client, "Where did the airship fly?")[0] == "airship.md:1"
        assert ask(client).json()["kvtool"]["revision"] > before


def test_a_store_that_is_replaced_meanwhile(store: Path, comets: Path, tmp_path: Path) -> None:
    """By another one of the same model, which is not loaded again; then it is gone, and comes back."""
    with serving(store) as served, served.client as client:
        assert ask(client).status_code == 200
        decoder = served.engine._loaded.decoder
        store.rename(tmp_path / "old")
        assert ask(client).status_code == 503
        shutil.move(comets, store)
        assert sources(client, "Who saw the comet?") == ["other.md:1"]
        assert served.engine._loaded.decoder is decoder
        store.rename(comets)
        (tmp_path / "old").rename(store)
        assert sources(client, QUESTION)[0] == "mill2.md:1"


@pytest.mark.slow
def test_a_store_that_is_replaced_within_an_answer(store: Path, comets: Path, tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40, "stream": True}
    with serving(store) as served, served.client as client:
        whole = said(client.post(CHAT, json=asked).text)
        with turned(served) as permits, client.stream("POST", CHAT, json=asked) as answer:
            permits.release(3)
            lines = answer.iter_lines()
            begun = [next(lines)]
            wait_until(lambda: any(job.sequence for job in served.engine.scheduler._running))  # its prompt is computed
            store.rename(tmp_path / "old")
            shutil.move(comets, store)
            with ThreadPoolExecutor(1) as pool:
                behind = pool.submit(sources, client, "Who saw the comet?")
                queue = served.engine.scheduler  # a permit that is left lets the second job run at once
                wait_until(lambda: queue.waiting + queue.running == 2)
                permits.release(10**6)
                assert said("\n".join([*begun, *lines])) == whole
                assert behind.result() == ["other.md:1"]
    assert served.warnings == []


def said(events: str) -> str:
    rows = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: {")]
    parts = [json.loads(row)["choices"][0]["delta"].get("content", "") for row in rows]
    assert events.rstrip().endswith("data: [DONE]")
    return "".join(parts)


def test_an_ingest_gives_way_to_answers(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(storer.BATCH_TOKENS, "cpu", 64)
    uploads = tmp_path / "sent"
    texts = [{"name": f"n{n}.md", "text": f"# Number {n}\n\n" + f"Word {n} and more. " * 40} for n in range(12)]
    with serving(store, uploads=uploads) as served, served.client as client:
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(client.post, DOCUMENTS, json={"documents": texts})
            while not done.done():
                with served.client as other:
                    answer = ask(other)
                assert answer.status_code == 200
        assert done.result().json()["documents"]["added"] == 12


def test_metrics_and_log(ready: Path) -> None:
    with serving(ready, strict=True) as served, served.client as client:
        ask(client)
        ask(client, "zzyzx")
        client.get("/v1/nowhere/at/all")
        text = client.get("/metrics").text
        rows = served.logged(4)
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["kvtool_requests_total", ("path", CHAT), ("status", "200")] == 1
    assert values["kvtool_requests_total", ("path", "other"), ("status", "404")] == 1
    assert values[("kvtool_ttft_seconds_count",)] == values[("kvtool_generate_seconds_count",)] == 1
    assert values["kvtool_tokens_total", ("kind", "reused")] > 0
    assert values["kvtool_chunks_total", ("status", "hit")] > 0
    assert values[("kvtool_queued",)] == values[("kvtool_running",)] == 0
    assert [(row["path"], row["status"]) for row in rows] == [
        (CHAT, 200),
        (CHAT, 404),
        ("/v1/nowhere/at/all", 404),
        ("/metrics", 200),
    ]
    assert rows[0]["tokens"]["generated"] == 2
    assert "no chunk matches" in rows[1]["error"]
    assert len({row["id"] for row in rows}) == 4


def test_a_search_finds_what_the_command_finds(ready: Path) -> None:
    with serving(ready) as served, served.client as client:
        assert client.post(DOCUMENTS, json={"documents": [{"name": "a.md", "text": "b"}]}).status_code == 403
        found = client.get("/v1/search", params={"q": QUESTION, "top_k": 3}).json()
        some = client.get("/v1/search", params={"q": "mill", "source": ["*mill1.md", "*mill2.md"]}).json()
        nothing = client.get("/v1/search", params={"q": "zzyzx"}).json()
        for params, named in (
            ({}, "question"),
            ({"q": "x", "top_k": "0"}, "top_k"),
            ({"q": "x", "level": "1"}, "level"),
            ({"q": "x", "source": ["*mill1.md"] * 257}, "source has 257 values"),
            ({"q": "x", "source": ["a" * 4000] * 9}, "source has 36,000 characters"),
        ):
            refused = client.get("/v1/search", params=params)
            assert (refused.status_code, named in refused.json()["error"]["message"]) == (400, True)
        assert client.get("/v1/search", params={"q": "x"}, headers={"Authorization": "Bearer wrong"}).status_code == 401
    said = command("search", QUESTION, "--top-k", 3, "--store", ready, "--json").fine().json
    assert {"schema": said["schema"], **found} == said
    assert nothing["chunks"] == []
    assert {Path(chunk["source"]).name for chunk in some["chunks"]} == {"mill1.md", "mill2.md"}
