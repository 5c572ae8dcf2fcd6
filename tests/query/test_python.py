"""`kvtool.open()` as a Python user sees it: its replies, its warnings, and several threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import kvtool
from kvtool.core.api import Cache
from kvtool.core.fusion.selectors import FUSIONS
from kvtool.core.query.reply import Reply, read_batch
from tests.cli.working import QUESTION, SEEN, chunks_of, drop_records, listing
from tests.cli.working import kvtool as command
from tests.query.test_revision import facts


@pytest.fixture
def reply(store: Path) -> Reply:
    with kvtool.open(store) as cache:
        return cache.query("Where does the first mill stand?", top_k=3, max_tokens=4)


def test_chunks_carry_their_text(reply: Reply) -> None:
    for chunk in reply.chunks:
        assert chunk.text == Path(chunk.source).read_text("utf-8")[chunk.start : chunk.end]
        assert chunk.text.strip()
        assert chunk.to_json()["text"] == chunk.text


def test_a_notebook_shows_the_sources(reply: Reply) -> None:
    reply.answer = "<b>mill</b>"
    page = reply._repr_html_()
    assert "&lt;b&gt;mill&lt;/b&gt;" in page
    assert page.count("<tr>") == len(reply.chunks) + 1


def test_options_that_were_made_before_are_asked_with(store: Path) -> None:
    options = kvtool.QueryOptions(fusion="epic", max_tokens=3)
    with kvtool.open(store) as cache:
        asked = cache.query("Where does the first mill stand?", **vars(options))
        assert asked.fusion == "epic"
        assert asked.tokens["generated"] <= 3
        with pytest.raises(kvtool.KvtoolError, match="offline is the same for all"):
            cache.query("Where?", **vars(kvtool.QueryOptions(offline=True)))


def test_a_store_is_searched_and_listed_without_a_model(store: Path) -> None:
    with kvtool.open(store) as opened:
        report, documents, stats = opened.search(QUESTION, top_k=2), opened.documents(), opened.stats()
        assert opened._session is None
    by_command = command("search", QUESTION, "--top-k", 2, "--store", store, "--json").fine().json
    assert {"schema": by_command["schema"], **report.to_json()} == by_command
    assert documents == listing(store)
    assert stats["documents"] == len(documents)


def test_a_line_may_hold_any_separator_that_json_allows(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "one\u2028two\x85three"}\r\n\n{"question": "b"}\n', "utf-8")
    assert [one.question for one in read_batch(tmp_path / "q.jsonl")] == ["one\u2028two\x85three", "b"]


ASKED = [(f"Who built the {which} mill?", mode) for which in SEEN[:3] for mode in FUSIONS]


@pytest.fixture
def cache(store: Path) -> Iterator[Cache]:
    with kvtool.open(store) as opened:
        opened.query(SEEN[0], fusion="auto", max_tokens=1)  # the machine is measured, the gate has run
        yield opened


@pytest.mark.slow
def test_a_pool_of_threads_answers_as_one_thread_does(cache: Cache) -> None:
    def ask(one: tuple[str, str]) -> tuple[object, ...]:
        return facts(cache.query(one[0], fusion=one[1], max_tokens=4, top_k=3))

    serial = [ask(one) for one in ASKED]
    torch.set_num_threads(1)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, ASKED)) == serial


@pytest.mark.slow
def test_threads_ingest_while_others_ask(cache: Cache, corpus: Path) -> None:
    def ask(number: int) -> str:
        if number % 4 == 3:
            cache.ingest([corpus])
        return cache.query(ASKED[0][0], max_tokens=4).answer

    expected = ask(0)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(8))) == {expected}


def test_a_python_user_is_warned(store: Path) -> None:
    drop_records(store, *chunks_of(store, "mill0.md"))
    with kvtool.open(store) as opened, pytest.warns(kvtool.KvtoolWarning, match="computed in place") as told:
        opened.query("first mill", documents=["mill0.md"], max_tokens=1)
    assert {one.filename for one in told} == {__file__}
