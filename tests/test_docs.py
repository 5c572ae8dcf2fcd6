"""The documentation holds together: every topic has its page, every link its target, and the wheel all of them."""

from __future__ import annotations

import re
import shutil
import tomllib
import unicodedata
from fnmatch import fnmatch
from pathlib import Path

import pytest

import kvtool
from kvtool.cli.app import COMMANDS, load_command
from kvtool.cli.commands import LazyGroup
from kvtool.cli.help import PAGES as TOPICS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "kvtool" / "docs"
PAGES = sorted(
    [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("samples/*.md"), *ROOT.glob("samples/results/*.md")]
)
_LINK = re.compile(r"!?\[[^]]*\]\(([^)\s]+)\)")
_COMMAND = re.compile(r"(?:^ {4}|`|&& |; )kvtool ([a-z][^`#\n;&|]*)", re.MULTILINE)
_CODE = re.compile(r"^ {4}[^\n]*$|```.*?```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Targets of a page's links within this repository."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    return [target for target in _LINK.findall(text) if "://" not in target]


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", _CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    kept = ("".join(c for c in head.lower() if c in " -_" or unicodedata.category(c)[0] in "LN") for head in heads)
    return {name.replace(" ", "-") for name in kept}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_resolves(page: Path) -> None:
    for link in links(page):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_links_of_packaged_pages_stay_in_the_package(page: Path) -> None:
    assert [link for link in links(page) if not (page.parent / link).resolve().is_relative_to(DOCS)] == []


def test_every_topic_is_a_page_and_every_page_a_topic() -> None:
    assert {(folder, name) for folder, pages in TOPICS.items() for name in pages} == {
        (page.parent.name, page.stem) for page in DOCS.rglob("*.md")
    }


def test_every_page_is_linked_from_the_readme_or_the_concepts() -> None:
    known = {
        (start.parent / link).resolve()
        for start in (ROOT / "README.md", DOCS / "guide/concepts.md")
        for link in links(start)
    }
    assert {*DOCS.rglob("*.md")} - known <= {DOCS / "guide/concepts.md"}


def test_every_page_of_figures_is_linked() -> None:
    known = {(ROOT / "samples" / link).resolve() for link in links(ROOT / "samples" / "README.md")}
    assert {*ROOT.glob("samples/results/*.md")} <= known


def test_the_wheel_holds_every_page_and_picture() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["kvtool"]
    for path in (path for path in DOCS.rglob("*") if path.is_file()):
        name = path.relative_to(ROOT / "kvtool").as_posix()
        assert any(fnmatch(name, pattern) for pattern in patterns), name


def flags_of(words: list[str]) -> set[str]:
    """The options of the command that these words begin with."""
    command = load_command(words[0])
    for word in words[1:]:
        if word not in getattr(command, "commands", {}):
            break
        command = command.load(word) if isinstance(command, LazyGroup) else command.commands[word]
    return {"--help"}.union(*({*option.opts, *option.secondary_opts} for option in command.params))


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "CHANGELOG"], ids=lambda page: page.stem)
def test_options_in_examples_exist(page: Path) -> None:
    for example in _COMMAND.findall(page.read_text(encoding="utf-8")):
        words = example.split()
        if words[0] in COMMANDS:
            named = {word.split("=")[0] for word in words if word.startswith("--")}
            assert named <= flags_of(words), f"{page.name}: kvtool {example}"


def test_the_python_page_names_what_exists() -> None:
    text = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    assert {*re.findall(r"\bstore\.([a-z_]+)\(", text)} <= {*dir(kvtool.Cache)}
    assert {*re.findall(r"\bkvtool\.([A-Za-z]+)\(", text)} <= {*kvtool.__all__}
    assert {*re.findall(r"`kvtool ([a-z]+)", text)} <= {*COMMANDS}


@pytest.mark.model
@pytest.mark.slow
def test_examples_of_the_python_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "old.md").write_text("An old note.", encoding="utf-8")
    shutil.copy(ROOT / "samples/corpus/places/kellhaven-observatory.md", "docs")
    text = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for example in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(example, names)
