"""`kvtool config [show]`: every option that a file or a variable can give."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvtool.cli.options import SETTINGS, Run, takes
from kvtool.core.cache.options import LockOptions, StoreOptions
from kvtool.core.common.urls import for_people, is_url
from kvtool.core.errors import UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.resolve import settings_of


@takes(StoreOptions, LockOptions, ModelOptions, examples=("config", "config show --json"))
def config(
    run: Run,
    what: Annotated[
        str, typer.Argument(metavar="show", help="Settings.", show_default=False, autocompletion=lambda: ["show"])
    ] = "show",
) -> None:
    """Show every setting, its value and its source (flag, variable, file, default)."""
    if what != "show":
        raise UsageError(f"config: there is no {what!r}", "`kvtool config show` shows every setting")
    rows = {name: _row(run, name) for name in settings_of(SETTINGS)}
    result = {"settings": rows}
    run.out.result(result, lambda: run.out.table(("setting", "value", "from"), [_human(n, r) for n, r in rows.items()]))


def _row(run: Run, name: str) -> dict[str, Any]:
    origin = run.resolved.origin(name)
    value = run.resolved.values.get(name, settings_of(SETTINGS)[name].default)
    if name == "store":
        value = str(run.get(StoreOptions).place)
    if isinstance(value, str) and is_url(value):
        value = for_people(value)  # without its password
    return {"value": value, "origin": origin.layer, "location": origin.where}


def _human(name: str, row: dict[str, Any]) -> tuple[str, str, str]:
    value = row["value"]
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, tuple | list):
        text = ", ".join(map(str, value))
    if value is None or value == ():
        instead = settings_of(SETTINGS)[name].instead
        text = f"({instead})" if instead else ""
    return name, text, f"{row['origin']} {row['location']}".rstrip()
