"""Questions that spell something otherwise than the documents (grouped numbers, typos), and those that are no search:
greetings, and words that no passage has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.errors import NothingFoundError
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.core.query.retrieve import find_chunks
from kvtool.core.retrieval import search
from kvtool.core.retrieval.finder import Finder
from kvtool.core.retrieval.passages import Found
from kvtool.core.retrieval.terms import asked_terms, near_words, terms, without_idle
from tests.retrieval.making import index_of_texts, retrieval, search_in, store_of

Ask = Callable[[dict[str, str], str], Found]
OTHERS = {"parts": "There were 987 houses and 654 barns.", "other": "The pier was mended by 12 people."}
SAME = (
    *("987654", "987,654", "987.654", "987'654", "987’654", "987_654", "9,87,654"),
    *("987 654", "987\u00a0654", "987\u2009654", "987\u202f654"),
)
EQUAL = ("1250.5", "1250.50", "1250,5", "1,250.50", "1.250,50", "1'250.5", "1 250,5", "1\u202f250,50")


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Ask]:
    opened: list[Store] = []

    def found(texts: dict[str, str], question: str) -> Found:
        opened.append(store_of(tmp_path / str(len(opened)), texts))
        return Finder(opened[-1]).find(question, retrieval("bm25"))

    yield found
    for store in opened:
        store.close()


def first(found: Found) -> str:
    return found.hits[0].passage.source


def best(texts: dict[str, str], question: str) -> str:
    return search_in(index_of_texts(texts), texts).best(question, 1)[0].passage.source


@pytest.mark.parametrize("written", SAME)
def test_a_number_is_found_however_its_digits_are_grouped(written: str) -> None:
    texts = {**OTHERS, "sum": f"The dredging cost {written} crowns."}
    for asked in SAME:
        assert best(texts, asked) == "sum", asked


@pytest.mark.parametrize("written", EQUAL)
def test_decimals_of_equal_value_are_equal(written: str) -> None:
    texts = {"parts": "In 1250 there were 5 and 50.", "sum": f"It cost ${written}kg."}
    assert [best(texts, asked) for asked in EQUAL] == ["sum"] * len(EQUAL)


@pytest.mark.parametrize(
    "text", ["총987,654원", "共９８７，６５４人", "€987.654,–", "(987'654.00)", "~987,654.Next", "987,654kg"]
)
def test_a_number_is_found_next_to_letters_and_signs(text: str) -> None:
    assert best({**OTHERS, "sum": text}, "987654") == "sum"


@pytest.mark.parametrize(
    "text",
    [
        *("12.05.2031", "2031-05-12", "1.2.3", "192.168.1.1", "1,2,3", "100,200,300,4", "1,234,56", "12:30", "v1.250"),
        *("555-123-4567", "1234,5678,90", "3/4", "007", "2031"),
    ],
)
def test_dates_versions_addresses_and_lists_have_no_value(text: str) -> None:
    assert [term for term in terms(text)[1] if term.replace(".", "").isdecimal()] == []


def test_numbers_of_a_sentence_keep_their_values_and_parts() -> None:
    parts, wholes = terms("In 2031 12,345 and 6,789 of -1,000-2,000 (0.125%).")
    assert parts == ["2031", "12", "345", "6", "789", "1", "000", "2", "000", "0", "125"]
    assert wholes == ["12345", "6789", "1000", "2000", "0.125"]


def test_a_version_is_found_before_one_of_equal_value() -> None:
    texts = {"new": "Changes of 2.10 follow.", "old": "Changes of 2.1 follow."}
    assert [best(texts, version) for version in ("2.10", "2.1")] == ["new", "old"]


def test_a_number_with_decimals_is_no_greeting(tmp_path: Path) -> None:
    with store_of(tmp_path, {"sum": "It cost 1250.5 crowns."}) as store:
        assert first(find_chunks(Finder(store), Request("Hi, what is 1,250.50?"), QueryOptions())) == "sum"


LIGHT = {"light": "The lighthouse of Kellhaven was built in 1874.", "mill": "The mill grinds corn for lightermen."}


@pytest.mark.parametrize("typed", ["ligthouse", "lighthuse", "lightthouse", "lighthause", "Ligthouse", "lighthousd"])
def test_a_typo_finds_the_word_that_was_meant(ask: Ask, typed: str) -> None:
    found = ask(LIGHT, f"Where is the {typed}?")
    assert (first(found), found.corrections) == ("light", [{"from": typed, "to": "lighthouse"}])


@pytest.mark.parametrize(
    ("text", "typed", "meant"),
    [
        ("Маяк стоит на скале, обсерватория на холме.", "обсервтория", "обсерватория"),
        ("Der Leuchtturm steht auf dem Felsen, und die Häuser sind nicht weit.", "Leuchtrurm", "leuchtturm"),
        ("Les bâtiments de l'université sont dans la ville et les forêts.", "universtié", "université"),
        ("Ο φάρος είναι στο λιμάνι της πόλης.", "λιμναι", "λιμανι"),
        ("The observatories were sold.", "obsrevatories", "observatories"),
        ("A forty-three foot pole.", "fourty", "forty"),
        ("The lighthouse was built in 1874.", "ligthouses", "lighthouses"),
    ],
)
def test_typos_of_many_scripts(ask: Ask, text: str, typed: str, meant: str) -> None:
    found = ask({"text": text, **OTHERS}, typed)
    assert (first(found), found.corrections) == ("text", [{"from": typed, "to": meant}])


def test_parts_of_compounds_and_of_korean_words(ask: Ask) -> None:
    found = ask({"light": "국립해양등대박물관은 항구에 있다.", **OTHERS}, "국립해앙등대박물관")
    assert (first(found), [*found.corrections]) == ("light", [])
    found = ask(LIGHT, "ligthouse-kelhaven")
    assert found.corrections == [{"from": "ligthouse", "to": "lighthouse"}, {"from": "kelhaven", "to": "kellhaven"}]


def test_meant_words(ask: Ask) -> None:
    texts = {"a": "A tower.", "b": "A tower, too.", "c": "Some power, power and more power."}
    assert ask(texts, "tgwer").corrections == [{"from": "tgwer", "to": "tower"}]
    assert ask({**texts, "d": "The timer.", "e": "A miner, a miner."}, "timur").corrections[0]["to"] == "timer"
    texts = {"thief": "The thief saw a tier of stones.", "mill": "The mill was built in 1874."}
    assert not ask(texts, "thier mill").corrections


@pytest.mark.parametrize("question", ["lightermen", "mill", "ligth", "x8ghthouse lighthous3", "1875 light_hxxse_7"])
def test_known_short_and_numbered_words_are_left_alone(ask: Ask, question: str) -> None:
    assert not ask(LIGHT, f"{question} corn").corrections


def test_what_is_gone_from_the_store_corrects_nothing(tmp_path: Path) -> None:
    with store_of(tmp_path, LIGHT) as store:
        finder = Finder(store)
        assert finder.find("ligthouse", retrieval(top_k=1)).corrections
        with store.writer() as writer:
            writer.remove_file("light")
        with pytest.raises(NothingFoundError):
            finder.find("ligthouse", retrieval(top_k=1))


def test_a_question_that_only_greets_but_for_a_typo_is_answered(tmp_path: Path) -> None:
    with store_of(tmp_path, LIGHT) as store:
        found = find_chunks(Finder(store), Request("Hi there, the ligthouse?"), QueryOptions(min_score=0.5))
        assert (first(found), *found[1:]) == ("light", 0, [{"from": "ligthouse", "to": "lighthouse"}])


@pytest.mark.parametrize("retriever", ["auto", "hybrid", "dense"])
def test_vectors_get_the_question_as_it_is(tmp_path: Path, static_model: Path, retriever: str) -> None:
    with store_of(tmp_path, {"a": "A mill.", "b": "Some bread and a grinder."}) as store:
        found = Finder(store).find("grindr bread", retrieval(retriever, static_model, top_k=2))
        assert (first(found), [*found.corrections]) == ("b", [])


def test_few_words_of_a_long_text_are_corrected(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"lantern{one}{two}keeper" for one in "abcd" for two in "abcd"]
    tried = []
    monkeypatch.setattr(search, "near_words", lambda *asked: tried.append(asked) or near_words(*asked))
    found = ask({"all": " ".join(words)}, " ".join(word.replace("keeper", "keepr") for word in words))
    assert len(found.corrections) == 8
    ask(LIGHT, " ".join(["mill", *words]))
    assert len(tried) == 16


TEXTS = {
    "deposit": "There is a deposit of two coins for each bottle, and you can ask for it at the counter today.",
    "letter": "Hello everyone, good morning and thanks for your help; the mill is open.",
}
GREETINGS = ("Hi there", "Hello!", "Good morning, everyone", "Can you help me?", "What can you do?", "Thanks a lot :)")
SAMPLES = Path(__file__).parents[2] / "samples"


def sources(finder: Finder, question: str, **how: object) -> list[str]:
    hits, *_ = find_chunks(finder, Request(question), QueryOptions(**how))  # type: ignore[arg-type]
    return [hit.passage.source for hit in hits]


@pytest.mark.parametrize("question", [*GREETINGS, "Hi there, xyzzy", "?", "Who are you?"])
def test_a_greeting_finds_nothing(store: Store, question: str) -> None:
    with pytest.raises(NothingFoundError):
        sources(Finder(store), question)


def test_one_word_of_a_passage_is_enough(store: Store) -> None:
    finder = Finder(store)
    assert sources(finder, "Hi there, what about the deposit?") == ["deposit"]
    assert sources(finder, "mill") == ["letter"]
    assert sources(finder, "Was it in the morning?") == ["letter"]
    with pytest.raises(NothingFoundError):
        sources(finder, "Is there a deposit?", source=("letter",))  # which has only its stop words
    options = QueryOptions()
    assert [hit.passage.source for hit in Finder(store).find("hello", options).hits] == ["letter"]


def test_by_meaning_a_question_needs_no_word_of_a_passage(store: Store, static_model: Path) -> None:
    finder, model = Finder(store), str(static_model)
    assert sources(finder, "grinder", retriever="dense", embedder=model)
    with pytest.raises(NothingFoundError):
        sources(finder, "Hi there", retriever="dense", embedder=model)


def test_every_sample_question_is_a_search() -> None:
    texts = {
        str(path): path.read_text(encoding="utf-8")
        for path in sorted((SAMPLES / "corpus").rglob("*"))
        if path.suffix in (".md", ".txt", ".jsonl", ".html")
    }
    index = index_of_texts(texts)
    search = search_in(index, texts)
    lines = (SAMPLES / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    assert len(questions) > 200
    assert [one for one in questions if not search.matches(asked_terms(without_idle(one), index.languages))] == []
    assert not any(search.matches(asked_terms(without_idle(one), index.languages)) for one in GREETINGS)
