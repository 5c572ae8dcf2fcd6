"""`kvtool config [show|plugins]`: every option that a file or a variable can give, and what other packages add."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvtool.cli.options import SETTINGS, Run, takes
from kvtool.core.cache.options import LockOptions, StoreOptions
from kvtool.core.common.urls import for_people, is_url
from kvtool.core.errors import UsageError, did_you_mean
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.resolve import settings_of

_WHAT = ("show", "plugins")


@takes(StoreOptions, LockOptions, ModelOptions, examples=("config", "config show --json", "config plugins"))
def config(
    run: Run,
    what: Annotated[
        str,
        typer.Argument(
            metavar="show|plugins", help="Settings, or plugins.", show_default=False, autocompletion=lambda: [*_WHAT]
        ),
    ] = "show",
) -> None:
    """Show every setting, its value and its source (flag, variable, file, default); or plugins."""
    if what not in _WHAT:
        raise UsageError(f"config: there is no {what!r}", did_you_mean(what, _WHAT) or f"known: {', '.join(_WHAT)}")
    if what == "plugins":
        _show_plugins(run)
        return
    rows = {name: _row(run, name) for name in settings_of(SETTINGS)}
    result = {"settings": rows}
    run.out.result(result, lambda: run.out.table(("setting", "value", "from"), [_human(n, r) for n, r in rows.items()]))


def _show_plugins(run: Run) -> None:
    from kvtool.reports.doctor import all_plugins

    rows = [
        {"kind": each.group, "name": each.name, "package": each.package, "target": each.target, "problem": problem}
        for each, problem in all_plugins()
    ]
    shown = [[row["kind"], row["name"], row["package"], row["problem"] or "ready"] for row in rows]
    run.out.result({"plugins": rows}, lambda: run.out.table(("kind", "name", "package", "state"), shown))


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
