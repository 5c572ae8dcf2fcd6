"""Ranking: scores against the formula, ties, equal chunks, what a second hop follows, titles, orders and globs. The
index follows its store: what changed is read, nothing else; damage and haste cost time, never a wrong answer."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtool.core.cache.store import Store
from kvtool.core.query.retrieve import in_order
from kvtool.core.retrieval import index as room
from kvtool.core.retrieval import terms as of_terms
from kvtool.core.retrieval.finder import _matcher
from kvtool.core.retrieval.index import Index, index_of
from kvtool.core.retrieval.passages import Hit, Passage, title_of
from kvtool.core.retrieval.search import Search, bm25_scores, count_rare, keywords
from kvtool.core.retrieval.segment import IndexSegment
from kvtool.core.retrieval.terms import asked_terms, terms
from tests.retrieval.making import index_of_texts, ingest, search_in, store_of

TEXTS = {
    "a": "The mill on the river was built by Ansel Corve in 1874.",
    "b": "Bread is made from flour, water and salt.",
    "c": "The river rises in the hills. The river is long. Nobody built a bridge over the river.",
    "d": "강가의 방앗간은 안셀 코르베가 1874년에 지었다.",
    "e": "빵은 밀가루와 물과 소금으로 만든다.",
    "f": "…",
}
QUESTIONS = ["river mill 1874", "방앗간", "river river bread", "zebra", "", "the of a", "물과 built"]


def by_formula(question: str, texts: dict[str, str]) -> list[float]:
    """Robertson and Zaragoza with Lucene's idf, written out."""
    words = [Counter(terms(text)[0]) for text in texts.values()]
    average = sum(map(Counter.total, words)) / len(words)
    found = []
    for own in words:
        score = 0.0
        for term in terms(question)[0]:
            having = sum(term in other for other in words)
            if own[term]:
                idf = math.log(1 + (len(words) - having + 0.5) / (having + 0.5))
                score += idf * own[term] / (own[term] + 1.5 * (0.25 + 0.75 * own.total() / average))
        found.append(score)
    return found


def split(texts: dict[str, str], *sizes: int) -> Index:
    index, items = Index.empty(), list(texts.items())
    for size in sizes:
        some, items = dict(items[:size]), items[size:]
        index.segments += index_of_texts(some).segments
    return index


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("sizes", [(6,), (1, 5), (2, 2, 1, 1)])
def test_the_formula(question: str, sizes: tuple[int, ...]) -> None:
    assert bm25_scores(split(TEXTS, *sizes), asked_terms(question)) == pytest.approx(by_formula(question, TEXTS))


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_dead_leave_no_trace(question: str) -> None:
    index = split(TEXTS, 4, 2)
    index.segments[0].bury(np.array([1, 2]))
    living = {source: TEXTS[source] for source in "adef"}
    found = bm25_scores(index, asked_terms(question))
    assert found[[0, 3, 4, 5]] == pytest.approx(by_formula(question, living))
    assert not found[[1, 2]].any()
    merged = Index.empty()
    merged.segments = [IndexSegment.merged(index.segments)]
    assert bm25_scores(merged, asked_terms(question)).tolist() == found[[0, 3, 4, 5]].tolist()


def test_a_word_of_several_forms_counts_as_one() -> None:
    """By the form that a chunk has most of; its rarity is counted over the chunks that have any of them."""
    texts = {"a": "river brook", "b": "river mill", "c": "brook mill", "d": "mill bread"}
    index = split(texts, 3, 1)
    one = bm25_scores(index, [("river", "brook")])
    joined = {"a": "river bread", "b": "river mill", "c": "river mill", "d": "mill bread"}
    assert one == pytest.approx(bm25_scores(split(joined, 3, 1), [("river",)]))
    assert count_rare(index, [("river", "brook"), ("mill",), ("zebra", "bread")], 0.25) == 1
    assert count_rare(index, [("river", "brook"), ("mill",), ("zebra", "bread")], 1.0) == 3


def test_nothing_and_keywords() -> None:
    assert bm25_scores(Index.empty(), [("mill",)]).tolist() == []
    assert bm25_scores(index_of_texts({"a": "…"}), [("mill",)]).tolist() == [0.0]
    index = index_of_texts(TEXTS)
    assert keywords(index, terms(TEXTS["c"])[0], 1) == ["river"]
    assert "built" not in keywords(index, terms(TEXTS["a"])[0], 4)  # another text has it, too
    assert keywords(index, [], 4) == []


HOPS = {
    "0-corve": "Ansel Corve\n\nHe kept bees in later years.",
    "1-mill": "River mill\n\nThe mill was built by Ansel Corve.",
    "2-bees": "Bees\n\nBees make honey, and somebody built a hive.",
    "3-hive": "Hive\n\nNobody built a hive in the year of the mill.",
}


def found(texts: dict[str, str], question: str, top_k: int = 5, hop: bool = True) -> list[tuple[str, int]]:
    hits = search_in(index_of_texts(texts), texts).best(question, top_k, hop=hop)
    return [(hit.passage.source, hit.passage.index) for hit in hits]


@pytest.mark.parametrize("question", ["zebra", "", "the of a", "!?", "얼룩말"])
def test_no_match_is_no_hit(question: str) -> None:
    assert found(TEXTS, question) == []


def test_order_of_hits() -> None:
    hits = search_in(index_of_texts(TEXTS), TEXTS).best("river built 1874", 5, hop=False)
    scores = [hit.score for hit in hits]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == 1.0
    assert min(scores) > 0
    lamp = {str(number): f"The lamp is lit. {mark}" for number, mark in enumerate("x y x z x x".split())}
    assert [source for source, _ in found(lamp, "lamp", 3)] == ["0", "1", "3"]
    assert [source for source, _ in found(lamp, "lamp", 9)] == ["0", "1", "3"]
    many = {f"{number:03}": "The lamp is lit." for number in range(200)} | {"999": "A lamp, at last, of some kind."}
    assert [source for source, _ in found(many, "lamp", 2)] == ["000", "999"]


def test_what_is_named_comes_along() -> None:
    question = "What did the builder of the river mill keep?"
    assert ("0-corve", 0) not in found(HOPS, question, 3, hop=False)
    assert ("0-corve", 1) in found(HOPS, "What did the builder of the river mill keep in his years?", 3)
    hits = found(HOPS, question, 4)
    assert "0-corve" in [source for source, _ in hits]
    assert hits[0] == ("1-mill", 0)
    texts = {"a": "Hive\n\nOf wood.", "b": "Other\n\nA hive, a hive and a hive: the hive is a house."}
    assert found(texts, "hive house", 1, hop=False) == [("b", 1)]
    gained = search_in(index_of_texts(texts), texts)
    plain, hopped = (
        {hit.passage.source: hit.score for hit in reversed(gained.best("hive house", 9, hop=hop))}
        for hop in (False, True)
    )
    assert hopped["a"] == pytest.approx(plain["a"] + 0.2 + 0.4 * plain["b"])  # the question names it, and so does b
    assert hopped["b"] == plain["b"]


def test_a_title_that_many_have_says_little() -> None:
    texts = {"m": "Mill\n\nThe mill of the town stands near the notes."} | {
        f"n{number}": f"Notes\n\nSomething else, number {number}." for number in range(50)
    }
    hits = search_in(index_of_texts(texts), texts).best("mill of the town", 60)
    assert hits[0].passage.source == "m"
    assert all(hit.score < 0.05 for hit in hits if hit.passage.source != "m")


def test_allowed_documents_and_likeness() -> None:
    index = index_of_texts(TEXTS)
    allowed = np.array([True, True, False, True, True, True])
    search = Search(index, search_in(index, TEXTS).texts, allowed)
    assert [hit.passage.source for hit in search.best("river", 5)] == ["a"]
    index = index_of_texts(TEXTS)
    search = search_in(index, TEXTS)
    meaning = np.array([0.0, 0.9, 0.1, 0.0, 0.0, 0.0])
    hits = search.best("river", 3, meaning)
    assert [hit.passage.source for hit in hits] == ["b", "c", "a"]
    assert hits[0].score == pytest.approx(0.7 * 0.9)
    assert [hit.passage.source for hit in search.best("zebra", 1, meaning)] == ["b"]


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("# The mill\n\nIt was built.", "The mill"),
        ("\n\n  \nPlain title\ntext", "Plain title"),
        ("", ""),
        ("x" * 121, ""),
        ("x" * 120, "x" * 120),
    ],
)
def test_title(text: str, title: str) -> None:
    assert title_of(text) == title


def test_orders() -> None:
    places = [("b", 30), ("a", 5), ("b", 2), ("c", 0), ("a", 1)]
    hits = [Hit(Passage(bytes(20), source, start, start + 1, 0), 1.0) for source, start in places]

    def order(name: str) -> list[tuple[str, int]]:
        return [(hit.passage.source, hit.passage.start) for hit in in_order(hits, name)]

    assert order("relevance") == places
    assert order("best-last") == places[::-1]
    assert order("document") == [("b", 2), ("b", 30), ("a", 1), ("a", 5), ("c", 0)]


@pytest.mark.parametrize(
    ("source", "glob", "matches"),
    [
        ("/docs/a.md", "*.md", True),
        ("/docs/a.md", "a.md", True),
        ("/docs/a.md", "docs/*", True),
        ("/docs/a.md", "ocs/*", False),
        ("/docs/a.md", "*.txt", False),
        ("/docs/all.jsonl#7", "*.jsonl", True),
        ("/docs/all.jsonl#7", "*#7", True),
    ],
)
def test_globs(source: str, glob: str, matches: bool) -> None:
    assert _matcher([glob])(source) is matches


FOLDER = f"index/words-{room.INDEX_FORMAT}"
Answers = list[list[tuple[str, int, float]]]


def answers(index: Index, texts: dict[str, str]) -> Answers:
    search = search_in(index, texts)
    return [
        [(hit.passage.source, hit.passage.index, hit.score) for hit in search.best(question, 9)]
        for question in (*QUESTIONS, "Ansel Corve built")
    ]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    real = IndexSegment.build.__func__  # type: ignore[attr-defined]

    def build(cls: type[IndexSegment], documents: list[object]) -> IndexSegment:
        counts.append(len(documents))
        return real(cls, documents)

    monkeypatch.setattr(IndexSegment, "build", classmethod(build))
    return counts


def test_kept_and_made_anew(store: Store, built: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    first = answers(index_of(store), TEXTS)
    assert built == [6]
    assert answers(index_of(store), TEXTS) == first
    assert built == [6]  # read, not made
    assert any(first)
    monkeypatch.setattr(room, "_TEXT_AT_ONCE", 1)
    anew = Index.empty()
    anew.update(store)
    assert built == [6, 1, 1, 1, 1, 1, 1]
    assert len(anew.segments) == 1
    assert answers(anew, TEXTS) == first


def test_only_what_changed_is_read(store: Store, built: list[int]) -> None:
    index_of(store)
    texts = {**TEXTS, "b": "A zebra.", "g": "A mill of wind."}
    del texts["c"]
    with store.writer() as writer:
        ingest(writer, {"b": {"b": texts["b"]}, "g": {"g": texts["g"]}})
        writer.remove_file("c")
    found = answers(index_of(store), texts)
    assert built == [6, 2]
    with store_of(store.path.parent / "fresh", texts) as fresh:
        assert found == answers(index_of(fresh), texts)


def test_a_file_that_was_only_touched_is_not_indexed_again(store: Store, built: list[int]) -> None:
    index_of(store)
    entry, document = store.file("a"), store.document("a")
    with store.writer() as writer:
        writer.commit_file(replace(entry, mtime_ns=77), [document])
    assert index_of(store).revision == store.revision()
    assert built == [6]


def test_of_a_file_of_many_documents_only_the_changed_are_read(tmp_path: Path, built: list[int]) -> None:
    lines = {f"all.jsonl#{number}": f"Line {number} of a mill." for number in range(30)}
    with Store.create_or_open(tmp_path / "store") as store:
        with store.writer() as writer:
            ingest(writer, {"all.jsonl": lines})
        index_of(store)
        lines["all.jsonl#7"] = "A zebra."
        del lines["all.jsonl#8"]
        with store.writer() as writer:
            ingest(writer, {"all.jsonl": lines})
        found = answers(index_of(store), lines)
        assert built == [30, 1]
        assert [hit[0] for hit in found[QUESTIONS.index("zebra")]] == ["all.jsonl#7"]
        assert len(index_of(store)) == 29


def test_no_order_of_arrival_changes_a_score(tmp_path: Path) -> None:
    """Law 10, for retrieval: another order, another number of steps, documents that were added and removed."""
    found = []
    for number, order in enumerate(itertools.islice(itertools.permutations(TEXTS), 0, 720, 240)):
        with Store.create_or_open(tmp_path / f"store{number}") as store:
            for step, source in enumerate(order):
                with store.writer() as writer:
                    ingest(writer, {source: {source: TEXTS[source]}, f"passing{step}": {f"p{step}": "a passing mill"}})
                index_of(store)
                with store.writer() as writer:
                    writer.remove_file(f"passing{step}")
                if step % 2:
                    index_of(store)
            index = index_of(store)
            found.append(answers(index, TEXTS))
            assert len(index) == len(TEXTS)
            assert len(index.segments) <= 3
    assert found[0] == found[1] == found[2]


def test_files_that_no_state_names_go_after_a_while(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    index_of(store)
    orphan = store.path / FOLDER / "segment-0.safetensors"
    orphan.write_bytes(b"")
    with store.writer() as writer:
        writer.remove_file("a")
    index_of(store)
    assert orphan.exists()  # another process may be about to name it
    os.utime(orphan, (1, 1))
    with store.writer() as writer:
        writer.remove_file("b")
    index_of(store)
    assert not orphan.exists()


def test_search_without_writing_the_index(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = answers(index_of(store), TEXTS)
    with store.writer() as writer:
        ingest(writer, {"h": {"h": "…"}})

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(room, "write_tables", full)
    texts = {**TEXTS, "h": "…"}
    found = answers(index_of(store), texts)
    assert [[hit[:2] for hit in hits] for hits in found] == [[hit[:2] for hit in hits] for hits in wanted]


def test_index_of_another_stemmer(tmp_path: Path, built: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"a": "The packages cost 30 euros."}
    with store_of(tmp_path / "store", texts) as store:
        with monkeypatch.context() as patch:
            patch.setattr(room, "STEMS", "snowball 0")
            patch.setattr(of_terms, "_stem", lambda word, language: f"{word}!")
            of_terms._split.cache_clear()
            index_of(store)
        of_terms._split.cache_clear()
        (hit,) = search_in(index_of(store), texts).best("package", 5)
        assert hit.passage.source == "a"
        index_of(store)
        assert built == [1, 1]
