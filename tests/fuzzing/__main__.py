"""Coverage-guided fuzzing: ``python -m tests.fuzzing TARGET|all --seconds N --corpus FOLDER``, or ``list``.

Each target runs in a process of its own, under libFuzzer (atheris), with two seconds and 3 GB for each input. What it
has learned stays in the corpus folder, and the next run continues from there. Exit 1: something was found.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzzing import registry

INPUT_SECONDS = 2
RSS_MB = 3000
_MOST_STARTS = 40  # of one target: each ends with a finding
_RUNS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_COVERED = re.compile(r"#\d+\s+\w+\s+cov: (\d+) ft: \d+ corp: \d+")


def fuzz(target: str, module: str, seconds: float, folder: Path) -> list[Path]:
    """Run a target for so many seconds, again where a finding has ended its process; return what was found."""
    started, runs, covered = time.monotonic(), 0, ["0"]
    for _ in range(_MOST_STARTS):
        left = int(seconds - (time.monotonic() - started))
        if left < 1:
            break
        ended = _child(target, module, folder, left)
        runs += sum(map(int, _RUNS.findall(ended.stderr)))
        covered += _COVERED.findall(ended.stderr)
        if ended.returncode == 0:
            break
    findings = sorted(path for path in (folder / "findings").iterdir() if path.suffix == "")
    said = f"{target}: {time.monotonic() - started:.0f} s, {runs:,} runs, {covered[-1]} covered edges"
    sys.stdout.write("\n".join([said, *(f"found: {path}" for path in findings)]) + "\n")
    sys.stdout.flush()
    return findings


def _child(target: str, module: str, folder: Path, left: int) -> subprocess.CompletedProcess[str]:
    options = [f"-max_total_time={left}", f"-timeout={_patience()}", f"-rss_limit_mb={RSS_MB}", "-print_final_stats=1"]
    command = [sys.executable, "-m", "tests.fuzzing.child", target, module, str(folder), *options]
    with tempfile.TemporaryDirectory(prefix="kvtool-fuzz-") as home:  # libFuzzer ends without cleaning up
        variables = {"TMPDIR": home, "KVTOOL_HOME": f"{home}/home", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=left + 300, check=False,
            env=os.environ | variables,
        )  # fmt: skip


def _patience() -> int:
    """Seconds on the clock in which an input surely has had its seconds of a processor."""
    return math.ceil(INPUT_SECONDS * max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__)
    parser.add_argument("target", help="a target's name, several with commas, `all` or `list`")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for each target")
    parser.add_argument("--corpus", type=Path, default=Path(".fuzzing"), help="folder for what was learned and found")
    said = parser.parse_args()
    known = registry.targets()
    if said.target == "list":
        sys.stdout.write("\n".join(known) + "\n")
        return 0
    names = list(known) if said.target == "all" else said.target.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no target {unknown[0]!r}: {', '.join(known)}")
    found = [path for name in names for path in fuzz(name, known[name], said.seconds, said.corpus / name)]
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
