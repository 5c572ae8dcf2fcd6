"""How a source is cited to a person."""

from __future__ import annotations

from kvtool.cli.sources import cited
from kvtool.core.query.reply import ReplyChunk


def test_a_citation_is_one_line_whatever_the_file_is_called() -> None:
    chunk = ReplyChunk(id="ab", source="/in/a\nerror: no.md", start=0, end=1, line=3, label="", score=1.0, tokens=1,
                       status="hit", text="x")  # fmt: skip
    assert cited(chunk) == "/in/a\\nerror: no.md:3"
