from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtool.core.cache.identity import chunk_named, is_id
from kvtool.core.cache.layout import REPAIR
from kvtool.core.common.marks import end_of, start_of
from kvtool.core.common.text import composed, regex_of
from kvtool.core.common.types import Warn, warn_nobody
from kvtool.core.corpus.readers import file_of
from kvtool.core.errors import DamagedError, ModelError, NoDocumentsError, NothingFoundError, UsageError
from kvtool.core.retrieval.embed import Embeds, Meaning, embedder_of, remember, remembered
from kvtool.core.retrieval.index import Index, index_of
from kvtool.core.retrieval.passages import (
    Found,
    Hit,
    Passage,
    RetrievalOptions,
    found_by,
    holds_passage,
    passages_in,
    recent_first,
)
from kvtool.core.retrieval.search import Search, count_rare, keywords
from kvtool.core.retrieval.segment import Array
from kvtool.core.retrieval.spotting import Span, Spotter
from kvtool.core.retrieval.terms import asked_terms, language_of, spellings, terms, without_idle

if TYPE_CHECKING:
    from kvtool.core.cache.entries import DocumentEntry
    from kvtool.core.cache.store import Store


_LABEL = re.compile(r"(?:p\.|text line|label|slide|cell|ch\.|¶) \d|(?:header|footer)(?: –|$)")
_ROW = re.compile(r" row \d")
_MOST_DIGITS = 18  # of a line, or a page: Python reads no number of over 4,300
_MOST_SPLITS = 32  # places of a name at which a label may begin; each costs a look at all sources


class Places:
    """Places of a store's chunks in their files, read once for each revision of its documents."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sources = lru_cache(maxsize=1)(lambda revision: store.sources())
        self._passages = lru_cache(maxsize=1)(lambda revision: _passages_by_id(store))

    def of_chunks(self, text: str) -> list[Passage]:
        """The passages of a chunk's id in hex or its beginning, or of a place. Raises UsageError."""
        if not is_id(text):
            return self._at(text)
        passages = self._passages(self._store.documents_revision())
        return [passages[chunk_named(text, passages)]]

    def of_document(self, name: str) -> list[Passage]:
        return [passage for document in self._documents(name) for passage in passages_in(document)]

    def _documents(self, name: str) -> list[DocumentEntry]:
        sources = self._sources(self._store.documents_revision())
        documents = (self._store.document(source) for source in _matching(name, sources))
        return [document for document in documents if document is not None]

    def _at(self, place: str) -> list[Passage]:
        path, sign, number = place.rpartition(":")
        if sign and number.isdecimal() and len(number) <= _MOST_DIGITS:
            return self._at_number(path, int(number))
        refused = None
        for at in islice(_label_starts(place), _MOST_SPLITS):  # files have spaces in their names, and so have sheets
            try:
                return self._at_label(place[: at - 1], place[at:])
            except UsageError as error:
                refused = error
        hint = "give an id, `PATH:LINE`, or a place as answers cite it; `kvtool store ls --chunks` lists ids"
        raise refused or UsageError(f"{place!r} names no chunk", hint)

    def _at_label(self, path: str, label: str) -> list[Passage]:
        for document in self._documents(path):
            for mark in document.marks:
                if label == mark.place:
                    return _holding(document, mark.start)
            if cited := [each for each in passages_in(document) if document.place(each.start, each.end).label == label]:
                return cited
        raise UsageError(f"{path} has no {label}", "answers cite the places that there are")

    def _at_number(self, path: str, number: int) -> list[Passage]:
        found: tuple[int, list[Passage]] | None = None
        for document in self._documents(path):
            start = start_of(document.text, document.marks, number)
            if start is None:
                continue
            line = document.place(start, start + 1).line or 0  # of several documents the last that begins before it
            if (found is None or line > found[0]) and (passages := _holding(document, start)):
                found = line, passages
        if found is None:
            raise UsageError(f"{path} has no line, page or part {number}", "answers cite the places that there are")
        return found[1]


def _passages_by_id(store: Store) -> dict[bytes, Passage]:
    found: dict[bytes, Passage] = {}
    for document in store.documents():
        for passage in passages_in(document):
            found.setdefault(passage.chunk_id, passage)
    return found


def _label_starts(place: str) -> Iterator[int]:
    last_row = max((row.start() for row in _ROW.finditer(place)), default=-1)
    for space in re.finditer(" ", place):
        if space.end() <= last_row or _LABEL.match(place, space.end()):
            yield space.end()


def _holding(document: DocumentEntry, start: int) -> list[Passage]:
    text, stop = document.text, end_of(document.text, document.marks, start)
    after = [passage for passage in passages_in(document) if passage.end > start]
    inside = [passage for passage in after if text[max(start, passage.start) : min(stop, passage.end)].strip()]
    return inside or after[:1]


def _matching(name: str, sources: Sequence[str]) -> list[str]:
    """The sources of a path, or of the one path ending with it. Raises UsageError."""
    same = _of_file(os.path.abspath(name), sources) or _of_file(name, sources)
    if same:
        return same
    tail = composed("/" + Path(name).as_posix().lstrip("./"))
    ending = sorted(each for each in sources if any(composed(name).endswith(tail) for name in (each, file_of(each))))
    if not ending:
        raise UsageError(f"document {name!r} is not in the store", "`kvtool store ls` lists the documents")
    if len({file_of(source) for source in ending}) > 1:
        raise UsageError(f"document {name!r} could be {ending[0]} or {ending[1]}", "give more of the path")
    return ending


def _of_file(path: str, sources: Iterable[str]) -> list[str]:
    return [source for source in sources if path in (source, file_of(source))]


_NOTHING = "no chunk matches the question", "use words of the documents, or name the documents"
_DOCUMENTS = 16  # held unpacked
_TIES = 8  # found beyond those wanted: a preferred one may replace one of the same score


class Finder:
    """Finds chunks; the index and vectors are updated when a question comes after a change of documents."""

    def __init__(
        self, store: Store, warn: Warn = warn_nobody, embedder: Callable[[str, bool], Embeds] = embedder_of
    ) -> None:
        self._store, self._warn, self._embedder_of = store, warn, embedder
        self.places = Places(store)
        self._index: Index | None = None
        self._meanings: dict[str, Meaning] = {}
        self._embedders: dict[str, Embeds] = {}
        self._spotter, self._spotted = Spotter(partial(token_ids, store)), (-1, -1)
        self._read = lru_cache(maxsize=_DOCUMENTS)(lambda source, revision: store.document(source))

    @property
    def index(self) -> Index:
        if self._index is None:
            self._index = index_of(self._store, self._warn)
        return self._index

    def follow(self) -> None:
        if self._index is not None and self._index.revision != self._store.documents_revision():
            self._index = None
            self._meanings.clear()
            self._read.cache_clear()

    def find(
        self, question: str, options: RetrievalOptions, prefer: Container[bytes] | None = None, is_asked: bool = False
    ) -> Found:
        """Find chunks and cut them where they stop helping. Chunks to `prefer` come first among equal scores. If a
        person asks (`is_asked`), stop words and greetings alone find nothing. Raises KvtoolError."""
        with self._store.view():
            self.follow()
            if not len(self.index):
                raise NoDocumentsError
            allowed = self._allowed(options.source) if options.source else None
            search = Search(self.index, self.text, allowed, lambda passage: (self.own_text(passage) or "").strip())
            corrections = search.corrections(question) if options.retriever != "dense" else []
            if corrections and self._meaning(options) is not None:
                corrections = []  # vectors find what a typo means
            question = " ".join((question, *(each["to"] for each in corrections)))
            if is_asked and not self._is_search(search, question, options):
                raise NothingFoundError(*_NOTHING)
            count = options.top_k if prefer is None else options.top_k + _TIES
            meaning = self._meaning(options)
            like = meaning(question) if meaning is not None else None
            hits = search.best(question, count, like, words=options.retriever != "dense")
            if not hits:
                raise NothingFoundError(*_NOTHING)
            hits = hits if prefer is None else recent_first(hits, prefer)[: options.top_k]
            if not options.min_score or options.retriever == "dense":
                return Found(hits, 0, corrections)
            kept = search.helpful(question, hits, options.min_score)
            return Found(kept, len(hits) - len(kept), corrections)

    def spot(self, ids: Sequence[int]) -> list[Span]:
        with self._store.view():
            self.follow()
            # a damaged chunk may have been repaired by a commit that changes no document
            revision = self.index.revision, self._store.revision() if self._spotter.unread else -1
            if self._spotted != revision:
                self._spotter.update(self.index.chunk_ids())
                self._spotted = revision
            return self._spotter.spot(ids)

    def named(self, chunks: Sequence[str], documents: Sequence[str]) -> list[Hit]:
        """Look up chunks by name, or all chunks of documents. Raises UsageError."""
        passages_of = self.places.of_chunks if chunks else self.places.of_document
        return [Hit(passage, math.nan) for name in chunks or documents for passage in passages_of(name)]

    def _is_search(self, search: Search, question: str, options: RetrievalOptions) -> bool:
        """Whether a question has a word of some chunk, stop words and greetings aside; vectors need none."""
        words = asked_terms(without_idle(question), self.index.languages)
        has_idle = len(words) < len(asked_terms(question, self.index.languages))  # else the search itself shows it
        return bool(words) and (not has_idle or search.matches(words) or self._meaning(options) is not None)

    def document(self, source: str) -> DocumentEntry | None:
        """The current document, cached since its chunks are read one after the other. Raises DamagedError."""
        return self._read(source, self._store.documents_revision())

    def text(self, passage: Passage) -> str:
        """The text by which a chunk is found; "" if its document is damaged or gone."""
        try:
            return self._text(passage)
        except DamagedError as error:
            self._warn(f"names in {passage.source} were not followed: {error.message}", REPAIR)
            return ""

    def own_text(self, passage: Passage) -> str | None:
        """The text of a passage; None if its document is damaged, gone or has changed there."""
        with suppress(DamagedError):
            document = self.document(passage.source)
            if document is not None and holds_passage(document, passage):
                return document.text[passage.start : passage.end]
        return None

    def _text(self, passage: Passage) -> str:
        document = self.document(passage.source)
        if document is None or not holds_passage(document, passage):
            raise DamagedError(f"the index says of {passage.source} what is not there", REPAIR)
        return found_by(document)[passage.index]

    def keywords(self, passage: Passage, question: str, most: int = 10) -> list[str]:
        """Words of a question that occur in a chunk, as spelled there, the most distinctive ones (TF-IDF) first."""
        text = self.text(passage)
        language = language_of(text)
        asked = {*itertools.chain(*asked_terms(question, (language,)))}
        spelled, both = spellings(text, language), [term for term in terms(text, language)[0] if term in asked]
        return list(dict.fromkeys(spelled[term] for term in keywords(self.index, both, most)))

    def rare_words(self, text: str, share: float) -> int:
        """Count a text's terms that occur in some chunks, but in no more than this share of all."""
        with self._store.view():
            self.follow()
            return count_rare(self.index, asked_terms(text, self.index.languages), share)

    def embed(self, ref: str, offline: bool = False) -> None:
        self.follow()
        self._meaning_by(ref, offline)
        remember(self._store, ref)

    def _meaning(self, options: RetrievalOptions) -> Meaning | None:
        if options.retriever == "bm25":
            return None
        ref = options.embedder or remembered(self._store, self._warn)
        if ref is None:
            if options.retriever == "auto":
                return None
            hint = "name it once with `ingest --embedder`, or in KVTOOL_EMBEDDER"
            raise UsageError(f"--retriever {options.retriever} needs an embedding model", hint)
        try:
            return self._meaning_by(ref, options.offline)
        except ModelError as error:
            if options.retriever != "auto" or options.embedder is not None:
                raise
            self._warn(f"found only by words: {error.message}", error.hint)
            return None

    def _meaning_by(self, ref: str, offline: bool) -> Meaning:
        if ref not in self._meanings:
            if ref not in self._embedders:
                self._embedders[ref] = self._embedder_of(ref, offline)
            self._meanings[ref] = Meaning.of(self._store, self.index, self._embedders[ref], self._text, self._warn)
        return self._meanings[ref]

    def _allowed(self, globs: Sequence[str]) -> Array:
        """Mask of chunks that may be found, bool `[rows]`. Raises UsageError if no document matches."""
        masks, is_meant = [np.empty(0, bool)], _matcher(globs)
        for segment in self.index.segments:
            sources = [segment.source(number) for number in range(len(segment.alive))]
            matching = np.array([is_meant(source) for source in sources], bool) & segment.alive
            masks.append(np.repeat(matching, segment.chunk_counts))
        allowed = np.concatenate(masks)
        if not allowed.any():
            raise UsageError(f"no document matches {', '.join(globs)}", "`kvtool store ls` lists the documents")
        return allowed


def token_ids(store: Store, chunk_id: bytes) -> Sequence[int]:
    with suppress(DamagedError):
        if (info := store.chunk_info(chunk_id)) is not None:
            return info.token_ids
    return ()


def _matcher(globs: Sequence[str]) -> Callable[[str], bool]:
    match = re.compile("|".join(regex_of(form) for glob in globs for form in (glob, f"*/{glob}"))).match

    def is_meant(source: str) -> bool:
        return any(match(name) is not None for name in (source, source.rpartition("#")[0], file_of(source)) if name)

    return is_meant
