"""vLLM fed from a store (`kvtool help vllm`): its answers beside those of kvtool's own engine, and its first token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from samples.benchmarks.gpu_day.carried import ROOT
from samples.benchmarks.gpu_day.day import Day
from samples.benchmarks.gpu_day.models import command, sized, tiny


def run(day: Day) -> None:
    if day.vllm is None:
        day.step("vLLM", lambda: {"missing": "give the interpreter of its environment by --vllm PYTHON"})
        return
    model = tiny(day) if day.dry else sized(day)
    store, python = day.scratch / "vllm-store", str(day.vllm)
    place = ["--store", str(store), "--model", str(model), "--chunk-tokens", "128", "--json"]
    corpus = str(ROOT / "samples" / "corpus" / "places")
    day.step("a store", lambda: command(day, "ingest", corpus, *place), least_s=30)
    day.step("answers", lambda: _script(day, sys.executable, "vllm_answers.py", store, model, python), least_s=60)
    lengths = "300" if day.dry else "1000,4000,16000"
    first = [python, "vllm_ttft.py", store, model, "--tokens", lengths, "--rounds", "1" if day.dry else "3"]
    day.step("first token", lambda: _script(day, *first), least_s=60)


def _script(day: Day, python: str, name: str, *given: str | Path) -> dict[str, Any]:
    """Run a script; return the lines of its table."""
    whole = [python, ROOT / "samples" / "benchmarks" / name, *given]
    done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=day.left(), check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: exit {done.returncode}: {done.stderr[-1500:]}")
    return {"lines": [line for line in done.stdout.splitlines() if line.startswith("| ")]}
