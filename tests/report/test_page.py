"""The page that reports are written on."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from kvtool.core.report.page import Section, Shaded, Table, page
from kvtool.core.report.svg import Line, Panel, line_charts


class Outline(HTMLParser):
    """Checks that tags are balanced, and collects text and tags."""

    VOID = ("meta", "link", "br")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_all_that_was_given_is_there_and_nothing_is_fetched() -> None:
    chart = line_charts("Growth", [Panel("ms", (Line("a", ((1, 2), (2, 3))),))], "tokens")
    section = Section(
        "What <it> is",
        ("One & two.",),
        (chart,),
        (Table(("mode", "F1"), (("full", 0.5), ("<b>", "&"))),),
        (Shaded((("warm ", 0.0), ("<tok>", 0.5), ("hot", 7.0))),),
    )
    html = page("Title & more", {"model": "a<b"}, [section])
    found = Outline(html)
    for text in ("Title & more", "a<b", "What <it> is", "One & two.", "full", "0.5", "<b>", "<tok>", "Growth"):
        assert text in found.text
    assert found.tags.count("svg") == 1
    assert found.tags.count("tr") == 3
    assert "/ 50%" in html
    assert "/ 100%" in html
    assert "script" not in found.tags
    assert not re.search(r"(?:src|href)=(?![\"']?data:)", html)
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html


def test_nothing_to_tell() -> None:
    assert "Empty" in Outline(page("Empty", {}, [])).text
