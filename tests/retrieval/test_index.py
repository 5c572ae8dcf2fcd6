"""The index follows its store: what changed is read, nothing else; damage and haste cost time, never a wrong answer."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.retrieval import index as room
from kvtool.core.retrieval import terms as of_terms
from kvtool.core.retrieval.index import Index, index_of
from kvtool.core.retrieval.segment import IndexSegment
from tests.retrieval.making import ingest, search_in, store_of
from tests.retrieval.test_search import QUESTIONS, TEXTS

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
