"""Citations: `--cite` names the sentence of a passage that each sentence of an answer rests on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import kvtool as package
from kvtool.core.cache.store import Store
from kvtool.core.query.cite import sentences_of
from kvtool.core.query.reply import Request, marked
from tests.cli.working import QUESTION, kvtool

SAID = "Baker B has built it in 1769. The one of 1783 is by baker D."
GOLD = "The third mill was built in 1783 by baker D. It grinds flour."
ASKED = ("--documents", "mill2.md", "--max-tokens", "80")


def cited(store: Path, *more: object) -> list[dict[str, Any]]:
    row = kvtool("query", QUESTION, "--store", store, *ASKED, "--cite", "--json", *more).fine().json
    assert row["timing_ms"]["cite"] > 0
    found: list[dict[str, Any]] = row["citations"]
    assert row["answer"] == SAID
    with Store.open(store) as opened:
        for one in found:
            document = opened.document(one["source"])
            assert " ".join(document.text[one["start"] : one["end"]].split()) == one["text"]
            assert document.text.count("\n", 0, one["start"]) + 1 == one["line"]
    return found


@pytest.mark.some(3)
@pytest.mark.parametrize("mode", ["full", "prefix", "reuse", "epic", "blend", "infoflow", "union"])
def test_each_sentence_names_one_of_a_passage(mode: str, store: Path, says: Callable[[str], None]) -> None:
    says(SAID)
    first, second = cited(store, "--fusion", mode)
    assert SAID[first["answer_start"] : first["answer_end"]] == "Baker B has built it in 1769."
    assert SAID[second["answer_start"] : second["answer_end"]] == "The one of 1783 is by baker D."
    assert "The third mill was built in" in first["text"]
    assert second["text"] == GOLD
    assert first["number"] == 1
    assert second["number"] == 1 + (first["text"] != GOLD)


def test_it_is_shown_with_a_list(store: Path, says: Callable[[str], None]) -> None:
    says(SAID)
    out = kvtool("query", QUESTION, "--store", store, *ASKED, "--cite").fine().out
    first, second = cited(store)
    answer, *listed = out.splitlines()
    last = second["number"]
    assert answer == f"Baker B has built it in 1769. [1] The one of 1783 is by baker D. [{last}]"
    assert [line.partition(": ")[2] for line in listed] == [first["text"], second["text"]][:last]
    assert listed[-1].startswith(f"[{last}] ")
    assert listed[-1].partition(": ")[0].endswith(f"mill2.md:{second['line']}")
    plain = kvtool("query", QUESTION, "--store", store, *ASKED, "--json").fine().json
    assert "citations" not in plain


def test_rows_that_are_not_stored_are_cited_too(store: Path, says: Callable[[str], None]) -> None:
    with package.open(store) as cache:
        cache.compress("2", keep=0.5, questions=0)
    says(SAID)
    _, second = cited(store, "--level", "keep50-2")
    assert second["text"] == GOLD


def test_an_earlier_turn_is_cited(store: Path, says: Callable[[str], None]) -> None:
    says(SAID)
    with package.open(store) as cache:
        talk = cache.conversation(max_tokens=80, top_k=2, cite=True)
        first = talk.ask(Request(QUESTION, search=QUESTION))
        again = talk.ask(Request(QUESTION, search=QUESTION))
        assert not again.chunks
        assert first.citations
        assert again.citations == first.citations
        assert talk.ask("And when?").citations


def test_a_question_counts_more_than_those_before_it(store: Path, says: Callable[[str], None]) -> None:
    """They help to search, and decide where its own words do not."""
    says("It was baker C.")
    before = "Was the first mill built by baker B in 1707?"
    both = ("mill0.md", "mill1.md")

    def first(question: str) -> str:
        with package.open(store) as cache:
            request = Request(question, documents=both, search=f"{before} {question}")
            return cache.conversation(max_tokens=8, cite=True).ask(request).citations[0].text

    assert "second mill was built" in first("Who built the second mill?")
    assert first("Who was it?") == "The first mill was built in 1707 by baker B. It grinds flour."


@pytest.mark.parametrize("more", ["Indeed so.", "그렇습니다. 정말입니다."])
def test_the_question_decides_where_a_sentence_has_no_word_of_a_passage(
    more: str, store: Path, says: Callable[[str], None]
) -> None:
    says(f"It was built well. {more}")
    both = ("mill0.md", "mill1.md")
    with package.open(store) as cache:
        for documents in (both, both[::-1]):
            request = Request("Who built the second mill?", documents=documents)
            found = cache.conversation(max_tokens=200, cite=True).ask(request).citations
            assert len(found) > 1
            assert {one.number for one in found} == {1}
            assert "second mill was built" in found[0].text


def test_code_in_an_answer_has_no_number(store: Path, says: Callable[[str], None]) -> None:
    code = "```python\nbuilt = 1783\nprint(built)\n```"
    says(f"Call this:\n\n{code}\n\nIt grinds flour.")
    with package.open(store) as cache:
        reply = cache.query(QUESTION, documents=["mill2.md"], max_tokens=200, cite=True)
    shown = marked(reply.answer, [asdict(one) for one in reply.citations])
    assert code in shown
    assert shown.startswith("Call this: [1]\n")
    assert shown.endswith("It grinds flour. [1]")


def test_tables_are_cited_by_line() -> None:
    table = "| mill | year |\n|---|---|\n| first | 1707 |\n| second | 1741 |\n"
    text = f"Years:\n\n{table}\n```\nx = 1\n```\n"
    cut = [text[start:end] for start, end in sentences_of(text, "markdown")]
    assert cut == ["Years:", "| mill | year |", "| first | 1707 |", "| second | 1741 |", "x = 1"]
    assert sentences_of("---\n...") == []


def test_titles_are_no_sentences() -> None:
    text = "The mill\n\nIt is old. Dr. A. Reeve built it!\n\n- one list\n- of two"
    cut = [text[start:end] for start, end in sentences_of(text)]
    assert cut == ["It is old.", "Dr. A. Reeve built it!", "- one list", "- of two"]
    assert sentences_of("The mill") == [(0, 8)]
    assert sentences_of(" \n") == []
