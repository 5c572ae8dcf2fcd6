"""The laws of `kvtool help design` on the GPU, a family and dtype at a time, several at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from samples.benchmarks.gpu_day.carried import ROOT
from samples.benchmarks.gpu_day.day import Day

_AT_ONCE = 6
_SECONDS = 400
_REST = "not -float32 and not -bfloat16"


def run(day: Day) -> None:
    from tests.families import FAMILIES

    names = ["llama"] if day.dry else [*FAMILIES]
    wanted = {f"{name} {dtype}": f"{name}-{dtype}" for name in names for dtype in ("float32", "bfloat16")}
    if day.dry:
        wanted = {name: f"{chosen} and test_3" for name, chosen in wanted.items()}
    else:
        wanted["laws and fusion without a family"] = _REST
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        # A law's process is started when there is room; what an earlier call has found is not asked for again.
        known = day.results.stages.get(day.stage, {}).get("steps", {})
        limit = min(_SECONDS, max(30, int(day.left())))
        jobs = {
            name: pool.submit(_tested, day.device, chosen, limit)
            for name, chosen in wanted.items()
            if "value" not in known.get(name, {})
        }
        try:
            for name in wanted:
                day.step(name, partial(_result, jobs.get(name)))
        finally:
            for job in jobs.values():
                job.cancel()


def _result(job: Future[dict[str, Any]] | None) -> dict[str, Any]:
    assert job is not None
    found = job.result()
    if found["status"] not in (0, 1) or not found.get("passed"):
        raise RuntimeError(found["end"])
    return found


def _tested(device: str, chosen: str, limit: int) -> dict[str, Any]:
    """Return how many tests passed and failed, which failed, and the end of pytest's output."""
    folders = ["tests/laws"] if chosen != _REST else ["tests/laws", "tests/fusion"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *folders,
        "-q",
        "-k",
        chosen,
        "--device",
        "pretended" if device == "cpu" else device,
    ]
    command += ["-W", "default", "-p", "no:cacheprovider", "--tb", "short"]
    # Threads of several tests at once only compete; interpreted Triton is not what is tested here.
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        return {"status": -1, "end": f"not done after {limit} s: {said[-1500:]}"}
    counts = {
        word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout[-500:])
    }
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    end = (done.stdout + done.stderr)[-6000:] if done.returncode else ""
    return {"status": done.returncode, **counts, "which": failed[:50], "end": end}
