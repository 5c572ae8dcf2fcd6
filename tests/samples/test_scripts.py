"""The small scripts beside the measurements: intervals of batches, and the picture of the rooms."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as Xml
from pathlib import Path

from tests.cli.working import built, tiny

__all__ = ["built", "tiny"]
SAMPLES = Path(__file__).resolve().parents[2] / "samples"


def run(script: str, *args: str) -> str:
    command = [sys.executable, str(SAMPLES / script), *args]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True).stdout


def batch(path: Path, scores: dict[str, float]) -> str:
    rows = [{"id": name, "f1": score} for name, score in scores.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"type": "summary", "f1": 9}]), encoding="utf-8")
    return str(path)


def test_batches_are_paired_by_question(tmp_path: Path) -> None:
    first = batch(tmp_path / "a.jsonl", {"x": 0.5, "y": 1.0})
    second = batch(tmp_path / "b.jsonl", {"y": 0.5, "x": 0.0})
    lines = run("paired.py", first, second, "--score", "f1").splitlines()
    assert lines[0].startswith("a.jsonl f1: 0.750 [")
    assert lines[2] == "difference of f1, 2 pairs: 0.500 [0.500, 0.500]"


def test_an_import_against_the_order_is_drawn_and_named(tmp_path: Path) -> None:
    for name, text in {
        "low/a.py": "import kvtool.core.high.b\n",
        "high/b.py": "from kvtool.core.low import a\n",
    }.items():
        path = tmp_path / "kvtool/core" / name
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    figure = tmp_path / "rooms.svg"
    said = run("rooms.py", str(figure), "--package", str(tmp_path / "kvtool"), "--order", "high,low")
    assert said == "2 arrows, 1 against the order: low → high\n"
    assert len(Xml.parse(figure).getroot().findall("{http://www.w3.org/2000/svg}path")) == 2


def test_shifts_are_compared_question_by_question(built: Path, tmp_path: Path) -> None:
    """Every kind is another distance."""
    questions, journal = tmp_path / "batch.jsonl", tmp_path / "journal.jsonl"
    questions.write_text(
        '{"question": "Who built the first mill?"}\n{"question": "Which mill grinds flour?"}\n', encoding="utf-8"
    )
    asked = [str(built / "store"), str(questions), "--ratio", "0.3", "--max-tokens", "3", "--resume", str(journal)]
    lines = run("shifts.py", *asked).splitlines()
    kept = map(json.loads, journal.read_text(encoding="utf-8").splitlines())
    distances = {kind: answer for _, _, kind, answer, _ in kept}
    assert lines[0] == "2 questions"
    assert [line.split(" | ")[1] for line in lines[4:]] == ["none", "product", "random", "true", "keys", "values"]
    assert len(set(distances.values())) == 6
