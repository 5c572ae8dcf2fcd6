"""`kvtool inspect`: each report is a command with its own flags."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.working import QUESTION, kvtool, write_batch


def test_the_help_of_reports_imports_no_torch() -> None:
    code = (
        "import sys; from kvtool.reports import REPORTS, load_report;"
        "[load_report(name) for name in (*REPORTS, 'glance')]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("words", ["gate --level 2", "chunk --top-k 3", "plan --runs reuse", "codec --level 2"])
def test_a_flag_of_another_report_is_refused(words: str, store: Path) -> None:
    name, flag, value = words.split()
    kvtool("inspect", name, flag, value, "--store", store).failed(
        2, f"No such option: {flag}", f"inspect {name} --help"
    )


def test_flags_may_stand_before_the_report(store: Path) -> None:
    behind = kvtool("inspect", "plan", QUESTION, "--store", store, "--json").fine().json
    before = kvtool("inspect", "--json", "--store", store, "plan", QUESTION).fine().json
    assert before.keys() == behind.keys()
    assert before["chunks"] == behind["chunks"]
    kvtool("inspect", "--runs", "full", "plan", QUESTION, "--store", store).failed(2, "--runs")


@pytest.mark.parametrize("at", [("gate", "more"), ("nonsense",), ("glance",)])
def test_what_is_no_report(at: tuple[str, ...], store: Path) -> None:
    kvtool("inspect", *at, "--store", store).failed(2)


@pytest.mark.slow
def test_codec_goes_on_from_its_results(store: Path, tmp_path: Path) -> None:
    rows = ({"question": QUESTION, "documents": [f"mill{number}.md"]} for number in range(2))
    batch, results = write_batch(tmp_path / "questions.jsonl", *rows), tmp_path / "results.jsonl"
    at = ("inspect", "codec", "--batch", batch, "--store", store, "--json")
    whole = kvtool(*at, "--scheme", "int8", "--scheme", "int4").fine().json
    kvtool(*at, "--scheme", "int8", "--limit", 1, "--resume", results).fine()
    first = results.read_bytes()
    assert kvtool(*at, "--scheme", "int8", "--scheme", "int4", "--resume", results).fine().json == whole
    assert results.read_bytes().startswith(first)
    lines = [json.loads(line)["runs"] for line in results.read_text().splitlines()[1:]]
    assert [set(line) for line in lines] == [{"exact", "int8"}, {"exact", "int4"}, {"exact", "int8", "int4"}]
    assert kvtool(*at, "--scheme", "int8", "--resume", results).fine().json == whole
    other = tmp_path / "eval.jsonl"
    kvtool("eval", batch, "--store", store, "--runs", "reuse", "--resume", other).fine()
    kvtool(*at, "--scheme", "int8", "--resume", other).failed(2, "not written by `kvtool inspect codec`")
