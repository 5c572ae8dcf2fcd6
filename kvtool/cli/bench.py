"""`kvtool bench`: the tool's numbers on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtool.cli.options import Run, new_app, takes
from kvtool.cli.parsing import store_path
from kvtool.core.errors import KvtoolError

app = new_app("Measure on this machine, beside plain transformers in the same run.")


@app.callback()
def _group() -> None:
    """Makes `bench` a group, although it has one command yet."""


@app.command()
@takes()
def ingest(
    run: Run,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="How much of the store to prefill again.")] = 8192,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Rounds; medians are shown.")] = 3,
) -> None:
    """Ingest the store's own documents again into a scratch store, against plain batched prefill of the same chunks."""
    from kvtool.core.bench.ingest import bench_ingest, files_of
    from kvtool.core.cache.store import Store
    from kvtool.core.query.session import Session

    settings = run.settings
    with Store.open(store_path(settings.store)) as store:
        session = Session.open(
            store, model=settings.model, device=settings.device, dtype=settings.dtype, offline=settings.offline
        )
        files = files_of(store, session.identity, tokens)
        if not files:
            raise KvtoolError("the store holds no documents", "run `kvtool ingest PATH` first")
        result = bench_ingest(session.decoder, session.identity, files, repeat)
    rows = [(name, f"{value:.3g}" if isinstance(value, float) else value) for name, value in result.to_json().items()]
    run.out.result(result.to_json(), human=lambda: run.out.table(("what", "value"), rows))
