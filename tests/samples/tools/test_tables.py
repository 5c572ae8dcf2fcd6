"""Tools that make tables: of batches and journals, and those of pages, which have to be the pages' own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from samples.benchmarks import machines
from samples.tools import families, layer_bytes, plan_of_scale
from tests.families import FAMILIES, HYBRIDS, tiny_model
from tests.fusion.making import decoder_of
from tests.wrappers import HYBRID_WRAPPERS, WRAPPERS

SAMPLES = Path(__file__).resolve().parents[3] / "samples"


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
    lines = run("tools/paired.py", first, second, "--score", "f1").splitlines()
    assert lines[0].startswith("a.jsonl f1: 0.750 [")
    assert lines[2] == "difference of f1, 2 pairs: 0.500 [0.500, 0.500]"


def journal(path: Path, wrong: int, count: int = 4) -> str:
    """Results of some questions, of which the first `wrong` are answered wrongly by reuse; the last is torn."""
    rows = [json.dumps({"type": "kvtool eval", "facts": {}})]
    for place in range(count):
        for run, score, distance in (("full", 1.0, 0.0), ("reuse", float(place >= wrong), 0.5), ("none", 0.0, 2.0)):
            rows.append(json.dumps({"index": place, "id": None, "runs": {run: answered(score, distance)}}))
    path.write_text("\n".join(rows) + '\n{"index": 9, "ru', encoding="utf-8")
    return str(path)


def answered(score: float, distance: float) -> dict[str, object]:
    scores = dict.fromkeys(("f1", "exact_match", "contains"), score)
    distances = {"kl_first": distance, "kl_answer": distance, "top1_agrees": not distance, "answer_equal": not distance}
    counts = {"reused": 3, "recomputed": 1, "fresh": 1, "bytes_read": 0, "levels": [], "holes": []}
    return {**scores, **distances, **counts, "ttft_ms": 1.0, "speedup": 1.0}


@pytest.mark.slow
def test_tables_of_several_sets_and_of_all_together(tmp_path: Path) -> None:
    a, b = journal(tmp_path / "a.jsonl", 1), journal(tmp_path / "b.jsonl", 0, 6)
    said = run("tools/quality_tables.py", f"A={a}", f"B, of six={b}", "--default", "reuse")
    assert "A: 4 questions" in said
    assert "all together: 10 questions" in said
    rows = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("|")]
    assert [row[5] for row in rows if row[0] == "`reuse`"] == [".750", "1.000", ".900"]
    loss = {row[0]: row for row in rows if row[0] in ("A", "all together") and row[1].isdigit()}
    assert loss["A"][2].startswith("-.250 [-.750, +.000]")
    assert loss["all together"][5].startswith(".900 [")


@pytest.mark.parametrize("name", ["qwen3-0.6b", "gemma-4-e4b", "gemma-4-26b-a4b"])
def test_the_bytes_of_kinds_of_layers_are_those_that_the_page_has(name: str) -> None:
    page = layer_bytes.PAGE.read_text(encoding="utf-8")
    assert f"{layer_bytes.HEAD}\n| qwen2.5-0.5b" in page
    assert layer_bytes.row(name, 4096) in page


def test_the_tables_by_machine_are_those_of_the_page() -> None:
    page = (machines.RESULTS / "speed.md").read_text(encoding="utf-8")
    assert run("benchmarks/machines.py", "tables").strip() in page


def test_the_plan_of_scale_is_the_one_that_the_page_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (SAMPLES.parent / "kvtool" / "docs" / "internals" / "scale.md").read_text("utf-8")
    monkeypatch.setattr(sys, "argv", ["plan_of_scale.py"])
    plan_of_scale.main()
    assert [table in page for table in capsys.readouterr().out.strip().split("\n\n")] == [True] * 3


def test_the_page_of_families_lists_each_and_no_other() -> None:
    listed = re.findall(r"([\w.-]+)\** \(`(\w+)`\)", families.PAGE.read_text(encoding="utf-8"))
    made = FAMILIES | WRAPPERS | HYBRIDS | HYBRID_WRAPPERS
    assert sorted(listed) == sorted((name, type(config()).__name__) for name, config in made.items())


def test_readme_counts_the_tested_families() -> None:
    assert families.readme() == families.README.read_text(encoding="utf-8")


def test_the_page_of_families_has_the_layers_of_the_built_models() -> None:
    """Of some: the whole page takes a minute (`samples/tools/families.py --check`)."""
    page = families.PAGE.read_text(encoding="utf-8")
    for name in ("llama", "gemma3", "gpt-oss", "deepseek-v2", "smollm3"):
        (line,) = re.findall(rf"^.*\b{name}\** \(`.*", page, re.MULTILINE)
        assert line.startswith(f"| {families.layers_of(decoder_of(tiny_model(name)))} | all |")
