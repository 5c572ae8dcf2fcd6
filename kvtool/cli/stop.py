"""`kvtool stop`: end the engine of a store that `kvtool query` has left loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvtool.cli.commands import new_app
from kvtool.cli.keep_alive import engines
from kvtool.cli.options import Run, takes
from kvtool.cli.ps import row
from kvtool.core.cache.options import STORE, StoreOptions
from kvtool.core.common.sizes import counted
from kvtool.core.options.option import Options, option

app = new_app()


@dataclass(frozen=True, kw_only=True)
class StopFlags(Options, settings=False):
    all: bool = option(False, "End those of all stores.", group=STORE)


@app.command()
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
