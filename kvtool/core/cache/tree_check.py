"""Whether the pages of a store's data file fit together: what no single look-up can tell."""

from __future__ import annotations

from collections.abc import Iterator

from kvtool.core.cache.pages import Counts
from kvtool.core.cache.tree import Branch, Leaf, Tree
from kvtool.core.errors import DamagedError

_FREE, _DATA = 0, 1


def damaged_pages(tree: Tree) -> Iterator[str]:
    """What is wrong, in words. Memory: a byte for each page of the file."""
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
    """One tree beside what the meta page counts of it."""
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
    found = Counts(deepest, branches, leaves, beside, keys)
    if counted != found:
        what = "data" if number else "free pages"
        yield f"the index of {what} has {found}; counted are {counted}"


def _beside(tree: Tree, node: Branch | Leaf) -> Iterator[tuple[int, int]]:
    """Where large values stand: the first page of each, and how many."""
    for at, (_, _, big) in enumerate(node.values if isinstance(node, Leaf) else ()):
        if big:
            assert isinstance(node, Leaf)
            yield tree.pages_of(node, at)
