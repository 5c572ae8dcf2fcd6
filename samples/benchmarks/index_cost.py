"""What the retrieval index costs: building it, taking in one changed file, one question.

    python samples/benchmarks/index_cost.py FOLDER [--chunks 100000]

makes a store of random texts in FOLDER (1,000 files of JSON lines, words with the frequencies of a natural language,
records of a few bytes: no model), and prints one line a figure. FOLDER must not exist.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import statistics
import time
from pathlib import Path

from kvtool.core.cache.entries import ChunkInfo, ChunkRef, DocumentEntry, FileEntry
from kvtool.core.cache.record import KVHeader, encode_record
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.retrieval.index import index_of
from kvtool.core.retrieval.passages import Passage, found_by
from kvtool.core.retrieval.search import Search

FILES, WORDS, VOCABULARY = 1000, 150, 200_000


def text_of(dice: random.Random, number: int, words: list[str], weights: list[float]) -> str:
    own = dice.choices(words, cum_weights=weights, k=WORDS)
    return f"{' '.join(own[:3])} {number}\n\n{' '.join(own)}."


def commit(writer: Writer, path: str, texts: list[str]) -> None:
    documents = []
    for number, text in enumerate(texts):
        chunk_id = hashlib.blake2b(text.encode(), digest_size=20).digest()
        record = encode_record(chunk_id, KVHeader("bfloat16", 1, 1, 2, 2, "raw", 0), [bytes(4), bytes(4)])
        writer.put_chunk(chunk_id, ChunkInfo((number,), bytes(16), 1), "raw", [record])
        documents.append(DocumentEntry(f"{path}#{number}", "text", text, (ChunkRef(chunk_id, 0, len(text), 1),)))
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()
    writer.commit_file(FileEntry(path, 1, 1, digest, "", tuple(one.source for one in documents)), documents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chunks", type=int, default=100_000)
    given = parser.parse_args()
    given.folder.mkdir()
    dice = random.Random(0)
    words = [f"w{number:x}" for number in range(VOCABULARY)]
    weights, total = [], 0.0
    for rank in range(1, VOCABULARY + 1):  # Zipf
        total += 1 / rank
        weights.append(total)
    each = given.chunks // FILES

    def texts(seed: int) -> list[str]:
        own = random.Random(seed)
        return [text_of(own, seed * each + number, words, weights) for number in range(each)]

    with Store.create_or_open(given.folder / "store") as store:
        with store.writer() as writer:
            for file in range(FILES):
                commit(writer, f"f{file}.jsonl", texts(file))
        started = time.perf_counter()
        index = index_of(store)
        print(f"{len(index):,} chunks indexed in {time.perf_counter() - started:.1f} s")
        times = []
        for change in range(5):
            with store.writer() as writer:
                commit(writer, f"f{change}.jsonl", texts(FILES + change))
            started = time.perf_counter()
            index = index_of(store)
            times.append(time.perf_counter() - started)
        print(f"one changed file of {each} documents: {statistics.median(times):.2f} s")

        def text(passage: Passage) -> str:
            document = store.document(passage.source)
            return found_by(document)[passage.index] if document is not None else ""

        questions = [" ".join(dice.choices(words, cum_weights=weights, k=10)) for _ in range(50)]
        cold, warm = [], []
        for question in questions:
            started = time.perf_counter()
            fresh = index_of(store)
            Search(fresh, text).best(question, 5)
            cold.append(time.perf_counter() - started)
            started = time.perf_counter()
            Search(fresh, text).best(question, 5)
            warm.append(time.perf_counter() - started)
        print(
            f"a question: {statistics.median(warm) * 1e3:.1f} ms, "
            f"{statistics.median(cold) * 1e3:.1f} ms with opening the index"
        )
        size = sum(path.stat().st_size for path in (given.folder / "store" / "index").rglob("*") if path.is_file())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"the index: {size / 1e6:.0f} MB on disk; this process at most {peak:.0f} MB")


if __name__ == "__main__":
    main()
