"""Flags of the contract whose effect no other test of a command shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.working import QUESTION, SHORT, kvtool, listing, write_corpus
from tests.stores import make_store

_SPACE = 4  # tokens: a chunk's length is limited without the white space around it


def lengths(path: Path) -> list[int]:
    (document,) = listing(path)
    return [chunk["tokens"] for chunk in document["chunks"]]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A document of six sections of different lengths."""
    path = tmp_path / "in" / "mills.md"
    path.parent.mkdir()
    path.write_text("\n\n".join(f"# Mill {n}\n\n" + "It grinds flour for the baker. " * (n % 3 + 1) for n in range(6)))
    return path


def test_split_and_its_bounds(fresh: Any, text: Path, tmp_path: Path) -> None:
    def split(name: str, *more: object) -> list[int]:
        store = tmp_path / name
        fresh(text, *more, store=store).fine()
        return lengths(store)

    def at_paragraphs(name: str) -> bool:
        (document,) = listing(tmp_path / name)
        return all(text.read_text()[: chunk["end"]].endswith("\n\n") for chunk in document["chunks"][:-1])

    split("fixed", "--split", "fixed")
    split("paragraph", "--split", "paragraph")
    assert [at_paragraphs(name) for name in ("fixed", "paragraph")] == [False, True]
    assert max(split("plain")) <= 64 + _SPACE  # `CHUNKS`
    long = split("long", "--max-tokens", "128", "--min-tokens", "64")
    assert max(long) > 64 + _SPACE
    assert min(split("short", "--max-tokens", "128", "--min-tokens", "1")[:-1]) < 64 <= min(long[:-1])


def test_no_ignore(fresh: Any, tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "in", 2)
    (folder / ".kvtoolignore").write_text("mill1.md\n")
    assert fresh(folder).fine().json["documents"]["added"] == 1
    assert fresh(folder, "--no-ignore").fine().json["documents"]["added"] == 1
    assert [Path(each["source"]).name for each in listing(tmp_path / "fresh")] == ["mill0.md", "mill1.md"]


@pytest.mark.parametrize(("link", "where"), [("initial", {0}), ("final", {1}), ("boundary", {0, 1})])
def test_link(link: str, where: set[int], store: Path) -> None:
    """`where`: 0 if the first tokens of each chunk are recomputed, 1 if the last ones are."""
    asked = ("--documents", "mill2.md", "--fusion", "epic", "--link-tokens", "4", "--link", link)
    row = kvtool("query", QUESTION, "--store", store, *asked, *SHORT, "--explain", "--json").fine().json
    hits = [chunk for chunk in row["chunks"] if chunk["status"] == "hit"]
    assert hits
    for chunk in hits:
        spans = [span for span in chunk["explanation"]["spans"] if span["reason"]]
        assert sum(span["token_end"] - span["token_start"] for span in spans) == 4
        assert {int(span["token_end"] == chunk["tokens"]) for span in spans} == where


def test_no_shift(store: Path) -> None:
    asked = ("query", QUESTION, "--store", store, "--fusion", "epic", *SHORT, "--json")
    assert kvtool(*asked).fine().json["tokens"]["shifted"] > 0
    assert kvtool(*asked, "--no-shift").fine().json["tokens"]["shifted"] == 0


def test_temperature_and_seed(store: Path) -> None:

    def answer(*more: str) -> str:
        asked = ("query", QUESTION, "--store", store, "--fusion", "reuse", "--max-tokens", "12", "--json")
        return str(kvtool(*asked, *more).fine().json["answer"])

    warm = ("--temperature", "2", "--seed")
    assert answer(*warm, "1") == answer(*warm, "1") != answer(*warm, "2")
    assert answer("--seed", "1") == answer("--seed", "2") != answer(*warm, "1")


def test_what_is_older_than_an_age_is_forgotten(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=3)
    words = ("store", "prune", "--store", path, "--json", "--yes")
    kvtool(*words, "--older-than", "1d").fine()
    assert len(listing(path)) == 3
    done = kvtool(*words, "--older-than", "0s").fine().json
    assert [(step["step"], step["documents"]) for step in done["steps"]] == [("documents", 3)]
    assert listing(path) == []
