"""Structural check of a store's data file: that it is whole, and that its pages fit together."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from kvtool.core.cache.layout import REBUILD
from kvtool.core.cache.nodes import Branch, Leaf
from kvtool.core.cache.pages import Counts, Meta, newest_meta
from kvtool.core.cache.tree import BIG_HEADER_BYTES, DataFile, Tree
from kvtool.core.errors import DamagedError, KvtoolError, StoreFormatError

_FREE, _DATA = 0, 1
_GIVEN_UP = 2**30  # bytes that a transaction may have taken at the end of the file and given up again, at most


def check_data_file(generation: Path) -> None:
    """Refuse a ``data.mdb`` that would hang, be taken for a new store, or kill the process when LMDB reads it.

    Raises
    ------
    StoreFormatError : not a regular file, or not LMDB 0.9's.
    DamagedError : missing, empty or shorter than the pages in use.
    """
    path = generation / "data.mdb"
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise StoreFormatError(f"{path} is not a regular file", REBUILD)
        with path.open("rb") as file:
            meta = newest_meta(path, file)
            size = os.fstat(file.fileno()).st_size
        short = meta.file_bytes - size
        if short > _GIVEN_UP or (short > 0 and not _holds_all(path, meta, size)):
            raise DamagedError(f"{path} is truncated: {size} bytes of {meta.file_bytes}", REBUILD)
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing", REBUILD) from error
    except OSError as error:
        raise KvtoolError(f"cannot read {path}: {error.strerror}", "check who owns the folder") from error


def _holds_all(path: Path, meta: Meta, size: int) -> bool:
    """Return True if every page in use is inside a file that is shorter than its last page.

    That happens without damage: LMDB does not write a page that one transaction took at the end and freed again.
    """
    with closing(DataFile(path)) as file:
        tree = Tree(file, meta)
        try:
            return all(_fits(tree, node, size) for number in (_FREE, _DATA) for _, _, node in tree.pages(number))
        except DamagedError:  # a page of the tree lies outside, or cannot be read
            return False


def _fits(tree: Tree, node: Branch | Leaf, size: int) -> bool:
    """Return True if the large values of a page are inside a file of this size."""
    return all(
        tree.page_of(node, at) * tree.meta.page_size + BIG_HEADER_BYTES + length <= size
        for at, (_, length, big) in enumerate(node.values if isinstance(node, Leaf) else ())
        if big and isinstance(node, Leaf)
    )


def damaged_pages(tree: Tree) -> Iterator[str]:
    """Describe the damage in words. Memory: a byte for each page of the file."""
    try:
        used = bytearray(tree.meta.last_page + 1)
        yield from _damaged_tree(tree, _DATA, used)
        yield from _damaged_tree(tree, _FREE, used)
        for page in tree.free_pages():
            if not 2 <= page <= tree.meta.last_page or used[page]:
                raise DamagedError("the list of free pages names pages that are in use")
            used[page] = 1
        if used.count(0) != 2:  # the meta pages
            yield "there are pages that are neither in use nor free"
    except DamagedError as error:
        yield error.message


def _damaged_tree(tree: Tree, number: int, used: bytearray) -> Iterator[str]:
    """Compare one tree with the counts in the meta page."""
    branches = leaves = keys = beside = deepest = 0
    for page, depth, node in tree.pages(number):
        deepest = max(deepest, depth)
        branches += isinstance(node, Branch)
        if isinstance(node, Leaf):
            leaves, keys = leaves + 1, keys + len(node.keys)
        values = list(_beside(tree, node))
        beside += sum(pages for _, pages in values)
        for at, pages in [(page, 1), *values]:
            if any(used[at : at + pages]):
                raise DamagedError(f"page {at} of the index is used twice")
            used[at : at + pages] = b"\1" * pages
    counted = tree.meta.counts[number]
    seen = Counts(deepest, branches, leaves, beside, keys)
    if counted != seen:
        what = "data" if number else "free pages"
        yield f"the index of {what} has {seen}; counted are {counted}"


def _beside(tree: Tree, node: Branch | Leaf) -> Iterator[tuple[int, int]]:
    """Yield the places of large values: the first page of each, and the number of pages."""
    for at, (_, _, big) in enumerate(node.values if isinstance(node, Leaf) else ()):
        if big:
            assert isinstance(node, Leaf)
            yield tree.pages_of(node, at)
