"""`kvtool store`: look after the store."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any

import typer

from kvtool.cli.listing import ls
from kvtool.cli.options import Run, new_app, takes
from kvtool.cli.pack import export, import_
from kvtool.cli.parsing import ManyValues, store_path
from kvtool.cli.transfer import pull, push, sync
from kvtool.cli.upkeep import budget, compact, forget, pin, prune, unpin
from kvtool.core.errors import EXIT_DAMAGED, UsageError

app = new_app("Look after the store: statistics, listing, verification, sharing, upkeep.")
for _command in (ls, push, pull, sync, forget, budget, prune, compact, pin, unpin):
    app.command()(_command)
app.command(cls=ManyValues)(export)
app.command("import")(import_)


@app.command()
@takes()
def stats(run: Run) -> None:
    """Counts and sizes."""
    from kvtool.core.cache.store import Store

    with Store.open(store_path(run.settings.store)) as store:
        value = {"path": str(store.path)} | store.stats()
    run.out.result(value, human=lambda: run.out.table(("what", "value"), _flat(value)))


def _flat(value: dict[str, Any], under: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, inner in value.items():
        label = f"{under}{name}"
        rows.extend(_flat(inner, f"{label}.") if isinstance(inner, dict) else [(label, inner)])
    return rows


@app.command()
@takes()
def verify(
    run: Run,
    repair: Annotated[bool, typer.Option("--repair", help="Drop what is damaged; it is computed again.")] = False,
    sample: Annotated[
        str | None, typer.Option("--sample", metavar="1/7", help="Check this part of the chunks.", show_default=False)
    ] = None,
) -> int | None:
    """Check every digest and every reference."""
    from kvtool.core.cache.store import Store

    with Store.open(store_path(run.settings.store)) as store:
        damaged = store.verify(_fraction(sample))
        left, repaired = damaged, 0
        if damaged and repair:
            with store.writer(run.settings.lock_wait) as writer:
                repaired = writer.repair(damaged)
            left = store.verify(_fraction(sample))
        sizes = store.stats()
    rows = [{"kind": d.kind, "chunk": d.chunk, "level": d.level, "layer": d.layer, "reason": d.reason} for d in damaged]
    value = {"records": sizes["records"], "bytes": sizes["bytes"], "damaged": rows, "repaired": repaired}

    def show() -> None:
        for row in rows:
            where = f"{row['chunk']} {row['level']} layer {row['layer']}: " if row["chunk"] else ""
            run.out.print(f"damaged: {where}{row['reason']}")
        if rows or run.out.verbosity >= 0:
            run.out.print(f"{value['records']} records, {len(rows)} damaged, {repaired} rows dropped for repair")

    run.out.result(value, human=show)
    return EXIT_DAMAGED if left else None


def _fraction(text: str | None) -> Fraction | None:
    if text is None:
        return None
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError(f"--sample: {text!r} is not a fraction", "such as 1/7") from error
    if not 0 < value <= 1:
        raise UsageError(f"--sample: {text!r} is not between 0 and 1", "such as 1/7")
    return value
