"""Storage checks: the folders that kvtool uses, their disk, the store, its shared store."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvtool.core.cache.space import disk_free
from kvtool.core.cache.store import Store
from kvtool.core.common.sizes import counted, shown_size
from kvtool.core.common.urls import for_people
from kvtool.core.errors import StoreNotFoundError
from kvtool.core.remote.blobs import open_blobs
from kvtool.core.session.identity import StoreIdentity, known_result
from kvtool.core.upkeep.inventory import sizes_of
from kvtool.lab.doctor.finding import Finding, failing

_PROBE_BYTES = 32 * 2**20
_LITTLE_DISK = 10**9
_SLOW_DISK = 50e6  # bytes a second: a chunk of a small model takes longer to read than to compute


@failing("disk")
def check_disk(folder: Path, name: str) -> Iterator[Finding]:
    """Write a file of 32 MiB beside where `folder` is or would be, read it back, and take it away."""
    place = _nearest(folder)
    written, read = _speeds(place)
    free = disk_free(place)
    text = f"{place} can be written; {shown_size(free)} are free; {written / 1e6:.0f} MB/s to the disk"
    text += f", {read / 1e6:.0f} MB/s back"
    if free < _LITTLE_DISK:
        yield Finding(name, "warning", text, "a thousand tokens take 10 to 100 MB: free some space")
    elif read < _SLOW_DISK:
        yield Finding(name, "warning", text, "put it on a disk of this machine: --store, KVTOOL_CACHE")
    else:
        yield Finding(name, "ok", text)


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())


def _speeds(place: Path) -> tuple[float, float]:
    """Bytes a second to the disk, and back from it (from memory where the system does not forget when told to)."""
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=place, buffering=0) as file:
        started = time.perf_counter()
        for _ in range(_PROBE_BYTES // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        written = _PROBE_BYTES / (time.perf_counter() - started)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        started = time.perf_counter()
        while file.read(len(block)):
            pass
        return written, _PROBE_BYTES / (time.perf_counter() - started)


@failing("store")
def check_store(folder: Path) -> Iterator[Finding]:
    """Open the store and count; that there is none yet is nothing bad."""
    try:
        with Store.open(folder) as store:
            sizes, concerns = sizes_of(store), store.concerns()
    except StoreNotFoundError as error:
        yield Finding("store", "ok", error.message, error.hint)
        return
    chunks = counted(sizes["chunks"], "chunk") + " and the prompt's own beginning" * bool(sizes["beginning"])
    text = f"{folder}: {counted(sizes['documents'], 'document')}, {chunks}"
    yield Finding("store", "ok", f"{text}, {shown_size(sizes['bytes'])}")
    for concern in concerns:
        yield Finding("store", "warning", concern, "`kvtool store verify` looks at all of it")


@failing("gate")
def check_gate(folder: Path, identity: StoreIdentity) -> Iterator[Finding]:
    """Tell the gate's verdict on the store's model."""
    with Store.open(folder) as store:
        verdict = known_result(store, identity.fingerprint)
    if verdict is None:
        yield Finding("gate", "ok", f"{identity.model} has not met this store", "the first question runs the gate")
        return
    verdict.enforce()
    worst = max((check.difference / check.allowed for check in verdict.checks if check.allowed), default=0.0)
    others = "".join(
        f"; records made in {made} lose {nats:.2g} nats a token" for made, nats in verdict.cross_dtype_loss.items()
    )
    yield Finding("gate", "ok", f"passed by {identity.model}, its worst law at {worst:.0%} of what is allowed{others}")


@failing("shared store")
def check_tier(url: str, timeout: float) -> Iterator[Finding]:
    """Ask the tier behind a URL for something."""
    started = time.perf_counter()
    blobs = open_blobs(url, timeout)
    try:
        blobs.sizes(["head"])
    finally:
        blobs.close()
    yield Finding(
        "shared store", "ok", f"{for_people(url)} answers after {(time.perf_counter() - started) * 1e3:.0f} ms"
    )
