"""Choice of the audited questions, and the journal of audits. (Audits of answers: tests/query/test_audit.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.core.cache.side_files import append_side
from kvtool.core.cache.store import Store
from kvtool.core.evaluate.audits import Audit, is_drawn, keep_audit, kept_audits, shortened
from kvtool.reports.paired_run import parse_run
from tests.cache.making import make_store

MODEL = "f" * 64


def made(at: int = 0, **changes: object) -> Audit:
    """Make an audit; only the given fields differ."""
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
        audits = [made(number, kl_answer=number / 7) for number in range(3)]
        assert all(keep_audit(store, MODEL, audit) for audit in audits)
        assert kept_audits(store, MODEL).audits == tuple(audits)
        assert kept_audits(store, "0" * 64).audits == ()


def test_what_is_no_audit_is_counted(tmp_path: Path) -> None:
    with Store.open(make_store(tmp_path / "store")) as store:
        wrong: list[dict[str, object]] = [
            {"kl_first": "0"},
            {"tokens": []},
            {"tokens": {"reused": 3}},
            {"levels": [1]},
            {"lead_in": {}},
            {"amount": "0.15"},
            {"at": 10**15},  # no year has it
            {"holes": 10**400},
            {"kl_answer": float("nan")},
        ]
        rows = [{}, {"format": 2}, *(made().to_json() | changes for changes in wrong)]
        for row in (*rows, made().to_json()):
            append_side(store, f"audit/{MODEL[:16]}.jsonl", row)
        kept = kept_audits(store, MODEL)
    assert kept.audits == (made(),)
    assert kept.damaged == len(rows)
