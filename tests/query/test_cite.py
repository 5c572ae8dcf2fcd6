"""Citations: `--cite` names the sentence of a passage that each sentence of an answer rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtool as package
from kvtool.core.cache.store import Store
from kvtool.core.kernels.attention.eager import mean_weights
from kvtool.core.kernels.attention.params import AttentionParams, KeyRanges
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.generate import generate
from kvtool.core.model.options import ModelOptions
from kvtool.core.model.tokens import encode, encode_with_ends
from kvtool.core.query.answer import PreparedAnswer, begin_answer
from kvtool.core.query.cite import attention_to, cite, passage_sentences, sentences_of
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import lay_out_request
from kvtool.core.query.reply import Request, marked
from kvtool.core.session.session import Session
from tests.cli.working import QUESTION, kvtool
from tests.fusion.making import tokenizer

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
            assert document is not None
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


@pytest.fixture
def session(store: Path) -> Iterator[Session]:
    with Store.open(store) as opened:
        yield Session.open(opened, ModelOptions())


def begun_in(session: Session, fusion: str) -> PreparedAnswer:
    options = QueryOptions(fusion=fusion, max_tokens=12)
    return begin_answer(session, lay_out_request(session, Request(QUESTION), options), options)


def test_the_cache_is_as_it_was(session: Session) -> None:
    begun = begun_in(session, "union")
    cache = begun.outcome.fused.cache
    said = generate(session.decoder, cache, begun.known[0], begun.sampling)

    def held() -> list[torch.Tensor]:
        return [side.clone() for buffer in cache.buffers for side in buffer.view()]

    before = held()
    assert cite(begun, said)
    assert all(torch.equal(one, other) for one, other in zip(before, held(), strict=True))


def test_attention_is_that_of_a_plain_prefill(session: Session) -> None:
    """In `full`, each row's attention to each sentence is that of the same rows of one prefill."""
    begun = begun_in(session, "full")
    decoder, plan, sentences = session.decoder, begun.outcome.fused.plan, passage_sentences(begun)
    said = generate(decoder, begun.outcome.fused.cache, begun.known[0], begun.sampling)
    seen = attention_to(begun, said.ids, sentences)
    assert seen is not None
    ids = [*plan.ids, *said.ids[:-1]]
    layers: dict[int, torch.Tensor] = {}

    def watch(layer: int, query: torch.Tensor, key: torch.Tensor, scoring: AttentionParams) -> None:
        rows = KeyRanges.run(range(plan.length - 1, len(ids)), None, key.device)
        layers[layer] = mean_weights(query[0, :, plan.length - 1 :], key[0], rows, scoring)

    cache = decoder.new_cache(len(ids))
    cache.set_length(len(ids))
    rows = QueryRows.of(torch.arange(len(ids)), decoder.device)
    decoder.fill_cache(ids, QueryRows(rows.places, rows.order, rows.dense, watch), cache)
    wanted = torch.stack([layers[layer] for layer in sorted(layers)[len(layers) // 2 :]]).mean(0)
    expected = torch.stack([wanted[:, list(one.rows)].sum(1) for one in sentences], 1)
    assert seen.shape == (len(said.ids), len(sentences))
    torch.testing.assert_close(seen, expected, atol=1e-5, rtol=1e-4)


def test_rows_of_a_sentence_are_its_tokens(session: Session) -> None:
    begun = begun_in(session, "reuse")
    ids = begun.outcome.fused.plan.ids
    for one in passage_sentences(begun):
        text = session.tokenizer.decode([ids[row] for row in one.rows])
        assert one.chunk.text[one.start : one.end] in text
        assert len(text.strip()) <= one.end - one.start + 3


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


def test_titles_are_no_sentences() -> None:
    text = "The mill\n\nIt is old. Dr. A. Reeve built it!\n\n- one list\n- of two"
    assert [text[start:end] for start, end in sentences_of(text)] == [
        "It is old.",
        "Dr. A. Reeve built it!",
        "- one list",
        "- of two",
    ]
    assert sentences_of("The mill") == [(0, 8)]
    assert sentences_of(" \n") == []


def test_marks_follow_their_sentences() -> None:
    ends = [{"answer_end": 2, "number": 1}, {"answer_end": 5, "number": 2}]
    assert marked("A. B.", ends) == "A. [1] B. [2]"
    assert marked("A.", []) == "A."


@pytest.mark.parametrize("text", ["plain words", "<think> of {this} [that]", "가나다 \ud800 x\n\n", "é́ — “q”", ""])
def test_ends_of_tokens_are_in_the_text(text: str) -> None:
    ids, ends = encode_with_ends(tokenizer(), text)
    assert ids == encode(tokenizer(), text)
    assert ends == sorted(ends)
    assert len(ends) == len(ids)
    assert not ends or ends[-1] == len(text)
