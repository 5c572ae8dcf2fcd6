"""Likeness by meaning: cosines of the model's own vectors, made once for a chunk and kept for each model."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtool.core.cache.store import Store
from kvtool.core.errors import DamagedError, ModelError, NothingFoundError, UsageError
from kvtool.core.retrieval import embed
from kvtool.core.retrieval.embed import Embedder, Meaning, remembered
from kvtool.core.retrieval.finder import Finder
from kvtool.core.retrieval.index import index_of
from kvtool.core.retrieval.passages import RetrievalOptions
from tests.retrieval.making import ingest, retrieval
from tests.wording import refused

TEXTS = {"a": "the mill", "b": "the stream", "c": "the loaf", "d": "something else"}


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    calls: list[list[str]] = []
    real = Embedder.encode

    def encode(self: Embedder, texts: Sequence[str]) -> np.ndarray:
        calls.append(list(texts))
        return real(self, texts)

    monkeypatch.setattr(Embedder, "encode", encode)
    return calls


def found(store: Store, question: str, options: RetrievalOptions) -> list[str]:
    return [hit.passage.source for hit in Finder(store).find(question, options).hits]


def test_a_word_that_is_not_there_is_found_by_its_meaning(store: Store, static_model: Path) -> None:
    for question, source in (("grinder", "a"), ("river", "b"), ("bread", "c")):
        for retriever in ("dense", "hybrid", "auto"):
            how = retrieval(retriever, static_model)
            assert found(store, question, how)[0] == source
        with refused(NothingFoundError):
            found(store, question, retrieval("bm25", static_model))


@pytest.mark.parametrize("kind", ["static_model", "sentence_model"])
def test_likeness_is_the_cosine(store: Store, kind: str, request: pytest.FixtureRequest) -> None:
    embedder = Embedder(str(request.getfixturevalue(kind)))
    question, texts = embedder.encode(["mill river"])[0], embedder.encode(list(TEXTS.values()))
    assert np.linalg.norm(texts[:3], axis=1) == pytest.approx(1)  # of the last one the static model knows no word
    cosines = texts @ question
    index = index_of(store)
    meaning = Meaning.of(store, index, embedder, lambda passage: TEXTS[passage.source])
    wanted = (cosines - cosines.min()) / (cosines.max() - cosines.min())
    assert meaning("mill river") == pytest.approx(wanted, abs=5e-3)  # float16


def test_a_vector_is_made_once(store: Store, static_model: Path, encoded: list[list[str]]) -> None:
    how = retrieval("dense", static_model)
    found(store, "mill", how)
    assert sorted(encoded[0]) == sorted(TEXTS.values())
    found(store, "river", how)
    assert encoded[1:] == [["mill"], ["river"]]
    with store.writer() as writer:
        ingest(writer, {"b": {"b": "the bread"}})
        writer.remove_file("d")
    encoded.clear()
    assert found(store, "bread", how)[:2] == ["b", "c"]
    assert encoded == [["the bread"], ["bread"]]


def test_each_model_has_vectors_of_its_own(store: Store, static_model: Path, sentence_model: Path) -> None:
    first = found(store, "grinder", retrieval("dense", static_model))
    found(store, "grinder", retrieval("dense", sentence_model))
    assert found(store, "grinder", retrieval("dense", static_model)) == first
    assert len(list((store.path / "index").glob("vectors-*"))) == 2


def test_the_model_is_remembered(store: Store, static_model: Path) -> None:
    assert remembered(store) is None
    with refused(UsageError):
        found(store, "grinder", retrieval("dense"))
    with refused(NothingFoundError):
        found(store, "grinder", retrieval())
    Finder(store).embed(str(static_model))
    assert remembered(store) == str(static_model)
    assert found(store, "grinder", retrieval())[0] == "a"
    assert found(store, "river mill", retrieval("dense", static_model))[:2] == ["a", "b"]
    assert found(store, "river mill", retrieval("dense", static_model, source="[bcd]")) == ["b"]
    with refused(UsageError):
        found(store, "river", retrieval(source="*.md"))


def test_a_remembered_model_that_is_gone_is_told_and_done_without(store: Store, static_model: Path) -> None:
    Finder(store).embed(str(static_model))
    gone = static_model.rename(static_model.with_name("gone"))
    try:
        warned: list[str] = []
        hits = Finder(store, lambda text, hint: warned.append(text)).find("mill", retrieval(top_k=1)).hits
        assert hits[0].passage.source == "a"
        assert "found only by words" in warned[0]
        for how in (retrieval("hybrid"), retrieval("auto", static_model)):
            with refused(ModelError):
                found(store, "mill", how)
    finally:
        gone.rename(static_model)


def test_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, static_model: Path, sentence_model: Path) -> None:
    with refused(ModelError):
        Embedder(str(tmp_path))
    (tmp_path / "config.json").write_text("[")
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights that can run code")
    with refused(ModelError):
        Embedder(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with refused(ModelError):
        Embedder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError):
        Embedder(str(tmp_path)).encode(["x"])
    for name in ("nobody/nothing", "./nothing"):
        with refused(ModelError):
            Embedder(name, offline=True)
    monkeypatch.setattr(embed, "find_spec", lambda name: None)
    for model in (static_model, sentence_model):
        with refused(ModelError):
            Embedder(str(model))


def test_hub_cache(static_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    repo = tmp_path / "models--org--vectors"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("c0ffee")
    shutil.copytree(static_model, repo / "snapshots" / "c0ffee")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached, local = Embedder("org/vectors", offline=True), Embedder(str(static_model))
    assert cached.digest == local.digest
    assert np.array_equal(cached.encode(["mill"]), local.encode(["mill"]))


def test_damaged_document(store: Store, static_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = store.document

    def document(source: str) -> object:
        if source == "a":
            raise DamagedError("its text is damaged", "")
        return real(source)

    index_of(store)
    monkeypatch.setattr(store, "document", document)
    warned: list[str] = []
    finder = Finder(store, lambda text, hint: warned.append(text))
    assert {hit.passage.source for hit in finder.find("mill stream", retrieval("bm25", top_k=2)).hits} == {"a", "b"}
    assert [text for text in warned if "names in a were not followed" in text]
    with pytest.raises(DamagedError):  # a vector of nothing would be kept for good
        finder.find("mill", retrieval("dense", static_model, top_k=1))
