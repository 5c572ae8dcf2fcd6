"""The installed command on the really pretrained packaged model: what a new user does first."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]

CORPUS = Path(__file__).parents[2] / "samples" / "corpus"
QUESTION = "What is the larger reflector at the Kellhaven Observatory called by the people who work with it?"
FILES = ("places/kellhaven-observatory.md", "people/ilse-varnholt.md", "work/ullock-cheese.txt")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """kvtool as installed, on a store of its own."""
    monkeypatch.setenv("KVTOOL_STORE", str(tmp_path / "store"))
    command, folder = Path(sys.executable).with_name("kvtool"), tmp_path / "in"
    folder.mkdir()

    def kvtool(*args: str, code: int = 0) -> str:
        done = subprocess.run([command, *args], capture_output=True, text=True, encoding="utf-8", cwd=folder)
        assert done.returncode == code, done.stderr
        return done.stdout

    for name in FILES:
        shutil.copy(CORPUS / name, folder)
    return kvtool


def test_a_question_is_answered_from_cached_chunks_by_a_real_model(run: Any) -> None:
    report = json.loads(run("ingest", ".", "--model", "smollm2", "--json"))
    assert report["documents"]["added"] == len(FILES)
    assert report["gate"]["passed"], report["gate"]
    full, *fused = json.loads(run("query", QUESTION, "--compare", "prefix,reuse,epic,blend", "--json"))["runs"]
    assert "Bucket" in full["answer"]
    assert all(chunk["status"] == "hit" for reply in fused for chunk in reply["chunks"])
    by_mode = {reply["fusion"]: reply for reply in fused}
    assert by_mode["prefix"]["kl_first"] < 0.01  # only bfloat16 rounding
    assert by_mode["reuse"]["tokens"]["recomputed"] == 0
    assert by_mode["blend"]["kl_answer"] < by_mode["reuse"]["kl_answer"]
    answer = run("query", QUESTION, "--fusion", "blend", "--max-tokens", "24")
    assert "Bucket" in answer


@pytest.mark.nightly
def test_the_question_of_the_readme_is_answered_from_the_passage_that_answers_it(run: Any) -> None:
    run("ingest", ".", "--model", "smollm2")
    asked = ("query", "Who founded the observatory?", "--json")
    reply = json.loads(run(*asked))
    assert "founded by Ilse Varnholt" in reply["answer"]
    assert [Path(chunk["source"]).name for chunk in reply["chunks"]] == ["kellhaven-observatory.md"]
    assert reply["chunks_omitted"] == 3
    assert json.loads(run(*asked, "--set", "search.min_score=0"))["chunks_omitted"] == 0
