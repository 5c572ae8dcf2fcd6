"""Reading and typing in a shell: a question, its answer, several of them, and what to type instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from kvtool.cli.terminal import clean
from tests.cli.working import PREFIX, QUESTION, SHORT, kvtool, on_terminal, process, write_batch
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
