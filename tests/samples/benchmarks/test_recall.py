"""The recall of a set of questions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_paragraph_that_answers_is_among_the_first(tmp_path: Path) -> None:
    paragraphs = [["nice", ["nice runs a program with modified scheduling priority."]], ["cat", ["cat joins files."]]]
    asked = {"_id": "1", "question": "Which priority is modified by nice?", "answer": "scheduling"}
    row = asked | {"context": paragraphs, "supporting_facts": [["nice", 0]]}
    (tmp_path / "in.json").write_text(json.dumps([row]), "utf-8")
    command = [sys.executable, "samples/benchmarks/recall.py", "hotpotqa", str(tmp_path / "in.json"), "--found", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "1 questions: recall@1 1.0000" in done.stdout
