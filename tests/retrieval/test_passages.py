"""Titles, and the order of found chunks in a prompt."""

from __future__ import annotations

import pytest

from kvtool.core.query.options import in_order
from kvtool.core.retrieval.finder import _matcher
from kvtool.core.retrieval.passages import Hit, Passage, title_of


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("# The mill\n\nIt was built.", "The mill"),
        ("\n\n  \nPlain title\ntext", "Plain title"),
        ("", ""),
        ("x" * 121, ""),
        ("x" * 120, "x" * 120),
    ],
)
def test_title(text: str, title: str) -> None:
    assert title_of(text) == title


def test_orders() -> None:
    places = [("b", 30), ("a", 5), ("b", 2), ("c", 0), ("a", 1)]
    hits = [Hit(Passage(bytes(20), source, start, start + 1, 0), 1.0) for source, start in places]

    def order(name: str) -> list[tuple[str, int]]:
        return [(hit.passage.source, hit.passage.start) for hit in in_order(hits, name)]

    assert order("relevance") == places
    assert order("best-last") == places[::-1]
    assert order("document") == [("b", 2), ("b", 30), ("a", 1), ("a", 5), ("c", 0)]


@pytest.mark.parametrize(
    ("source", "glob", "matches"),
    [
        ("/docs/a.md", "*.md", True),
        ("/docs/a.md", "a.md", True),
        ("/docs/a.md", "docs/*", True),
        ("/docs/a.md", "ocs/*", False),
        ("/docs/a.md", "*.txt", False),
        ("/docs/all.jsonl#7", "*.jsonl", True),
        ("/docs/all.jsonl#7", "*#7", True),
    ],
)
def test_globs(source: str, glob: str, matches: bool) -> None:
    assert _matcher([glob])(source) is matches
