"""Chunk boundaries, given the units of a text and their token counts.

Boundaries are content-defined: among the unit ends that make a chunk of min … max tokens, the best
level wins, and among equals the smallest hash of the following unit. So two texts that
differ in one place choose the same boundaries again soon after it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate

from kvtool.core.corpus.outline import Level, Unit


@dataclass(frozen=True, slots=True)
class Limits:
    """Says what a chunk may be.

    Parameters
    ----------
    most : tokens of a chunk, at most.
    least : tokens below which no boundary is sought; also of the last chunk.
    section : tokens from which on a heading always begins a new chunk.
    """

    most: int
    least: int
    section: int


def pack(text: str, units: Sequence[Unit], sizes: Sequence[int], limits: Limits) -> list[int]:
    """Choose the units that begin a chunk, by index; the first is always 0.

    Parameters
    ----------
    text : what the units are cut from.
    units : at least one.
    sizes : tokens of each unit.
    """
    packer = _Packer(text, units, [0, *accumulate(sizes)], limits)
    starts = [0]
    while (after := packer.next_start(starts[-1])) < len(units):
        starts.append(after)
    return starts


class _Packer:
    def __init__(self, text: str, units: Sequence[Unit], sums: list[int], limits: Limits) -> None:
        self._text = text
        self._units = units
        self._sums = sums  # tokens before each unit, and the total at the end
        self._limits = limits

    def next_start(self, first: int) -> int:
        """Find the unit that begins the chunk after the one that begins at `first`."""
        limits, count = self._limits, len(self._units)
        last = self._reach(first, limits.most)
        low = bisect_left(self._sums, self._sums[first] + limits.section, first + 1)
        section = next((i for i in range(low, last + 1) if self._is_section(i)), None)
        if section is not None and self._rest(section) >= limits.section:
            return section
        if last == count:
            return count
        low = bisect_left(self._sums, self._sums[first] + limits.least, first + 1)
        window = [i for i in range(low, last + 1) if self._allowed(i)]
        window = [i for i in window if self._rest(i) >= limits.least] or window
        if first == 0 and self._rest(0) <= 2 * limits.most:
            halves = [i for i in window if self._rest(i) <= limits.most]
            if halves:
                return self._balanced(halves)
        return self._best(window) if window else self._fallback(first, last)

    def _reach(self, first: int, most: int) -> int:
        """Find the furthest unit that may begin the next chunk; at least the next one."""
        return max(first + 1, bisect_right(self._sums, self._sums[first] + most) - 1)

    def _rest(self, index: int) -> int:
        return self._sums[-1] - self._sums[index]

    def _is_section(self, index: int) -> bool:
        return index < len(self._units) and self._units[index].level == Level.SECTION and self._allowed(index)

    def _allowed(self, index: int) -> bool:
        """Return True if a chunk may begin here: no chunk should end with a heading."""
        return not self._units[index - 1].heading

    def _balanced(self, window: list[int]) -> int:
        """Choose the boundary of a text that makes two chunks: of the best level, then nearest to the middle."""
        half = self._sums[-1] / 2
        return max(window, key=lambda i: (self._units[i].level, -abs(self._sums[i] - half), -i))

    def _best(self, window: list[int]) -> int:
        level = max(self._units[i].level for i in window)
        equals = [i for i in window if self._units[i].level == level]
        return equals[0] if len(equals) == 1 else min(equals, key=self._hash)

    def _hash(self, index: int) -> bytes:
        unit = self._units[index - 1]
        content = self._text[unit.start : unit.end].encode("utf-8", "surrogatepass")
        return blake2b(content, digest_size=8).digest()

    def _fallback(self, first: int, last: int) -> int:
        """Choose for units too large for the window: as full as it goes, if need be behind a heading."""
        return next((i for i in range(last, first, -1) if self._allowed(i)), last)
