"""Named arrays in mapped files, and the immutable parts of the index that are made of them."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save

from kvtool.core.cache.layout import check_file
from kvtool.core.cache.side_files import check_table, tail_of
from kvtool.core.common.files import replace_file
from kvtool.core.common.text import parsed
from kvtool.core.errors import DamagedError
from kvtool.core.retrieval.passages import Passage, found_by, title_of
from kvtool.core.retrieval.terms import LANGUAGES, folded, language_of, terms, typed_words

if TYPE_CHECKING:
    from kvtool.core.cache.entries import DocumentEntry


Array = np.ndarray[Any, np.dtype[Any]]
_HEAD = struct.Struct("<Q")
_KINDS = {"U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4"}


@dataclass(frozen=True, slots=True)
class Tables:
    """Arrays by name, views of the mapped file that must not be written, and a few texts."""

    arrays: Mapping[str, Array]
    texts: Mapping[str, str]

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]


def positions_in(ascending: Array, keys: Array) -> Array:
    """Positions of keys in an ascending table, int64 `[keys]`; -1 for a missing one."""
    at = np.searchsorted(ascending, keys)
    known = at < len(ascending)
    known[known] = ascending[at[known]] == keys[known]
    return np.where(known, at, -1)


def write_tables(path: Path, arrays: Mapping[str, Array], texts: Mapping[str, str]) -> None:
    """Write a file that appears whole or not at all: safetensors, followed by a digest. Raises OSError."""
    data = save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, dict(texts))
    check_file(path.parent, len(data))
    replace_file(path, data + tail_of(data))


def open_tables(path: Path) -> Tables:
    """Map a file of :func:`write_tables`; its digest is checked once a process. Raises OSError, DamagedError."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_size < _HEAD.size:
            raise DamagedError(f"{path} is cut off")
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    view = check_table(path, view, status)
    try:
        (length,) = _HEAD.unpack_from(view)
        head: dict[str, Any] = parsed(bytes(view[_HEAD.size : _HEAD.size + length]))
        texts = head.pop("__metadata__", {})
        data = view[_HEAD.size + length :]
        return Tables({name: _array(data, row) for name, row in head.items()}, texts)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error


def _array(data: memoryview, row: Mapping[str, Any]) -> Array:
    start, stop = row["data_offsets"]
    kind = np.dtype(_KINDS[row["dtype"]])
    if not 0 <= start <= stop <= len(data):
        raise ValueError("an array is outside the file")
    return np.frombuffer(data[start:stop], kind).reshape(row["shape"])


_MOST = 65_535  # times that a term counts in one row


@lru_cache(maxsize=1 << 20)
def key_of(term: str) -> int:
    """Digest a term to 64 bits. Among a million terms two share a digest with a chance of 10^-7."""
    digest = hashlib.blake2b(term.encode("utf-8", "surrogatepass"), digest_size=8, person=b"kvtool term").digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class Postings:
    """Rows and counts (uint32, uint16 `[postings]`) of each term, given by ascending digests (uint64)."""

    keys: Array
    offsets: Array
    rows: Array
    counts: Array

    @classmethod
    def build(cls, texts: Iterable[Sequence[str]]) -> Postings:
        numbers: dict[str, int] = {}
        occurrences: list[Array] = []
        for row, words in enumerate(texts):
            terms = np.fromiter((numbers.setdefault(word, len(numbers)) for word in words), np.int64, len(words))
            occurrences.append(terms << 32 | row)
        found = np.concatenate(occurrences) if occurrences else np.empty(0, np.int64)
        keys = np.fromiter(map(key_of, numbers), np.uint64, len(numbers))
        order = np.argsort(keys)
        ranks = np.empty_like(order)
        ranks[order] = np.arange(len(order))
        pairs, counts = np.unique(ranks[found >> 32] << 32 | found & 0xFFFFFFFF, return_counts=True)
        offsets = np.searchsorted(pairs, np.arange(len(keys) + 1) << 32)
        rows = (pairs & 0xFFFFFFFF).astype(np.uint32)
        return cls(keys[order], offsets, rows, np.minimum(counts, _MOST).astype(np.uint16))

    @classmethod
    def merged(cls, parts: Sequence[tuple[Postings, Array]]) -> Postings:
        """Join postings, each given with the new numbers of its rows (int64 `[rows]`; -1: removed)."""
        keys, rows, counts = [], [], []
        for postings, renumbered in parts:
            moved = renumbered[postings.rows]
            kept = moved >= 0
            keys.append(np.repeat(postings.keys, np.diff(postings.offsets))[kept])
            rows.append(moved[kept].astype(np.uint32))
            counts.append(postings.counts[kept])
        all_keys, all_rows, all_counts = (np.concatenate(arrays) for arrays in (keys, rows, counts))
        order = np.lexsort((all_rows, all_keys))
        ordered = all_keys[order]
        starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(ordered) else order
        offsets = np.append(starts, len(ordered)).astype(np.int64)
        return cls(ordered[starts], offsets, all_rows[order], np.minimum(all_counts[order], _MOST).astype(np.uint16))

    def of(self, key: int) -> tuple[Array, Array]:
        at = int(np.searchsorted(self.keys, np.uint64(key)))
        if at == len(self.keys) or int(self.keys[at]) != key:
            return self.rows[:0], self.counts[:0]
        span = slice(int(self.offsets[at]), int(self.offsets[at + 1]))
        return self.rows[span], self.counts[span]

    def rows_of(self, keys: Array) -> Array:
        """The rows of several terms one after the other; the keys ascend, each is given once (uint64)."""
        at = positions_in(self.keys, keys)
        spans = [self.rows[self.offsets[term] : self.offsets[term + 1]] for term in at[at >= 0].tolist()]
        return np.concatenate(spans) if spans else self.rows[:0]

    def to_arrays(self, name: str) -> dict[str, Array]:
        return {f"{name}_{field}": getattr(self, field) for field in self.__slots__}

    @classmethod
    def from_tables(cls, tables: Tables, name: str) -> Postings:
        return cls(*(tables[f"{name}_{field}"] for field in cls.__slots__))


_OF_DOCUMENTS = ("file_keys", "marks", "languages", "title_sizes", "title_ids")


@dataclass(frozen=True, slots=True)
class MarkedDocument:
    file_key: bytes
    mark: bytes
    entry: DocumentEntry


class IndexSegment:
    """Documents sorted by source, with their chunks in order. `words` counts a title as part of each chunk; `alive` is
    a mask of documents; `name` is "" until a file keeps it."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.words = Postings.from_tables(tables, "word")
        self.titles = Postings.from_tables(tables, "title")
        self.lengths, self.spelled = tables["lengths"], tables["spelled"]
        self._first = tables["first_chunk"]
        self.alive = np.ones(len(self._first) - 1, dtype=bool)
        self.name = ""

    @classmethod
    def build(cls, documents: Sequence[MarkedDocument]) -> IndexSegment:
        documents = sorted(documents, key=lambda document: document.entry.source)
        entries = [document.entry for document in documents]
        spoken = [language_of(entry.text) for entry in entries]
        named = zip(map(title_of, (entry.text for entry in entries)), spoken, strict=True)
        titles = [sorted({*terms(title, language)[0]}) for title, language in named]
        lengths, spelled = list[int](), set[str]()
        refs = [ref for entry in entries for ref in entry.chunks]
        arrays: dict[str, Array] = {
            **_sources(entry.source for entry in entries),
            "file_keys": digests([document.file_key for document in documents], 20),
            "marks": digests([document.mark for document in documents], 16),
            "languages": np.array([LANGUAGES.index(language) for language in spoken], np.uint8),
            "first_chunk": np.cumsum([0, *(len(entry.chunks) for entry in entries)], dtype=np.int64),
            "chunk_ids": digests([ref.chunk_id for ref in refs], 20),
            "spans": np.array([(ref.start, ref.end) for ref in refs], np.int64).reshape(-1, 2),
            "title_sizes": np.array([len(title) for title in titles], np.uint32),
            "title_ids": np.array([key_of("\0".join(title)) for title in titles], np.uint64),
            **Postings.build(_words(zip(entries, spoken, strict=True), lengths, spelled)).to_arrays("word"),
            **Postings.build(titles).to_arrays("title"),
        }
        arrays["lengths"] = np.array(lengths, np.uint32)
        arrays["spelled"] = np.array(sorted({key_of(folded(word)) for word in typed_words(spelled)}), np.uint64)
        return cls(Tables(arrays, {}))

    @classmethod
    def merged(cls, parts: Sequence[IndexSegment]) -> IndexSegment:
        kept = [(at, number) for at, part in enumerate(parts) for number in np.flatnonzero(part.alive).tolist()]
        kept.sort(key=lambda place: parts[place[0]].source(place[1]))
        documents = [np.full(len(part.alive), -1, np.int64) for part in parts]
        chunks = [np.full(len(part.lengths), -1, np.int64) for part in parts]
        count = 0
        for new, (at, number) in enumerate(kept):
            span = parts[at].chunks_of(number)
            documents[at][number] = new
            chunks[at][span.start : span.stop] = range(count, count + len(span))
            count += len(span)

        def gathered(name: str, numbers: Sequence[Array]) -> Array:
            pairs = [(part.tables[name][new >= 0], new[new >= 0]) for part, new in zip(parts, numbers, strict=True)]
            rows, places = (np.concatenate(side) for side in zip(*pairs, strict=True))
            return rows[np.argsort(places)]

        words = Postings.merged([(part.words, new) for part, new in zip(parts, chunks, strict=True)])
        titles = Postings.merged([(part.titles, new) for part, new in zip(parts, documents, strict=True)])
        arrays: dict[str, Array] = {
            **_sources(parts[at].source(number) for at, number in kept),
            "first_chunk": np.cumsum([0, *(len(parts[at].chunks_of(n)) for at, n in kept)], dtype=np.int64),
            **{name: gathered(name, documents) for name in _OF_DOCUMENTS},
            **{name: gathered(name, chunks) for name in ("chunk_ids", "spans", "lengths")},
            "spelled": np.unique(np.concatenate([part.spelled for part in parts])),
            **words.to_arrays("word"),
            **titles.to_arrays("title"),
        }
        return cls(Tables(arrays, {}))

    def __len__(self) -> int:
        return len(self.lengths)

    def source(self, document: int) -> str:
        ends = self.tables["source_ends"]
        start = int(ends[document - 1]) if document else 0
        return self.tables["source_bytes"][start : int(ends[document])].tobytes().decode("utf-8", "surrogatepass")

    def chunks_of(self, document: int) -> range:
        return range(int(self._first[document]), int(self._first[document + 1]))

    def documents_of(self, file_key: bytes) -> Array:
        at = self._by_file.get(file_key, ())
        return np.array([number for number in at if self.alive[number]], np.int64)

    @cached_property
    def _by_file(self) -> dict[bytes, list[int]]:
        numbers: dict[bytes, list[int]] = {}
        for number, key in enumerate(self.tables["file_keys"]):
            numbers.setdefault(key.tobytes(), []).append(number)
        return numbers

    def document_of(self, row: int) -> int:
        return int(np.searchsorted(self._first, row, side="right")) - 1

    def passage(self, row: int) -> Passage:
        document = self.document_of(row)
        start, end = self.tables["spans"][row].tolist()
        chunk_id, index = self.tables["chunk_ids"][row].tobytes(), row - int(self._first[document])
        return Passage(chunk_id, self.source(document), start, end, index)

    @cached_property
    def languages(self) -> frozenset[str]:
        return frozenset(LANGUAGES[number] for number in np.unique(self.tables["languages"]))

    @cached_property
    def title_sizes(self) -> Array:
        """Number of terms in each document's title, int64 `[documents]`; -1: it has no title."""
        sizes = self.tables["title_sizes"].astype(np.int64)
        return np.where(sizes > 0, sizes, -1)

    @property
    def chunk_counts(self) -> Array:
        return np.diff(self._first)

    @cached_property
    def living(self) -> Array | None:
        """Mask of chunks of live documents, bool `[chunks]`; None if all are."""
        return None if self.alive.all() else np.repeat(self.alive, self.chunk_counts)

    @property
    def living_lengths(self) -> Array:
        return self.lengths if self.living is None else self.lengths[self.living]

    def bury(self, documents: Array) -> None:
        self.alive[documents] = False
        self.__dict__.pop("living", None)


def _sources(sources: Iterable[str]) -> dict[str, Array]:
    encoded = [source.encode("utf-8", "surrogatepass") for source in sources]
    ends = np.cumsum([len(source) for source in encoded], dtype=np.int64)
    return {"source_bytes": np.frombuffer(b"".join(encoded), np.uint8), "source_ends": ends}


def _words(
    documents: Iterable[tuple[DocumentEntry, str]], lengths: list[int], spelled: set[str]
) -> Iterator[list[str]]:
    """Yield the words of one chunk at a time, since all would take more memory than the index."""
    for entry, language in documents:
        for text in found_by(entry):
            words, wholes = terms(text, language, spelled)
            lengths.append(len(words))
            yield words + wholes


def digests(values: Sequence[bytes], size: int) -> Array:
    return np.frombuffer(b"".join(values), np.uint8).reshape(-1, size)
