"""A wrong value is the same error from every source: a flag, a variable, a file or Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvtool
from kvtool.cli.options import SETTINGS
from kvtool.core.errors import UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import Options, options_of
from kvtool.core.options.resolve import resolve
from kvtool.core.query.options import QueryOptions
from tests.wording import refused

WRONG: list[tuple[type[Options], str, Any]] = [
    *((QueryOptions, "ratio", 15), (QueryOptions, "ratio", "150%"), (QueryOptions, "ratio", "much")),
    *((QueryOptions, "top_k", 0), (QueryOptions, "temperature", -1.0), (QueryOptions, "retriever", "typo")),
    *((QueryOptions, "fusion", "unoin"), (QueryOptions, "level", "9"), (QueryOptions, "level", "keep50")),
    *((IngestOptions, "read_timeout", "soon"), (QueryOptions, "max_tokens", 0), (IngestOptions, "split", "semantik")),
    *((IngestOptions, "chunk_tokens", 0), (IngestOptions, "level", "auto"), (IngestOptions, "lead_in", "wram")),
    *((IngestOptions, "lock_wait", "-1"), (ModelOptions, "device", "gpu"), (ModelOptions, "dtype", "float8")),
]


@pytest.mark.parametrize(("source", "name", "value"), WRONG, ids=lambda value: str(value)[:20])
def test_every_side_says_the_same(source: type[Options], name: str, value: Any, tmp_path: Path) -> None:
    option = options_of(source)[name]
    file = tmp_path / "kvtool.toml"
    file.write_text(f"{option.setting} = {value!r}")

    def by_flag() -> None:
        resolve(SETTINGS, {option: str(value)}, folder=tmp_path / "none")

    def by_variable() -> None:
        resolve(SETTINGS, environ={option.env: str(value)}, folder=tmp_path / "none")

    sides = {
        option.flag: by_flag,
        option.env: by_variable,
        f"{file}: {option.setting}": lambda: resolve(SETTINGS, environ={}, folder=tmp_path),
        name: lambda: source.of({name: value}),
    }
    said = {}
    for where, give in sides.items():
        with refused(UsageError, numbers=True) as error:
            give()
        said[where] = (error.value.message.removeprefix(f"{where}: ").split(" is ")[-1], error.value.hint)
    assert len({*said.values()}) == 1


CALLS = [
    *(lambda cache: cache.query("Who?", ratio=15), lambda cache: cache.query("Who?", set={"search.order": "typo"})),
    *(lambda cache: cache.query("Who?", topk=3), lambda cache: cache.query("Who?", device="cpu")),
    *(lambda cache: cache.ingest("docs", chunk_tokens=0), lambda cache: cache.compress("9")),
    *(lambda cache: cache.prune(max_size="much"), lambda cache: cache.push("file:///x", dleete=True)),
    *(lambda cache: cache.remove("x", dry=True), lambda cache: cache.query(None)),
    lambda cache: cache.query("Who?", chunks=5),
    *(lambda cache: cache.query("Who?", chunks="abcdef", documents="a.md"), lambda cache: cache.set_budget("much")),
    *(lambda cache: cache.set_budget(-1), lambda cache: cache.search("mill", top_k=0)),
]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_python_is_checked(call: Any, tmp_path: Path) -> None:
    with kvtool.open(tmp_path / "s") as cache, refused(UsageError, numbers=True):
        call(cache)


def test_what_opens_is_checked_too(tmp_path: Path) -> None:
    with refused(UsageError):
        kvtool.open(tmp_path, device="gpu")
    with refused(UsageError):
        kvtool.open(tmp_path, devcie="cpu")  # type: ignore[call-arg]


def test_one_path_is_one_path(tmp_path: Path) -> None:
    with kvtool.open(tmp_path / "s") as cache, refused(UsageError):
        cache.ingest("docs")
    assert IngestOptions(paths="docs").paths == (Path("docs"),)  # type: ignore[arg-type]
    assert QueryOptions(source="*.md").source == ("*.md",)  # type: ignore[arg-type]


def test_a_closed_cache_refuses(tmp_path: Path) -> None:
    with kvtool.open(tmp_path / "s") as cache:
        pass
    with refused(UsageError):
        cache.query("Who?")
    cache.close()
    assert repr(cache).endswith("(closed)")


def test_what_is_exported_is_there_without_torch() -> None:
    code = (
        "import sys, kvtool; assert not {'typer', 'logging', 'numpy'} & set(sys.modules);"
        "kvtool.QueryOptions(top_k=3), kvtool.IngestOptions; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_default_is_the_same_everywhere() -> None:
    assert QueryOptions().max_tokens == 256
    assert resolve(SETTINGS, environ={}).get(QueryOptions) == QueryOptions()


@pytest.mark.parametrize("given", ["epic,union", "epic,unoin"])
def test_several_modes_where_one_is_meant(given: str) -> None:
    with refused(UsageError):
        QueryOptions(fusion=given)
