"""`kvtool inspect`: look into the store and the model that uses it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvtool.cli.options import Run, new_app, takes
from kvtool.cli.parsing import store_path
from kvtool.core.errors import EXIT_MISFIT, KvtoolError, UsageError

app = new_app()

WHATS = ("gate",)


@app.command()
@takes()
def inspect(
    run: Run,
    what: Annotated[str, typer.Argument(metavar="[gate]", help="`gate`: the laws checked on this model.")] = "",
) -> int | None:
    """The store at a glance, or the gate's verdict on its model."""
    if what and what not in WHATS:
        raise UsageError(f"inspect: there is no {what!r}", f"known: {', '.join(WHATS)}")
    from kvtool.core.cache.store import Store

    with Store.open(store_path(run.settings.store)) as store:
        if what:
            return _gate(run, store)
        _glance(run, store)
        return None


def _glance(run: Run, store: Any) -> None:
    from kvtool.core.query.session import store_identity
    from kvtool.core.verdicts import stored_verdict

    identity = store_identity(store)
    verdict = stored_verdict(store, identity.fingerprint)
    value = {
        "path": str(store.path),
        "model": identity.model,
        "dtype": identity.dtype,
        "fingerprint": identity.fingerprint,
        "lead_in": {"mode": identity.lead_in.mode, "tokens": len(identity.lead_in.ids)},
        "gate": None if verdict is None else verdict.passed,
        "store": store.stats(),
    }

    def show() -> None:
        sizes = value["store"]
        gate = {None: "not run yet", True: "passed", False: "FAILED"}[value["gate"]]
        run.out.print(f"store    {value['path']}")
        run.out.print(f"model    {identity.model} in {identity.dtype}; gate {gate}")
        run.out.print(f"lead-in  {identity.lead_in.mode}, {len(identity.lead_in.ids)} tokens")
        run.out.print(f"content  {sizes['documents']} documents, {sizes['chunks']} chunks, {sizes['tokens']:,} tokens")
        for level, row in sizes["levels"].items():
            run.out.print(f"level    {level}: {row['chunks']} chunks, {row['bytes'] / 1e6:,.1f} MB")
        run.out.print(f"disk     {sizes['disk_free'] / 1e9:,.1f} GB free")

    run.out.result(value, human=show)


def _gate(run: Run, store: Any) -> int | None:
    from kvtool.core.query.session import store_identity
    from kvtool.core.verdicts import stored_verdict

    identity = store_identity(store)
    verdict = stored_verdict(store, identity.fingerprint)
    if verdict is None:
        raise KvtoolError("the gate has not met this model yet", "it runs at the first ingest or query")
    rows = [
        (f"law {c.law}", c.name, f"{c.difference:.3g}", f"{c.allowed:.3g}", "passed" if c.passed else "FAILED")
        for c in verdict.checks
    ]
    columns = ("law", "check", "difference", "allowed", "")
    run.out.result(verdict.to_json(), human=lambda: run.out.table(columns, rows))
    return None if verdict.passed else EXIT_MISFIT
