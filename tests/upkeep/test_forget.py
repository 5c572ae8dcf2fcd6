"""`store rm` removes the documents that were named and what only they refer to; its cost does not grow with a store."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest

from kvtool.core.cache import tables
from kvtool.core.cache.entries import DocumentEntry, FileEntry
from kvtool.core.cache.integrity import verify
from kvtool.core.cache.pages import Leaf
from kvtool.core.cache.store import Store
from kvtool.core.cache.tree import Tree
from kvtool.core.errors import UsageError
from kvtool.core.retrieval.index import Index, index_of
from kvtool.core.upkeep.forget import forget, pin, unpin
from tests.cli.working import damages, kvtool, listing
from tests.stores import add_file, check_file, id_of, make_store, put
from tests.wording import refused


def sources(path: Path) -> list[str]:
    with Store.open(path) as store:
        return store.sources()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Documents in folders; `/a/x.md` and `/b/y.md` share a chunk; a JSON-lines file has two documents."""
    with Store.create_or_open(tmp_path / "tree") as store, store.writer() as pen:
        pen.set_manifest({"model": "tiny"})
        add_file(pen, "/a/x.md", ["x", "shared"])
        add_file(pen, "/b/y.md", ["y", "shared"])
        add_file(pen, "/b/c/z.md", ["z"])
        rows = [DocumentEntry(f"/b/rows.jsonl#{n}", "text", "row", (put(pen, f"row{n}"),)) for n in range(2)]
        pen.commit_file(FileEntry("/b/rows.jsonl", 1, 2, "d", "s", tuple(row.source for row in rows)), rows)
        pen.commit_file(FileEntry("/b/empty.md", 0, 2, "d", "s", ()), [])
    return tmp_path / "tree"


@pytest.mark.parametrize(
    ("target", "gone"),
    [
        ("/a/x.md", ["/a/x.md"]),
        ("x.md", ["/a/x.md"]),
        ("*.md", ["/a/x.md", "/b/c/z.md", "/b/empty.md", "/b/y.md"]),
        ("b/*.md", ["/b/c/z.md", "/b/empty.md", "/b/y.md"]),
        ("/b/c", ["/b/c/z.md"]),
        ("/b/", ["/b/c/z.md", "/b/empty.md", "/b/rows.jsonl#0", "/b/rows.jsonl#1", "/b/y.md"]),
        ("rows.jsonl", ["/b/rows.jsonl#0", "/b/rows.jsonl#1"]),
        ("/b/rows.jsonl#1", ["/b/rows.jsonl#1"]),
        (id_of("shared").hex()[:12], ["/a/x.md", "/b/y.md"]),
        ("/b/empty.md", ["/b/empty.md"]),
    ],
)
def test_what_a_word_means(tree: Path, target: str, gone: list[str]) -> None:
    before = set(sources(tree))
    said = forget(tree, [target], dry_run=True)
    assert sorted(said.sources) == gone
    assert set(sources(tree)) == before
    assert forget(tree, [target], yes=True) == said
    assert set(sources(tree)) == before - set(gone)
    with Store.open(tree) as store:
        assert verify(store) == []
        assert {entry.path for entry in store.files()}.isdisjoint(gone)
        assert store.has_chunk(id_of("shared")) == bool({"/a/x.md", "/b/y.md"} & set(store.sources()))
        kept = {ref.chunk_id for document in store.documents() for ref in document.chunks}
        assert set(store.chunk_ids()) == kept


def test_a_name_means_a_file_however_its_letters_are_composed(tmp_path: Path) -> None:
    """Both spellings where both are there, unless one of them is what was typed."""
    taken_apart, written = (normalize(form, "/c/물레방아.md") for form in ("NFD", "NFC"))
    with Store.create_or_open(tmp_path / "store") as store, store.writer() as pen:
        pen.set_manifest({"model": "tiny"})
        add_file(pen, taken_apart, ["x"])
    for target in (written, "물레방아.md", "*방아.md", normalize("NFC", "/c")):
        assert forget(tmp_path / "store", [target], dry_run=True).sources == (taken_apart,)
    with Store.open(tmp_path / "store") as store, store.writer() as pen:
        add_file(pen, written, ["y"])
    assert forget(tmp_path / "store", [written], dry_run=True).sources == (written,)


def test_refusals(tree: Path) -> None:
    with refused(UsageError):
        forget(tree, ["/a/x.md", "empy.md"])
    assert len(sources(tree)) == 5
    with refused(UsageError, numbers=True):
        forget(tree, ["*"])
    assert len(sources(tree)) == 5
    many = kvtool("store", "rm", "*", "--store", tree, "--dry-run", "--json").fine()
    assert many.json["refusal"] == "5 of 5 documents would be removed"
    assert "--yes" in many.err
    assert kvtool("store", "rm", "*", "--store", tree, "--dry-run", "--yes", "--json").fine().json["refusal"] is None
    prune = ("store", "prune", "--max-age", "0s", "--store", tree, "--dry-run")
    assert "without --dry-run this is refused: " in kvtool(*prune).fine().err
    assert kvtool(*prune, "--yes").fine().err == ""
    with Store.open(tree) as store, store.writer() as pen:
        pen.set_pins(["/a/x.md"])
    assert "/a/x.md is pinned" in kvtool("store", "rm", "/a", "--store", tree, "--dry-run").fine().err
    with refused(UsageError):
        forget(tree, ["/a"])
    forget(tree, ["/b/y.md"])
    assert {"/a/x.md", "/b/y.md"} & {*sources(tree)} == {"/a/x.md"}


@pytest.mark.parametrize("target", ["", ".x.md", "../x.md", "../../b/y.md", "/x.md", "/c/z.md", ".", "./"])
def test_suffix_of_a_path(tree: Path, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does an unset variable mean the folder where one is."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir("/" if target == "" else tmp_path / "here")
    with Store.open(tree) as store, store.writer() as pen:
        add_file(pen, f"{tmp_path}/kept.md", ["kept"])
    with pytest.raises(UsageError):
        forget(tree, [target], yes=True)
    assert len(sources(tree)) == 6


def test_documents_of_files_and_names_with_brackets(tree: Path) -> None:
    with Store.open(tree) as store, store.writer() as pen:
        add_file(pen, "/d/n1.md", ["n1"])
        add_file(pen, "/d/n[1].md", ["n[1]"])
    assert forget(tree, ["n[1].md"]).sources == ("/d/n[1].md",)
    forget(tree, ["/b/rows.jsonl#0"])
    with Store.open(tree) as store:
        entry = store.file("/b/rows.jsonl")
        assert entry.documents == ("/b/rows.jsonl#1",)


def test_the_index_no_longer_finds_what_was_forgotten(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = listing(store)[2]["source"]
    value = kvtool("store", "rm", Path(source).name, "--store", store, "--json").fine().json
    assert value["sources"] == [source]
    assert value["chunks"] > 0
    assert damages(store) == []
    with Store.open(store) as opened, monkeypatch.context() as patch:
        patch.setattr(Index, "update", lambda *_: pytest.fail("the index was left behind"))
        assert len(index_of(opened)) == sum(len(document["chunks"]) for document in listing(store))
    human = kvtool("store", "rm", "mill4.md", "--store", store, "--dry-run").fine()
    assert "would be removed: 1 document," in human.out
    kvtool("store", "rm", "mill44.md", "--store", store).failed(2, "did you mean 'mill4.md'")
    assert kvtool("store", "rm", "mill4.md", "--store", store, "-q").fine().out == ""
    folder = Path(source).parent
    kvtool("store", "rm", folder.name, "--store", store).failed(2, f"name a folder by its path: {folder}")


def test_other_documents_stay_byte_for_byte(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=4)
    forget(path, ["f1", "f3"])
    with Store.open(path) as store:
        check_file(store, "f0")
        check_file(store, "f2")


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
