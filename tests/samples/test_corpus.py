"""The sample corpus and its questions keep the promises that the measurements rest on.

A wrong gold answer, or one that is also in another document, would look like a fault of the tool under test.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.corpus.readers import read_documents

SAMPLES = Path(__file__).resolve().parents[2] / "samples"
CORPUS = SAMPLES / "corpus"
DOCUMENTS = sorted(path.relative_to(CORPUS).as_posix() for path in CORPUS.rglob("*") if path.is_file())
QUESTIONS: list[dict[str, Any]] = [
    json.loads(line) for line in (SAMPLES / "questions.jsonl").read_text(encoding="utf-8").splitlines()
]
# In words: how far into the text the answer to a coreference is at least (so that the name is in the chunk before), how
# many words around it are free of the name, and how many after the last name. A Korean word has more tokens.
DEPTH, CLEAR, NAMELESS = {"en": 190, "ko": 95}, {"en": 100, "ko": 60}, {"en": 150, "ko": 80}


@cache
def text_of(path: str) -> str:
    if path.endswith((".html", ".jsonl")):
        return "\n\n".join(one.text for one in read_documents(CORPUS / path, (CORPUS / path).read_bytes()))
    return (CORPUS / path).read_text(encoding="utf-8")


def squash(text: str) -> str:
    return " ".join(text.split()).casefold()


@cache
def squashed(path: str) -> str:
    return squash(text_of(path))


def positions(needle: str, path: str) -> list[int]:
    """Return the word offsets of `needle` in the document: at word boundaries, in Korean anywhere (particles)."""
    pattern = re.escape(squash(needle))
    if not path.startswith("ko/"):
        pattern = rf"(?<!\w){pattern}(?!\w)"
    return [len(squashed(path)[: found.start()].split()) for found in re.finditer(pattern, squashed(path))]


def has_the_right_fields(q: dict[str, Any]) -> None:
    extra = {"hop": {"sources"}, "coreference": {"entity"}}.get(q["kind"], set())
    assert set(q) == {"id", "question", "answers", "kind", "lang", "source"} | extra
    assert q["lang"] == ("ko" if q["source"].startswith("ko/") else "en")
    assert q["question"].endswith("?")
    assert all(answer == answer.strip() and 0 < len(answer.split()) <= 8 for answer in q["answers"])


def is_answered_by_its_source_alone(q: dict[str, Any]) -> None:
    assert q["answers"][0] in " ".join(text_of(q["source"]).split())
    for answer in q["answers"]:
        assert [path for path in DOCUMENTS if path != q["source"] and positions(answer, path)] == []
        assert squash(answer) not in squash(q["question"])


def joins_two_documents(q: dict[str, Any]) -> None:
    if q["kind"] == "hop":
        assert len(q["sources"]) == len(set(q["sources"])) == 2
        assert q["sources"][-1] == q["source"]
        assert set(q["sources"]) <= set(DOCUMENTS)


def answers_far_from_the_name(q: dict[str, Any]) -> None:
    if q["kind"] != "coreference":
        return
    path, lang = q["source"], q["lang"]
    words = len(squashed(path).split())
    names = sorted(at for name in q["entity"] for at in positions(name, path))
    assert any(squash(name) in squash(q["question"]) for name in q["entity"])
    assert names[0] < words // 4
    assert words - names[-1] >= NAMELESS[lang]
    for at in positions(q["answers"][0], path):
        assert at >= DEPTH[lang]
        assert [name for name in names if abs(name - at) < CLEAR[lang]] == []
    paragraphs = [text for text in map(squash, text_of(path).split("\n\n")) if squash(q["answers"][0]) in text]
    assert paragraphs
    assert not any(squash(name) in text for name in q["entity"] for text in paragraphs)


@pytest.mark.parametrize(
    "check",
    [has_the_right_fields, is_answered_by_its_source_alone, joins_two_documents, answers_far_from_the_name],
    ids=lambda check: check.__name__,
)
def test_every_question(check: Any) -> None:
    for question in QUESTIONS:
        try:
            check(question)
        except AssertionError as error:
            error.add_note(f"question {question['id']}")
            raise


def test_counts() -> None:
    assert Counter(Path(path).suffix for path in DOCUMENTS).keys() == {".md", ".txt", ".html", ".jsonl"}
    assert set(DOCUMENTS) == {q["source"] for q in QUESTIONS}
    assert len({q["id"] for q in QUESTIONS}) == len({squash(q["question"]) for q in QUESTIONS}) == len(QUESTIONS) >= 220
    shares = {kind: count / len(QUESTIONS) for kind, count in Counter(q["kind"] for q in QUESTIONS).items()}
    assert shares.keys() == {"direct", "coreference", "hop"} == {q["kind"] for q in QUESTIONS if q["lang"] == "ko"}
    assert min(shares.values()) >= 0.17
    assert 0.5 <= shares["direct"] <= 0.65
