"""Compare kvtool's index of words with SQLite's FTS5 over the same terms: recall, size, time.

    python samples/tools/fts5.py FORMAT INPUT.json [--every N]

All paragraphs of the set are one corpus, a paragraph a chunk (see samples/benchmarks/recall.py). FTS5 is given the
terms of kvtool, joined by spaces (`unicode61`, no columns kept), and ranks with its `bm25()`. The second hop is
kvtool's in both rows. Prints one row an index, in Markdown: recall@1 and @5 by words only, and with the second hop;
bytes on disk; milliseconds for a question's scores, and for an added document until it is on the disk.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.core.cache.entries import ChunkRef, DocumentEntry
from kvtool.core.retrieval import search
from kvtool.core.retrieval.index import Index
from kvtool.core.retrieval.passages import Passage, found_by
from kvtool.core.retrieval.search import Forms, Search, bm25_scores
from kvtool.core.retrieval.segment import IndexSegment, MarkedDocument
from kvtool.core.retrieval.tables import Array
from kvtool.core.retrieval.terms import asked_terms, language_of, terms
from samples.tools.eval import READERS, Example, load

ADDED = 20  # documents that are added one by one
Scores = Callable[[Index, Sequence[Forms]], Array]


def marked(number: int, body: str) -> MarkedDocument:
    chunk_id = hashlib.blake2b(body.encode(), digest_size=20).digest()
    entry = DocumentEntry(f"{number:07}", "text", body, (ChunkRef(chunk_id, 0, len(body), 0),))
    return MarkedDocument(chunk_id, bytes(16), entry)


class Fts5:
    """The chunks of an index in a table of FTS5, under the numbers of their rows."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path)
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute(
            "CREATE VIRTUAL TABLE chunks USING fts5(terms, content='', tokenize='unicode61 remove_diacritics 0')"
        )

    def add(self, first: int, documents: Sequence[MarkedDocument]) -> None:
        """Add documents of one chunk each, and bring them to the disk."""
        rows = []
        for number, document in enumerate(documents, first):
            words, wholes = terms(found_by(document.entry)[0], language_of(document.entry.text))
            rows.append((number, " ".join(map(token, words + wholes))))
        with self.connection:
            self.connection.executemany("INSERT INTO chunks(rowid, terms) VALUES (?, ?)", rows)

    def scores(self, index: Index, words: Sequence[Forms]) -> Array:
        """Score every chunk by `bm25()`, float64 `[rows]`."""
        found = np.zeros(index.rows)
        wanted = dict.fromkeys(token(form) for form in itertools.chain.from_iterable(words))
        if wanted:
            query = " OR ".join(f'"{one}"' for one in wanted)
            sql = "SELECT rowid, -bm25(chunks) FROM chunks WHERE chunks MATCH ?"
            for row, score in self.connection.execute(sql, (query,)):
                found[row] = score
        return found


def token(term: str) -> str:
    """A term as one word of `unicode61`: one with other characters than letters and digits by its bytes."""
    return term if term.isalnum() else f"x{term.encode('utf-8', 'surrogatepass').hex()}"


def recalls(index: Index, bodies: dict[str, str], asked: Sequence[Example], scores: Scores, hop: bool) -> list[float]:
    """Recall@1 and @5 of the supporting paragraphs, with these scores of words."""

    def text(passage: Passage) -> str:
        return bodies[passage.source]

    search.bm25_scores = scores  # type: ignore[assignment]
    found: dict[int, list[float]] = {1: [], 5: []}
    finder = Search(index, text)
    for example in asked:
        gold = {paragraph.body for paragraph in example.paragraphs if paragraph.supporting}
        hits = [bodies[hit.passage.source] for hit in finder.best(example.question, 5, hop=hop)]
        for most, shares in found.items():
            shares.append(len(gold & {*hits[:most]}) / len(gold))
    search.bm25_scores = bm25_scores  # type: ignore[assignment]
    return [statistics.fmean(shares) for shares in found.values()]


def milliseconds(calls: Sequence[Callable[[], object]]) -> float:
    """The median time of a call."""
    times = []
    for call in calls:
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format", choices=READERS)
    parser.add_argument("input", type=Path)
    parser.add_argument("--every", type=int, default=1, help="ask one question in so many")
    given = parser.parse_args()
    examples = list(READERS[given.format](load(given.input)))
    paragraphs = dict.fromkeys(p.body for example in examples for p in example.paragraphs)
    documents = [marked(number, body) for number, body in enumerate(paragraphs)]
    bodies = {document.entry.source: document.entry.text for document in documents}
    more = [marked(len(documents) + n, document.entry.text[::-1]) for n, document in enumerate(documents[:ADDED])]
    index, asked = Index.empty(), examples[:: given.every]
    with tempfile.TemporaryDirectory() as folder:
        own, table = Path(folder, "own"), Path(folder, "fts5")
        table.mkdir()
        index.segments = [IndexSegment.build(documents)]
        index.save(own)
        fts5 = Fts5(table / "words.db")
        fts5.add(0, documents)
        fts5.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        arrays = index.segments[0].tables.arrays
        postings = sum(array.nbytes for name, array in arrays.items() if name.startswith("word_"))
        sizes = [sum(path.stat().st_size for path in at.iterdir()) for at in (own, table)]
        asks = [asked_terms(example.question, index.languages) for example in asked]
        rows = []
        for scores in (bm25_scores, fts5.scores):
            found = [recalls(index, bodies, asked, scores, hop) for hop in (False, True)]
            took = milliseconds([lambda words=words, of=scores: of(index, words) for words in asks])  # type: ignore[misc]
            rows.append((*found[0], *found[1], took))
        added = [
            milliseconds([lambda one=one: add_own(index, one, own) for one in more]),  # type: ignore[misc]
            milliseconds([lambda n=n, one=one: fts5.add(n, [one]) for n, one in enumerate(more, len(documents))]),  # type: ignore[misc]
        ]
    counts = f"{len(documents):,} paragraphs, {len(asked):,} questions"
    print(f"{given.input.name}: {counts}, SQLite {sqlite3.sqlite_version}; postings of words {postings / 1e6:.2f} MB")
    for name, numbers, size, each in zip(("kvtool's", "FTS5"), rows, sizes, added, strict=True):
        *recall, took = numbers
        shown = " | ".join(f"{value:.3f}" for value in recall)
        print(f"| {name} | {shown} | {size / 1e6:.2f} MB | {took:.2f} | {each:.1f} |")


def add_own(index: Index, document: MarkedDocument, folder: Path) -> None:
    """Add a document to kvtool's index, and bring it to the disk."""
    index.segments.append(IndexSegment.build([document]))
    index._merge()
    index.save(folder)


if __name__ == "__main__":
    main()
