"""A wrong value is the same error from every source: a flag, a variable, a file or Python."""

from __future__ import annotations

import re
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

WRONG: list[tuple[type[Options], str, Any, str]] = [
    (QueryOptions, "ratio", 15, "is not between 0 and 1"),
    (QueryOptions, "ratio", "150%", "is not between 0 and 1"),
    (QueryOptions, "ratio", "much", "is not a number or a percentage"),
    (QueryOptions, "top_k", 0, "is less than 1"),
    (QueryOptions, "temperature", -1.0, "is not between 0 and 2"),
    (QueryOptions, "retriever", "typo", "is none of auto, bm25, dense, hybrid"),
    (QueryOptions, "fusion", "unoin", "is none of full, prefix"),
    (QueryOptions, "level", "9", "is none of auto, raw"),
    (QueryOptions, "level", "keep50", "is none of auto, raw, lossless, 1..4, keepNN-…"),
    (IngestOptions, "read_timeout", "soon", "is not a length of time"),
    (QueryOptions, "max_tokens", 0, "is less than 1"),
    (IngestOptions, "split", "semantik", "is none of semantic"),
    (IngestOptions, "chunk_tokens", 0, "is less than 1"),
    (IngestOptions, "level", "auto", "is none of raw"),
    (IngestOptions, "lead_in", "wram", "is no lead-in"),
    (IngestOptions, "lock_wait", "-1", "is less than 0"),
    (ModelOptions, "device", "gpu", "does not fit"),
    (ModelOptions, "dtype", "float8", "is none of"),
]


@pytest.mark.parametrize(("source", "name", "value", "complaint"), WRONG, ids=lambda value: str(value)[:20])
def test_every_side_says_the_same(source: type[Options], name: str, value: Any, complaint: str, tmp_path: Path) -> None:
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
        with pytest.raises(UsageError, match=re.escape(complaint)) as error:
            give()
        assert error.value.message.startswith(f"{where}: ")
        said[where] = (error.value.message.removeprefix(f"{where}: ").split(" is ")[-1], error.value.hint)
    assert len({complaint for complaint, _ in said.values()}) == 1
    assert len({hint for _, hint in said.values()}) == 1
    assert all(hint for _, hint in said.values())


CALLS = [
    (lambda cache: cache.query("Who?", ratio=15), "ratio: 15.0 is not between 0 and 1"),
    (lambda cache: cache.query("Who?", set={"search.order": "typo"}), "search.order: 'typo' is none of"),
    (lambda cache: cache.query("Who?", topk=3), "unknown option 'topk'"),
    (lambda cache: cache.query("Who?", device="cpu"), "device is the same for all"),
    (lambda cache: cache.ingest("docs", chunk_tokens=0), "chunk_tokens: 0 is less than 1"),
    (lambda cache: cache.compress("9"), "levels: '9' is none of 1..4, auto, lossless, cachegen-1..4"),
    (lambda cache: cache.prune(max_size="much"), "max_size: 'much' is not a size"),
    (lambda cache: cache.push("file:///x", dleete=True), "unknown option 'dleete'"),
    (lambda cache: cache.remove("x", dry=True), "unknown option 'dry'"),
    (lambda cache: cache.query(None), "question: None is not text"),
    (lambda cache: cache.query("Who?", chunks=5), "chunks: 5 is no list"),
    (lambda cache: cache.query("Who?", chunks="abcdef", documents="a.md"), "--chunks and --documents exclude"),
    (lambda cache: cache.set_budget("much"), "'much' is not a size"),
    (lambda cache: cache.set_budget(-1), "-1 is not a size"),
    (lambda cache: cache.search("mill", top_k=0), "top_k: 0 is less than 1"),
]


@pytest.mark.parametrize(("call", "said"), CALLS, ids=[said for _, said in CALLS])
def test_a_call_in_python_is_checked(call: Any, said: str, tmp_path: Path) -> None:
    with kvtool.open(tmp_path / "s") as cache, pytest.raises(UsageError, match=re.escape(said)) as error:
        call(cache)
    assert error.value.hint


def test_what_opens_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="device: 'gpu' does not fit"):
        kvtool.open(tmp_path, device="gpu")
    with pytest.raises(UsageError, match="unknown option 'devcie'") as error:
        kvtool.open(tmp_path, devcie="cpu")  # type: ignore[call-arg]
    assert error.value.hint == "did you mean 'device'?"


def test_one_path_is_one_path(tmp_path: Path) -> None:
    with kvtool.open(tmp_path / "s") as cache, pytest.raises(UsageError, match="docs"):
        cache.ingest("docs")
    assert IngestOptions(paths="docs").paths == (Path("docs"),)  # type: ignore[arg-type]
    assert QueryOptions(source="*.md").source == ("*.md",)  # type: ignore[arg-type]


def test_a_closed_cache_refuses(tmp_path: Path) -> None:
    with kvtool.open(tmp_path / "s") as cache:
        pass
    with pytest.raises(UsageError, match="this cache was closed") as error:
        cache.query("Who?")
    assert "kvtool.open" in error.value.hint
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


@pytest.mark.parametrize(("given", "hint"), [("epic,union", "--compare MODE,MODE"), ("epic,unoin", "did you mean")])
def test_several_modes_where_one_is_meant(given: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        QueryOptions(fusion=given)
    assert hint in caught.value.hint
