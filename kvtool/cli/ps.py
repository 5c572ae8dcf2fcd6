"""`kvtool ps`: the engines that `kvtool query` has left loaded."""

from __future__ import annotations

import time
from typing import Any

from kvtool.cli.commands import new_app
from kvtool.cli.keep_alive import EngineRecord, engines
from kvtool.cli.options import Run, takes
from kvtool.core.common.sizes import shown_size

app = new_app()
_HEAD = ("process", "memory", "since", "expires", "questions", "model", "store", "log")


def row(engine: EngineRecord) -> dict[str, Any]:
    return {
        **{name: getattr(engine, name) for name in ("store", "pid", "log", "started", "requests")},
        **{"model": engine.model or None, "expires": engine.ends or None, "memory_bytes": engine.memory},
    }


@app.command()
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
