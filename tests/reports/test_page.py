from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvtool.reports.charts import Line, Panel, line_charts
from kvtool.reports.page import HeatMap, Passage, Section, Table, page


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


def test_all_that_was_given_is_there_and_nothing_is_fetched() -> None:
    chart = line_charts("Growth", [Panel("ms", (Line("a", ((1, 2), (2, 3))),))], "tokens")
    section = Section(
        "What <it> is",
        ("One & two.",),
        (chart,),
        (Table(("mode", "F1"), (("full", 0.5), ("<b>", "&"))),),
        HeatMap("warmth", (Passage("a.md, characters 0 to 9", (("warm ", 0.0), ("<tok>", 1.0), ("hot", 2.0))),)),
    )
    html = page("Title & more", {"model": "a<b"}, [section])
    found = Outline(html)
    words = ("Title & more", "a<b", "What <it> is", "One & two.", "full", "0.5", "<b>", "<tok>", "Growth", "warmth")
    for text in (*words, "a.md", "2 and more"):
        assert text in found.text
    assert found.tags.count("svg") == 1
    assert found.tags.count("tr") == 3
    assert "/ 50%" in html
    assert "/ 100%" in html
    assert "script" not in found.tags
    assert not re.search(r"(?:src|href)=(?![\"']?data:)", html)
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed (apt-get install chromium)")
def test_a_browser_draws_it_without_complaint(tmp_path: Path) -> None:
    """Offline, light and dark: plots take the width of a desk's screen, scroll on a phone's; nothing is logged."""
    chart = line_charts("Growth", [Panel("ms", (Line("a", ((1, 2), (2, 3))),))], "tokens")
    html = page("A page", {"model": "x"}, [Section("One", ("Text.",), (chart,))])
    probe = (
        "<script>addEventListener('error', e => console.error(e.message));"
        "document.title = [...document.querySelectorAll('figure')].map(one => one.scrollWidth > one.clientWidth"
        " ? 'scrolls' : one.firstChild.getBoundingClientRect().width > 1000)"
        "+ ' ' + getComputedStyle(document.body).backgroundColor</script></body>"
    )
    (tmp_path / "page.html").write_text(html.replace("</body>", probe), encoding="utf-8")
    seen = []
    for size, more in (("1200,800", ()), ("400,800", ("--blink-settings=preferredColorScheme=0",))):
        done = subprocess.run(
            [
                *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--enable-logging=stderr"),
                *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}"),
                *(f"--window-size={size}", *more, (tmp_path / "page.html").as_uri()),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert "CONSOLE" not in done.stderr
        found = re.search(r"<title>(true|scrolls) (rgb[^<]*)</title>", done.stdout)
        assert found, done.stdout[:500]
        seen.append(found.groups())
    assert seen == [("true", "rgb(255, 255, 255)"), ("scrolls", "rgb(20, 24, 29)")]
