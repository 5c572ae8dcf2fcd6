"""A few of every kind of fault that `tests/support/faults.py` injects for hours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import readers

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    *("ingest", "first ingest", "compress", "prune", "compact", "import", "push", "pull"),
    *("ingest of states", "question", "learn"),
}
FEW = "--flips 40 --cuts 10 --kills 3 --fills 1 --readers 0 --threads 1 --seed 3"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_few_faults_of_every_kind() -> None:
    command = [sys.executable, str(ROOT / "tests/support/faults.py"), *FEW.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(row[0], row[1]): int(row[2]) for row in (line.split(" | ") for line in done.stdout.splitlines()[2:])}
    assert rows["| one bit flipped", "all"] == 40
    assert rows["| file cut", "all"] == 10
    for kind in ("kill -9", "file size limit"):
        assert {name for fault, name in rows if fault == f"| {kind}"} == {*COMMANDS, "all"}


@pytest.mark.slow
def test_readers_get_the_answers_of_an_idle_store_at_their_revision(tiny: Path, tmp_path: Path) -> None:
    outcome = readers.run(tmp_path, str(tiny), processes=2, questions=15)
    assert outcome.wrong == []
    assert outcome.answers == 30
    assert outcome.commits > outcome.revisions > 1
