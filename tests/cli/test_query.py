"""`kvtool query`: what it reads, finds before the model is loaded, cites and compares."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from kvtool.cli import query
from kvtool.cli.answers import cited
from kvtool.cli.terminal import clean
from kvtool.core.checkpoint import load
from kvtool.core.query.reply import ReplyChunk
from kvtool.core.retrieval.finder import Finder
from tests.cli.working import PREFIX, QUESTION, SHORT, environment, kvtool, listing, on_terminal, process, write_batch
from tests.support.office.portable import pdf

LONG = ("--max-tokens", "40")


def test_a_pipe_without_a_question(store: Path) -> None:
    """As cron has it, whose stdin is /dev/null."""
    for nothing in (b"", b" \n"):
        kvtool("query", "--store", store, stdin=nothing).failed(2, "no question was given", 'kvtool query "Who')
    process("query", "--store", store).failed(2, "no question was given")
    kvtool("query", "--store", store, stdin=b"\xff\xfe").failed(2, "not UTF-8")


def test_a_batch_does_not_read_a_pipe(store: Path, tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "batch.jsonl", {"question": QUESTION})
    done = kvtool("query", "--batch", batch, "--store", store, *SHORT, stdin=b"Another one?").fine()
    assert done.lines[0]["question"] == QUESTION


@pytest.mark.parametrize(
    ("words", "question"),
    [
        (("query", "Who", "built", "the", "third", "mill?"), QUESTION),
        (("query", "Who", "--top-k", "3", "built", "the", "mill"), "Who built the mill"),
        (("query", "--set", "search.min_score=0", "third", "mill"), "third mill"),
        (("inspect", "plan", "Who", "built", "it"), "Who built it"),
    ],
)
def test_a_question_of_several_words(words: tuple[str, ...], question: str, store: Path) -> None:
    more = SHORT if words[0] == "query" else ()
    assert kvtool(*words, "--store", store, *more, "--json").fine().json["question"] == question


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("query", "x", "--top-k"), "kvtool query"),
        (("store", "prune", "--bogus"), "kvtool store prune"),
        (("inspect", "quality", "--html"), "kvtool inspect quality"),
        (("store", "--store"), "kvtool store"),
    ],
)
def test_a_hint_names_the_help_of_the_command(words: tuple[str, ...], command: str) -> None:
    kvtool(*words).failed(2, f"hint: `{command} --help` shows what is possible\n")


@pytest.mark.slow
def test_an_answer_is_not_broken_within_words(store: Path) -> None:
    """The tiny model writes words of no language: they have to come out the same, each on one line."""
    asked = ("query", QUESTION, "--store", store, *LONG, "--fusion", "reuse")
    plain, shown = kvtool(*asked).fine().out, on_terminal(*asked, columns=40).fine().out
    assert len(plain) > 40
    assert shown.split() == plain.split()
    assert max(map(cell_len, shown.splitlines())) <= 40
    assert plain.count("\n") < shown.count("\n")


@pytest.mark.slow
def test_places_are_named_as_answers_name_them(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    pages = [[f"Page {number} tells of the mill of baker {number}. It grinds flour all day."] * 3 for number in (1, 2)]
    (tmp_path / "in" / "mill.pdf").write_bytes(pdf(pages))
    store = tmp_path / "store"
    kvtool("ingest", tmp_path / "in", "--store", store, "--model", tiny, "--chunk-tokens", "64", *PREFIX).fine()
    monkeypatch.chdir(tmp_path)
    asked = ("Who mills on page 2?", "--store", store, "--set", "search.min_score=0")
    told = kvtool("query", *asked, *SHORT, "-v", "--explain").fine().err
    chunk_lines = [line for line in told.splitlines() if re.search(r"^ +hit | tokens recomputed", line)]
    cited = re.findall(r"in/mill\.pdf p\. \d(?:–\d)?", re.search(r"sources: (.*)", told)[1])  # type: ignore[index]
    assert len(cited) > 1
    assert {name for line in chunk_lines for name in re.findall(r"in/mill.*?(?=: |$)", line)} == set(cited)
    assert str(tmp_path / "in") not in told
    plan = kvtool("inspect", "plan", *asked).fine().out
    assert all(f" {name} " in plan for name in cited)
    assert str(tmp_path / "in") not in plan


@pytest.mark.slow
def test_modes_are_compared_within_100_columns_and_answers_stand_below(store: Path) -> None:
    modes = ["full", "blend", "infoflow", "union", "reuse"]
    asked = ("query", QUESTION, "--store", store, *LONG, "--compare")
    for compared in (",".join(modes), "auto"):
        shown = on_terminal(*asked, compared).fine().out
        assert max(map(cell_len, shown.splitlines())) <= 100
        assert shown.count("KL first") == shown.count("speedup") == 1  # one table, not bands of it
    runs = kvtool(*asked, ",".join(modes), "--json").fine().json["runs"]
    said = [f"{run['fusion']}: {run['answer']}{'' if run['finish'] == 'stop' else ' …'}" for run in runs]
    said[1:] = [
        text if run["answer"] != runs[0]["answer"] else f"{run['fusion']}: as full"
        for text, run in zip(said[1:], runs[1:], strict=True)
    ]
    table, answers = on_terminal(*asked, ",".join(modes)).fine().out.split("\n\n")
    assert " ".join(answers.split()) == " ".join(clean(" ".join(said)).split())
    assert not any(clean(run["answer"]) in table for run in runs)


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
    def interrupt(*given: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(query, "load_session", interrupt)
    assert "committed" not in kvtool("query", QUESTION, "--store", store).failed(130, "the store is unchanged").err


@pytest.mark.parametrize(
    ("source", "origin", "shown"),
    [
        ("/in/report (1).md", "", "/in/report (1).md:3"),
        ("/in/a\nerror: no.md", "", "/in/a\\nerror: no.md:3"),
        ("/in/own.md:1, b.md", "a.kvpack", '"/in/own.md:1, b.md:3" (from a.kvpack)'),
        ("/in/a.md (from team.kvpack)", "", '"/in/a.md (from team.kvpack):3"'),
        ("/in/a.md", "a.kvpack), own.md:1 (from b", '/in/a.md:3 (from "a.kvpack), own.md:1 (from b")'),
        ("/in/a.md", "a\nerror: no.kvpack", "/in/a.md:3 (from a\\nerror: no.kvpack)"),
        ("/in/own.md:1,\u200b b.md", "", '"/in/own.md:1,\u200b b.md:3"'),
    ],
)
def test_a_citation_is_one_place_whatever_the_file_and_its_origin_are_called(
    source: str, origin: str, shown: str
) -> None:
    chunk = ReplyChunk(id="ab", source=source, start=0, end=1, line=3, label="", score=1.0, tokens=1,
                       status="hit", origin=origin, text="x")  # fmt: skip
    assert cited(chunk) == shown


def test_no_command_gives_a_line_of_a_name_a_line_of_its_own(tmp_path: Path, tiny: Path) -> None:
    folder, store, pack = tmp_path / "docs", tmp_path / "store", tmp_path / "a\nerror: of a pack"
    folder.mkdir()
    (folder / "a\nerror: of a file.md").write_text("The mill was built by baker Z.")
    kvtool("ingest", folder, "--store", tmp_path / "theirs", "--model", tiny, *PREFIX).fine()
    for args in (
        ("store", "export", pack, "--store", tmp_path / "theirs"),
        ("store", "import", pack),
        ("query", "Who built the mill?", "-v", "--explain", *SHORT),
        ("store", "pin", folder),
        ("store", "pin", "--remove", folder),
        ("store", "rm", folder, "--yes"),
    ):
        done = kvtool(*args, *(() if "--store" in args else ("--store", store)))
        assert done.code == 0
        assert not [line for line in (done.out + done.err).splitlines() if line.startswith("error: ")], done
