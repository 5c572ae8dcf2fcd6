"""The keywords of the Python API are those that the rooms declare."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from kvtool.core import api
from kvtool.core.cache.options import LockOptions
from kvtool.core.compress.options import CompressOptions
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.options import arguments
from kvtool.core.options.option import Option, Options, options_of
from kvtool.core.query.options import QueryOptions
from kvtool.core.remote.options import ExportOptions, ImportOptions, PullOptions, PushOptions
from kvtool.core.upkeep.options import ForgetOptions, PruneOptions

SOURCES: dict[str, type[Options]] = {
    "Open": ModelOptions,
    "Ingest": IngestOptions,
    "Query": QueryOptions,
    "Compress": CompressOptions,
    "Push": PushOptions,
    "Pull": PullOptions,
    "Export": ExportOptions,
    "Import": ImportOptions,
    "Forget": ForgetOptions,
    "Prune": PruneOptions,
    "Lock": LockOptions,
}
POSITIONAL = {("Open", "model"), ("Ingest", "paths"), ("Compress", "levels")}


def annotation(option: Option) -> str:
    """What a call may give: also texts with a unit, and one value where several are meant."""
    kind = "str | Path" if option.kind is Path else option.kind.__name__
    if option.unit in ("duration", "percentage", "size"):
        kind += " | str"
    if option.many:
        kind += f" | Iterable[{kind}]"
    if option.table:
        kind += " | Mapping[str, object]"
    return kind + (" | None" if option.optional else "")


def source_of(name: str, options: type[Options]) -> str:
    """One class of `kvtool/core/options/arguments.py`."""
    model = options_of(ModelOptions)
    lines = [
        f"    {option.name}: {annotation(option)}"
        for option in options_of(options).values()
        if option.is_keyword and (name, option.name) not in POSITIONAL and (name == "Open" or option.name not in model)
    ]
    return "\n".join(
        [f"class {name}Arguments(TypedDict, total=False):", f'    """See `{options.__name__}`."""', "", *lines]
    )


@pytest.mark.parametrize("name", SOURCES)
def test_every_option_is_a_typed_keyword(name: str) -> None:
    written = Path(arguments.__file__).read_text("utf-8")
    assert source_of(name, SOURCES[name]) + "\n" in written, "put this into kvtool/core/options/arguments.py"


def test_nothing_else_is_written_there() -> None:
    classes = [name for name, value in vars(arguments).items() if inspect.isclass(value) and "Arguments" in name]
    assert classes == [f"{name}Arguments" for name in SOURCES]


def test_notebooks_are_shown_the_options() -> None:
    shown = inspect.signature(api.Cache.query).parameters
    assert shown["ratio"].default == 0.15
    assert "options" not in shown
    assert "device" not in shown
