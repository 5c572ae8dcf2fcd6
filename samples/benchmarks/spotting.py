"""How much of a corpus is found again in prompts that its passages are pasted into, form by form.

    python samples/benchmarks/spotting.py TOKENIZER (FOLDER | {hotpotqa|musique|squad}:FILE) [--group N]
    python samples/benchmarks/spotting.py random CHUNKS
    python samples/benchmarks/spotting.py followed CHUNKS

The second form takes random token ids, 180 a chunk, and says what an index of so many chunks costs. The third one puts
such chunks without KV into a store, as documents of ten chunks and as learned passages, and says how long reading them
all takes, and how long a question waits for what another process has added: a document, a passage.

TOKENIZER is a `tokenizer.json`. Documents are cut into chunks as an ingest does; groups of N chunks are shuffled and
pasted with what clients write around them. No language model is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.core.cache.entries import ChunkRef, ChunkSpec, DocumentEntry, FileEntry
from kvtool.core.cache.store import Store
from kvtool.core.common.machine import Arithmetic
from kvtool.core.common.types import Ids
from kvtool.core.corpus.split import SplitSettings, split
from kvtool.core.retrieval.finder import Finder
from kvtool.core.retrieval.spotting import Spotter
from kvtool.core.session.identity import LeadInIds, StoreIdentity
from kvtool.core.session.learned import LearnedStore
from samples.tools.eval import READERS, load

Form = Callable[[int, str], str]
FORMS: dict[str, Form] = {
    "blank line": lambda number, text: f"{text}\n\n",
    "newline": lambda number, text: f"{text}\n",
    "space": lambda number, text: f"{text} ",
    "nothing": lambda number, text: text,
    "`Passage 1: `": lambda number, text: f"Passage {number}: {text}\n\n",
    "`[1] `": lambda number, text: f"[{number}] {text}\n",
    "`- `": lambda number, text: f"- {text}\n",
    "`---`": lambda number, text: f"{text}\n---\n",
    "Markdown fence": lambda number, text: f"```\n{text}\n```\n\n",
    "`<doc>`": lambda number, text: f'<doc id="{number}">{text}</doc>\n',
    "quoted (`> `)": lambda number, text: textwrap.indent(text, "> ", lambda line: True) + "\n\n",
    "JSON string": lambda number, text: json.dumps({"text": text}, ensure_ascii=False) + "\n",
    "wrapped at 80": lambda number, text: "\n".join(textwrap.fill(line, 80) for line in text.splitlines()) + "\n\n",
    "second half": lambda number, text: text[len(text) // 2 :] + "\n\n",
    "middle third": lambda number, text: text[len(text) // 3 : 2 * len(text) // 3] + "\n\n",
}
SHARES = {"second half": 1 / 2, "middle third": 1 / 3}  # of a chunk that are pasted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("corpus")
    parser.add_argument("--group", type=int, default=5, help="chunks in a prompt")
    given = parser.parse_args()
    if str(given.tokenizer) == "random":
        return cost(int(given.corpus))
    if str(given.tokenizer) == "followed":
        return follow(int(given.corpus))
    tokenizer = Tokenizer.from_file(str(given.tokenizer))

    def ids_of(texts: Sequence[str]) -> list[list[int]]:
        return [encoded.ids for encoded in tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    documents = list(dict.fromkeys(documents_of(given.corpus)))
    chunks = list(dict.fromkeys(cut(documents, ids_of)))
    ids = {
        digest(text): tokens for text, tokens in zip(chunks, ids_of([f"{text}\n\n" for text in chunks]), strict=True)
    }
    spotter = Spotter(ids.__getitem__)
    started = time.thread_time()
    spotter.update(ids)
    built = time.thread_time() - started
    total = sum(map(len, ids.values()))
    print(f"{len(ids):,} chunks of {total:,} tokens; {spotter.nbytes / len(ids):.0f} bytes a chunk, {built:.2f} s\n")
    shuffled = random.Random(0).sample(chunks, len(chunks))
    groups = [shuffled[first : first + given.group] for first in range(0, len(shuffled), given.group)]
    print("| pasted with | chunks found | of their tokens | ms a prompt of 8,000 tokens |\n| --- | --- | --- | --- |")
    for name, form in FORMS.items():
        texts = ["".join(form(number, text) for number, text in enumerate(group, 1)) for group in groups]
        row(name, texts, ids_of, spotter, len(chunks), total * SHARES.get(name, 1))
    row("whole documents", [f"{text}\n\n" for text in documents], ids_of, spotter, len(chunks), total)


def cost(chunks: int) -> None:
    """Print what an index of random chunks takes, and a prompt of 7,800 tokens with forty of them."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, (chunks, 180), np.uint32)
    spotter = Spotter(lambda chunk_id: tokens[int.from_bytes(chunk_id, "big")].tolist())
    started = time.thread_time()
    spotter.update(number.to_bytes(20, "big") for number in range(chunks))
    built = time.thread_time() - started
    rows = rng.integers(chunks, size=40)
    prompt = np.concatenate([np.concatenate((rng.integers(0, 50_000, 15), tokens[row])) for row in rows]).tolist()
    taken = []
    for _ in range(30):
        started = time.thread_time()
        assert len(spotter.spot(prompt)) == len(rows)
        taken.append(1000 * (time.thread_time() - started))
    size = spotter.nbytes / chunks
    print(f"{chunks:,} chunks: built in {built:.2f} s, {size:.0f} bytes a chunk, {np.median(taken):.2f} ms a prompt")


def follow(chunks: int) -> None:
    """Print how long questions wait for what is in a store of so many chunks, and for what another process added."""
    rng, arithmetic = np.random.default_rng(0), Arithmetic("float32", "cpu")
    identity = StoreIdentity("", "", "float32", (), (), LeadInIds("none", ()), SplitSettings())
    decoder: Any = SimpleNamespace(loaded=SimpleNamespace(arithmetic=arithmetic))

    def put(store: Store, documents: int, each: int, wanted: Callable[[Ids], ChunkSpec], name: str = "") -> None:
        with store.writer() as writer:
            files = []
            for _ in range(documents):
                specs = [wanted(tuple(rng.integers(0, 50_000, 180).tolist())) for _ in range(each)]
                writer.describe({spec.chunk_id: spec.info(1, b"", arithmetic) for spec in specs})
                words = [" ".join(f"w{word}" for word in rng.integers(0, 50_000, 120)) for _ in specs]
                size = len(words[0])
                refs = tuple(ChunkRef(spec.chunk_id, at * size, (at + 1) * size, 180) for at, spec in enumerate(specs))
                source = name + specs[0].chunk_id.hex()
                document = DocumentEntry(source, "text", "".join(word[:size].ljust(size) for word in words), refs)
                files.append((FileEntry(source, 1, 0, "", "", (source,)), [document]))
            writer.commit_files(files)

    def timed(spot: Callable[[], object]) -> str:
        started = time.thread_time()
        spot()
        return f"{1000 * (time.thread_time() - started):,.0f} ms"

    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"KVTOOL_CACHE": folder, "KVTOOL_DISK_RESERVE": "0"}
        with Store.create_or_open(Path(folder, "store")) as store, Store.create_or_open(store.path) as other:
            put(store, chunks // 10, 10, identity.wanted)
            finder = Finder(store)
            print(f"documents: {timed(lambda: finder.spot(range(9)))} at first", end="")
            for _ in range(3):
                put(other, 1, 10, identity.wanted)
                print(f", {timed(lambda: finder.spot(range(9)))} after a document", end="")
        learned = LearnedStore("0", identity, decoder, 10**12, lambda text, hint: print(text))
        with Store.open(learned.store.path) as other:
            put(other, chunks, 1, partial(learned.wanted, "all"), "all/")
            print(f"\nlearned: {timed(lambda: learned.trim(None))} at the start of a server", end="")
            for _ in range(3):
                put(other, 1, 1, partial(learned.wanted, "all"), "all/")
                print(f", {timed(lambda: learned.spot(range(9), 'all'))} after a passage", end="")
        learned.close()
    print()


def row(
    name: str,
    texts: Sequence[str],
    ids_of: Callable[[Sequence[str]], list[list[int]]],
    spotter: Spotter,
    chunks: int,
    tokens: float,
) -> None:
    """Print one form's row."""
    prompts = ids_of([f"Use these passages.\n\n{text}Question: who was it?" for text in texts])
    started = time.thread_time()
    spans = [(number, span) for number, prompt in enumerate(prompts) for span in spotter.spot(prompt)]
    each = 8000 * (time.thread_time() - started) / sum(map(len, prompts))
    found = len({(number, span.chunk_id) for number, span in spans})
    share = sum(len(span) for _, span in spans) / tokens
    print(f"| {name} | {found / chunks:.1%} | {share:.1%} | {1000 * each:.2f} |", flush=True)


def documents_of(corpus: str) -> Iterable[str]:
    """Read the texts of a folder, or the paragraphs of a set of questions."""
    form, _, path = corpus.partition(":")
    if form in READERS:
        yield from (p.body for example in READERS[form](load(Path(path))) for p in example.paragraphs)
        return
    for file in sorted(Path(corpus).rglob("*")):
        if file.suffix in (".md", ".txt", ".rst", ".tex"):
            yield file.read_text(encoding="utf-8")


def cut(documents: Iterable[str], ids_of: Callable[[Sequence[str]], list[list[int]]]) -> Iterable[str]:
    """Cut documents into chunks."""
    for text in documents:
        spans = split(text, SplitSettings(), lambda texts: [len(ids) for ids in ids_of(texts)], "markdown")
        yield from (text[span.start : span.end].strip() for span in spans)


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=20).digest()


if __name__ == "__main__":
    main()
