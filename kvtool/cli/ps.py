"""`kvtool ps` and `kvtool stop`: list and end the engines that `kvtool query` has left loaded."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from kvtool.cli.keep_alive import EngineRecord, engines
from kvtool.cli.options import Run, takes
from kvtool.core.cache.options import STORE, StoreOptions
from kvtool.core.common.text import counted, shown_size
from kvtool.core.options.option import Options, option

_HEAD = ("process", "memory", "since", "expires", "questions", "model", "store", "log")


def row(engine: EngineRecord) -> dict[str, Any]:
    return {
        **{name: getattr(engine, name) for name in ("store", "pid", "log", "started", "requests")},
        **{"model": engine.model or None, "expires": engine.ends or None, "memory_bytes": engine.memory},
    }


@takes(examples=("ps", "ps --json"))
def ps(run: Run) -> None:
    """List the models that `query` keeps loaded."""
    found = engines()

    def show() -> None:
        if found:
            run.out.table(_HEAD, [_cells(each) for each in found])
        else:
            run.out.status("no model stays loaded")

    run.out.result({"engines": [row(each) for each in found]}, human=show)


def _cells(each: EngineRecord) -> tuple[object, ...]:
    memory = "unknown" if each.memory is None else shown_size(each.memory)
    model, ends = each.model or "is loaded now", _clock(each.ends) if each.ends else ""
    return each.pid, memory, _clock(each.started), ends, each.requests, model, each.store, each.log


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


@dataclass(frozen=True, kw_only=True)
class StopFlags(Options, settings=False):
    all: bool = option(False, "End those of all stores.", group=STORE)


@takes(StopFlags, StoreOptions, examples=("stop", "stop --all"))
def stop(run: Run) -> None:
    """End the model that `query` keeps loaded for a store.

    Answers that are being written are finished first.
    """
    every = engines()
    wanted = None if run.get(StopFlags).all else os.path.realpath(run.folder)
    ended = [row(each) for each in every if wanted in (None, each.store)]
    for each in every:
        if wanted in (None, each.store):
            run.out.doing(f"ending process {each.pid}")
            each.end()

    def show() -> None:
        for each in ended:
            run.out.print(f"ended process {each['pid']} of {each['store']}")
        if not ended:
            others = f"; {counted(len(every), 'other')} (`kvtool ps`)" if every else ""
            run.out.status(f"no model stays loaded for this store{others}" if wanted else "no model stays loaded")

    run.out.report({"stopped": ended}, human=show)
