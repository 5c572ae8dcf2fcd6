"""Chunks and documents that a question names itself, by an id or by a path."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.core.cache.identity import chunk_named, is_id
from kvtool.core.common.marks import end_of, start_of
from kvtool.core.common.spelling import composed
from kvtool.core.corpus.readers import file_of
from kvtool.core.errors import UsageError
from kvtool.core.retrieval.passages import Passage, passages_in

if TYPE_CHECKING:
    from kvtool.core.cache.entries import DocumentEntry
    from kvtool.core.cache.store import Store

_LABEL = re.compile(r"(?:p\.|text line|label|slide|cell|ch\.|¶) \d")
_ROW = re.compile(r" row \d")
_MOST_DIGITS = 18  # of a line, or a page: Python reads no number of over 4,300
_MOST_SPLITS = 32  # places of a name at which a label may begin; each costs a look at all sources


class Places:
    """Places of a store's chunks in their files; looked up once for each revision of its documents."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._passages: dict[bytes, Passage] | None = None
        self._sources: list[str] | None = None
        self._revision: int | None = None

    def of_chunks(self, text: str) -> list[Passage]:
        """The passage of a chunk, given by its id in hex or the beginning of it; or all that hold something of a place,
        in order. Raises UsageError."""
        self._follow()
        if not is_id(text):
            return self._at(text)
        if self._passages is None:
            self._passages = {}
            for document in self._store.documents():
                for passage in passages_in(document):
                    self._passages.setdefault(passage.chunk_id, passage)
        return [self._passages[chunk_named(text, self._passages)]]

    def of_document(self, name: str) -> list[Passage]:
        """The passages of a document, or of all documents of a JSON-lines file, in order. Raises UsageError."""
        return [passage for document in self._documents(name) for passage in passages_in(document)]

    def _documents(self, name: str) -> list[DocumentEntry]:
        self._follow()
        if self._sources is None:
            self._sources = self._store.sources()
        documents = (self._store.document(source) for source in _matching(name, self._sources))
        return [document for document in documents if document is not None]

    def _at(self, place: str) -> list[Passage]:
        """The passages at `PATH:LINE`, or at a place as it is cited: `paper.pdf p. 12`. Raises UsageError."""
        path, sign, number = place.rpartition(":")
        if sign and number.isdecimal() and len(number) <= _MOST_DIGITS:
            return self._at_number(path, int(number))
        refused = None
        for at in islice(_label_starts(place), _MOST_SPLITS):  # files have spaces in their names, and so have sheets
            try:
                return self._at_label(place[: at - 1], place[at:])
            except UsageError as error:
                refused = error
        if refused is not None:
            raise refused
        hint = "give an id, `PATH:LINE`, or a place as answers cite it; `kvtool store ls --chunks` lists ids"
        raise UsageError(f"{place!r} names no chunk", hint)

    def _at_label(self, path: str, label: str) -> list[Passage]:
        """The passages of a file that are cited as `p. 12–13` or `Costs row 9 – Taxes row 2`, or hold something of
        `p. 12`."""
        for document in self._documents(path):
            for mark in document.marks:
                if label == mark.place:
                    return _holding(document, mark.start)
            if cited := [each for each in passages_in(document) if document.place(each.start, each.end).label == label]:
                return cited
        raise UsageError(f"{path} has no {label}", "answers cite the places that there are")

    def _at_number(self, path: str, number: int) -> list[Passage]:
        """The passages that hold something of a line, or a page, slide or paragraph, of a file."""
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

    def _follow(self) -> None:
        revision = self._store.documents_revision()
        if revision != self._revision:
            self._passages = self._sources = None
            self._revision = revision


def _label_starts(place: str) -> Iterator[int]:
    """Yield where in a place, behind a space, a label such as `p. 12` or `Costs row 9` may begin."""
    last_row = max((row.start() for row in _ROW.finditer(place)), default=-1)
    for space in re.finditer(" ", place):
        if space.end() <= last_row or _LABEL.match(place, space.end()):
            yield space.end()


def _holding(document: DocumentEntry, start: int) -> list[Passage]:
    """The passages with something of the part of a document that begins at a character; of an empty line the next."""
    text, stop = document.text, end_of(document.text, document.marks, start)
    behind = [passage for passage in passages_in(document) if passage.end > start]
    inside = [passage for passage in behind if text[max(start, passage.start) : min(stop, passage.end)].strip()]
    return inside or behind[:1]


def _matching(name: str, sources: Sequence[str]) -> list[str]:
    """The sources that a name means: the path itself (or a JSON-lines file's documents), else the one path ending so.

    Raises
    ------
    UsageError : there is none, or several paths end so.
    """
    same = _of_file(os.path.abspath(name), sources) or _of_file(name, sources)
    if same:
        return same
    tail = composed("/" + Path(name).as_posix().lstrip("./"))
    ending = sorted(
        {each for each in sources if composed(each).endswith(tail) or composed(file_of(each)).endswith(tail)}
    )
    if not ending:
        raise UsageError(f"document {name!r} is not in the store", "`kvtool store ls` lists the documents")
    if len({file_of(source) for source in ending}) > 1:
        raise UsageError(f"document {name!r} could be {ending[0]} or {ending[1]}", "give more of the path")
    return ending


def _of_file(path: str, sources: Iterable[str]) -> list[str]:
    return [source for source in sources if path in (source, file_of(source))]
