"""Benchmarks that a user is told to run, on a tiny shape; and what they show of the streaming policy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvtool.cli.app import main
from kvtool.core.fusion.selectors import MODES
from samples.benchmarks.bench import machine
from samples.benchmarks.bench.__main__ import app
from samples.benchmarks.gpu_day.day import Results
from samples.benchmarks.streaming.bench import ADAPTIVE, ALL, LINK, TEXT, StreamOptions, bench_stream
from samples.benchmarks.streaming.context import DEFAULT_LEVELS, Context, shape_context
from samples.benchmarks.streaming.speeds import GivenSpeeds
from samples.benchmarks.streaming.traces import generate
from samples.tools import families
from tests.cli.working import script
from tests.families import FAMILIES, HYBRIDS
from tests.wrappers import HYBRID_WRAPPERS, WRAPPERS

ROOT = Path(__file__).resolve().parents[2]
MEASURED = DEFAULT_LEVELS.levels


def test_fusion_benchmark_has_a_row_for_each_mode_and_context(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(machine, "_COPIED", 2**16)
    monkeypatch.setattr(machine, "_ROWS", {"cpu": 8})
    monkeypatch.setattr(machine, "_LEAST_SECONDS", 0.0)
    sizes = ("--chunk-tokens", 40, "--question-tokens", 8, "--repeat", 1, "--link-tokens", 4)
    words = ("fusion", "--shape", "tiny", "--dtype", "bfloat16", *sizes, "--context", "160,120", "--json")
    rows = script(lambda args: main(args, app, "bench"), *words).fine().json["rows"]
    modes = [mode for mode in MODES if mode != "full"]
    assert [(row["fusion"], row["context"]) for row in rows] == [(mode, n) for n in (160, 120) for mode in modes]
    assert all(row["speedup"] == pytest.approx(row["full_ms"] / row["ttft_ms"]) for row in rows)
    assert not list((home / "cache").glob("kvtool-bench-*"))


@pytest.mark.slow
@pytest.mark.nightly
def test_gpu_script_runs_dry(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--dry", "--stage", "machine", "answers", "vllm"]
    subprocess.run(
        [sys.executable, "samples/benchmarks/gpu.py", *words], cwd=ROOT, check=True, capture_output=True, timeout=280
    )
    stages = Results.read(tmp_path / "results.json").stages
    assert [stages[name]["finished"] for name in ("machine", "answers", "vllm")] == [True] * 3


def test_families_of_the_page_and_the_readme_are_those_tested() -> None:
    page = families.PAGE.read_text(encoding="utf-8")
    configs = FAMILIES | WRAPPERS | HYBRIDS | HYBRID_WRAPPERS
    assert {*re.findall(r"([\w.-]+)\** \(`\w+`\)", page)} == {*configs}
    assert families.readme() == families.README.read_text(encoding="utf-8")


# ---- the adaptive policy over simulated links ----


def subject(gpu: str, chunk_tokens: int, decode: float | None) -> Context:
    return shape_context("mistral-7b", 10_000, chunk_tokens, GivenSpeeds(gpu, None, decode))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "depth"), [(("a100", 1500, None), 2), (("a40", 1000, 20e9), 4)], ids=["a100", "slower GPU and decoding"]
)
def test_adaptive_policy_is_in_time_most_often_and_loses_least(
    context: tuple[str, int, float | None], depth: int
) -> None:
    report = bench_stream(subject(*context), generate(), StreamOptions((300, 500, 1000, 2000), depth=depth))
    for kind in (ALL, *report.kinds):
        adaptive, link = report.row(ADAPTIVE, kind), report.row(LINK, kind)
        assert adaptive.met_share >= link.met_share, kind
        assert adaptive.kl_answer < link.kl_answer, kind
        for policy in (*MEASURED, TEXT):
            other = report.row(policy, kind)
            assert adaptive.met_share >= other.met_share, (kind, policy)
            if other.met_share == adaptive.met_share and policy != TEXT and MEASURED[policy].loss:
                assert adaptive.kl_answer < other.kl_answer, (kind, policy)
    assert report.row(ADAPTIVE).met_share > max(report.row(policy).met_share for policy in (*MEASURED, TEXT, LINK))
