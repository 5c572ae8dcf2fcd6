"""The script of the first hour on a GPU: results that are kept, steps that are not done twice, wheels, the table."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from samples.benchmarks.gpu_day import carried
from samples.benchmarks.gpu_day.day import BROKEN, Day, Results

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


def test_a_step_that_loses_the_device_ends_the_process_and_is_noted(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        day(tmp_path).step("a", fails("CUDA error: an illegal memory access was encountered"))
    assert ended.value.code == BROKEN
    assert day(tmp_path).step("a", lambda: 1) is None  # of the same call: another process does the steps after it
    assert day(tmp_path, run="2").step("a", lambda: 1) == 1


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
