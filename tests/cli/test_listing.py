"""`kvtool store ls`: what is listed, in which order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from tests.cli.working import QUESTION, SHORT, chunks_of, drop_records, kvtool
from tests.compress.making import run


@pytest.fixture
def mixed(store: Path) -> Path:
    """One document's first chunk was used, its second is at a lossy level, too, its third has lost its records."""
    used, lossy, lost, *_ = chunks_of(store, "mill1.md")
    kvtool("query", QUESTION, "--store", store, "--chunks", used, *SHORT).fine()
    run(store, "2", chunks=(lossy,))
    drop_records(store, lost)
    return store


def listed(store: Path, *args: str) -> list[dict[str, Any]]:
    documents = kvtool("store", "ls", "--store", store, *args, "--json").fine().json["documents"]
    rows = [chunk | {"source": one["source"]} for one in documents for chunk in one["chunks"]]
    return [row | {"levels": {one["level"]: one["bytes"] for one in row["levels"]}} for row in rows]


def test_rows_tell_levels_bytes_and_use(mixed: Path) -> None:
    used, lossy, lost, *_ = chunks_of(mixed, "mill1.md")
    rows = {row["id"]: row for row in listed(mixed)}
    with Store.open(mixed) as opened:
        for key, row in rows.items():
            assert row["levels"] == opened.level_sizes(bytes.fromhex(key))
            assert row["bytes"] == sum(row["levels"].values())
            assert row["last_used"] == opened.last_used().get(bytes.fromhex(key))
    assert (sorted(rows[lossy]["levels"]), rows[lost]["levels"]) == (["2", "raw"], {})
    told = kvtool("store", "ls", "--chunks", "--store", mixed).fine().out.splitlines()
    assert [line.split()[2] for line in told if used[:12] in line or lost[:12] in line] == ["raw", "none"]
    assert len(told) == 1 + len(rows)


def test_documents_that_are_named_are_listed(mixed: Path, corpus: Path) -> None:
    everything = listed(mixed)
    for words, names in (
        (("mill1.md",), {"mill1.md"}),
        (("*ill[23].md",), {"mill2.md", "mill3.md"}),
        ((corpus,), {f"mill{n}.md" for n in range(6)}),
        ((everything[-1]["id"], "mill0.md"), {"mill5.md", "mill0.md"}),
    ):
        found = listed(mixed, *map(str, words))
        assert found == [row for row in everything if Path(row["source"]).name in names]
    kvtool("store", "ls", "mill9.md", "--store", mixed).failed(2, "document not found")


def document_lines(store: Path, *args: str) -> dict[str, list[str]]:
    """Cells of the list of documents by the name of their file, in the list's order."""
    head, *lines = kvtool("store", "ls", "--store", store, *args).fine().out.splitlines()
    assert head.split() == ["chunks", "tokens", "levels", "bytes", "used", "modified", "document"]
    return {Path(line.rsplit("  ", 1)[1]).name: re.split(r"\s{2,}", line.strip()) for line in lines}


@pytest.mark.slow
def test_documents_are_listed_with_what_their_chunks_come_to(mixed: Path, corpus: Path) -> None:
    documents = kvtool("store", "ls", "--store", mixed, "--json").fine().json["documents"]
    lines = document_lines(mixed)
    assert list(lines) == [Path(one["source"]).name for one in documents] == [f"mill{n}.md" for n in range(6)]
    for one, line in zip(documents, lines.values(), strict=True):
        chunks = one["chunks"]
        assert one["tokens"] == sum(chunk["tokens"] for chunk in chunks)
        assert one["bytes"] == sum(chunk["bytes"] for chunk in chunks)
        assert one["modified"] == int((corpus / Path(one["source"]).name).stat().st_mtime)
        assert line[:2] == [str(len(chunks)), str(one["tokens"])]
        assert line[3] == str(one["bytes"])
        assert (line[4] == "never") == (one["last_used"] is None)
        assert one["last_used"] == max((chunk["last_used"] for chunk in chunks if chunk["last_used"]), default=None)
    assert lines["mill1.md"][2] == "raw 2"
    assert list(document_lines(mixed, "mill4.md", "mill2.md")) == ["mill2.md", "mill4.md"]
