"""Time to the first token from the store on disk: page cache warm, cold, and chunks held on the device; by part."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from kvtool.core.cache.store import Store
from kvtool.core.fusion import loader
from kvtool.core.fusion.engine import fuse
from kvtool.core.fusion.options import selector_for
from kvtool.core.fusion.selectors import REFERENCE
from kvtool.core.fusion.source import ChunkCache, StoreSource, held_on
from kvtool.core.model.decoder import Decoder
from kvtool.core.query.options import QueryOptions
from kvtool.core.session.identity import ProfileCache
from samples.benchmarks.bench.fusion import PLAIN, About, Answerer, Measured, rows_of, warm_up
from samples.benchmarks.bench.machine import Architecture, measure_machine, synchronize
from samples.benchmarks.bench.prompts import BenchPrompt
from samples.benchmarks.gpu_day import shapes
from samples.benchmarks.gpu_day.day import Day
from samples.benchmarks.gpu_day.machine import dropped

MODES = ("reuse", "epic", "union", "infoflow", "blend")
LONG = ("reuse", "epic", "union")  # what is measured of longer prompts
LEVELS = ("raw", "lossless", "1")
WORKERS = (1, 2, 4, 8)  # threads that load


def run(day: Day) -> None:
    """Short prompts of all models first: they find most of what is wrong."""
    day.step("workers", partial(_by_workers, day), least_s=_least(day))
    for context in shapes.contexts(day):
        for shape in shapes.shapes(day):
            day.step(
                f"{shape}, {context} tokens, raw", partial(_measured, day, shape, context, "raw"), least_s=_least(day)
            )
    for level in LEVELS[1:]:
        shape, context = shapes.shapes(day)[0], shapes.contexts(day)[0]
        day.step(
            f"{shape}, {context} tokens, {level}", partial(_measured, day, shape, context, level), least_s=_least(day)
        )


def _least(day: Day) -> float:
    return 2 if day.dry else 45


def _measured(day: Day, shape: str, context: int, level: str) -> dict[str, Any]:
    decoder = shapes.decoder(day, shape)
    started = time.perf_counter()
    with shapes.stored(day, decoder, context, level) as (store, prompt, path):
        filled_s = time.perf_counter() - started
        answerer = Answerer(decoder, store, QueryOptions())
        chosen = MODES if prompt.length <= 4096 else LONG
        modes = (PLAIN, REFERENCE, *chosen)
        warm_up(answerer, prompt, modes)
        machine = measure_machine(decoder)
        repeat = 1 if day.dry else 5 if prompt.length <= 4096 else 3 if prompt.length <= 16384 else 2
        facts = {mode: answerer.facts(prompt, mode) for mode in modes}
        samples = {mode: [answerer.sample(prompt, mode) for _ in range(repeat)] for mode in modes}
        measured, about = Measured(prompt, samples, facts), About(Architecture.of(decoder), machine, decoder)
        rows = {row["fusion"]: row for row in rows_of(measured, about, chosen)}
        held = {mode: _held(decoder, store, prompt, mode, repeat) for mode in chosen}
        store.close()
        cold = {mode: _cold(decoder, path, prompt, mode, min(repeat, 3)) for mode in chosen}
    for mode, row in rows.items():
        row.pop("rows_by_layer")
        row |= {"cold_ms": cold[mode], "held_ms": held[mode]}
    return {
        "context": prompt.length,
        "fill_s": filled_s,
        "machine": machine.to_json(),
        "reference": asdict(measured.reference),
        "rows": rows,
    }


def _by_workers(day: Day) -> dict[str, Any]:
    """Milliseconds of `reuse` and where they go, by how many threads load: page cache warm, and held on the device."""
    decoder = shapes.decoder(day, shapes.shapes(day)[0])
    found: dict[str, Any] = {"in one launch": decoder.rotary.by_kernel}
    with shapes.stored(day, decoder, shapes.contexts(day)[0], "raw") as (store, prompt, _):
        on_disk = StoreSource(store, decoder, ProfileCache(store))
        held = ChunkCache(on_disk, sys.maxsize, device=held_on(decoder))
        for name, source in (("warm", on_disk), ("held", held)):
            for workers in WORKERS:
                with mock.patch.object(loader, "default_workers", lambda workers=workers: workers):
                    _seconds(decoder, store, prompt, "reuse", source)
                    taken = [_seconds(decoder, store, prompt, "reuse", source) for _ in range(2 if day.dry else 9)]
                    parts = fuse(decoder, prompt.plan(store), selector_for(QueryOptions(), "reuse"), source).timing
                least, middle = min(taken) * 1e3, statistics.median(taken) * 1e3
                found[f"{name}, {workers}"] = {"median_ms": middle, "least_ms": least} | asdict(parts)
    return found


def _held(decoder: Decoder, store: Store, prompt: BenchPrompt, mode: str, repeat: int) -> float:
    """Measure with all chunks on the device already: only rotation and compute are left."""
    source = ChunkCache(StoreSource(store, decoder, ProfileCache(store)), sys.maxsize, device=held_on(decoder))
    _seconds(decoder, store, prompt, mode, source)  # reads them
    return statistics.median(_seconds(decoder, store, prompt, mode, source) for _ in range(repeat)) * 1e3


def _cold(decoder: Decoder, path: Path, prompt: BenchPrompt, mode: str, repeat: int) -> float | None:
    """Measure with the store's pages dropped from the cache: it must not be mapped, so it is opened anew each time."""
    times = []
    for _ in range(repeat):
        if not all(dropped(file) for file in path.rglob("*") if file.is_file()):
            return None
        with Store.open(path) as store:
            profiles = ProfileCache(store)
            times.append(_seconds(decoder, store, prompt, mode, StoreSource(store, decoder, profiles)))
    return statistics.median(times) * 1e3


def _seconds(decoder: Decoder, store: Store, prompt: BenchPrompt, mode: str, source: Any) -> float:
    select: Callable[[], Any] = partial(selector_for, QueryOptions(), mode)
    synchronize(decoder.device)
    started = time.perf_counter()
    fused = fuse(decoder, prompt.plan(store), select(), source)
    int(fused.logits.argmax())
    synchronize(decoder.device)
    return time.perf_counter() - started
