"""The sample corpus and its questions keep the promises the measurements rest on.

A wrong gold answer, or one that is also in another document, would look like a fault of the tool under test.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from kvtool.core.corpus.readers import read_documents

SAMPLES = Path(__file__).resolve().parents[2] / "samples"
CORPUS = SAMPLES / "corpus"
KINDS = ("direct", "coreference", "hop")
# The nameless part of a coreference document: how far into the text an answer is at least (so that the name is in
# the chunk before), and how many words around it must be free of the name. A Korean word carries more tokens.
DEPTH = {"en": 190, "ko": 95}
CLEAR = {"en": 100, "ko": 60}
NAMELESS = {"en": 150, "ko": 80}

Question = dict[str, Any]
Row = TypeVar("Row", Question, str)


@cache
def text_of(path: str) -> str:
    if path.endswith((".html", ".jsonl")):
        found = read_documents(CORPUS / path, (CORPUS / path).read_bytes())
        return "\n\n".join(document.text for document in found)
    return (CORPUS / path).read_text(encoding="utf-8")


@cache
def documents() -> tuple[str, ...]:
    return tuple(sorted(p.relative_to(CORPUS).as_posix() for p in CORPUS.rglob("*") if p.is_file()))


@cache
def questions() -> tuple[Question, ...]:
    lines = (SAMPLES / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines if line)


def of_kind(kind: str) -> list[Question]:
    return [q for q in questions() if q["kind"] == kind]


def language(path: str) -> str:
    return "ko" if path.startswith("ko/") else "en"


def squash(text: str) -> str:
    return " ".join(text.split()).casefold()


@cache
def squashed(path: str) -> str:
    return squash(text_of(path))


def positions(needle: str, path: str) -> list[int]:
    """Return the word offsets of `needle` in the document: at word boundaries, in Korean anywhere (particles)."""
    pattern = re.escape(squash(needle))
    if language(path) == "en":
        pattern = rf"(?<!\w){pattern}(?!\w)"
    return [len(squashed(path)[: m.start()].split()) for m in re.finditer(pattern, squashed(path))]


def every(rows: Sequence[Row]) -> Callable[[Callable[[Row], None]], Callable[[], None]]:
    """One test of all of these, which names each that fails: a test for each would be a tenth of the suite."""

    def of(check: Callable[[Row], None]) -> Callable[[], None]:
        def test() -> None:
            wrong = {}
            for row in rows:
                try:
                    check(row)
                except AssertionError as error:
                    wrong[row["id"] if isinstance(row, dict) else row] = str(error)
            assert rows
            assert wrong == {}

        return test

    return of


# --- documents


def test_document_counts() -> None:
    langs = Counter(language(p) for p in documents())
    kinds = Counter(Path(p).suffix for p in documents())
    assert len(documents()) >= 44
    assert langs["en"] >= 34
    assert langs["ko"] >= 10
    assert set(kinds) == {".md", ".txt", ".html", ".jsonl"}
    assert kinds[".html"] >= 2
    assert kinds[".jsonl"] >= 1


# --- questions


def test_question_counts() -> None:
    kinds = Counter(q["kind"] for q in questions())
    total = len(questions())
    assert total >= 220
    assert set(kinds) == set(KINDS)
    assert 0.5 <= kinds["direct"] / total <= 0.65
    assert kinds["coreference"] / total >= 0.17
    assert kinds["hop"] / total >= 0.17
    korean = Counter(q["kind"] for q in questions() if q["lang"] == "ko")
    assert sum(korean.values()) >= 40
    assert set(korean) == set(KINDS)


def test_ids_and_questions_are_unique() -> None:
    assert len({q["id"] for q in questions()}) == len(questions())
    assert len({squash(q["question"]) for q in questions()}) == len(questions())


def test_every_document_is_asked_about() -> None:
    assert set(documents()) == {q["source"] for q in questions()}


@every(questions())
def test_question_has_the_right_fields(q: Question) -> None:
    expected = {"id", "question", "answers", "kind", "lang", "source"}
    extra = {"hop": {"sources"}, "coreference": {"entity"}}.get(q["kind"], set())
    assert set(q) == expected | extra
    assert q["kind"] in KINDS
    assert q["lang"] == language(q["source"])
    assert q["source"] in documents()
    assert q["question"].endswith("?")
    assert len(q["question"].split()) >= 4
    assert 1 <= len(q["answers"]) == len(set(q["answers"]))
    assert all(a == a.strip() and 0 < len(a.split()) <= 8 for a in q["answers"])


@every(questions())
def test_answer_stands_in_its_source_alone(q: Question) -> None:
    assert q["answers"][0] in " ".join(text_of(q["source"]).split())
    for answer in q["answers"]:
        assert [p for p in documents() if p != q["source"] and positions(answer, p)] == []


@every(questions())
def test_question_does_not_give_its_answer_away(q: Question) -> None:
    assert not any(squash(a) in squash(q["question"]) for a in q["answers"])


@every(of_kind("hop"))
def test_hop_joins_two_documents(q: Question) -> None:
    assert len(q["sources"]) == len(set(q["sources"])) == 2
    assert q["sources"][-1] == q["source"]
    assert set(q["sources"]) <= set(documents())


@every(of_kind("coreference"))
def test_coreference_answer_stands_far_from_the_name(q: Question) -> None:
    path, lang = q["source"], q["lang"]
    words = len(squashed(path).split())
    names = sorted(i for name in q["entity"] for i in positions(name, path))
    assert any(squash(name) in squash(q["question"]) for name in q["entity"])
    assert names
    assert names[0] < words // 4
    assert words - names[-1] >= NAMELESS[lang]
    for at in positions(q["answers"][0], path):
        assert at >= DEPTH[lang]
        assert [i for i in names if abs(i - at) < CLEAR[lang]] == []


@every(of_kind("coreference"))
def test_coreference_paragraph_does_not_name_the_entity(q: Question) -> None:
    answer = squash(q["answers"][0])
    holders = [p for p in map(squash, text_of(q["source"]).split("\n\n")) if answer in p]
    assert holders
    assert not any(squash(name) in p for name in q["entity"] for p in holders)
