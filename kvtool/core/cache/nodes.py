"""The pages of LMDB's trees: branches and leaves, parsed out of their bytes and checked before they are believed.

They are those of LMDB 0.9 (data format 1) on a 64-bit machine, as in :mod:`kvtool.core.cache.pages`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from kvtool.core.errors import DamagedError

_HEADER = struct.Struct("=Q2xHHH")  # own number, flags, end of the pointers, start of the nodes
_NODE = struct.Struct("=HHHH")  # size (low, high) or child (low, middle, high with the flags), flags, size of the key
NUMBER = struct.Struct("=Q")
_BRANCH, _LEAF = 1, 2
_BIG = 1


@dataclass(frozen=True, slots=True)
class Branch:
    """Keys from which each child on is meant; the first child has all below the second's."""

    keys: list[bytes]
    children: list[int]


@dataclass(frozen=True, slots=True)
class Leaf:
    """Keys and, for each, where its value begins in the page, its size, and whether that is a number of pages beside.

    Attributes
    ----------
    data : the page.
    """

    keys: list[bytes]
    values: list[tuple[int, int, bool]]
    data: bytes


def parse_page(page: int, data: bytes, ordered: bool = True) -> Branch | Leaf:
    """A page of a tree.

    Parameters
    ----------
    page : its number, which it has to state itself.
    ordered : whether its keys have to be in the order of their bytes; numbers, as keys of the list of free pages, are
        not.

    Raises
    ------
    DamagedError : it is none, or its parts do not fit together.
    """
    number, flags, lower, upper = _HEADER.unpack_from(data)
    if number != page or flags not in (_BRANCH, _LEAF):
        raise DamagedError(f"page {page} of the index is no page of a tree")
    if not _HEADER.size <= lower <= upper <= len(data) or lower % 2:
        raise DamagedError(f"page {page} of the index has bounds that cannot be")
    pointers = struct.unpack_from(f"={(lower - _HEADER.size) // 2}H", data, _HEADER.size)
    read: Callable[..., Branch | Leaf] = _read_branch if flags == _BRANCH else _read_leaf
    try:
        node = read(data, pointers, upper)
        if ordered:
            _check_order(node.keys[1:] if isinstance(node, Branch) else node.keys)
        return node
    except (ValueError, struct.error) as error:
        raise DamagedError(f"page {page} of the index is damaged: {error}") from error


def _read_branch(data: bytes, pointers: tuple[int, ...], upper: int) -> Branch:
    keys, children, ends = [], [], []
    for at in pointers:
        low, middle, high, length = _NODE.unpack_from(data, at)
        keys.append(data[at + _NODE.size : at + _NODE.size + length])
        children.append(low | middle << 16 | high << 32)
        ends.append(at + _NODE.size + length)
    if not children:
        raise ValueError("a branch without children")
    _check_layout(data, pointers, ends, upper)
    return Branch(keys, children)


def _read_leaf(data: bytes, pointers: tuple[int, ...], upper: int) -> Leaf:
    keys, values, ends = [], [], []
    for at in pointers:
        low, high, flags, length = _NODE.unpack_from(data, at)
        if flags not in (0, _BIG):
            raise ValueError("a value of a kind that is not used here")
        start, size = at + _NODE.size + length, low | high << 16
        keys.append(data[at + _NODE.size : start])
        values.append((start, size, bool(flags)))
        ends.append(start + (NUMBER.size if flags else size))
    _check_layout(data, pointers, ends, upper)
    return Leaf(keys, values, data)


def _check_layout(data: bytes, starts: tuple[int, ...], ends: list[int], upper: int) -> None:
    """Nodes fill the page from `upper` to its end, each on an even address, without gap or overlap."""
    at = upper
    for start, end in sorted(zip(starts, ends, strict=True)):
        if start != at:
            raise ValueError("its parts do not join")
        at = end + end % 2
    if at != len(data):
        raise ValueError("its parts do not fill it")


def _check_order(keys: list[bytes]) -> None:
    if any(before >= after for before, after in pairwise(keys)):
        raise ValueError("its keys are not in order")
