"""`kvtool config show`: every setting, and where its value came from."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvtool.cli.options import Run, new_app, takes
from kvtool.core.common.urls import for_people, is_url

app = new_app("Show the settings and where they come from.")


@app.callback()
def config() -> None:
    """Show the settings and where they come from."""


@app.command()
@takes()
def show(run: Run) -> None:
    """List every setting, its value, and where it came from.

    That is a flag, a variable, a file, or the default.
    """
    rows = _rows(run)
    result = {"settings": {row["key"]: {k: v for k, v in row.items() if k != "key"} for row in rows}}
    run.out.result(result, lambda: run.out.table(("setting", "value", "from"), map(_human, rows)))


def _rows(run: Run) -> list[dict[str, Any]]:
    origins = run.resolved.origins
    return [
        {"key": name, "value": _shown(value), "layer": origins[name].layer, "where": origins[name].where}
        for name, value in asdict(run.settings).items()
    ]


def _shown(value: Any) -> Any:
    """A shared store's URL without its password."""
    return for_people(value) if isinstance(value, str) and is_url(value) else value


def _human(row: dict[str, Any]) -> tuple[str, str, str]:
    value = (
        "" if row["value"] is None else str(row["value"]).lower() if isinstance(row["value"], bool) else row["value"]
    )
    return row["key"], str(value), f"{row['layer']} {row['where']}".rstrip()
