"""Checks of `kvtool doctor`: libraries, plugins, machine, disk, store and model."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from kvtool import __version__
from kvtool.core.cache.layout import disk_free
from kvtool.core.cache.store import Store
from kvtool.core.checkpoint.files import PACKAGED, ModelFiles
from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import resolve_device, resolve_dtype, supported_config
from kvtool.core.common.files import cache_dir
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
from kvtool.core.common.plugins import AT_FAULT, Plugin, extra_line, install_line, listed
from kvtool.core.common.text import counted, shown_size
from kvtool.core.common.urls import for_people, scrubbed
from kvtool.core.errors import KvtoolError, ModelError, StoreNotFoundError
from kvtool.core.model.options import DEFAULT_MODEL, ModelOptions
from kvtool.core.native.isa import best_isa
from kvtool.core.remote.blobs import open_blobs
from kvtool.core.remote.mirror import local_place
from kvtool.core.session.identity import StoreIdentity, known_result, model_files, store_identity
from kvtool.core.upkeep.plan import sizes_of

State = Literal["ok", "warning", "failed"]
_NOT_OFFERED = ("dev", "fuzz")  # extras for work on kvtool itself
# Each looks for plugins of its kind when it is imported, and leaves out those that would take the place of its own.
_REGISTRIES = (
    *("kvtool.core.corpus.readers", "kvtool.core.retrieval.embed", "kvtool.core.fusion.selectors"),
    "kvtool.core.remote.blobs",
)
_TELLING = ("avx2", "fma", "avx512f", "avx512vnni", "avx512bf16", "amxbf16", "asimd", "bf16", "i8mm", "sve")
_LITTLE_MEMORY = 2 * 10**9
_DRIVER = Path("/proc/driver/nvidia/version")
_LITTLE_DISK = 10**9


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    state: State
    message: str
    hint: str = ""
    details: tuple[str, ...] = ()


def judged(subject: str, text: str, remedy: str = "") -> Finding:
    """Make a finding: a warning if there is a remedy."""
    return Finding(subject, "warning" if remedy else "ok", text, remedy)


def failing(name: str) -> Callable[[Callable[..., Iterator[Finding]]], Callable[..., list[Finding]]]:
    """Make a check, a generator of findings, return a list. An exception of the check is a failed finding."""

    def decorate(check: Callable[..., Iterator[Finding]]) -> Callable[..., list[Finding]]:
        @wraps(check)
        def checked(*args: object) -> list[Finding]:
            found: list[Finding] = []
            try:
                found.extend(check(*args))
            except KvtoolError as error:
                hint = error.hint or "KVTOOL_DEBUG=1 shows where it comes from"
                found.append(Finding(name, "failed", scrubbed(error.message), scrubbed(hint)))
            except OSError as error:
                hint = "check the path and its permissions"
                found.append(Finding(name, "failed", f"{error.filename or name}: {error.strerror or error}", hint))
            return found

        return checked

    return decorate


def checkup(place: Path | str, wanted: ModelOptions, timeout: float, doing: Callable[[str], None]) -> list[Finding]:
    doing("looking at the libraries")
    found = [*check_kvtool(), *(libraries := check_libraries())]
    if any(finding.state == "failed" for finding in libraries):
        return found  # most other checks would only fail for want of these
    found += [*check_extras(), *check_plugins(), *check_cpu(), *check_memory(), *check_device(wanted)]
    doing("writing to the disk")
    here = place if isinstance(place, Path) else local_place(place)
    if not isinstance(place, Path):
        found += check_tier(place, timeout)
    if here is place or here.exists():  # a local cache is made by the first question
        found += [*check_disk(here, "disk of the store"), *check_store(here)]
    identity = _identity(here)
    found += check_disk(cache_dir(), "disk of the cache")
    doing("looking for the model")
    if here is place or identity is not None or wanted.model is not None:  # else a question asks the shared store
        found += _check_model(identity, wanted)
    if identity is not None:
        found += check_gate(here, identity)
    return found


def _identity(folder: Path) -> StoreIdentity | None:
    with suppress(KvtoolError, OSError), Store.open(folder) as store:
        return store_identity(store)
    return None


@failing("model")
def _check_model(identity: StoreIdentity | None, wanted: ModelOptions) -> Iterator[Finding]:
    try:
        if identity is None:
            files = resolve(wanted.model or DEFAULT_MODEL, offline=True)
        else:
            files = model_files(identity, replace(wanted, offline=True))
    except ModelError:
        if identity is not None or wanted.model is not None:
            raise
        text = f"{DEFAULT_MODEL}, which a new store takes, is not on this machine"
        hint = f"the first `kvtool ingest` downloads it; --model {PACKAGED} needs no model hub"
        yield Finding("model", "warning", text, hint)
        return
    supported_config(files)
    yield Finding("model", "ok", f"{files.ref} ({files.kind}) at {files.folder}")
    yield from [*check_dtype(wanted, files), *check_attention(wanted, files)]


# ---- installation ----


@failing("kvtool")
def check_kvtool() -> Iterator[Finding]:
    place = Path(__file__).resolve().parents[2]
    python = f"Python {platform.python_version()} at {sys.prefix}"
    yield Finding("kvtool", "ok", f"{__version__} at {place}, {python}, {platform.system()} {platform.machine()}")


@failing("libraries")
def check_libraries() -> Iterator[Finding]:
    bad = [finding for wanted in _wanted() if (finding := _judged(wanted)) is not None]
    yield from bad
    if not bad:
        shown = ", ".join(f"{name} {_installed(name)}" for name in ("torch", "transformers", "numpy", "lmdb"))
        yield Finding("libraries", "ok", f"all {len(_wanted())} are there: {shown}, …")


@failing("extras")
def check_extras() -> Iterator[Finding]:
    for extra in sorted(set(metadata.metadata("kvtool").get_all("Provides-Extra") or ()) - {*_NOT_OFFERED}):
        wanted = _wanted(extra)
        if missing := [each.name for each in wanted if _installed(each.name) is None]:
            text, hint = f"not installed ({', '.join(missing)})", f"where it is wanted: {extra_line(extra)}"
            yield Finding(f"extra [{extra}]", "ok", text, hint)
        elif bad := [finding for each in wanted if (finding := _judged(each)) is not None]:
            yield from bad
        else:
            text = ", ".join(f"{each.name} {_installed(each.name)}" for each in wanted)
            yield Finding(f"extra [{extra}]", "ok", text)


def _wanted(extra: str = "") -> list[Requirement]:
    known = [Requirement(line) for line in metadata.requires("kvtool") or ()]
    base = [each for each in known if each.marker is None or each.marker.evaluate({"extra": ""})]
    if not extra:
        return base
    return [each for each in known if each not in base and each.marker and each.marker.evaluate({"extra": extra})]


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _judged(wanted: Requirement) -> Finding | None:
    version, install = _installed(wanted.name), install_line(f"'{wanted.name}{wanted.specifier}'")
    if version is None:
        return Finding(wanted.name, "failed", f"{wanted.name} is not installed", install)
    if not wanted.specifier.contains(version, prereleases=True):
        text = f"{wanted.name} {version} is outside of what was tested ({wanted.specifier})"
        return Finding(wanted.name, "warning", text, install)
    return None


def all_plugins() -> list[tuple[Plugin, str]]:
    for registry in _REGISTRIES:
        importlib.import_module(registry)
    return listed()


@failing("plugins")
def check_plugins() -> Iterator[Finding]:
    for plugin, problem in all_plugins():
        yield judged(
            f"plugin {plugin.name} ({plugin.group})", problem or f"of {plugin.package}", AT_FAULT if problem else ""
        )


# ---- machine ----


@failing("CPU")
def check_cpu() -> Iterator[Finding]:
    features = [name for name in _TELLING if name in cpu_features()]
    text = f"{cpu_name()}, {counted(cores(), 'core')}: {' '.join(features) or 'nothing known of what it can do'}"
    text += f"; kernels for {best_isa()}"
    slow = "everything works at about a quarter of the speed" if lacks_avx2() else ""
    yield judged("CPU", f"{text}; no AVX2" if slow else text, slow)
    if is_busy():
        yield Finding("load", "warning", "other work wants the cores", "answers take longer until it is done")


@failing("memory")
def check_memory() -> Iterator[Finding]:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        whole, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
        rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        free = next((int(row[1]) * 1024 for row in rows if row[0] == "MemAvailable:"), free)
    except (AttributeError, ValueError, OSError):
        return
    text = f"{shown_size(free)} of {shown_size(whole)} are free"
    little = "close other programs, or use a small model such as smollm2" if free < _LITTLE_MEMORY else ""
    yield judged("memory", text, little)


@failing("device")
def check_device(wanted: ModelOptions) -> Iterator[Finding]:
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
    import torch

    from kvtool.core.kernels.attention.dispatch import explain
    from kvtool.core.kernels.attention.params import AttentionCall

    device = resolve_device(wanted.device)
    dtype = product_dtype(resolve_dtype(wanted.dtype, device, files), device)
    found = explain(AttentionCall(device.partition(":")[0], getattr(torch, dtype)))
    yield Finding("attention", "ok", f"{found.serves.name}, in {dtype}", details=tuple(found.reasons))


@failing("dtype")
def check_dtype(wanted: ModelOptions, files: ModelFiles) -> Iterator[Finding]:
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


# ---- storage ----


@failing("disk")
def check_disk(folder: Path, name: str) -> Iterator[Finding]:
    """Write a file where `folder` is or would be."""
    place = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
    with tempfile.TemporaryFile(dir=place, buffering=0) as file:
        file.write(b"kvtool")
        os.fsync(file.fileno())
    free = disk_free(place)
    little = "a thousand tokens take 10 to 100 MB: free some space" if free < _LITTLE_DISK else ""
    yield judged(name, f"{place} can be written; {shown_size(free)} are free", little)


@failing("store")
def check_store(folder: Path) -> Iterator[Finding]:
    try:
        with Store.open(folder) as store:
            sizes, concerns = sizes_of(store), store.concerns()
    except StoreNotFoundError as error:
        yield Finding("store", "ok", error.message, error.hint)
        return
    chunks = counted(sizes["chunks"], "chunk") + " and the prompt's own beginning" * bool(sizes["prefix"])
    text = f"{folder}: {counted(sizes['documents'], 'document')}, {chunks}"
    yield Finding("store", "ok", f"{text}, {shown_size(sizes['bytes'])}")
    for concern in concerns:
        yield Finding("store", "warning", concern, "`kvtool store verify` looks at all of it")


@failing("gate")
def check_gate(folder: Path, identity: StoreIdentity) -> Iterator[Finding]:
    with Store.open(folder) as store:
        verdict = known_result(store, identity.fingerprint)
    if verdict is None:
        yield Finding("gate", "ok", f"{identity.model} has not been checked with this store", "the first question does")
        return
    verdict.enforce()
    worst = max((check.difference / check.tolerance for check in verdict.checks if check.tolerance), default=0.0)
    others = "".join(
        f"; records made in {made} lose {nats:.2g} nats a token" for made, nats in verdict.cross_dtype_loss.items()
    )
    yield Finding("gate", "ok", f"passed by {identity.model}, its worst law at {worst:.0%} of what is allowed{others}")


@failing("shared store")
def check_tier(url: str, timeout: float) -> Iterator[Finding]:
    started = time.perf_counter()
    blobs = open_blobs(url, timeout)
    try:
        blobs.sizes(["head"])
    finally:
        blobs.close()
    text = f"{for_people(url)} answers after {(time.perf_counter() - started) * 1e3:.0f} ms"
    yield Finding("shared store", "ok", text)
