"""BM25 over the chunks of a store; the index is a side file, rebuilt when the documents changed."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.retrieval.passages import Passage
from kvtool.core.retrieval.terms import terms

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store

INDEX_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage and how well it matches (BM25 score; higher is better)."""

    passage: Passage
    score: float


class BM25Index:
    """Ranks passages by BM25 (bm25s, Lucene variant).

    A passage is indexed with the title of its document: the chunk that says "the institute" is then found by its name.
    """

    def __init__(self, passages: Sequence[Passage], engine: Any | None) -> None:
        self.passages = list(passages)
        self._engine = engine

    @classmethod
    def build(cls, texts: Sequence[tuple[Passage, str]]) -> BM25Index:
        """Index (passage, text) pairs."""
        import bm25s

        words = [terms(text) for _, text in texts]
        passages = [passage for passage, _ in texts]
        if not any(words):
            return cls(passages, None)
        engine = bm25s.BM25()
        engine.index(words, show_progress=False)
        return cls(passages, engine)

    def search(self, question: str, top_k: int) -> list[Hit]:
        """The best `top_k` passages with a positive score, best first; equal chunks once, ties by document order."""
        known = self._engine.vocab_dict if self._engine is not None else {}
        wanted = [term for term in terms(question) if term in known]
        if self._engine is None or not wanted:
            return []
        scores = self._engine.get_scores(wanted)
        hits: dict[bytes, Hit] = {}
        for index in (-scores).argsort(kind="stable"):
            if scores[index] <= 0 or len(hits) == top_k:
                break
            passage = self.passages[int(index)]
            hits.setdefault(passage.chunk_id, Hit(passage, float(scores[index])))
        return list(hits.values())

    def save(self, folder: Path) -> None:
        """Write the index to `folder`, which appears whole or not at all."""
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            if self._engine is not None:
                self._engine.save(part, show_progress=False)
            (part / "passages.json").write_text(json.dumps([passage.to_json() for passage in self.passages]))
            part.rename(folder)
        except OSError:  # another process was faster, or the folder is read-only or full: the index is a convenience
            shutil.rmtree(part, ignore_errors=True)

    @classmethod
    def load(cls, folder: Path) -> BM25Index | None:
        """Read a saved index; None when there is none or it is not whole."""
        import bm25s

        try:
            passages = [Passage.from_json(row) for row in json.loads((folder / "passages.json").read_text())]
            has_terms = (folder / "params.index.json").exists()
            engine = bm25s.BM25.load(folder, show_progress=False) if has_terms else None
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            return None
        return cls(passages, engine)


def index_of(store: Store) -> BM25Index:
    """The store's index at its present revision: from the side file, or built and kept there."""
    from kvtool.core.retrieval.passages import passages_of

    folder = store.side_file(f"index/bm25-{INDEX_FORMAT}-{store.revision()}")
    index = BM25Index.load(folder)
    if index is None:
        index = BM25Index.build(list(passages_of(store)))
        if not store.read_only:
            for old in folder.parent.glob("bm25-*"):
                shutil.rmtree(old, ignore_errors=True)
            index.save(folder)
    return index
