"""Machine checks: the hardware that this machine computes with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvtool.core.checkpoint.files import ModelFiles
from kvtool.core.checkpoint.load import resolve_device, resolve_dtype
from kvtool.core.common.machine import (
    cores,
    cpu_features,
    cpu_name,
    is_busy,
    is_fast,
    lacks_avx2,
    product_dtype,
    why_float32,
)
from kvtool.core.common.sizes import counted, shown_size
from kvtool.core.model.options import ModelOptions
from kvtool.core.native.isa import best_isa
from kvtool.lab.doctor.finding import Finding, failing

_TELLING = ("avx2", "fma", "avx512f", "avx512vnni", "avx512bf16", "amxbf16", "asimd", "bf16", "i8mm", "sve")
_LITTLE_MEMORY = 2 * 10**9
_DRIVER = Path("/proc/driver/nvidia/version")


@failing("CPU")
def check_cpu() -> Iterator[Finding]:
    """Say what the CPU can do, and whether it is free."""
    features = [name for name in _TELLING if name in cpu_features()]
    text = f"{cpu_name()}, {counted(cores(), 'core')}: {' '.join(features) or 'nothing known of what it can do'}"
    text += f"; kernels for {best_isa() or 'only numpy and torch'}"
    if lacks_avx2():
        yield Finding("CPU", "warning", f"{text}; no AVX2", "everything works at about a quarter of the speed")
    else:
        yield Finding("CPU", "ok", text)
    if is_busy():
        yield Finding("load", "warning", "other work wants the cores", "answers take longer until it is done")


@failing("memory")
def check_memory() -> Iterator[Finding]:
    """Say how much memory is there; nothing where the system does not tell."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        whole, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
        rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        free = next((int(row[1]) * 1024 for row in rows if row[0] == "MemAvailable:"), free)
    except (AttributeError, ValueError, OSError):
        return
    text = f"{shown_size(free)} of {shown_size(whole)} are free"
    if free < _LITTLE_MEMORY:
        yield Finding("memory", "warning", text, "close other programs, or use a small model such as smollm2")
    else:
        yield Finding("memory", "ok", text)


@failing("device")
def check_device(wanted: ModelOptions) -> Iterator[Finding]:
    """Say where a model would run."""
    device = resolve_device(wanted.device)
    if device != "cpu":
        import torch

        name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "Apple's GPU"
        yield Finding("device", "ok", f"{device} ({name})")
    elif wanted.device == "auto" and _DRIVER.exists():
        hint = "install the torch build for its driver: https://pytorch.org/get-started/locally"
        yield Finding("device", "warning", "cpu, though there is an NVIDIA driver: torch cannot use it", hint)
    else:
        yield Finding("device", "ok", "cpu, as asked" if wanted.device != "auto" else "cpu, since there is no other")


@failing("attention")
def check_attention(wanted: ModelOptions, files: ModelFiles) -> Iterator[Finding]:
    """Say which backend attends with a prompt's rows, and why each one before it does not."""
    import torch

    from kvtool.core.kernels.attention.dispatch import explain
    from kvtool.core.kernels.attention.params import AttentionCall

    device = resolve_device(wanted.device)
    dtype = product_dtype(resolve_dtype(wanted.dtype, device, files), device)
    found = explain(AttentionCall(device.partition(":")[0], getattr(torch, dtype)))
    yield Finding("attention", "ok", f"{found.serves.name}, in {dtype}", details=tuple(found.reasons))


@failing("dtype")
def check_dtype(wanted: ModelOptions, files: ModelFiles) -> Iterator[Finding]:
    """Say in which numbers a model is stored and computes, and why."""
    device = resolve_device(wanted.device)
    stored = resolve_dtype(wanted.dtype, device, files)
    computed = product_dtype(stored, device)
    if wanted.dtype != "auto":
        slow = device == "cpu" and not is_fast(stored)
        text, hint = f"{stored}, as asked", "leave --dtype out" if slow else ""
        yield Finding("dtype", "warning" if slow else "ok", f"{text}; {why_float32(stored)}" if slow else text, hint)
    elif stored == computed:
        yield Finding("dtype", "ok", f"{stored}, which is fast here")
    else:
        yield Finding("dtype", "ok", f"stored in {stored}, computed in {computed}: {why_float32(stored)}")
