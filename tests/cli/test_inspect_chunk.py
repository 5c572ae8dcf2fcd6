"""`kvtool inspect chunk`, and what the glance says of the questions that were served."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.core.cache.access_log import UseLog, read_served
from kvtool.core.cache.store import Store
from tests.cli.working import CHUNKS, PREFIX, QUESTION, SHORT, chunks_of, drop_records, kvtool, listing, prefix_chunk
from tests.reports.test_page import Outline


def test_one_chunk(store: Path, tmp_path: Path) -> None:
    chunk, html = chunks_of(store, "mill2.md")[1], tmp_path / "chunk.html"
    row = kvtool("inspect", "chunk", chunk, "--store", store, "--html", html, "--json").fine().json
    assert row["id"] == chunk
    assert row["tokens"] == len(row["sensitivity"]) > 0
    assert all(level["bytes"] > 0 for level in row["levels"])
    (place,) = row["places"]
    text = Path(place["source"]).read_text(encoding="utf-8")
    assert row["text"] == text[place["start"] : place["end"]]
    page = Outline(html.read_text(encoding="utf-8"))
    assert row["text"].strip() in page.text
    assert f"{max(row['sensitivity']):.3g}" in page.text
    told = kvtool("inspect", "chunk", chunk[:8].upper(), "--store", store).fine().out
    assert "".join(f"| {line}".rstrip() + "\n" for line in row["text"].rstrip().split("\n")) in told
    assert chunk in told


@pytest.mark.slow
def test_a_place_of_several_chunks_names_them_all(tiny: Path, tmp_path: Path) -> None:
    """A line that is longer than a chunk."""
    (tmp_path / "long.txt").write_text("The mill stands on the river. " * 40)
    at = ("--store", tmp_path / "store")
    kvtool("ingest", tmp_path / "long.txt", *at, "--model", tiny, *CHUNKS, *PREFIX).fine()
    chunks = list(dict.fromkeys(chunks_of(tmp_path / "store", "long.txt")))
    assert len(chunks) > 1
    row = kvtool("inspect", "chunk", "long.txt:1", *at, "--json").fine().json
    assert list(dict.fromkeys([row["id"], *row["other_chunks"]])) == chunks
    assert f"also     chunk {row['other_chunks'][-1]}" in kvtool("inspect", "chunk", "long.txt:1", *at).fine().out
    asked = kvtool("query", QUESTION, *at, "--chunks", "long.txt:1", *SHORT, "--json").fine().json
    assert [chunk["id"] for chunk in asked["chunks"]] == [row["id"], *row["other_chunks"]]


def test_when_it_was_used(store: Path) -> None:
    with Store.open(store) as opened:
        used = opened.last_used()
    one, lost, *_ = [chunk for chunk in chunks_of(store, "mill5.md") if bytes.fromhex(chunk) not in used]
    drop_records(store, lost)
    for chunk in (one, lost):  # it counts, too, where the chunk has to be computed
        for expected in ("not yet", "20"):
            said = kvtool("inspect", "chunk", chunk, "--store", store).fine().out
            assert said.split("used")[1].strip().startswith(expected)
            kvtool("query", QUESTION, "--store", store, "--chunks", chunk, *SHORT).fine()


@pytest.mark.parametrize("text", ["", "12345", "no id at all", "0" * 40, "zz" * 20])
def test_no_such_chunk(text: str, store: Path) -> None:
    kvtool("inspect", "chunk", *([text] if text else []), "--store", store).failed(2, "kvtool store ls")


@pytest.mark.slow
def test_the_glance_tells_how_many_chunks_were_found(store: Path) -> None:
    at = ("--store", store)
    before = kvtool("inspect", *at, "--json").fine().json["usage"]
    kvtool("query", QUESTION, *at, "--documents", "mill2.md", *SHORT).fine()
    chunks = chunks_of(store, "mill2.md")
    drop_records(store, chunks[0])
    kvtool("query", QUESTION, *at, "--documents", "mill2.md", *SHORT).fine()
    kvtool("query", QUESTION, *at, "--documents", "mill2.md", "--fusion", "full", *SHORT).fine()  # asks for no chunk
    compared = ("--compare", "full,reuse,epic,union")  # one question
    kvtool("query", QUESTION, *at, "--documents", "mill2.md", *SHORT, *compared).fine()
    served = kvtool("inspect", *at, "--json").fine().json["usage"]
    more = {name: served[name] - before[name] for name in ("questions", "hits", "misses")}
    assert more == {"questions": 3, "hits": 3 * len(chunks) - 1, "misses": 1}
    assert served["hit_rate"] == served["hits"] / (served["hits"] + served["misses"])
    assert f"{served['questions']} questions" in kvtool("inspect", *at).fine().out


def test_counts_that_cannot_be_read_count_nothing(tmp_path: Path) -> None:
    log = UseLog(tmp_path, enabled=True)
    log.note_question(3, 1)
    log.note_question(2, 0)
    log.flush()
    log.flush()
    assert read_served(tmp_path).hits == 5
    path = tmp_path / "served.log"
    path.write_bytes(path.read_bytes() + b"9 9 9 00000000\n\xff\n7 7")
    total = read_served(tmp_path)
    assert (total.questions, total.hits, total.misses) == (2, 5, 1)
    closed = UseLog(tmp_path / "nowhere", enabled=True)
    closed.note_question(1, 1)
    closed.flush()
    assert read_served(tmp_path / "nowhere").hit_rate is None
    UseLog(tmp_path, enabled=False).note_question(1, 1)
    assert read_served(tmp_path) == total


def test_the_glance_counts_the_chunks_that_ls_lists(store: Path) -> None:
    """The prompt's own beginning is a chunk of the store that no document has; it is counted separately."""
    listed = {chunk["id"]: chunk["tokens"] for document in listing(store) for chunk in document["chunks"]}
    for command in (("inspect",), ("store", "stats")):
        row = kvtool(*command, "--store", store, "--json").fine().json
        assert row["prefix"]["id"] == prefix_chunk(store)
        assert row["chunks"] == len(listed)
        assert row["tokens"] == sum(listed.values())
    told = kvtool("inspect", "--store", store).fine().out
    assert f"{len(listed)} chunks; KV of {sum(listed.values()):,} tokens\n" in told
    assert f"beginning: {row['prefix']['tokens']} tokens, one chunk more\n" in told
