"""Search terms of any script and language."""

from __future__ import annotations

import itertools
import threading
import unicodedata

import pytest

from kvtool.core.retrieval.terms import LANGUAGES, asked_terms, language_of, terms
from tests.retrieval.making import index_of_texts, search_in


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The mill was founded in 1874.", ["mill", "found", "1874"]),
        ("Founding, founded; FOUNDS", ["found", "found", "found"]),
        ("mills on rivers", ["mill", "river"]),
        ("it is red", ["red"]),
        ("Ansel's mill’s", ["ansel", "mill"]),
        ("x2 UTF", ["x2", "utf"]),
        ("", []),
        (" \t\n—!?_-_", []),
        ("who was she", []),
        ("Straße STRASSE", ["strass", "strass"]),
        ("ﬁnal １８７４", ["final", "1874"]),  # compatibility forms
        ("Ελλάδα Москва", ["ελλαδ", "москв"]),
        ("mill\u00adstone", ["millston"]),
        *(("방앗간", ["방앗", "앗간"]), ("방앗간은 누가", ["방앗", "앗간", "간은", "누가"]), ("강", ["강"])),
        *(("1874년에", ["1874", "년에"]), ("KV캐시는 GPU에", ["kv", "캐시", "시는", "gpu", "에"])),
        *(
            ("東京都", ["東京", "京都"]),
            ("カタカナ", ["カタ", "タカ", "カナ"]),
            ("我喜欢 tea", ["我喜", "喜欢", "tea"]),
        ),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert terms(text) == (expected, [])


@pytest.mark.parametrize(
    ("text", "words", "wholes"),
    [
        ("e-mail", ["e", "mail"], ["email"]),
        ("snake_cases", ["snake", "case"], ["snakecas"]),
        ("camelCase", ["camel", "case"], ["camelcas"]),
        ("HTTPServer", ["http", "server"], ["httpserver"]),
        ("URLs and PDFs", ["url", "pdfs"], []),  # no compounds
        ("1914-1918", ["1914", "1918"], []),
        ("state-of-the-art", ["state", "art"], ["stateoftheart"]),
        ("how-to", ["howto"], []),
        ("KV-캐시", ["kv", "캐시"], []),
    ],
)
def test_compounds_are_split_and_whole(text: str, words: list[str], wholes: list[str]) -> None:
    assert terms(text) == (words, wholes)
    assert {*itertools.chain(*asked_terms(text))} == {*words, *wholes}
    assert len(asked_terms(text)) == len(words)  # the whole adds no word to a question


@pytest.mark.parametrize(
    ("there", "asked"),
    [
        *(("package", "packages"), ("machines", "machine"), ("value", "values"), ("houses", "house")),
        *(("city", "cities"), ("policies", "policy"), ("run", "running"), ("create", "created")),
        *(("café", "cafe"), ("cafe", "cafés"), ("naïve", "naive"), ("Dvořák", "dvorak"), ("Ørsted", "orsted")),
        *(("e-mail", "email"), ("email", "e-mail"), ("E-mails", "email"), ("non‑zero", "nonzero")),
        *(("parseTimeout", "timeout"), ("parse_timeout", "timeouts"), ("parseTimeout", "parse_timeout")),
        *(("parse_timeout", "parsetimeout"), ("ParseTimeout", "parsetimeout"), ("HTTPServer", "server")),
        *(("Москве", "Москва"), ("ёлка", "елка"), ("за\u0301мок", "замок"), ("Ελλάδας", "ελλαδα")),
        *(("लड़कियाँ", "लड़की"), ("العربيّة", "عربية"), ("방앗간은", "방앗간"), ("กรุงเทพมหานคร", "กรุงเทพ")),
    ],
)
def test_other_forms_of_a_word_find_it(there: str, asked: str) -> None:
    texts = {"a": f"Here: {there}.", "b": "Something else."}
    hits = search_in(index_of_texts(texts), texts).best(asked, 5)
    assert [hit.passage.source for hit in hits] == ["a"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(("director", "directories"), ("news", "new"), ("й", "и"), ("їх", "их"), ("ќе", "ке")),
        *(("हिन्दी", "हन्द"), ("दिन", "दान"), ("ปี", "ปู"), ("가", "각"), ("が", "か")),
    ],
)
def test_other_words_do_not(one: str, other: str) -> None:
    assert not {*terms(one)[0]} & {*terms(other)[0]}


@pytest.mark.parametrize(
    ("text", "asked", "language"),
    [
        ("Die Häuser am Fluss sind alt und schön.", "Haus", "german"),
        ("Les journaux de la ville sont imprimés à Lyon.", "journal imprimer", "french"),
        ("Las canciones que se oyen en el puerto.", "canción", "spanish"),
        ("Le città della regione e gli abitanti che lavorano.", "abitante lavorare", "italian"),
        ("De huizen aan het water zijn van de stad.", "huis", "dutch"),
        ("Hunden som bor på landet och inte i staden.", "hund", "swedish"),
        ("Kitapları ve defterleri bir çantada olarak.", "kitap", "turkish"),
        ("Ngôi nhà của ông và những cây cầu.", "những cây cầu", "vietnamese"),
        ("The houses by the river are old.", "house", "english"),
        ("Los Angeles Lakers, Die Hard, and La La Land are in the list.", "list", "english"),
        ("방앗간은 1874년에 지었다. " * 20 + "La Loire", "방앗간", "english"),
    ],
)
def test_a_document_is_stemmed_in_its_language(text: str, asked: str, language: str) -> None:
    assert language_of(text) == language
    texts = {"a": text, "b": "An English text about the weather, which is fine.", "c": "Der Wind und das Wetter."}
    assert search_in(index_of_texts(texts), texts).best(asked, 1)[0].passage.source == "a"


def test_a_word_matches_itself_whatever_the_language_of_its_document() -> None:
    for word in ("Universities", "Häuser", "canciones", "journaux", "cầu", "Москве", "parse_timeout", "방앗간은"):
        asked = asked_terms(word, LANGUAGES)
        for language in LANGUAGES:
            words, wholes = terms(word, language)
            assert all({term, *wholes} & {*forms} for term, forms in zip(words, asked, strict=True))


@pytest.mark.parametrize("text", ["cafe´", "´", "a ¨ b", "a_\u0301", "x-\u0301y", "\u0301s", "¸", "ि"])
def test_an_accent_alone_is_no_word_in_any_language(text: str) -> None:
    for language in LANGUAGES:
        assert len(asked_terms(text, LANGUAGES)) == len(terms(text, language)[0])


def test_accents_of_vietnamese_make_other_words() -> None:
    assert not {*terms("má", "vietnamese")[0]} & {*terms("mà", "vietnamese")[0]}
    assert not {*terms("má")[0]} & {*terms("ma", "vietnamese")[0]}


def test_a_compound_counts_as_its_parts_do() -> None:
    """Whether a compound is written as one word or as two, it is as long, and as good a match of either."""
    texts = {"a": "The e-mail of today.", "b": "The email of today.", "c": "A mail of today."}
    index = index_of_texts(texts)
    assert index.segments[0].lengths.tolist() == [3, 2, 2]
    scores = {
        asked: {hit.passage.source: hit.score for hit in search_in(index, texts).best(asked, 5, hop=False)}
        for asked in ("e-mail", "email")
    }
    assert {*scores["email"]} == {"a", "b"}
    assert scores["e-mail"]["b"] > scores["e-mail"]["c"]
    assert scores["e-mail"]["a"] > scores["e-mail"]["c"]


def test_threads_share_a_stemmer() -> None:
    words = [f"running{number} policies{number}" for number in range(2000)]
    wanted = [terms(word) for word in words]
    found: list[list[object]] = [[] for _ in range(4)]

    def run(own: list[object]) -> None:
        own += [terms(f"{word} ") for word in words]

    threads = [threading.Thread(target=run, args=(own,)) for own in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 4


@pytest.mark.parametrize("text", ["방앗간은 1874년에", "Café Zürich", "がぎぐ", "Việt Nam", "Москвой й", "हिन्दी"])
@pytest.mark.parametrize("language", ["english", "french", "vietnamese"])
def test_composed_and_decomposed_are_alike(text: str, language: str) -> None:
    composed, decomposed = unicodedata.normalize("NFC", text), unicodedata.normalize("NFD", text)
    assert terms(composed, language) == terms(decomposed, language)
    assert terms(composed, language)[0]
