"""The machine's hardware and what it can do: memory, bus, products by dtype, disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from samples.benchmarks.bench.machine import Host
from samples.benchmarks.gpu_day import carried
from samples.benchmarks.gpu_day.day import Day, milliseconds

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(day: Day) -> None:
    day.step("what is there", lambda: _there(day))
    day.step("missing", carried.missing)
    day.step("products", lambda: _products(day))
    day.step("copies", lambda: _copies(day))
    day.step("disk", lambda: _disk(day))


def _there(day: Day) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "versions": carried.versions(),
        "host": asdict(Host.here()),
    }
    found["memory_gb"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    found["disk_free_gb"] = shutil.disk_usage(day.scratch).free / 1e9
    if day.device.startswith("cuda"):
        of = torch.cuda.get_device_properties(day.device)
        found["gpu"] = {
            "name": of.name,
            "capability": list(torch.cuda.get_device_capability(day.device)),
            "multiprocessors": of.multi_processor_count,
            "memory_gb": of.total_memory / 1e9,
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "flash": torch.backends.cuda.flash_sdp_enabled(),
        }
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown: {error}"


def _products(day: Day) -> dict[str, float]:
    """TFLOP/s of square products of random numbers."""
    size = 512 if day.dry else 8192
    speeds = {}
    for dtype in _DTYPES:
        one, other = (torch.randn((size, size), device=day.device).to(dtype) for _ in range(2))
        speeds[str(dtype)] = 2 * size**3 / milliseconds(partial(torch.mm, one, other), day.device) / 1e9
    return speeds


def _copies(day: Day) -> dict[str, float]:
    """GB/s of bytes copied (a copy on the device reads and writes as many)."""
    size = 2**22 if day.dry else 2**30
    here, there = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8, device=day.device)
    speeds = {"main memory": size / milliseconds(lambda: torch.clone(here), "cpu", 5) / 1e6}
    other = torch.empty_like(there)
    speeds["on the device"] = size / milliseconds(lambda: other.copy_(there), day.device) / 1e6
    speeds["pageable up"] = size / milliseconds(lambda: there.copy_(here), day.device, 3) / 1e6
    if day.device.startswith("cuda"):
        pinned = here.pin_memory()
        speeds["pinned up"] = size / milliseconds(lambda: there.copy_(pinned, non_blocking=True), day.device) / 1e6
        speeds["pinned down"] = size / milliseconds(lambda: pinned.copy_(there, non_blocking=True), day.device) / 1e6
    return speeds


def _disk(day: Day) -> dict[str, float]:
    """GB/s of one file, written through and read with a cold page cache by one thread, and again with a warm one."""
    path, block = day.scratch / "disk-test", os.urandom(2**20)
    blocks = 8 if day.dry else 4096
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(blocks):
            file.write(block)
        os.fsync(file.fileno())
    written = time.perf_counter() - started
    cold = dropped(path)
    found = {"write": written, "read cold": _reading(path), "read warm": _reading(path)}
    path.unlink()
    return {name: blocks * 2**20 / seconds / 1e9 for name, seconds in found.items()} | {"dropped": float(cold)}


def _reading(path: Path) -> float:
    started, buffer = time.perf_counter(), bytearray(2**24)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - started


def dropped(path: Path) -> bool:
    """Drop a file's pages from the page cache; False if the system cannot. No process may have the file mapped."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True
