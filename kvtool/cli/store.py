"""`kvtool store`: look after the store."""

from __future__ import annotations

from typing import Any

from kvtool.cli.commands import new_app
from kvtool.cli.listing import ls
from kvtool.cli.options import ManyValues, Run, takes
from kvtool.cli.pack import export, import_, merge
from kvtool.cli.transfer import pull, push, sync
from kvtool.cli.upkeep import budget, compact, forget, pin, prune, unpin
from kvtool.cli.verify import repair, verify
from kvtool.cli.warm import warm
from kvtool.core.cache.options import StoreOptions
from kvtool.core.common.json_text import level_rows

app = new_app("Look after the store: listing, verification, upkeep, sharing.")


@takes(StoreOptions, examples=("store stats", "store stats --json"))
def stats(run: Run) -> None:
    """Counts and sizes."""
    from kvtool.core.cache.store import Store
    from kvtool.core.upkeep.inventory import sizes_of

    with Store.open(run.folder) as store:
        sizes = {"path": str(store.path)} | sizes_of(store)
    value = sizes | {"levels": level_rows(sizes["levels"])}
    run.out.result(value, human=lambda: run.out.table(("what", "value"), _flat(sizes | _in_short(sizes["beginning"]))))


def _in_short(beginning: dict[str, Any] | None) -> dict[str, Any]:
    tokens = 0 if beginning is None else beginning["tokens"]
    return {"beginning": {"tokens": tokens}}


def _flat(value: dict[str, Any], under: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, inner in value.items():
        label = f"{under}{name}"
        rows.extend(_flat(inner, f"{label}.") if isinstance(inner, dict) else [(label, inner)])
    return rows


for _command in (stats, ls, verify, repair, forget, pin, unpin, budget, prune, compact, push, pull, sync, warm, merge):
    app.command()(_command)
app.command(cls=ManyValues)(export)
app.command("import")(import_)
