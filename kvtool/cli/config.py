"""`kvtool config [show]`: every option that a file or a variable can give, and where its value came from."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvtool.cli.commands import new_app
from kvtool.cli.options import SETTINGS, Run, takes
from kvtool.core.cache.options import LockOptions, StoreOptions
from kvtool.core.common.urls import for_people, is_url
from kvtool.core.errors import UsageError, did_you_mean
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.resolve import settings_of

app = new_app()


@app.command()
@takes(StoreOptions, LockOptions, ModelOptions, examples=("config", "config show --json"))
def config(
    run: Run,
    what: Annotated[
        str, typer.Argument(metavar="show", help="The only thing to do.", autocompletion=lambda: ["show"])
    ] = "show",
) -> None:
    """List every setting, its value, and where it came from: a flag, a variable, a file, or the default."""
    if what != "show":
        raise UsageError(f"config: there is no {what!r}", did_you_mean(what, ["show"]) or "known: show")
    rows = {name: _row(run, name) for name in settings_of(SETTINGS)}
    result = {"settings": rows}
    run.out.result(result, lambda: run.out.table(("setting", "value", "from"), [_human(n, r) for n, r in rows.items()]))


def _row(run: Run, name: str) -> dict[str, Any]:
    origin = run.resolved.origin(name)
    value = run.resolved.values.get(name, settings_of(SETTINGS)[name].default)
    if name == "store":
        value = str(run.get(StoreOptions).place)
    return {"value": _shown(value), "origin": origin.layer, "where": origin.where}


def _shown(value: Any) -> Any:
    """A shared store's URL without its password."""
    return for_people(value) if isinstance(value, str) and is_url(value) else value


def _human(name: str, row: dict[str, Any]) -> tuple[str, str, str]:
    value = row["value"]
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if value is None:
        instead = settings_of(SETTINGS)[name].instead
        text = f"({instead})" if instead else ""
    return name, text, f"{row['origin']} {row['where']}".rstrip()
