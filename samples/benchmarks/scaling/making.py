"""A folder of small files, and the store that `kvtool ingest` would make of it: by the store's writer, without a model.

Chunks, ids and descriptions are those of an ingest; only the KV is made up, of numbers drawn once. An ingest checks
that the store is what it would have made: it has to find nothing changed.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kvtool.core.cache import tables
from kvtool.core.cache.record import Kind, KVHeader, encode_record, seal
from kvtool.core.cache.store import Store
from kvtool.core.cache.tables import Row, document_row, file_row
from kvtool.core.cache.tree import Transaction
from kvtool.core.cache.writer import Writer
from kvtool.core.common.machine import Arithmetic
from kvtool.core.corpus.reading import Reading
from kvtool.core.corpus.walk import FoundFile
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.stream import Choices
from kvtool.core.ingest.survey import ChangedFile, PreparedFile, Seen, Survey, prepare
from kvtool.core.session.identity import StoreIdentity

CHUNKS = 10  # of a file
_WORDS, _VOCABULARY = 16, 100_000  # of a chunk; of all files
_FILES_A_FOLDER, _AT_ONCE = 1_000, 250  # files
_BATCHES = 32  # in one transaction: keys are digests, so each touches nearly every page of a smaller store
_HEAD = 8  # size of the model's only head
Vocabulary = tuple[list[str], list[float]]


@cache
def vocabulary() -> Vocabulary:
    """Words, and their cumulative weights: those of a natural language (Zipf)."""
    syllables = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
    words = ("".join(parts) for length in (2, 3) for parts in itertools.product(syllables, repeat=length))
    weights = itertools.accumulate(1 / rank for rank in range(1, _VOCABULARY + 1))
    return list(itertools.islice(words, _VOCABULARY)), list(weights)


def text_of(number: int) -> str:
    """A file's text: a title, and a paragraph a chunk."""
    dice, (words, weights) = random.Random(number), vocabulary()
    title = f"Note {number} {' '.join(dice.choices(words, cum_weights=weights, k=3))}"
    paragraphs = (" ".join(dice.choices(words, cum_weights=weights, k=_WORDS)) for _ in range(CHUNKS))
    return "\n\n".join([title, *(f"{paragraph}." for paragraph in paragraphs)]) + "\n"


def question(seed: int) -> str:
    """A question of ten words, frequent and rare ones."""
    words, weights = vocabulary()
    return " ".join(random.Random(f"question {seed}").choices(words, cum_weights=weights, k=10))


def path_of(folder: Path, number: int) -> Path:
    return folder / f"{number // _FILES_A_FOLDER:04d}" / f"{number:07d}.txt"


def write_files(folder: Path, count: int) -> None:
    for number in range(count):
        path_of(folder, number).parent.mkdir(parents=True, exist_ok=True)
        restore(folder, number)


def restore(folder: Path, number: int) -> None:
    """Write a file's text, unless the file holds just that already."""
    path, text = path_of(folder, number), text_of(number)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def fill(store_path: Path, files: Path, count: int) -> None:
    """Put what an ingest of these files would have stored into a store that an ingest has made of the first.

    Rows go into LMDB as they are, many files a transaction: a commit of the writer looks at every page on its way.
    """
    lengths = [min(_AT_ONCE, count - at) for at in range(1, count - 1, _AT_ONCE)]
    batches = [
        (store_path, files, at, length) for at, length in zip(range(1, count - 1, _AT_ONCE), lengths, strict=True)
    ]
    with Store.open(store_path) as store, store.writer(), multiprocessing.get_context("spawn").Pool(2) as pool:
        made = pool.imap(_rows_of_batch, batches)
        while rows := sorted(row for some in itertools.islice(made, _BATCHES) for row in some):
            need = sum(len(value) for _, value in rows)
            store.environment.write(lambda transaction, rows=rows: _put(transaction, rows), 2 * need)
        last = [*_rows(_cut(path_of(files, count - 1), *_cutting(store_path)))]
        Writer(store).commit(last)  # which counts: the index sees that documents are others


def _put(transaction: Transaction, rows: list[tuple[bytes, bytes]]) -> None:
    for key, value in rows:
        transaction.put(key, value)


def _rows_of_batch(batch: tuple[Path, Path, int, int]) -> list[tuple[bytes, bytes]]:
    """Read and cut files as an ingest does; what is to be stored, sorted."""
    store_path, files, start, length = batch
    paths = (path_of(files, number) for number in range(start, start + length))
    rows = (row for path in paths for row in _rows(_cut(path, *_cutting(store_path))))
    return sorted({table + key: value for table, key, value in rows}.items())


@cache
def _cutting(store_path: Path) -> tuple[StoreIdentity, Any]:
    with Store.open(store_path) as store:
        choices = Choices(store, IngestOptions(offline=True))
        return choices.identity, choices.tokenizer


def _cut(path: Path, identity: StoreIdentity, tokenizer: Any) -> PreparedFile:
    status = path.stat()
    found = FoundFile(str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    with Reading() as reading:
        changed = Survey(identity.settings_digest(), reading, Seen(None)).look(found)
    assert isinstance(changed, ChangedFile)
    return prepare(changed, identity, tokenizer)


def _rows(file: PreparedFile) -> Iterator[Row]:
    now = int(time.time())
    for chunk in file.chunks:
        key, tokens = chunk.chunk_id, len(chunk.ids)
        info = chunk.info(1, np.ones(tokens, np.float16).tobytes(), Arithmetic("float32", "cpu"))
        size, at = 2 * _HEAD * tokens, int.from_bytes(key[:2], "little") * 2
        numbers = [_drawn()[at : at + size], _drawn()[at + size : at + 2 * size]]
        record = encode_record(key, KVHeader("bfloat16", 1, tokens, _HEAD, _HEAD, "raw", 0), numbers)
        level = tables.level_key(key, "raw")
        yield tables.CHUNKS, key, seal(key, Kind.CHUNK, info.to_bytes())
        yield tables.ADDED, key, tables.seal_number(key, now)
        yield tables.RECORDS, tables.record_key(key, "raw", 0), record
        yield tables.LEVELS, level, tables.LevelRow(1, tokens, len(record)).seal(level)
    yield from map(document_row, file.documents)
    yield file_row(file.entry)


@cache
def _drawn() -> bytes:
    """Numbers in bfloat16."""
    numbers = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    return bytes(numbers.view(np.uint32).__rshift__(16).astype(np.uint16).tobytes())
