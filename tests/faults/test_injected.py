"""Faults, really injected: a few of every kind that `tests/support/faults.py` injects for hours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FEW = {"flips": 40, "cuts": 10, "kills": 3, "fills": 0, "readers": 0, "threads": 0}
COMMANDS = {
    *("ingest", "first ingest", "compress", "prune", "compact", "import", "push", "pull"),
    *("ingest of states", "question", "learn"),
}


def run(journal: Path, *words: object) -> subprocess.CompletedProcess[str]:
    few = [str(word) for name, count in FEW.items() for word in (f"--{name}", count)]
    command = [sys.executable, str(ROOT / "tests/support/faults.py"), "--journal", str(journal), "--json", *few]
    return subprocess.run([*command, *map(str, words)], capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_few_faults_of_every_kind(tmp_path: Path) -> None:
    done = run(tmp_path / "journal", "--minutes", 5, "--seed", 3)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    times = {(row["part"], row["what"]): row["times"] for row in rows}
    assert sum(count for (part, _), count in times.items() if part == "flip") == FEW["flips"]
    assert sum(count for (part, _), count in times.items() if part == "cut") == FEW["cuts"]
    assert {what for part, what in times if part == "kill"} == COMMANDS
    assert [row for row in rows if row["wrong"]] == []
    assert json.loads(run(tmp_path / "journal", "--minutes", 0).stdout) == rows  # from the journal
