"""Plugins: found by their packages' metadata, imported when they are used, left out when something is wrong."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtool.core.common import plugins
from kvtool.core.common.plugins import PluginError, extra_line, found, install_line, listed, troubles
from kvtool.core.corpus import readers
from kvtool.core.corpus.readers import read_documents
from kvtool.core.corpus.readers.document import UnreadableFile
from kvtool.core.errors import ModelError
from kvtool.core.retrieval import embed
from kvtool.reports.doctor import check_plugins
from tests.cli.working import kvtool
from tests.wording import refused

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install(package, group, name, target, module=code)`: files as a package manager installs them."""
    monkeypatch.syspath_prepend(tmp_path)

    def add(package: str, group: str, name: str, target: str, **modules: str) -> None:
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        with (folder / "entry_points.txt").open("a") as file:
            file.write(f"[kvtool.{group}]\n{name} = {target}\n")
        for module, code in modules.items():
            (tmp_path / f"{module}.py").write_text(code)
        importlib.invalidate_caches()
        plugins._all.cache_clear()

    before = set(sys.modules)
    yield add
    plugins._all.cache_clear()
    plugins._troubles.clear()
    for module in set(sys.modules) - before:
        if getattr(sys.modules[module], "__file__", None) and str(tmp_path) in str(sys.modules[module].__file__):
            del sys.modules[module]


def test_a_plugin_is_known_by_name_and_imported_when_it_is_used(install: Install) -> None:
    install("lazy", "readers", "abc", "lazy_plugin:read", lazy_plugin="read = 'the reader'")
    (plugin,) = found("readers").values()
    assert (plugin.name, plugin.package) == ("abc", "lazy 1.0")
    assert "lazy_plugin" not in sys.modules
    assert plugin.load() == "the reader"
    assert troubles() == []


def test_a_name_of_kvtools_own_is_not_replaced_and_that_is_told(install: Install) -> None:
    install("bold", "selectors", "epic", "bold_plugin:Epic")
    assert found("selectors", names=("epic",)) == {}
    ((text, hint),) = troubles()
    assert "the plugin 'epic' of bold 1.0" in text
    assert "kvtool's own" in text
    assert hint
    assert "bold 1.0" in kvtool("config").fine().err


def test_of_two_packages_with_one_name_the_first_is_taken(install: Install) -> None:
    install("two", "blobs", "here", "b:x")
    install("one", "blobs", "here", "a:x")
    assert found("blobs")["here"].package == "one 1.0"
    assert "two 1.0" in troubles()[0][0]


def test_a_name_that_is_none_is_left_out(install: Install) -> None:
    install("odd", "blobs", "Über/store", "a:x")
    assert found("blobs") == {}
    assert "its name is none" in troubles()[0][0]


def test_a_broken_plugin_is_named_and_no_other_is_broken_by_it(install: Install) -> None:
    install("broken", "embedders", "bad", "broken_plugin:E", broken_plugin="raise RuntimeError('boom')")
    install("good", "embedders", "good", "good_plugin:E", good_plugin="E = 1")
    with refused(PluginError, numbers=True):
        found("embedders")["bad"].load()
    assert found("embedders")["good"].load() == 1
    assert {plugin.name: bool(problem) for plugin, problem in listed()} == {"bad": True, "good": False}
    bad, good = check_plugins()
    assert (bad.state, good.state, good.message) == ("warning", "ok", "of good 1.0")


def test_a_reader_that_cannot_be_imported_fails_its_files_alone(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install("gone", "readers", "abc", "no_such_module:read")
    monkeypatch.setattr(readers, "_PLUGINS", found("readers"))
    assert readers.is_known(Path("x.ABC"))
    assert readers.is_bounded(Path("x.abc"), 0)
    with refused(UnreadableFile, numbers=True):
        read_documents(tmp_path / "x.abc", b"text")
    assert read_documents(tmp_path / "x.txt", b"text")


@pytest.mark.parametrize(
    "code",
    [
        "class E:\n    digest = 'no-good'",
        "class E:\n    digest = 'd1'\n    encode = lambda self, texts: [[float('nan')]]",
        "class E:\n    digest = 'd1'\n    def encode(self, texts): raise OSError('x')",
    ],
)
def test_an_embedder_that_is_none_is_an_error_of_the_model(
    install: Install, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    install("vectors", "embedders", "vec", "vec_plugin:E", vec_plugin=code)
    monkeypatch.setattr(embed, "_PLUGINS", found("embedders"))
    with refused(ModelError):
        embed.embedder_of("vec").encode(["a"])


@pytest.mark.parametrize(
    ("left_behind", "told"),
    [
        (None, "{python} -m pip install"),
        ("bin/pip", "pip install"),
        ("pipx_metadata.json", "pipx runpip kvtool-cpu install"),
        ("uv-receipt.toml", "uv pip install --python '{home}'"),
    ],
)
def test_the_line_that_is_told_installs_where_kvtool_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_behind: str | None, told: str
) -> None:
    home = tmp_path / "my tools" / "kvtool-cpu"  # pipx's --suffix
    home.mkdir(parents=True)
    if left_behind:
        (home / left_behind).parent.mkdir(exist_ok=True)
        (home / left_behind).touch(0o755)
    monkeypatch.setattr(sys, "prefix", str(home))
    monkeypatch.setenv("PATH", str(home / "bin"))
    told = told.format(home=home, python=sys.executable)
    assert install_line("--no-deps", "wanted==1") == f"{told} --no-deps wanted==1"
    assert extra_line("serve") == f"{told} 'kvtool[serve]'"
