"""Lines of a file of questions, as others may have written them."""

from __future__ import annotations

from pathlib import Path

from kvtool.core.query.reply import read_batch


def test_a_line_may_hold_any_separator_that_json_allows(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "one\u2028two\x85three"}\r\n\n{"question": "b"}\n', "utf-8")
    assert [one.question for one in read_batch(tmp_path / "q.jsonl")] == ["one\u2028two\x85three", "b"]
