"""Choice of the audited questions, and the audits that are kept. (Audits of answers: tests/query/test_audit.py.)"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.errors import DamagedError
from kvtool.core.evaluate import measures
from kvtool.core.evaluate.measures import Audit, is_drawn, keep_audit, kept_audits, shortened
from kvtool.reports.questions import parse_run
from tests.chaos.processes import start
from tests.stores import make_store

MODEL = "f" * 64


def made(at: int = 0, **changes: object) -> Audit:
    values: dict[str, object] = {
        "at": at,
        "question": "Who?",
        "revision": 3,
        "fusion": "union",
        "amount": 0.15,
        "changes": {},
        "levels": ["raw"],
        "lead_in": "warm",
        "tokens": {"prompt": 100, "reused": 80, "recomputed": 15, "fresh": 5, "script": 8},
        "holes": 0,
        "sampled": False,
        "kl_first": 0.01,
        "kl_answer": 0.02,
        "top1_agrees": True,
        "answer_equal": True,
        "milliseconds": 12.5,
    }
    return Audit(**(values | changes))  # type: ignore[arg-type]


def test_the_share_is_that_of_the_questions_and_nested() -> None:
    questions = [f"question {number}?" for number in range(4000)]
    drawn = {share: {q for q in questions if is_drawn(q, 7, share)} for share in (0.0, 0.01, 0.1, 0.5, 1.0)}
    assert drawn[0.0] == set()
    assert drawn[1.0] == set(questions)
    assert drawn[0.01] < drawn[0.1] < drawn[0.5]
    for share in (0.01, 0.1, 0.5):
        assert len(drawn[share]) / 4000 == pytest.approx(share, abs=3 * (share * (1 - share) / 4000) ** 0.5)
    assert drawn[0.1] != {q for q in questions if is_drawn(q, 8, 0.1)}
    assert is_drawn("\ud800", 0, 1.0)


def test_a_draw_is_the_same_everywhere() -> None:
    drawn = [number for number in range(300) if is_drawn(f"{number}", 1, 0.02)]
    assert drawn == [4, 46, 66, 72, 89, 147, 279, 285, 299]


def test_a_question_is_kept_short_and_on_one_line() -> None:
    assert shortened(" who\n is\tit? ") == "who is it?"
    assert len(shortened("long " * 100)) == 160


def test_a_run_is_named_as_a_user_would_name_it() -> None:
    assert made().run == "union:0.15"
    assert made(fusion="reuse", amount=None).run == "reuse"
    assert made(fusion="epic", amount=16.0, changes={"link": "final"}).run == "epic+link=final:16"
    assert made(changes={"shift": False}).run == parse_run("union+shift=no:15%").name


def test_audits_are_kept_by_model(tmp_path: Path) -> None:
    with Store.open(make_store(tmp_path / "store")) as store:
        assert kept_audits(store, MODEL) == ()
        made_ones = [made(number, kl_answer=number / 7) for number in range(3)]
        assert all(keep_audit(store, MODEL, audit) for audit in made_ones)
        assert kept_audits(store, MODEL) == tuple(made_ones)
        assert kept_audits(store, "0" * 64) == ()
        path = store.side_file("audit/audits.sqlite")
        assert path.stat().st_mode & 0o777 == 0o600
        path.write_bytes(b"no database" * 1000)
        with pytest.raises(DamagedError):
            kept_audits(store, MODEL)
        assert not keep_audit(store, MODEL, made())


def test_the_newest_audits_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "_MOST", 3)
    with Store.open(make_store(tmp_path / "store")) as store:
        for number in range(5):
            keep_audit(store, MODEL, made(number))
        assert [audit.at for audit in kept_audits(store, MODEL)] == [2, 3, 4]


def test_audits_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(make_store(tmp_path / "store")) as store:
        with monkeypatch.context() as patch:
            patch.setattr(type(store), "read_only", True)
            assert not keep_audit(store, MODEL, made())
        assert kept_audits(store, MODEL) == ()
        store.side_file("audit/audits.sqlite").mkdir()
        assert not keep_audit(store, MODEL, made())


def test_keeping_an_audit_drops_no_lock_of_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "_LOCK_SECONDS", 0.05)
    begin = "import sqlite3, sys; sqlite3.connect(sys.argv[1], 0).execute('BEGIN IMMEDIATE')"
    with Store.open(make_store(tmp_path / "store")) as store:
        assert keep_audit(store, MODEL, made())
        file = store.side_file("audit/audits.sqlite")
        with closing(sqlite3.connect(file)) as database:
            database.execute("BEGIN IMMEDIATE")
            assert not keep_audit(store, MODEL, made())
            other = subprocess.run([sys.executable, "-c", begin, file], capture_output=True, check=False)
    assert b"database is locked" in other.stderr


@pytest.mark.slow
def test_several_threads_and_processes_keep_audits(tmp_path: Path) -> None:
    with Store.open(make_store(tmp_path / "store")) as store:
        workers = [start(store.path, "audits", word, "20") for word in ("a", "killed")]
        with ThreadPoolExecutor(2) as pool:
            kept = pool.map(lambda number: keep_audit(store, "model", made(number, question="b")), range(20))
            workers[1].kill()
        assert all(kept)
        outputs = [worker.communicate(timeout=60)[0] for worker in workers]
        rows = [(audit.question, audit.at) for audit in kept_audits(store, "model")]
        assert keep_audit(store, "model", made())
    assert outputs == ["", ""]
    assert sorted(row for row in rows if row[0] != "killed") == [(word, n) for word in "ab" for n in range(20)]
