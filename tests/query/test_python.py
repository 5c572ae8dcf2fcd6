"""The reply as a Python user sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvtool
from kvtool.core.query.reply import Reply, read_batch


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


def test_a_line_may_hold_any_separator_that_json_allows(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "one\u2028two\x85three"}\r\n\n{"question": "b"}\n', "utf-8")
    assert [one.question for one in read_batch(tmp_path / "q.jsonl")] == ["one\u2028two\x85three", "b"]
