"""Documents that a text names: all terms of their title stand in it. What the second hop of a question follows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvtool.core.retrieval.index import Index
from kvtool.core.retrieval.postings import key_of
from kvtool.core.retrieval.tables import Array

Place = tuple[int, int]  # number of a segment, number of a document in it


def named_in(index: Index, words: Iterable[str]) -> dict[Place, float]:
    """The living documents all of whose title's terms are among these words.

    Each comes with its share: 1 over the number of documents that have the very same title.
    """
    keys = np.array(sorted({key_of(word) for word in words}), np.uint64)
    places: list[Place] = []
    titles: list[Array] = []
    for number, segment in enumerate(index.segments):
        sizes = segment.title_sizes
        held = np.bincount(segment.titles.rows_of(keys), minlength=len(sizes))
        documents = np.flatnonzero(held == sizes)
        documents = documents[segment.alive[documents]]
        places += [(number, document) for document in documents.tolist()]
        titles.append(segment.tables["title_ids"][documents])
    if not places:
        return {}
    _, which, counts = np.unique(np.concatenate(titles), return_inverse=True, return_counts=True)
    return dict(zip(places, (1 / counts[which]).tolist(), strict=True))
