"""The script of the first hour on a GPU: results that are kept, steps that are not done twice, wheels, the table."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from samples.benchmarks.gpu import STAGES
from samples.benchmarks.gpu_day import carried, table
from samples.benchmarks.gpu_day.day import BROKEN, Day, OutOfTime, Results
from samples.benchmarks.gpu_wheels import command

ROOT = Path(__file__).resolve().parents[3]


def day(folder: Path, run: str = "1", seconds: float = 60) -> Day:
    results = Results.read(folder / "results.json")
    return Day("laws", results, "cpu", True, time.monotonic() + seconds, run, folder)


def fails(message: str) -> Callable[[], None]:
    def work() -> None:
        raise RuntimeError(message)

    return work


def test_a_step_is_done_once_and_what_failed_is_tried_again_by_the_next_call(tmp_path: Path) -> None:
    first = day(tmp_path)
    assert first.step("a", lambda: {"ms": 1}) == {"ms": 1}
    assert first.step("b", fails("no")) is None
    assert first.step("b", lambda: 2) is None  # not twice in one call
    again = day(tmp_path, run="2")
    assert again.step("a", fails("done before")) == {"ms": 1}
    assert again.step("b", lambda: 2) == 2
    kept = json.loads((tmp_path / "results.json").read_text())["stages"]["laws"]["steps"]
    assert (kept["a"]["value"], kept["b"]["value"]) == ({"ms": 1}, 2)


def test_out_of_time_keeps_what_is_done(tmp_path: Path) -> None:
    late = day(tmp_path, seconds=6)
    late.step("a", lambda: 1)
    with pytest.raises(OutOfTime):
        late.step("b", lambda: 2, least_s=600)
    assert list(Results.read(tmp_path / "results.json").stages["laws"]["steps"]) == ["a"]


def test_a_step_that_loses_the_device_ends_the_process_and_is_noted(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        day(tmp_path).step("a", fails("CUDA error: an illegal memory access was encountered"))
    assert ended.value.code == BROKEN
    assert day(tmp_path).step("a", lambda: 1) is None  # of the same call: another process does the steps after it
    assert day(tmp_path, run="2").step("a", lambda: 1) == 1


def test_the_table_has_a_row_a_step(tmp_path: Path) -> None:
    one = day(tmp_path)
    one.step("llama", lambda: {"passed": 3, "which": []})
    one.step("qwen3", fails("a | b"))
    text = table.of(one.results.stages, STAGES)
    assert "| llama | passed 3 |" in text
    assert "**failed** RuntimeError: a / b" in text
    row = {"rows": {"epic": {"ttft_ms": 12.5, "cold_ms": None}}}
    assert "| x | epic | 12.5 |" in table.of({"fusion": {"steps": {"x": {"value": row}}}}, STAGES)


def test_every_stage_has_its_module() -> None:
    for name in STAGES:
        assert (ROOT / "samples" / "benchmarks" / "gpu_day" / f"{name}.py").is_file()


def test_wheels_are_those_of_the_lock_and_shadow_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = command(tmp_path, "3.12", [*carried.CARRIED])
    assert f"lmdb=={carried.locked()['lmdb']}" in said
    assert "--no-deps" in said
    assert carried.missing() == []
    wheel = tmp_path / "kvtool_carried-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("kvtool_carried.py", "HERE = 1\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setitem(carried.CARRIED, "kvtool-carried", "kvtool_carried")
    assert carried.missing() == ["kvtool-carried is missing (carry its wheel: samples/benchmarks/gpu_wheels.py)"]
    carried.unpack(tmp_path)
    assert not [line for line in carried.missing() if "is missing" in line]


@pytest.mark.slow
def test_a_dry_day(tmp_path: Path) -> None:
    """Some stages end to end; all of them: python samples/benchmarks/gpu.py --out DIR --dry."""
    given = ["--out", str(tmp_path), "--dry", "--stage", "machine", "answers", "vllm"]
    subprocess.run(
        [sys.executable, "samples/benchmarks/gpu.py", *given], cwd=ROOT, check=True, capture_output=True, timeout=280
    )
    stages = Results.read(tmp_path / "results.json").stages
    assert [stages[name]["finished"] for name in ("machine", "answers", "vllm")] == [True] * 3
    assert "static ms_a_token" in (tmp_path / "table.md").read_text(encoding="utf-8")


def test_what_is_carried_lacks_nothing_that_it_needs() -> None:
    """Apart from what torch and transformers have brought, and requests, which gguf wants only to download."""
    brought = {re.sub(r"[-_.]+", "-", name).lower() for name in (*carried.THERE, *carried.CARRIED, *carried.LARGE)}
    brought |= {"typing-extensions", "huggingface-hub", "requests"}
    needed = {"kvtool": requires("kvtool")} | {name: requires(name) for name in carried.CARRIED}
    missing = {
        (name, need.name)
        for name, needs in needed.items()
        for need in map(Requirement, needs or ())
        if need.marker is None or need.marker.evaluate({"extra": ""})
        if re.sub(r"[-_.]+", "-", need.name).lower() not in brought
    }
    assert not missing
