"""The sample corpus and its questions keep the promises the measurements rest on.

A wrong gold answer, or one that is also in another document, would look like a fault of the tool under test.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, TypeVar

SAMPLES = Path(__file__).resolve().parents[2] / "samples"
CORPUS = SAMPLES / "corpus"
KINDS = ("direct", "coreference", "hop")
WORDS = {"en": (150, 600), "ko": (110, 600)}
# The nameless part of a coreference document: how far into the text an answer is at least (so that the name is in
# the chunk before), and how many words around it must be free of the name. A Korean word carries more tokens.
DEPTH = {"en": 190, "ko": 95}
CLEAR = {"en": 100, "ko": 60}
NAMELESS = {"en": 150, "ko": 80}

Question = dict[str, Any]
Row = TypeVar("Row", Question, str)


class _Text(HTMLParser):
    """Visible text of a page; block ends become paragraph ends."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("script", "style", "head", "nav", "footer")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style", "head", "nav", "footer")
        if tag in ("p", "h1", "h2"):
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data)


def _read_html(raw: str) -> str:
    parser = _Text()
    parser.feed(raw)
    return "".join(parser.parts)


def _read_jsonl(raw: str) -> str:
    rows = [json.loads(line) for line in raw.splitlines() if line.strip()]
    return "\n\n".join(f"{row['title']}\n\n{row['text']}" for row in rows)


@cache
def text_of(path: str) -> str:
    raw = (CORPUS / path).read_text(encoding="utf-8")
    if path.endswith(".html"):
        return _read_html(raw)
    return _read_jsonl(raw) if path.endswith(".jsonl") else raw


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


@every(documents())
def test_document_reads_well(path: str) -> None:
    low, high = WORDS[language(path)]
    text = text_of(path)
    assert low <= len(text.split()) <= high
    assert not set(text) & set("\r\t\ufffd")


@every([p for p in documents() if language(p) == "ko"])
def test_korean_document_is_korean(path: str) -> None:
    letters = [c for c in text_of(path) if c.isalpha()]
    assert sum("가" <= c <= "힣" for c in letters) / len(letters) > 0.97


@every(documents())
def test_document_starts_with_a_title(path: str) -> None:
    first = text_of(path).strip().splitlines()[0]
    if path.endswith(".md"):
        assert first.startswith("# ")
    assert 2 <= len(first) <= 80
    assert not first.endswith((".", "다."))


def test_documents_have_distinct_titles_and_paragraphs() -> None:
    titles = [text_of(p).strip().splitlines()[0] for p in documents()]
    paragraphs = [squash(x) for p in documents() for x in text_of(p).split("\n\n") if x.strip()]
    assert len(set(titles)) == len(titles)
    assert [x for x, n in Counter(paragraphs).items() if n > 1] == []


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


# --- direct questions carry enough words for a keyword search


def tokens(text: str) -> list[str]:
    """Words; Korean words also as pairs of syllables, since a particle is glued to the noun."""
    words = re.findall(r"\w+", text.casefold())
    pairs = [w[i : i + 2] for w in words if re.search("[가-힣]", w) for i in range(len(w) - 1)]
    return [w for w in words if not re.search("[가-힣]", w)] + pairs


@cache
def index() -> tuple[dict[str, Counter[str]], Counter[str]]:
    counts = {p: Counter(tokens(text_of(p))) for p in documents()}
    return counts, Counter(t for c in counts.values() for t in c)


def rank(question: str) -> list[str]:
    """Documents by BM25 (k1=1.2, b=0.75)."""
    counts, spread = index()
    mean = sum(c.total() for c in counts.values()) / len(counts)

    def score(path: str) -> float:
        c = counts[path]
        norm = 1.2 * (0.25 + 0.75 * c.total() / mean)
        terms = [t for t in set(tokens(question)) if c[t]]
        return sum(math.log(1 + len(counts) / spread[t]) * 2.2 * c[t] / (c[t] + norm) for t in terms)

    return sorted(counts, key=score, reverse=True)


@every(of_kind("direct"))
def test_keyword_search_finds_the_document_of_a_direct_question(q: Question) -> None:
    assert q["source"] in rank(q["question"])[:2]
