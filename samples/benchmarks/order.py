"""How many of the passages that later questions find are computed already, by the share that is and by their order.

    python samples/benchmarks/order.py FORMAT=INPUT.json ... [--splits N]

FORMAT is one of `samples/tools/eval.py`; paragraphs of one title are a document, a paragraph a chunk. Half of a set's
questions, drawn at random, were asked before; the other half is asked after a share of the chunks was computed. Printed
are the means over splits, in percent, with the half width of their 95 % interval. No language model is needed.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.core.retrieval.index import Index
from kvtool.core.retrieval.passages import Passage, found_by
from kvtool.core.retrieval.search import Search
from kvtool.core.retrieval.segment import IndexSegment, MarkedDocument
from samples.benchmarks.recall import document
from samples.tools.eval import READERS, load

SHARES = (5, 10, 20, 40, 60)  # percent
FOUND = 5  # passages of a question


class Corpus:
    """A set's paragraphs, and what each of its questions finds."""

    def __init__(self, form: str, path: Path) -> None:
        examples = list(READERS[form](load(path)))
        titles: dict[str, dict[str, None]] = {}
        for paragraph in (paragraph for example in examples for paragraph in example.paragraphs):
            titles.setdefault(paragraph.title, {})[paragraph.body] = None
        entries = [
            document(number, body) for number, body in enumerate(b for bodies in titles.values() for b in bodies)
        ]
        texts = {entry.source: entry for entry in entries}
        ids = iter(entry.chunks[0].chunk_id for entry in entries)
        self.documents = [[next(ids) for _ in bodies] for bodies in titles.values()]
        index = Index.empty()
        index.segments = [IndexSegment.build([MarkedDocument(bytes(20), bytes(16), entry) for entry in entries])]

        def text(passage: Passage) -> str:
            return found_by(texts[passage.source])[passage.index]

        self._search = Search(index, text)
        self.questions = [self.found(example.question) for example in examples]
        self.central = Counter(chunk for title in titles for chunk in self.found(title))
        self.chunks = [chunk for chunks in self.documents for chunk in chunks]

    def found(self, question: str) -> list[bytes]:
        return [hit.passage.chunk_id for hit in self._search.best(question, FOUND, None)]


def missed(corpus: Corpus, used: Mapping[bytes, float]) -> list[bytes]:
    """What was asked before: the order of kvtool."""
    return sorted(corpus.chunks, key=lambda chunk: -used.get(chunk, 0.0))


def neighbours(corpus: Corpus, used: Mapping[bytes, float]) -> list[bytes]:
    """What was asked before, then the other chunks of its documents, the nearest first."""
    place: dict[bytes, tuple[float, float]] = {}
    for chunks in corpus.documents:
        numbers = [number for number, chunk in enumerate(chunks) if chunk in used]
        for number, chunk in enumerate(chunks):
            near = min((abs(number - other) for other in numbers), default=len(corpus.chunks))
            place[chunk] = (-used.get(chunk, 0.0), near)
    return sorted(corpus.chunks, key=place.__getitem__)


def central(corpus: Corpus, used: Mapping[bytes, float]) -> list[bytes]:
    """What was asked before, then what the most titles find."""
    return sorted(corpus.chunks, key=lambda chunk: (-used.get(chunk, 0.0), -corpus.central[chunk]))


def by_name(corpus: Corpus, used: Mapping[bytes, float]) -> list[bytes]:
    return corpus.chunks


def drawn(corpus: Corpus, used: Mapping[bytes, float]) -> list[bytes]:
    return random.Random(len(used)).sample(corpus.chunks, len(corpus.chunks))


ORDERS: tuple[Callable[[Corpus, Mapping[bytes, float]], list[bytes]], ...] = (
    *(missed, neighbours, central, by_name, drawn),
)


def shown(rates: Sequence[float]) -> str:
    return f"{100 * mean(rates):5.1f} ±{196 * stdev(rates) / len(rates) ** 0.5:3.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", metavar="FORMAT=INPUT.json")
    parser.add_argument("--splits", type=int, default=20)
    given = parser.parse_args()
    for form, _, path in (name.partition("=") for name in given.sets):
        corpus = Corpus(form, Path(path))
        rates: dict[tuple[str, int], list[float]] = {}
        for seed in range(given.splits):
            questions = random.Random(seed).sample(corpus.questions, len(corpus.questions))
            half = len(questions) // 2
            used = Counter(chunk for found in questions[:half] for chunk in found)
            asked = [chunk for found in questions[half:] for chunk in found]
            for order in ORDERS:
                place = {chunk: number for number, chunk in enumerate(order(corpus, dict(used)))}
                for share in SHARES:
                    count = len(place) * share / 100
                    hits = sum(place[chunk] < count for chunk in asked) / len(asked)
                    rates.setdefault((order.__name__, share), []).append(hits)
        print(
            f"{path}: {len(corpus.chunks)} chunks, {len(corpus.documents)} documents, {len(corpus.questions)} questions"
        )
        print("computed     " + "".join(f"{share:>9} %" for share in SHARES))
        for order in ORDERS:
            print(f"{order.__name__:12} " + "".join(f"{shown(rates[order.__name__, share]):>11}" for share in SHARES))


if __name__ == "__main__":
    main()
