"""Errors that retrieval finds are reported before the model is loaded; and what an interrupted question leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtool.cli import query
from kvtool.core.checkpoint import load
from kvtool.core.retrieval.finder import Finder
from tests.cli.working import QUESTION, environment, kvtool, listing, write_batch

NOTHING = "xyzzy plugh"


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load_model", None)  # a call of it fails


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (("query", NOTHING), 1, "no chunk matches"),
        (("query", QUESTION, "--chunks", "deadbeef"), 2, "'deadbeef' is not in the store"),
        (("query", QUESTION, "--documents", "none.md"), 2, "'none.md' is not in the store"),
        (("query", QUESTION, "--set", "search.source=zz*"), 2, "no document matches"),
        (("query", QUESTION, "--retriever", "dense"), 2, "embedding model"),
        (("query", NOTHING, "--compare", "reuse,union"), 1, "no chunk matches"),
        (("inspect", "sparsity", NOTHING), 1, "no chunk matches"),
        (("inspect", "deviation", NOTHING), 1, "no chunk matches"),
    ],
    ids=str,
)
def test_what_cannot_be_found(given: tuple[str, ...], code: int, said: str, store: Path) -> None:
    kvtool(*given, "--store", store).failed(code, said)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("query", NOTHING), 1, "no chunk matches"),
        (("eval", "none.jsonl"), 2, "questions cannot be read from 'none.jsonl'"),
    ],
)
def test_neither_torch_nor_transformers_is_imported_for_it(
    words: tuple[str, ...], code: int, said: str, store: Path
) -> None:
    program = "import sys; from kvtool.cli.app import main; code = main(sys.argv[1:])\n"
    program += "print({'torch', 'transformers'} & set(sys.modules)); sys.exit(code)"
    line = [sys.executable, "-c", program, *words, "--store", str(store)]
    done = subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=120, check=False)
    assert (done.returncode, done.stdout) == (code, "set()\n"), done.stderr
    assert said in done.stderr


@pytest.mark.usefixtures("no_model")
def test_an_empty_store(store: Path) -> None:
    for source in [document["source"] for document in listing(store)]:
        kvtool("store", "rm", source, "--yes", "--store", store).fine()
    kvtool("query", QUESTION, "--store", store).failed(1, "holds no documents")


@pytest.mark.usefixtures("no_model")
def test_a_batch_that_nothing_is_found_for(store: Path, tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "batch.jsonl", *({"id": n, "question": NOTHING} for n in range(2)))
    done = kvtool("query", "--batch", batch, "--store", store)
    assert done.code == 1
    assert [row["error"]["message"] for row in done.lines[:2]] == ["no chunk matches the question"] * 2
    assert done.lines[2] == {"schema": 1, "type": "summary", "count": 0, "failed": 2}


def test_each_question_is_searched_for_once(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searches, find = list[str](), Finder.find
    monkeypatch.setattr(Finder, "find", lambda *given, **how: (searches.append(given[1]), find(*given, **how))[1])
    batch = write_batch(tmp_path / "batch.jsonl", *({"question": text} for text in (NOTHING, QUESTION)))
    for asked in (("--batch", batch), (QUESTION, "--compare", "reuse,union"), (QUESTION,)):
        kvtool("query", *asked, "--max-tokens", 2, "--store", store)
    assert searches == [NOTHING, *[QUESTION] * 3]


def test_an_interrupted_question(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(query, "load_session", interrupt)
    assert "committed" not in kvtool("query", QUESTION, "--store", store).failed(130, "the store is unchanged").err
