"""The first hour on a GPU, in independent stages that can be resumed: `kvtool help gpu`.

    python samples/benchmarks/gpu_wheels.py wheels                                  # where there is a network
    python samples/benchmarks/gpu.py --wheels wheels --out out --stage laws entropy # there; at most --minutes in all
    python samples/benchmarks/gpu.py --out out --dry                                # here, on the CPU, in small

Results: OUT/results.json (every stage, written after every step) and OUT/table.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from samples.benchmarks.gpu_day import carried, table
from samples.benchmarks.gpu_day.day import BROKEN, Day, OutOfTime, Results

ROOT = Path(__file__).resolve().parents[2]
STAGES = {
    "machine": "what is there, and what it could do",
    "laws": "(a) the laws over all families, float32 and bfloat16",
    "entropy": "(b) the Triton decoder: bytes, mutated records, GB/s",
    "fusion": "(c) time to the first token, warm, cold and held, by part",
    "ingest": "(d) ingest beside plain prefill",
    "encode": "(e) records of every level",
    "answers": "(f) decoding of answers, plain and by CUDA graph",
    "memory": "(g) memory of the passes",
    "models": "(h) a model end to end, on the sample corpus",
    "vllm": "(i) vLLM fed from a store",
    "attention": "the kernels for scattered rows beside each other",
}
STAGE_MINUTES = 8.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results go")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="packages to be put before those that are here")
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=[*STAGES], help="default: all, in this order")
    parser.add_argument("--steps", default="", metavar="REGEX", help="only steps whose names contain it")
    parser.add_argument("--minutes", type=float, default=9.0, help="for this call; each stage has 8 at most")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="an earlier results.json; else that in OUT goes on")
    parser.add_argument("--model", type=Path, help="a GGUF file or folder for the stage `models`")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="vLLM's environment's, for the stage `vllm`")
    parser.add_argument("--scratch", type=Path, help="a folder on the disk that is measured; default: OUT")
    parser.add_argument("--device", default="", help="default: cuda, with --dry cpu; or pretended")
    parser.add_argument("--dry", action="store_true", help="small sizes, on the CPU")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # this process is one stage's
    parser.add_argument("--run", default=str(os.getpid()), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.device = options.device or ("cpu" if options.dry else "cuda")
    if options.only:
        return one_stage(options)
    return all_stages(options)


def all_stages(options: argparse.Namespace) -> int:
    """Run each stage in a process of its own, so that one that loses the device does not end the others."""
    if options.wheels:
        carried.unpack(options.wheels)
    lacking = carried.missing()
    print("\n".join(lacking) if lacking else "nothing is missing", flush=True)
    if any(line.endswith("(needed)") for line in lacking):
        return 2
    path = options.out / "results.json"
    if options.resume and options.resume != path:
        path.write_bytes(options.resume.read_bytes())
    end = time.monotonic() + options.minutes * 60
    for stage in options.stage:
        if Results.read(path).stages.get(stage, {}).get("finished"):
            print(f"{stage}: finished before", flush=True)
            continue
        run_stage(stage, options, min(end, time.monotonic() + STAGE_MINUTES * 60))
    text = table.of(Results.read(path).stages, STAGES)
    (options.out / "table.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def run_stage(stage: str, options: argparse.Namespace, end: float) -> None:
    """Run a stage's process, anew after a step that lost the device."""
    if end - time.monotonic() <= 10:
        print(f"{stage}: no time left", flush=True)
        return
    status = BROKEN
    while status == BROKEN and end - time.monotonic() > 10:
        left = end - time.monotonic()
        command = [sys.executable, __file__, "--only", stage, "--run", options.run, "--out", str(options.out)]
        command += ["--minutes", str((left - 5) / 60), "--device", options.device]
        command += ["--dry"] if options.dry else []
        for name in ("model", "vllm", "scratch", "steps"):
            value = getattr(options, name)
            command += [f"--{name}", str(value)] if value else []
        try:
            status = subprocess.run(
                command, cwd=ROOT, env=environment(options), timeout=left + 20, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            print(f"{stage}: killed at its end of time", flush=True)
            return
    if status:
        print(f"{stage}: exit status {status}", flush=True)


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment of a stage's process: its own home, no network, without a GPU Triton's interpreter."""
    given = {"KVTOOL_HOME": str(options.out / "home"), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    given |= {"TRITON_INTERPRET": "1"} if options.device != "cuda" else {}
    known = dict(os.environ) | given
    known["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return known


@contextlib.contextmanager
def device_of(day: Day) -> Iterator[None]:
    """Nothing for a device that is there; for `pretended`, a GPU that is not (tests/pretended)."""
    if day.device != "pretended":
        yield
        return
    from tests.pretended import pretended

    day.device = "cuda"
    with pretended():
        yield


def one_stage(options: argparse.Namespace) -> int:
    scratch = options.scratch or options.out
    scratch.mkdir(parents=True, exist_ok=True)
    day = Day(
        stage=options.only,
        results=Results.read(options.out / "results.json"),
        device=options.device,
        dry=options.dry,
        deadline=time.monotonic() + options.minutes * 60,
        run=options.run,
        scratch=scratch.resolve(),
        model=options.model.resolve() if options.model else None,
        vllm=options.vllm.absolute() if options.vllm else None,
        only=re.compile(options.steps),
    )
    module = importlib.import_module(f"samples.benchmarks.gpu_day.{options.only}")
    try:
        with device_of(day):
            module.run(day)
    except OutOfTime as late:
        print(f"{options.only}: out of time before {late}", flush=True)
        return 0
    day.results.stages.setdefault(options.only, {"steps": {}})
    failed = [name for name, step in day.results.stages[options.only]["steps"].items() if "value" not in step]
    day.results.stages[options.only]["finished"] = not failed and not options.steps
    day.results.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
