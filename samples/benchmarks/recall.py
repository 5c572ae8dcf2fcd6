"""How many of the paragraphs that answer a question are among the first that kvtool finds.

    python samples/benchmarks/recall.py {hotpotqa|musique|squad} INPUT.json [--no-hop] [--embedder MODEL [--dense]]
                             [--every N] [--found N]

All paragraphs of the set are one corpus, a paragraph a chunk; a question's recall is the share of its supporting
paragraphs that were found. No language model is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.core.cache.entries import ChunkRef, DocumentEntry
from kvtool.core.retrieval.embed import Embedder
from kvtool.core.retrieval.index import Index
from kvtool.core.retrieval.passages import Passage, found_by
from kvtool.core.retrieval.search import Search
from kvtool.core.retrieval.segment import Array, IndexSegment, MarkedDocument
from kvtool.core.retrieval.terms import asked_terms, without_idle
from samples.tools.eval import READERS, load


def document(number: int, body: str) -> DocumentEntry:
    chunk_id = hashlib.blake2b(body.encode(), digest_size=20).digest()
    return DocumentEntry(f"{number:07}", "text", body, (ChunkRef(chunk_id, 0, len(body), 0),))


def scaled(found: Array) -> Array:
    """Scale the likeness of every question's chunks from 0, the least alike, to 1."""
    low, high = found.min(1, keepdims=True), found.max(1, keepdims=True)
    return ((found - low) / (high - low)).astype(np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format", choices=READERS)
    parser.add_argument("input", type=Path)
    parser.add_argument("--no-hop", action="store_true", help="words (and meaning) alone")
    parser.add_argument("--every", type=int, default=1, help="ask one question in so many")
    parser.add_argument("--embedder", help="find by meaning, too, with vectors of this model")
    parser.add_argument("--dense", action="store_true", help="by meaning alone")
    parser.add_argument("--found", type=int, default=5, help="how many are found for each question")
    given = parser.parse_args()
    examples = list(READERS[given.format](load(given.input)))
    bodies = dict.fromkeys(p.body for example in examples for p in example.paragraphs)
    entries = [document(number, body) for number, body in enumerate(bodies)]
    index = Index.empty()
    started = time.perf_counter()
    index.segments = [IndexSegment.build([MarkedDocument(bytes(20), bytes(16), entry) for entry in entries])]
    built = time.perf_counter() - started
    by_source = {entry.source: entry for entry in entries}

    def text(passage: Passage) -> str:
        return found_by(by_source[passage.source])[passage.index]

    asked = examples[:: given.every]
    likeness: Sequence[Array | None] = [None] * len(asked)
    if given.embedder:
        embedder = Embedder(given.embedder)
        texts = [text(index.passage(row)) for row in range(index.rows)]
        likeness = list(scaled(embedder.encode([one.question for one in asked]) @ embedder.encode(texts).T))
    search, total, left, started = Search(index, text), 0.0, 0, time.perf_counter()
    for example, like in zip(asked, likeness, strict=True):
        gold = {p.body for p in example.paragraphs if p.supporting}
        hits = search.best(example.question, given.found, like, hop=not given.no_hop, words=not given.dense)
        left += not search.matches(asked_terms(without_idle(example.question), index.languages))
        total += len(gold & {by_source[hit.passage.source].text for hit in hits}) / len(gold)
    each = (time.perf_counter() - started) / len(asked) * 1e3
    print(
        f"{len(entries)} paragraphs, {len(asked)} questions: recall@{given.found} {total / len(asked):.4f}; "
        f"indexed in {built:.2f} s, {each:.1f} ms a question; "
        f"{left} have no word of any paragraph, stop words and greetings aside"
    )


if __name__ == "__main__":
    main()
