"""Precedence, validation, and the words of every complaint."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

import pytest

from kvtool.cli.options import SETTINGS
from kvtool.core.cache.options import LockOptions, StoreOptions
from kvtool.core.common import files
from kvtool.core.errors import UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.options import resolve as module
from kvtool.core.options.option import Option, options_of
from kvtool.core.options.resolve import RESERVED_ENV, Resolved, settings_of
from kvtool.core.query.options import QueryOptions
from kvtool.core.remote.options import PullOptions
from tests.wording import refused

KNOWN = settings_of(SETTINGS)
LAYERS = ("user", "project", "environment", "flag")  # lowest first
VALUES = dict(zip(LAYERS, (0.1, 0.2, 0.3, 0.4), strict=True))


def resolve(flags: dict[str, Any] | None = None, *, config: Any = None, **more: Any) -> Resolved:
    by_option = {KNOWN[name]: value for name, value in (flags or {}).items()}
    return module.resolve(SETTINGS, by_option, config=config, **more)


def query(resolved: Resolved) -> QueryOptions:
    return resolved.get(QueryOptions)


@pytest.fixture
def user_file(home: Path) -> Path:
    home.mkdir()
    return home / "config.toml"


def resolve_from(layers: set[str], folder: Path, user_file: Path) -> Resolved:
    if "user" in layers:
        user_file.write_text("ratio = 0.1")
    if "project" in layers:
        (folder / "kvtool.toml").write_text("ratio = 0.2")
    environ = dict(os.environ) | ({"KVTOOL_RATIO": "0.3"} if "environment" in layers else {})
    return resolve({"ratio": "0.4" if "flag" in layers else None}, environ=environ, folder=folder)


@pytest.mark.parametrize("given", [c for n in range(5) for c in itertools.combinations(LAYERS, n)], ids="+".join)
def test_the_highest_layer_wins(given: tuple[str, ...], tmp_path: Path, user_file: Path) -> None:
    resolved = resolve_from(set(given), tmp_path, user_file)
    assert query(resolved).ratio == (VALUES[given[-1]] if given else 0.15)
    assert resolved.origin("ratio").layer == (given[-1] if given else "default")
    assert resolved.origin("top_k").layer == "default"


def test_origins_name_the_place(tmp_path: Path, user_file: Path) -> None:
    places = {
        layer: resolve_from({layer}, tmp_path / layer, user_file)
        for layer in LAYERS
        if not (tmp_path / layer).mkdir() and not user_file.unlink(missing_ok=True)
    }
    assert {layer: str(r.origin("ratio")) for layer, r in places.items()} == {
        "user": f"user {user_file}",
        "project": f"project {tmp_path / 'project' / 'kvtool.toml'}",
        "environment": "environment KVTOOL_RATIO",
        "flag": "flag --ratio",
    }


def test_config_replaces_the_user_file_and_not_the_project(tmp_path: Path, user_file: Path) -> None:
    user_file.write_text("top_k = 2\nseed = 2")
    (tmp_path / "kvtool.toml").write_text("top_k = 3")
    (tmp_path / "mine.toml").write_text("top_k = 4\nratio = 0.4")
    by_flag = query(resolve(config=str(tmp_path / "mine.toml"), folder=tmp_path))
    named = os.environ | {"KVTOOL_CONFIG": str(tmp_path / "mine.toml")}
    by_variable = query(resolve(environ=named, folder=tmp_path))
    assert by_flag == by_variable
    assert (by_flag.top_k, by_flag.ratio, by_flag.seed) == (3, 0.4, 0)


def test_a_named_config_has_to_exist(tmp_path: Path) -> None:
    with refused(UsageError):
        resolve(config=str(tmp_path / "nope.toml"))
    with refused(UsageError):
        resolve(environ={"KVTOOL_CONFIG": str(tmp_path / "nope.toml")})


@pytest.mark.parametrize(  # what is so only as text: other wrong values are in `test_sides`
    ("name", "text"),
    [
        *(("ratio", "nan"), ("link_tokens", "-1"), ("top_k", "2.5"), ("temperature", "inf"), ("lead_in", "sink:0")),
        ("store", "a\0b"),
    ],
)
def test_wrong_text_names_the_flag_and_the_variable(name: str, text: str) -> None:
    with refused(UsageError, numbers=True):
        resolve({name: text})
    with refused(UsageError, numbers=True):
        resolve(environ={KNOWN[name].env: text})


@pytest.mark.parametrize(
    "line",
    [
        *("top_k = true", "top_k = 2.0", "offline = 1", "store = 5", "store = []", "[query]\nratio = 2"),
        *("top_k = 1\n[query]\ntop_k = 2", "ratoi = 0.5", "[query]\nsplit = 'fixed'", "[bench]\nx = 1", "query = 1"),
        *('"top-k" = 1', '"Store" = 1'),
    ],
)
def test_wrong_files_name_the_file_and_the_key(line: str, tmp_path: Path) -> None:
    (tmp_path / "kvtool.toml").write_text(line)
    with refused(UsageError, numbers=True):
        resolve(folder=tmp_path)


def test_a_wrong_value_is_found_even_where_it_is_overridden(tmp_path: Path) -> None:
    (tmp_path / "kvtool.toml").write_text("top_k = 0")
    with refused(UsageError):
        resolve({"top_k": "3"}, folder=tmp_path)
    (tmp_path / "kvtool.toml").write_text("ratio == 1")
    with pytest.raises(UsageError):  # a sentence of Python's parser
        resolve(folder=tmp_path)


def test_did_you_mean_variable() -> None:
    ((text, hint),) = resolve(environ={"KVTOOL_STROE": "x"}).warnings
    assert (text, hint) == ("unknown variable KVTOOL_STROE in the environment", "did you mean KVTOOL_STORE?")


def test_reserved_and_empty_variables_are_no_settings(tmp_path: Path) -> None:
    environ = {"KVTOOL_HOME": str(tmp_path), "KVTOOL_DEBUG": "1", "KVTOOL_TEST_GPU": "1", "KVTOOL_TOP_K": ""}
    environ["KVTOOL_MAP_LIMIT"] = "1000000"
    assert query(resolve(environ=environ)).top_k == 5


def test_numbers_and_booleans_are_taken_as_written(tmp_path: Path) -> None:
    (tmp_path / "kvtool.toml").write_text(
        "\ufefflevel = 2\nratio = 1\noffline = true\n[ingest]\nmax_tokens = 300\nlevel = 1\n[query]\nmax_tokens = 7",
        encoding="utf-8",
    )
    got = resolve({"lock_wait": "0", "seed": 7}, environ={"KVTOOL_OFFLINE": "no"}, folder=tmp_path)
    asked, ingest = got.get(QueryOptions), got.get(IngestOptions)
    assert (asked.level, ingest.level, asked.ratio, asked.offline, ingest.offline) == ("2", "1", 1.0, False, False)
    assert (ingest.max_chunk_tokens, asked.max_tokens, ingest.lock_wait, asked.seed) == (300, 7, 0.0, 7)


@pytest.mark.parametrize("lead_in", ["warm", "sink:4", "none", "./text.txt", "data/운영.txt"])
def test_lead_ins(lead_in: str) -> None:
    assert resolve({"lead_in": lead_in}).get(IngestOptions).lead_in == lead_in


def test_values_that_contradict_each_other() -> None:
    for given in ({"min_chunk_tokens": 100, "chunk_tokens": 50}, {"min_chunk_tokens": 300}):
        with refused(UsageError, numbers=True):
            resolve(given).get(IngestOptions)
    lengths = {"min_chunk_tokens": 50, "chunk_tokens": 50, "max_chunk_tokens": 50}
    assert resolve(lengths).get(IngestOptions).chunk_tokens == 50


def test_durations_and_percentages(tmp_path: Path) -> None:
    (tmp_path / "kvtool.toml").write_text('ratio = "15%"\nlock_wait = "2m"')
    got = resolve(environ={"KVTOOL_AUDIT": "5 %"}, folder=tmp_path)
    asked = got.get(QueryOptions)
    assert (asked.ratio, asked.audit) == (0.15, 0.05)
    assert got.get(LockOptions).lock_wait == 120


def test_several_values() -> None:
    levels, source = options_of(PullOptions)["levels"], options_of(QueryOptions)["source"]
    assert levels.parse(["2,3", "2"], "--level") == ("2", "3")
    assert source.parse(["a,b", "a,b"], "--source") == ("a,b", "a,b")
    assert levels.parse(["2,", " 3"], "--level") == ("2", "3")
    for nothing in ("", " "):  # such as a script's empty variable: not the default
        with refused(UsageError):
            levels.parse([nothing], "--level")


def test_an_instruction_is_a_text_or_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "kvtool.toml").write_text('system = "@say.txt"')
    with refused(UsageError, numbers=True):
        resolve(folder=tmp_path).get(QueryOptions)
    for content in (" \n", "word " * 20_000):
        (tmp_path / "say.txt").write_text(content)
        with refused(UsageError, numbers=True):
            resolve(folder=tmp_path).get(QueryOptions)
    os.mkfifo(tmp_path / "pipe")
    for name in ("@pipe", "@/dev/zero", "@ "):
        environ = {"KVTOOL_SYSTEM": name.replace("pipe", f"{tmp_path}/pipe")}
        with refused(UsageError, numbers=True):
            resolve(folder=tmp_path, environ=environ).get(QueryOptions)
    (tmp_path / "say.txt").write_text("Answer briefly.\n")
    assert resolve(folder=tmp_path).get(QueryOptions).system == "Answer briefly."
    environ = {"KVTOOL_SYSTEM": " Answer at length, and/or in rhyme. "}
    assert resolve(folder=tmp_path, environ=environ).get(QueryOptions).system == environ["KVTOOL_SYSTEM"].strip()
    assert resolve(folder=tmp_path, environ={"KVTOOL_SYSTEM": "짧게" * 999}).get(QueryOptions).system == "짧게" * 999


@pytest.mark.parametrize("name", ["say.txt", "prompts/brief", r"C:\brief.md", "one two"])
def test_a_file_is_no_instruction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As an option it was a file's path once: its name would be said to the model in the place of what it holds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one two").write_text("Answer briefly.")
    with refused(UsageError):
        resolve(environ={"KVTOOL_SYSTEM": name}).get(QueryOptions)


def store_of(resolved: Resolved) -> str:
    return resolved.get(StoreOptions).store


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tmp_path / "deep" / "c.toml"
    config.parent.mkdir()
    config.write_text('store = "cache"')
    assert store_of(resolve(config=config)) == str(tmp_path / "deep" / "cache")
    assert store_of(resolve({"store": "cache"})) == "cache"
    assert store_of(resolve({"store": "~/cache"})) == str(tmp_path / "cache")
    assert store_of(resolve({"store": "s3://bucket/cache"})) == "s3://bucket/cache"


def test_one_variable_moves_all_state(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.data_dir() == home / "data"
    assert files.cache_dir() == home / "cache"
    assert files.default_config_file(os.environ) == home / "config.toml"
    assert resolve().get(StoreOptions).folder == home / "data" / "store"
    monkeypatch.setenv("KVTOOL_CACHE", "/elsewhere")
    assert files.cache_dir() == Path("/elsewhere")


def test_without_a_home_only_the_default_store_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    import platformdirs

    monkeypatch.delenv("KVTOOL_HOME")
    for name in ("user_data_path", "user_cache_path", "user_config_path"):
        monkeypatch.setattr(platformdirs, name, lambda *_, **__: Path("~/.local/kvtool"))
    assert store_of(resolve({"store": "here"})) == "here"
    with refused(UsageError):
        resolve().get(StoreOptions).folder  # noqa: B018


EVERY = [option for source in SETTINGS for option in options_of(source).values()]


@pytest.mark.parametrize("option", EVERY, ids=lambda option: option.key or option.name)
def test_every_option_is_declared_in_full(option: Option) -> None:
    assert option.env == (f"KVTOOL_{option.setting.upper()}" if option.setting else "")
    assert option.flag.startswith("--") or not option.flag
    assert option.help.endswith(".")
    assert option.group or not option.flag
    assert option.accept(option.default, option.name) == option.default
    for word in (*option.choices, *option.suggest):
        assert option.parse(word, option.name) == word


def test_rooms_that_share_a_setting_mean_the_same() -> None:
    for option in EVERY:
        if option.setting:
            shared = KNOWN[option.setting]
            own = (option.kind, option.default, option.help, option.flag)
            assert own == (shared.kind, shared.default, shared.help, shared.flag)


def test_every_variable_that_is_read_anywhere_is_known() -> None:
    package = Path(module.__file__).parents[2]
    texts = [file.read_text("utf-8") for file in package.rglob("*.py")]
    read = {name for text in texts for name in re.findall(r"\bKVTOOL_[A-Z]+(?:_[A-Z]+)*\b", text)}
    assert read - {option.env for option in EVERY} - set(RESERVED_ENV) <= {"KVTOOL_TEST"}


def test_flags_are_unique_within_a_room() -> None:
    for source in SETTINGS:
        flags = [flag for option in options_of(source).values() for flag in (option.flag, *option.synonyms) if flag]
        assert len(flags) == len(set(flags))


def test_a_flag_lifts_a_number_that_a_variable_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_SLO_MS", "900")
    assert resolve().get(QueryOptions).slo_ms == 900
    lifted = resolve({"slo_ms": "none"})
    assert lifted.get(QueryOptions).slo_ms is None
    assert lifted.origin("slo_ms").layer == "flag"
    with refused(UsageError):
        resolve({"top_k": "none"})  # it always has a value
