"""Which chunks a question is answered from: named by id, by document, or found by retrieval."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

from kvtool.core.cache.identity import chunk_named
from kvtool.core.cache.store import Store
from kvtool.core.common.types import Warn
from kvtool.core.corpus.readers.jsonl import ENDINGS
from kvtool.core.errors import UsageError
from kvtool.core.query.reply import Request
from kvtool.core.retrieval.finder import Finder, How
from kvtool.core.retrieval.passages import Hit, Passage, passages_in, warm_first

_TIES = 8  # found beyond those wanted, where one that is warm may stand instead of one as good


class Chooser:
    """Finds chunks in one store.

    Attributes
    ----------
    warm : ids of chunks that need not be read again: of equal scores they come first.
    """

    def __init__(self, store: Store, warn: Warn) -> None:
        self._store = store
        self.finder = Finder(store, warn)
        self.warm: Container[bytes] | None = None
        self._places: dict[bytes, Passage] | None = None
        self._sources: list[str] | None = None
        self._revision: int | None = None

    def follow(self) -> None:
        """Forget what was looked up, if the store's documents are others now."""
        revision = self._store.documents_revision()
        if revision != self._revision:
            self._places = self._sources = None
            self._revision = revision

    def choose(self, request: Request, top_k: int, how: How) -> list[Hit]:
        """The chunks for a request, in prompt order: as given, else best first.

        Raises
        ------
        UsageError : an unknown chunk id or document, or an empty question.
        KvtoolError : retrieval found nothing, or its embedding model cannot be had.
        """
        if not request.question.strip():
            raise UsageError("the question is empty", "ask something")
        self.follow()
        if request.chunks:
            return [Hit(self._by_id(chunk), float("nan")) for chunk in request.chunks]
        if request.documents:
            return [Hit(passage, float("nan")) for name in request.documents for passage in self._of_document(name)]
        if self.warm is None:
            return self.finder.find(request.question, top_k, how)
        return warm_first(self.finder.find(request.question, top_k + _TIES, how), self.warm)[:top_k]

    def _by_id(self, text: str) -> Passage:
        places = self._all_places()
        return places[chunk_named(text, places)]

    def _all_places(self) -> dict[bytes, Passage]:
        if self._places is None:
            self._places = {}
            for document in self._store.documents():
                for passage in passages_in(document):
                    self._places.setdefault(passage.chunk_id, passage)
        return self._places

    def _of_document(self, name: str) -> list[Passage]:
        if self._sources is None:
            self._sources = self._store.sources()
        sources = _matching(name, self._sources)
        documents = [document for source in sources if (document := self._store.document(source)) is not None]
        return [passage for document in documents for passage in passages_in(document)]


def _matching(name: str, sources: Sequence[str]) -> list[str]:
    """Sources that a name means: the path itself (or a JSON-lines file's documents), else the one path ending so.

    Raises
    ------
    UsageError : none, or several.
    """
    found = _below(os.path.abspath(name), sources) or _below(name, sources)
    if found:
        return found
    tail = Path(name).as_posix().lstrip("./")
    files = sorted(
        {source for source in sources if _file_of(source).endswith("/" + tail) or source.endswith("/" + tail)}
    )
    if not files:
        raise UsageError(f"document {name!r} is not in the store", "`kvtool store ls` lists the documents")
    if len({_file_of(source) for source in files}) > 1:
        raise UsageError(f"document {name!r} could be {files[0]} or {files[1]}", "give more of the path")
    return files


def _below(path: str, sources: Iterable[str]) -> list[str]:
    return [source for source in sources if source == path or _file_of(source) == path]


def _file_of(source: str) -> str:
    """The file of a source: a JSON-lines document is named `file.jsonl#id`."""
    file, mark, _ = source.rpartition("#")
    return file if mark and file.endswith(ENDINGS) else source
