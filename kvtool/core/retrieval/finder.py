"""Chunks of one store for a question: by words, by meaning, or by both."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from kvtool.core.cache.layout import REPAIR
from kvtool.core.common.spelling import regex_of
from kvtool.core.common.types import Warn, warn_nobody
from kvtool.core.errors import DamagedError, KvtoolError, ModelError, NothingFoundError, UsageError
from kvtool.core.model.preemption import run_pending
from kvtool.core.retrieval import bm25
from kvtool.core.retrieval.embed import Embeds, embedder_of
from kvtool.core.retrieval.index import Index, index_of
from kvtool.core.retrieval.passages import Found, Hit, Passage, found_by, recent_first, stands_in
from kvtool.core.retrieval.places import Places
from kvtool.core.retrieval.search import Search
from kvtool.core.retrieval.tables import Array
from kvtool.core.retrieval.terms import asked_terms, language_of, spellings, terms
from kvtool.core.retrieval.vectors import Meaning, remember, remembered

if TYPE_CHECKING:
    from kvtool.core.cache.entries import DocumentEntry
    from kvtool.core.cache.store import Store

_DOCUMENTS = 16  # held unpacked
_TIES = 8  # found beyond those wanted, where a preferred one may stand instead of one as good


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Says how chunks are to be found.

    Attributes
    ----------
    retriever : `bm25` (words), `dense` (vectors), `hybrid` (both), `auto`: both where the store has vectors.
    embedder : the vectors' model; None: the one that the store remembers.
    offline : the network must not be touched.
    only : globs; documents whose path, or the end of it, matches one of them. None given: all.
    min_score : share of the best score below which a chunk has to add words of the question; 0 cuts nothing. Found by
        vectors alone, nothing is cut: cosines of chunks that help and of others differ too little.
    """

    retriever: str = "auto"
    embedder: str | None = None
    only: tuple[str, ...] = ()
    offline: bool = False
    min_score: float = 0.0


class Finder:
    """Finds chunks for questions.

    The index and the vectors are read, or brought up to date, when a question needs them and the store's documents are
    others than at the question before.

    Attributes
    ----------
    places : of chunks and documents that a question names itself.
    """

    def __init__(self, store: Store, warn: Warn = warn_nobody) -> None:
        self._store, self._warn = store, warn
        self.places = Places(store)
        self._index: Index | None = None
        self._meanings: dict[str, Meaning] = {}
        self._embedders: dict[str, Embeds] = {}
        self._read = lru_cache(maxsize=_DOCUMENTS)(lambda source, revision: store.document(source))

    @property
    def index(self) -> Index:
        """The index at the revision of the last question, or of the first use."""
        if self._index is None:
            self._index = index_of(self._store, self._warn)
        return self._index

    def follow(self) -> None:
        """Forget what was read of documents, if the store's are others now."""
        if self._index is not None and self._index.revision != self._store.documents_revision():
            self._index = None
            self._meanings.clear()
            self._read.cache_clear()

    def find(self, question: str, top_k: int, retrieval: Retrieval, prefer: Container[bytes] | None = None) -> Found:
        """Find the best chunks, `top_k` at most, and cut them where they stop helping.

        Parameters
        ----------
        prefer : ids of chunks that come first among those of the same score.

        Raises
        ------
        NothingFoundError : nothing matches. KvtoolError : there are no documents.
        ModelError : the embedding model that was asked for cannot be had.
        UsageError : meaning was asked for without a model.
        """
        with self._store.view():
            self.follow()
            search = self._search(retrieval)
            hits = self._best(search, question, top_k if prefer is None else top_k + _TIES, retrieval)
            hits = hits if prefer is None else recent_first(hits, prefer)[:top_k]
            if not retrieval.min_score or retrieval.retriever == "dense":
                return Found(hits)
            kept = search.helpful(question, hits, retrieval.min_score)
            return Found(kept, len(hits) - len(kept))

    def named(self, chunks: Sequence[str], documents: Sequence[str]) -> list[Hit]:
        """Look up chunks by their names, or all chunks of documents. Raises UsageError for an unknown one."""
        hits: list[Hit] = []
        for name in chunks or documents:
            places = self.places.of_chunks(name) if chunks else self.places.of_document(name)
            hits += [Hit(place, math.nan) for place in places]
            run_pending()
        return hits

    def _search(self, retrieval: Retrieval) -> Search:
        if not len(self.index):
            raise KvtoolError("the store holds no documents", "run `kvtool ingest PATH` first")
        allowed = self._allowed(retrieval.only) if retrieval.only else None
        return Search(self.index, self.text, allowed, lambda passage: (self.own_text(passage) or "").strip())

    def _best(self, search: Search, question: str, top_k: int, retrieval: Retrieval) -> list[Hit]:
        meaning = self._meaning(retrieval)
        like = meaning(question) if meaning is not None else None
        hits = search.best(question, top_k, like, words=retrieval.retriever != "dense")
        if not hits:
            raise NothingFoundError(
                "no chunk matches the question", "use words of the documents, or name the documents"
            )
        return hits

    def document(self, source: str) -> DocumentEntry | None:
        """Return a document as it is now; its chunks are asked for one after the other, so it is kept for a while.
        Raises DamagedError."""
        return self._read(source, self._store.documents_revision())

    def text(self, passage: Passage) -> str:
        """The text by which a chunk is found; "" where its document is damaged or gone: questions go on without."""
        try:
            return self._text(passage)
        except DamagedError as error:
            self._warn(f"names in {passage.source} were not followed: {error.message}", REPAIR)
            return ""

    def own_text(self, passage: Passage) -> str | None:
        """Return the text of a passage; None if its document is damaged, gone or has changed there."""
        with suppress(DamagedError):
            document = self.document(passage.source)
            if document is not None and stands_in(document, passage):
                return document.text[passage.start : passage.end]
        return None

    def _text(self, passage: Passage) -> str:
        """The text by which a chunk is found. Raises DamagedError where its document is damaged or gone."""
        document = self.document(passage.source)
        if document is None or not stands_in(document, passage):
            raise DamagedError(f"the index says of {passage.source} what does not stand there", REPAIR)
        return found_by(document)[passage.index]

    def keywords(self, passage: Passage, question: str, most: int = 10) -> list[str]:
        """The words of a question that stand in a chunk, as they are spelled there; what tells it from the others best
        (TF-IDF) first."""
        text = self.text(passage)
        language = language_of(text)
        asked = {*itertools.chain(*asked_terms(question, (language,)))}
        spelled, both = spellings(text, language), [term for term in terms(text, language)[0] if term in asked]
        return list(dict.fromkeys(spelled[term] for term in bm25.keywords(self.index, both, most)))

    def rare_words(self, text: str, share: float) -> int:
        """Count a text's terms that distinguish chunks: they occur in at most this share of all, and in some."""
        with self._store.view():
            self.follow()
            return bm25.rare(self.index, asked_terms(text, self.index.languages), share)

    # ---- meaning ----

    def embed(self, ref: str, offline: bool = False) -> None:
        """Make the vectors that are missing, and remember their model. Raises ModelError."""
        self.follow()
        self._meaning_by(ref, offline)
        remember(self._store, ref)

    def _meaning(self, retrieval: Retrieval) -> Meaning | None:
        if retrieval.retriever == "bm25":
            return None
        ref = retrieval.embedder or remembered(self._store, self._warn)
        if ref is None:
            if retrieval.retriever == "auto":
                return None
            raise UsageError(
                f"--retriever {retrieval.retriever} needs an embedding model",
                "name it with --embedder, once, at ingest or here",
            )
        try:
            return self._meaning_by(ref, retrieval.offline)
        except ModelError as error:
            if retrieval.retriever != "auto" or retrieval.embedder is not None:
                raise
            self._warn(f"found only by words: {error.message}", error.hint)
            return None

    def _meaning_by(self, ref: str, offline: bool) -> Meaning:
        if ref not in self._meanings:
            if ref not in self._embedders:
                self._embedders[ref] = embedder_of(ref, offline)
            self._meanings[ref] = Meaning.of(self._store, self.index, self._embedders[ref], self._texts, self._warn)
        return self._meanings[ref]

    def _texts(self, rows: Sequence[int]) -> list[str]:
        return [self._text(self.index.passage(row)) for row in rows]

    # ---- which documents ----

    def _allowed(self, globs: Sequence[str]) -> Array:
        """Return the mask of chunks that may be found, bool `[rows]`. Raises UsageError if no document matches."""
        masks, is_meant = [np.empty(0, bool)], _matcher(globs)
        for segment in self.index.segments:
            sources = [segment.source(number) for number in range(len(segment.alive))]
            matching = np.array([is_meant(source) for source in sources], bool) & segment.alive
            masks.append(np.repeat(matching, segment.chunk_counts))
        allowed = np.concatenate(masks)
        if not allowed.any():
            raise UsageError(f"no document matches {', '.join(globs)}", "`kvtool store ls` lists the documents")
        return allowed


def _matcher(globs: Sequence[str]) -> Callable[[str], bool]:
    """Return what says whether a glob matches the whole path of a document, or its end from some folder on.

    A document of a JSON-lines file is matched by its file's path, too.
    """
    match = re.compile("|".join(regex_of(form) for glob in globs for form in (glob, f"*/{glob}"))).match

    def is_meant(source: str) -> bool:
        return any(match(name) is not None for name in (source, source.rpartition("#")[0]) if name)

    return is_meant
