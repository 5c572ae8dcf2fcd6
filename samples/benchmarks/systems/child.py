"""One process: a contender loads its model, warms up, answers one prompt, and says what that took."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from kvtool.core.common.collecting import paused_collection
from kvtool.core.errors import KvtoolError
from samples.benchmarks.systems.task import (
    KVTOOL,
    LLAMA,
    TRANSFORMERS,
    Measured,
    PeerPrompt,
    Runner,
    Task,
    hold_to,
    read_prompt,
)

T = TypeVar("T")
_MODULES = {LLAMA: "llama", TRANSFORMERS: "plain", KVTOOL: "fused"}


def main() -> None:
    """Run the job that the command line names, with the JSON after its name; print one JSON object."""
    job, told = JOBS[sys.argv[1]], json.loads(sys.argv[2])
    try:
        found = job(told)
    except KvtoolError as error:
        found = {"error": {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}}
    print(json.dumps(found), flush=True)
    os._exit(0)  # skips the libraries' threads and tear-down


def measure(told: dict[str, Any]) -> dict[str, Any]:
    """Let one contender answer one prompt."""
    task = Task.from_json(told)
    hold_to(task.threads)
    prompt = read_prompt(task)
    with paused_collection() if task.contender.kind == KVTOOL else nullcontext():  # as its command imports
        module, import_ms = _timed(lambda: importlib.import_module(f"{__package__}.{_MODULES[task.contender.kind]}"))
    base = resident()
    runner, model_load_ms = _timed(lambda: module.load(task, len(prompt.ids) + task.new_tokens))
    loaded = resident()
    _, warm_ms = _timed(lambda: _answer(runner, prompt.shortest(), 2))
    gc.collect()
    reset_peak()
    cpu = time.process_time()
    first, ttft_ms = _timed(lambda: runner.first(prompt))
    cpu = time.process_time() - cpu
    more, decode_ms = _timed(lambda: _decode(runner, first, task.new_tokens))
    peak, in_files = peak_resident(), mapped()
    about = runner.about(prompt)
    found = Measured(
        import_ms=import_ms,
        model_load_ms=model_load_ms,
        warm_ms=warm_ms,
        ttft_ms=ttft_ms,
        ttft_cpu_ms=cpu * 1e3,
        decode_ms=decode_ms,
        base_bytes=base,
        loaded_bytes=loaded,
        peak_bytes=peak,
        mapped_bytes=in_files,
        ids=(first, *more),
        version=about.version,
        build=about.build,
        saved=about.saved,
        bytes_read=about.bytes_read,
        flops=about.flops,
    )
    return asdict(found)


def _answer(runner: Runner, prompt: PeerPrompt, new_tokens: int) -> list[int]:
    return _decode(runner, runner.first(prompt), new_tokens)


def _decode(runner: Runner, token: int, count: int) -> list[int]:
    said = []
    for _ in range(count):
        token = runner.next(token)
        said.append(token)
    return said


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    result = work()
    return result, (time.perf_counter() - started) * 1e3


def prepare(told: dict[str, Any]) -> dict[str, Any]:
    """See `prepare.py`, which imports torch."""
    from samples.benchmarks.systems.prepare import prepared

    return prepared(told)


def tune(told: dict[str, Any]) -> dict[str, Any]:
    """See `llama.py`, which imports llama.cpp."""
    from samples.benchmarks.systems.llama import tuned

    return tuned(Task.from_json(told))


JOBS = {"measure": measure, "prepare": prepare, "tune": tune}


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5), clear_refs


def resident() -> int | None:
    """Return the bytes of resident memory now, files mapped into memory included."""
    return _book("VmRSS")


def peak_resident() -> int | None:
    """Return the peak of resident memory in bytes since `reset_peak`."""
    return _book("VmHWM")


def mapped() -> int | None:
    """Return the bytes of resident memory that are mapped files now."""
    return _book("RssFile")


def reset_peak() -> None:
    """Begin a new peak; where the kernel cannot, the peak of the whole process counts."""
    with suppress(OSError):
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")


def _book(name: str) -> int | None:
    with suppress(OSError, ValueError):
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0]) * 1024
    return None
