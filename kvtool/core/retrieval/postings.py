"""Postings of an inverted index: the rows of each term with its count, sorted, in four arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kvtool.core.retrieval.tables import Array, Tables

_MOST = 65_535  # times that a term counts in one row


@lru_cache(maxsize=1 << 20)
def key_of(term: str) -> int:
    """A term as a 64-bit digest, so that terms of any script fit one array.

    Among a million terms two share a digest with a chance of 10^-7.
    """
    digest = hashlib.blake2b(term.encode("utf-8", "surrogatepass"), digest_size=8, person=b"kvtool term").digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class Postings:
    """Postings lists: the rows of each term, and its count in each.

    Attributes
    ----------
    keys : uint64 `[terms]`, ascending digests.
    offsets : int64 `[terms + 1]`, the first posting of each term.
    rows, counts : uint32 and uint16 `[postings]`; a term's rows ascend.
    """

    keys: Array
    offsets: Array
    rows: Array
    counts: Array

    @classmethod
    def build(cls, texts: Iterable[Sequence[str]]) -> Postings:
        """Index rows by their terms; row i is given as the i-th sequence of words."""
        numbers: dict[str, int] = {}
        occurrences: list[Array] = []
        for row, words in enumerate(texts):
            terms = np.fromiter((numbers.setdefault(word, len(numbers)) for word in words), np.int64, len(words))
            occurrences.append(terms << 32 | row)
        all_pairs = np.concatenate(occurrences) if occurrences else np.empty(0, np.int64)
        pairs, counts = np.unique(all_pairs, return_counts=True)
        keys = np.fromiter(map(key_of, numbers), np.uint64, len(numbers))
        lengths = np.bincount(pairs >> 32, minlength=len(keys))
        order = np.argsort(keys)
        # The lists are whole already; they only change places.
        starts = np.repeat((np.cumsum(lengths) - lengths)[order], lengths[order])
        offsets = np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int64)
        places = starts + np.arange(len(pairs)) - np.repeat(offsets[:-1], lengths[order])
        rows = (pairs[places] & 0xFFFFFFFF).astype(np.uint32)
        return cls(keys[order], offsets, rows, np.minimum(counts[places], _MOST).astype(np.uint16))

    @classmethod
    def merged(cls, parts: Sequence[tuple[Postings, Array]]) -> Postings:
        """Join several postings, each given with the new numbers of its rows (int64 `[rows]`; -1: the row goes)."""
        keys, rows, counts = [], [], []
        for postings, renumbered in parts:
            moved = renumbered[postings.rows]
            kept = moved >= 0
            keys.append(np.repeat(postings.keys, np.diff(postings.offsets))[kept])
            rows.append(moved[kept].astype(np.uint32))
            counts.append(postings.counts[kept])
        return _sorted(np.concatenate(keys), np.concatenate(rows), np.concatenate(counts))

    def of(self, key: int) -> tuple[Array, Array]:
        """The rows that have a term, and how often each has it."""
        at = int(np.searchsorted(self.keys, np.uint64(key)))
        if at == len(self.keys) or int(self.keys[at]) != key:
            return self.rows[:0], self.counts[:0]
        span = slice(int(self.offsets[at]), int(self.offsets[at + 1]))
        return self.rows[span], self.counts[span]

    def rows_of(self, keys: Array) -> Array:
        """The rows of several terms one after the other; the keys ascend, each is given once (uint64)."""
        at = np.searchsorted(self.keys, keys)
        known = at < len(self.keys)
        known[known] = self.keys[at[known]] == keys[known]
        spans = [self.rows[self.offsets[term] : self.offsets[term + 1]] for term in at[known].tolist()]
        return np.concatenate(spans) if spans else self.rows[:0]

    def to_arrays(self, name: str) -> dict[str, Array]:
        """The four arrays under names that begin with `name`, for a file."""
        fields = ("keys", "offsets", "rows", "counts")
        return {f"{name}_{field}": getattr(self, field) for field in fields}

    @classmethod
    def from_tables(cls, tables: Tables | Mapping[str, Array], name: str) -> Postings:
        """Inverse of :meth:`to_arrays`."""
        keys, offsets, rows, counts = (tables[f"{name}_{field}"] for field in ("keys", "offsets", "rows", "counts"))
        return cls(keys, offsets, rows, counts)


def _sorted(keys: Array, rows: Array, counts: Array) -> Postings:
    order = np.lexsort((rows, keys))
    keys = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else np.empty(0, np.int64)
    offsets = np.append(starts, len(keys)).astype(np.int64)
    return Postings(keys[starts], offsets, rows[order], np.minimum(counts[order], _MOST).astype(np.uint16))
