"""The index of a store's documents: immutable segments, stored next to the records and brought up to date."""

from __future__ import annotations

import itertools
import json
import secrets
import shutil
import time
from bisect import bisect_right
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtool.core.cache.side_files import TABLES
from kvtool.core.common.files import make_folder
from kvtool.core.common.text import parsed
from kvtool.core.common.types import Warn, warn_nobody
from kvtool.core.errors import DamagedError
from kvtool.core.retrieval.passages import Passage
from kvtool.core.retrieval.segment import Array, IndexSegment, MarkedDocument, digests, open_tables, write_tables
from kvtool.core.retrieval.terms import STEMS

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store

INDEX_FORMAT = 1
_KEY, _MARK = 20, 16  # bytes
_STATE = f"state{TABLES}"
_TRIES = 3
_GROWTH = 4  # a segment is merged with the one after it unless it is so many times as large
_TEXT_AT_ONCE = 1 << 22  # characters
_ORPHAN_SECONDS = 600.0  # a segment that no state names may be another process's, about to be named


class Index:
    """Segments with the documents of one revision; rankings use numbers of living documents only."""

    def __init__(self, segments: list[IndexSegment], marks: tuple[Array, Array], revision: int) -> None:
        self.segments, self.revision = segments, revision
        self._marks = marks

    @cached_property
    def _files(self) -> dict[bytes, bytes]:
        return {key.tobytes(): mark.tobytes() for key, mark in zip(*self._marks, strict=True)}

    @classmethod
    def empty(cls) -> Index:
        return cls([], (digests([], _KEY), digests([], _MARK)), -1)

    @property
    def languages(self) -> tuple[str, ...]:
        return tuple(sorted(set[str]().union(*(segment.languages for segment in self.segments))))

    def __len__(self) -> int:
        return sum(len(segment.living_lengths) for segment in self.segments)

    @property
    def offsets(self) -> list[int]:  # first rows of the segments
        return [0, *itertools.accumulate(map(len, self.segments))][:-1]

    @property
    def rows(self) -> int:
        return sum(map(len, self.segments))

    def passage(self, row: int) -> Passage:
        number, row_there = self._place(row)
        return self.segments[number].passage(row_there)

    def document_at(self, row: int) -> tuple[int, int]:
        number, row_there = self._place(row)
        return number, self.segments[number].document_of(row_there)

    def rows_of(self, place: tuple[int, int]) -> range:
        number, document = place
        span, offset = self.segments[number].chunks_of(document), self.offsets[number]
        return range(offset + span.start, offset + span.stop)

    def _place(self, row: int) -> tuple[int, int]:
        number = bisect_right(offsets := self.offsets, row) - 1
        return number, row - offsets[number]

    @property
    def documents(self) -> int:
        return sum(int(segment.alive.sum()) for segment in self.segments)

    def holders(self, chunk_ids: Collection[bytes]) -> dict[bytes, set[str]]:
        found: dict[bytes, set[str]] = {}
        for segment, row, chunk_id in self._living_rows(chunk_ids):
            found.setdefault(chunk_id, set()).add(segment.source(segment.document_of(row)))
        return found

    def chunk_ids(self) -> set[bytes]:
        found = set[bytes]()
        for segment in self.segments:
            rows = segment.tables["chunk_ids"]
            found.update(row.tobytes() for row in (rows if segment.living is None else rows[segment.living]))
        return found

    def passages(self, chunk_ids: Collection[bytes]) -> dict[bytes, Passage]:
        found: dict[bytes, Passage] = {}
        for segment, row, chunk_id in self._living_rows(chunk_ids):
            found.setdefault(chunk_id, segment.passage(row))
        return found

    def _living_rows(self, chunk_ids: Collection[bytes]) -> Iterator[tuple[IndexSegment, int, bytes]]:
        wanted = beginnings(digests([*chunk_ids], _KEY))
        for segment in self.segments:
            ids = segment.tables["chunk_ids"]
            for row in np.flatnonzero(np.isin(beginnings(ids), wanted)).tolist():
                if segment.alive[segment.document_of(row)] and (chunk_id := ids[row].tobytes()) in chunk_ids:
                    yield segment, row, chunk_id

    def update(self, store: Store) -> None:
        """Index what changed since the index's revision. Raises DamagedError."""
        read = 0  # characters

        def number_of_batch(document: MarkedDocument) -> int:
            nonlocal read
            read += len(document.entry.text)
            return read // _TEXT_AT_ONCE

        with store.view():
            self.revision = store.documents_revision()
            now = store.file_marks()
            changed = [key for key, mark in now.items() if self._files.get(key) != mark]
            added = (document for key in changed for document in self._changed(store, key))
            segments = [IndexSegment.build([*batch]) for _, batch in itertools.groupby(added, number_of_batch)]
        for key, segment in itertools.product(self._files.keys() - now.keys(), self.segments):
            segment.bury(segment.documents_of(key))
        self._files = now
        if segments:
            self.segments.append(segments[0] if len(segments) == 1 else IndexSegment.merged(segments))
        self._merge()

    def _changed(self, store: Store, key: bytes) -> Iterator[MarkedDocument]:
        entry = store.file_at(key)
        known = self._documents_of(key)
        for source in entry.documents if entry is not None else ():
            mark = store.document_mark(source)
            place = known.get(source)
            if place is not None and mark == place[0].tables["marks"][place[1]].tobytes():
                del known[source]
            elif mark is not None and (document := store.document(source)) is not None:
                yield MarkedDocument(key, mark, document)
        for segment, number in known.values():
            segment.bury(np.array([number]))

    def _documents_of(self, key: bytes) -> dict[str, tuple[IndexSegment, int]]:
        segments = self.segments if key in self._files else []
        places = ((segment, number) for segment in segments for number in segment.documents_of(key).tolist())
        return {segment.source(number): (segment, number) for segment, number in places}

    def _merge(self) -> None:
        """Merge segments so that each is several times as large as the next and most of it is living."""
        living = [segment for segment in self.segments if segment.alive.any()]
        self.segments = [each if each.alive.mean() >= 0.5 else IndexSegment.merged([each]) for each in living]
        self.segments.sort(key=len, reverse=True)
        while len(self.segments) > 1 and len(self.segments[-2]) < _GROWTH * len(self.segments[-1]):
            self.segments.append(IndexSegment.merged([self.segments.pop(), self.segments.pop()]))

    def save(self, folder: Path) -> None:
        """Write new segments and then, in one step, the list of those that belong together. Raises OSError."""
        make_folder(folder)
        for segment in self.segments:
            if not segment.name:
                name = f"segment-{secrets.token_hex(8)}{TABLES}"
                write_tables(folder / name, segment.tables.arrays, {})
                segment.name = name
        keys = sorted(self._files)
        marks = digests([self._files[key] for key in keys], _MARK)
        arrays: dict[str, Array] = {"file_keys": digests(keys, _KEY), "file_marks": marks}
        for at, segment in enumerate(self.segments):
            arrays[f"dead_{at}"] = np.flatnonzero(~segment.alive).astype(np.uint32)
        names = [segment.name for segment in self.segments]
        texts = {"revision": str(self.revision), "segments": json.dumps(names), "stems": STEMS}
        write_tables(folder / _STATE, arrays, texts)
        for path in folder.iterdir():
            with suppress(OSError):
                if path.name not in (*names, _STATE) and time.time() - path.stat().st_mtime > _ORPHAN_SECONDS:
                    path.unlink()

    @classmethod
    def open(cls, folder: Path) -> Index:
        for _ in range(_TRIES):
            with suppress(FileNotFoundError):  # another process has just kept another one
                return cls._open(folder)
        return cls.empty()

    @classmethod
    def _open(cls, folder: Path) -> Index:
        try:
            state = open_tables(folder / _STATE)
            if state.texts["stems"] != STEMS:
                return cls.empty()
            segments = []
            for at, name in enumerate(parsed(state.texts["segments"])):
                segments.append(IndexSegment(open_tables(folder / name)))
                segments[at].name = name
                segments[at].bury(state[f"dead_{at}"])
            return cls(segments, (state["file_keys"], state["file_marks"]), int(state.texts["revision"]))
        except FileNotFoundError:
            raise
        except (OSError, KeyError, ValueError, IndexError, TypeError) as error:
            raise DamagedError(f"{folder} cannot be read: {error}") from error


def beginnings(ids: Array) -> Array:
    return np.ascontiguousarray(ids[:, :8]).view(np.uint64)[:, 0]


def index_of(store: Store, warn: Warn = warn_nobody) -> Index:
    """Open the store's index and bring it up to date; a damaged one is built again. Raises DamagedError for a
    document."""
    folder = store.side_file(f"index/words-{INDEX_FORMAT}/{_STATE}").parent
    with store.view():
        index, revision = _kept(folder, warn), store.documents_revision()
        newer = index.revision < revision
        if index.revision != revision:
            index.update(store)
            if newer and not store.read_only:  # a view may be older than what others have kept
                with suppress(OSError):  # the disk is full: the index is a convenience
                    index.save(folder)
    return index


def _kept(folder: Path, warn: Warn) -> Index:
    try:
        return Index.open(folder)
    except DamagedError as error:
        warn(f"the retrieval index is damaged and was made anew: {error.message}", "")
        with suppress(OSError):  # read-only: then it is built every time
            shutil.rmtree(folder)
            make_folder(folder)
        return Index.empty()
