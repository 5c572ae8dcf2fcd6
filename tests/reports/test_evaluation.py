"""The results file: after any kill, finished rows are kept, and no foreign file is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtool.core.errors import KvtoolError, UsageError
from kvtool.reports.evaluation import Journal
from tests.wording import refused

FACTS = {"store": "abc", "max_tokens": 20, "max_loss": None}
ROWS = {"full": {"f1": 1.0, "answer": "마을\n둘"}, "reuse": {"f1": 0.5, "answer": ""}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def filled(path: Path) -> bytes:
    journal = Journal(path, FACTS)
    with journal.writing():
        for index in range(3):
            journal.add(index, f"q{index}", ROWS)
    return path.read_bytes()


def test_back_and_forth(path: Path) -> None:
    assert filled(path).count(b"\n") == 4
    assert Journal(path, FACTS).rows == dict.fromkeys(range(3), ROWS)
    assert Journal(None, FACTS).rows == {}


def test_torn_anywhere(path: Path) -> None:
    whole = filled(path)
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        journal = Journal(path, FACTS)
        kept = sum(end <= cut for end in ends)
        assert sorted(journal.rows) == list(range(max(kept - 1, 0)))
        assert path.read_bytes() == whole[:cut]  # reading changes nothing
        with journal.writing():
            for index in range(len(journal.rows), 3):
                journal.add(index, f"q{index}", ROWS)
        assert path.read_bytes() == whole


def test_a_last_line_of_nothing(path: Path) -> None:
    """A machine that crashed may leave zeros."""
    whole = filled(path)
    path.write_bytes(whole + b"\0\0\0\n")
    journal = Journal(path, FACTS)
    assert len(journal.rows) == 3
    with journal.writing():
        pass
    assert path.read_bytes() == whole


def test_more_runs_of_a_question(path: Path) -> None:
    filled(path)
    journal = Journal(path, FACTS)
    with journal.writing():
        journal.add(1, "q1", {"full": {"f1": 0.9}, "epic:16": {"f1": 0.7}})
    for known in (journal, Journal(path, FACTS)):
        assert known.rows[1] == ROWS | {"epic:16": {"f1": 0.7}}  # the first row counts


@pytest.mark.parametrize("changed", [{"store": "abd"}, {"max_tokens": 21}, {"more": 1}])
def test_other_facts(path: Path, changed: dict[str, object]) -> None:
    whole = filled(path)
    with refused(UsageError):
        Journal(path, FACTS | changed)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "content", [b"x", b"\n", b"hello\n", b'{"question": "?"}\n', b'{"type": "kvtool eval"', b"\xff\xfe", b"[]\n"]
)
def test_a_foreign_file_is_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    if content.startswith(b'{"type": "kvtool'):  # a torn first line of our own
        assert Journal(path, FACTS).rows == {}
        return
    with refused(UsageError, numbers=True):
        Journal(path, FACTS)
    assert path.read_bytes() == content


def test_damage_in_the_middle(path: Path) -> None:
    lines = filled(path).split(b"\n")
    for bad in (b"{", b"[]", b"{}", json.dumps({"index": "x", "runs": {}}).encode()):
        path.write_bytes(b"\n".join([*lines[:2], bad, *lines[3:]]))
        with refused(UsageError, numbers=True):
            Journal(path, FACTS)


def test_two_at_once(path: Path) -> None:
    filled(path)
    first, second = Journal(path, FACTS), Journal(path, FACTS)
    with first.writing():
        with refused(KvtoolError), second.writing():
            pass
        first.add(3, None, ROWS)
    assert 3 not in second.rows
    with second.writing():
        assert 3 in second.rows


def test_places(tmp_path: Path) -> None:
    with refused(UsageError):
        Journal(tmp_path, FACTS)
    deep = tmp_path / "a" / "b.jsonl"
    with Journal(deep, FACTS).writing():
        pass
    assert deep.is_file()
