"""Costs that do not grow with a store: counted in pages of the index by table, and in documents that are read."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache import tables
from kvtool.core.cache.entries import DocumentEntry, FileEntry
from kvtool.core.cache.pages import Leaf
from kvtool.core.cache.store import Store
from kvtool.core.cache.tree import Tree
from kvtool.core.retrieval.index import index_of
from kvtool.core.upkeep.forget import forget, pin, unpin
from tests.stores import put

DOCUMENTS, CHUNKS = 12, 5  # of a file, of a document
OF_CHUNKS = (tables.CHUNKS, tables.LEVELS, tables.RECORDS, tables.USED, tables.ADDED)


def entry(file: int, number: int, chunks: Any) -> DocumentEntry:
    return DocumentEntry(f"/in/{file}.jsonl#{number}", "text", f"Mill {file} of row {number}", tuple(chunks))


def store_of(path: Path, files: int) -> Path:
    with Store.create_or_open(path) as store:
        with store.writer() as pen:
            pen.set_manifest({"model": "tiny"})
            for file in range(files):
                rows = [
                    entry(file, number, [put(pen, f"{file} {number} {at}") for at in range(CHUNKS)])
                    for number in range(DOCUMENTS)
                ]
                pen.commit_file(FileEntry(f"/in/{file}.jsonl", 1, 2, "d", "s", tuple(row.source for row in rows)), rows)
            pen.collect()
        index_of(store)
    return path


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("growth")
    return store_of(folder / "small", 5), store_of(folder / "large", 20)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Documents that were read, and leaves of the tables that are of chunks."""
    count: Counter[str] = Counter()
    document, parse = Store.document, Tree._parse

    def reading(store: Store, source: str) -> Any:
        count["documents"] += 1
        return document(store, source)

    def parsing(tree: Tree, page: int, ordered: bool = True) -> Any:
        node = parse(tree, page, ordered)
        if isinstance(node, Leaf) and node.keys and node.keys[0][:1] in OF_CHUNKS:
            count["leaves"] += 1
        return node

    monkeypatch.setattr(Store, "document", reading)
    monkeypatch.setattr(Tree, "_parse", parsing)
    return count


def change(path: Path) -> None:
    with Store.open(path) as store, store.writer() as pen:
        old = store.file("/in/1.jsonl")
        rows = [store.document(source) for source in old.documents]
        kept = [row for row in rows[1:] if row is not None]
        pen.commit_file(replace(old, digest="e"), [entry(1, 0, [put(pen, "another")]), *kept])
        assert pen.collect(referred=lambda chunks: index_of(store).holders(chunks)) == CHUNKS


OPERATIONS = {
    "pin": lambda path: pin(path, ["/in/2.jsonl"]),
    "unpin": lambda path: unpin(path, ["/in/2.jsonl"]),
    "what would be forgotten": lambda path: forget(path, ["/in/3.jsonl#1"], dry_run=True),
    "forget": lambda path: forget(path, ["/in/3.jsonl#1"]),
    "change": change,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_costs_of_one_document(name: str, stores: tuple[Path, Path], counted: Counter[str]) -> None:
    counts = []
    for path in stores:
        if name == "unpin":
            pin(path, ["/in/2.jsonl"])
        counted.clear()
        OPERATIONS[name](path)
        counts.append((counted["documents"], counted["leaves"]))
    (documents, leaves), (documents_of_large, leaves_of_large) = counts
    assert documents_of_large == documents
    assert leaves_of_large <= 2 * leaves + 4  # keys are digests: adjacent chunks have scattered keys
