"""The folder of a new user: its questions are asked of paragraphs that answer them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from samples.benchmarks import first_hour
from samples.tools import eval as sets


def test_each_inflected_question_is_asked_of_the_paragraph_that_answers_it(tmp_path: Path) -> None:
    rows = first_hour.rows_of(first_hour.INFLECTED)
    assert len(rows) >= 60
    assert len({row["id"] for row in rows}) == len(rows)
    names = {row["source"] for row in rows[:3] + rows[-2:]}
    for name in names:
        said = [row["answer"] for row in rows if row["source"] == name]
        (tmp_path / name).write_text(" ".join(f"{answer} {'word ' * 200}" for answer in said), "utf-8")
    made = first_hour.inflected(tmp_path)
    assert {row["_id"] for row in made} == {row["id"] for row in rows if row["source"] in names}
    for example in sets.hotpotqa(made):
        (gold,) = [each for each in example.paragraphs if each.supporting]
        assert example.answers[0] in gold.body


def test_recall_is_measured_on_them(tmp_path: Path) -> None:
    (tmp_path / "man-nice.txt").write_text("It is to run a program with modified scheduling priority.", "utf-8")
    (tmp_path / "in.json").write_text(json.dumps(first_hour.inflected(tmp_path)), "utf-8")
    command = [sys.executable, "samples/benchmarks/recall.py", "hotpotqa", str(tmp_path / "in.json"), "--found", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "1 questions: recall@1 1.0000" in done.stdout


def test_an_answer_contains_every_part_as_whole_words() -> None:
    parts = [["Terry Jan Reedy", "Terry Reedy"], ["2010"]]
    assert first_hour.contains("Since 2010 it is terry\nreedy.", parts)
    assert not first_hour.contains("Terry Reedy, since 20101", parts)
