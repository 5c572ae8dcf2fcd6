"""What all stages share: where results go, what has been done, and how much time is left."""

from __future__ import annotations

import json
import re
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BROKEN = 75  # exit status: the device is lost to this process, another process continues
_LOST = ("CUDA error", "Triton Error [CUDA]", "cudaError", "CUBLAS_STATUS", "unspecified launch failure")


class OutOfTime(Exception):
    """Out of time: finished steps are kept, and `--resume` continues."""


@dataclass
class Results:
    """All results in one file, written after every step."""

    path: Path
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read the results of a file; none if it does not exist."""
        stages = json.loads(path.read_text(encoding="utf-8"))["stages"] if path.exists() else {}
        return cls(path, stages)

    def write(self) -> None:
        """Whole or not at all."""
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps({"stages": self.stages}, indent=1, default=str) + "\n", encoding="utf-8")
        part.replace(self.path)


@dataclass
class Day:
    """One stage's process.

    Attributes
    ----------
    dry : small sizes, on the CPU: tests that it runs, not how fast.
    deadline : of `time.monotonic`.
    run : names this call; a step that failed in it is not tried twice.
    scratch : a folder on the disk whose speed counts.
    only : steps whose names it is found in; the others are passed over.
    model : a GGUF file or a model's folder; None: random weights serve.
    vllm : the interpreter of vLLM's environment, if there is one.
    """

    stage: str
    results: Results
    device: str
    dry: bool
    deadline: float
    run: str
    scratch: Path
    model: Path | None = None
    vllm: Path | None = None
    only: re.Pattern[str] = re.compile("")

    def step(self, name: str, work: Callable[[], Any], least_s: float = 5.0) -> Any:
        """Do a piece of work unless an earlier call did; its value (JSON), or None where it failed.

        Raises
        ------
        OutOfTime : less than `least_s` is left.
        SystemExit : the device does not answer this process any more.
        """
        steps = self.results.stages.setdefault(self.stage, {"steps": {}})["steps"]
        known = steps.get(name, {})
        if "value" in known or known.get("run") == self.run or not self.only.search(name):
            return known.get("value")
        if time.monotonic() + least_s > self.deadline:
            raise OutOfTime(name)
        print(f"{self.stage}: {name}", flush=True)
        started = time.monotonic()
        try:
            steps[name] = {"value": work()}
        except OutOfTime:
            raise
        except Exception as error:  # the other steps are worth having
            steps[name] = {"error": f"{type(error).__name__}: {error}"[:2000], "trace": traceback.format_exc()[-3000:]}
            print(f"{self.stage}: {name}: {steps[name]['error'][:400]}", flush=True)
        steps[name] |= {"seconds": round(time.monotonic() - started, 2), "run": self.run}
        self.results.write()
        self._clean()
        if any(sign in steps[name].get("error", "") for sign in _LOST):
            raise SystemExit(BROKEN)
        return steps[name].get("value")

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def _clean(self) -> None:
        import gc

        import torch

        gc.collect()
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()


def milliseconds(work: Callable[[], object], device: str, repeat: int = 10, warm: int = 2) -> float:
    """Median time of one call, on the GPU between two events, after calls that are not counted."""
    import torch

    for _ in range(warm):
        work()
    times = []
    for _ in range(repeat):
        if device.startswith("cuda"):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            started = time.perf_counter()
            work()
            times.append((time.perf_counter() - started) * 1e3)
    return float(statistics.median(times))
