from __future__ import annotations

import re
from html.parser import HTMLParser

from kvtool.reports.report import Quote, Table, page, sparkline


class Outline(HTMLParser):
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


def test_a_page_shows_all_parts_and_fetches_nothing() -> None:
    parts = ("One & <two>.", Quote("a\n<b>"), Table(("mode", "F1"), (("full", 0.5), ("<i>", "&")), "all > runs"))
    html = page("Title & more", {"resolved": {"model": "a<b"}, "runs": []}, parts)
    outline = Outline(html)
    for text in ("Title & more", "model: a<b", "One & <two>.", "a\n<b>", "full", "0.5", "<i>", "all > runs"):
        assert text in outline.text
    assert outline.tags.count("tr") == 3
    assert not {"script", "b", "i", "two"} & set(outline.tags)
    assert not re.search(r"(?:src|href)=(?![\"']?data:)", html)
    assert 'name="viewport"' in html


def test_numbers_are_plotted_as_bars_and_other_cells_are_not() -> None:
    rows = (
        ("1", "1,200", "5%", "a", "0.2 [0, 1]", "1 MB"),
        ("2", "", "10%", "-", "0.4", "9 kB"),
        ("3", -600, "0%", "3", "-", "-"),
    )
    html = page("Title", {}, (Table(("layer", "tokens", "share", "name", "F1", "size"), rows),))
    assert re.findall(r"<td>([^<]*)", html) == ["1", "a", "1 MB", "2", "-", "9 kB", "3", "3", "-"]
    shares = re.findall(r'<td style="--share:([\d.]+)">', html)
    assert shares == ["1.000", "0.500", "0.500", "0.000", "1.000", "1.000", "0.000", "0.000", "0.000"]


def test_sparklines() -> None:
    assert sparkline([0, None, 0.5, 1]) == "▁ ▄█"
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([]) == ""
