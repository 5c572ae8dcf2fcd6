"""Ranking, ties, duplicates, and the index on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.core.retrieval.bm25 import BM25Index
from kvtool.core.retrieval.passages import Passage, title_of

TEXTS = [
    "The mill on the river was built by Ansel Corve in 1874.",
    "Bread is made from flour, water and salt.",
    "The river rises in the hills. The river is long. Nobody built a bridge over the river.",
    "강가의 방앗간은 안셀 코르베가 1874년에 지었다.",
    "빵은 밀가루와 물과 소금으로 만든다.",
]


def passage(index: int, chunk: bytes | None = None) -> Passage:
    return Passage(chunk or b"chunk %d" % index, f"doc{index}.txt", 0, 10, index)


@pytest.fixture(scope="module")
def index() -> BM25Index:
    return BM25Index.build([(passage(number), text) for number, text in enumerate(TEXTS)])


def found(index: BM25Index, question: str, top_k: int = 5) -> list[int]:
    return [hit.passage.index for hit in index.search(question, top_k)]


@pytest.mark.parametrize(
    ("question", "first"),
    [
        ("Who built the mill?", 0),
        ("What is bread made of?", 1),
        ("How long is the river?", 2),
        ("방앗간을 지은 사람은?", 3),
        ("밀가루로 무엇을 만드나?", 4),
    ],
)
def test_the_best_passage_comes_first(index: BM25Index, question: str, first: int) -> None:
    assert found(index, question)[0] == first


def test_scores_fall_and_are_positive(index: BM25Index) -> None:
    hits = index.search("river mill built 1874", 5)
    scores = [hit.score for hit in hits]
    assert scores == sorted(scores, reverse=True)
    assert min(scores) > 0
    assert found(index, "river mill built 1874", 2) == found(index, "river mill built 1874")[:2]


@pytest.mark.parametrize("question", ["zebra", "", "the of a", "!?", "얼룩말"])
def test_no_match_is_no_hit(index: BM25Index, question: str) -> None:
    assert index.search(question, 5) == []


def test_a_word_that_is_nowhere_does_not_disturb(index: BM25Index) -> None:
    assert found(index, "zebra mill") == found(index, "mill")


def test_ties_by_document_order() -> None:
    same = "The lamp is lit."
    index = BM25Index.build([(passage(number), same) for number in range(6)])
    assert found(index, "lamp", 4) == [0, 1, 2, 3]


def test_equal_chunks_once() -> None:
    chunks = [b"x", b"y", b"x", b"z"]
    index = BM25Index.build([(passage(i, chunk), "The lamp is lit.") for i, chunk in enumerate(chunks)])
    assert found(index, "lamp", 3) == [0, 1, 3]
    assert found(index, "lamp", 9) == [0, 1, 3]


def test_top_k_of_none(index: BM25Index) -> None:
    assert found(index, "mill", 0) == []


@pytest.mark.parametrize("texts", [[], ["", "the", "…"]], ids=["no passage", "no term"])
def test_an_index_of_nothing(texts: list[str], tmp_path: Path) -> None:
    empty = BM25Index.build([(passage(number), text) for number, text in enumerate(texts)])
    assert empty.search("mill", 5) == []
    empty.save(tmp_path / "index")
    loaded = BM25Index.load(tmp_path / "index")
    assert loaded is not None
    assert loaded.passages == empty.passages
    assert loaded.search("mill", 5) == []


def test_a_passage_without_terms_among_others() -> None:
    index = BM25Index.build([(passage(0), "…"), (passage(1), "The lamp is lit.")])
    assert found(index, "lamp") == [1]


def test_saved_and_loaded(index: BM25Index, tmp_path: Path) -> None:
    index.save(tmp_path / "side" / "index")
    loaded = BM25Index.load(tmp_path / "side" / "index")
    assert loaded is not None
    for question in ("river mill", "방앗간", "zebra", "1874"):
        assert loaded.search(question, 5) == index.search(question, 5)
    index.save(tmp_path / "side" / "index")  # another process was faster
    assert [path.name for path in (tmp_path / "side").iterdir()] == ["index"]


def test_the_same_text_gives_the_same_scores(index: BM25Index) -> None:
    again = BM25Index.build([(passage(number), text) for number, text in enumerate(TEXTS)])
    assert again.search("river mill 1874 방앗간", 5) == index.search("river mill 1874 방앗간", 5)


def test_no_index(tmp_path: Path) -> None:
    assert BM25Index.load(tmp_path / "none") is None


@pytest.mark.parametrize("damage", ["", "{", '[["zz"]]', '{"a": 1}', "[1]", "7"])
def test_a_damaged_list_of_passages_is_no_index(index: BM25Index, tmp_path: Path, damage: str) -> None:
    index.save(tmp_path / "index")
    (tmp_path / "index" / "passages.json").write_text(damage)
    assert BM25Index.load(tmp_path / "index") is None


@pytest.mark.parametrize("keep", [0, 30])
def test_a_damaged_part_is_no_index(index: BM25Index, tmp_path: Path, keep: int) -> None:
    index.save(tmp_path / "whole")
    for part in sorted((tmp_path / "whole").iterdir()):
        folder = tmp_path / f"without-{part.name}"
        index.save(folder)
        (folder / part.name).write_bytes(part.read_bytes()[:keep])
        assert BM25Index.load(folder) is None


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
