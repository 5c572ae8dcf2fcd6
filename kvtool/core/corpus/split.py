"""KVSplit (EPIC, arXiv 2410.15332): documents → chunks along their own structure.

The laws: spans adjoin and join to the text; none has more than `max_tokens`; a text that fits is one
chunk; and, since a chunk's id is its content, an edit changes the chunks it touches and few others.

Boundaries are content-defined: among the unit ends that make a chunk of min … max tokens, the best level wins, and
among equals the smallest hash of the following unit. So two texts that differ in one place choose the same boundaries
again soon after it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, chain, pairwise

from kvtool.core.corpus.outline import Level, Unit, finer, paragraphs, units, words
from kvtool.core.errors import UsageError

CountTokens = Callable[[Sequence[str]], list[int]]
"""Number of tokens of each text, tokenised separately."""

_BATCH = 8192  # texts in one call of the counter
_LONGEST_UNIT = 4000  # characters; a tokenizer is quadratic on lines without spaces


@dataclass(frozen=True, slots=True)
class SplitSettings:
    """Settings of a split; a `min_tokens` of 0 stands for what suits the method."""

    method: str = "semantic"
    max_tokens: int = 256
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"unknown split method {self.method!r}", f"one of: {', '.join(METHODS)}")
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise UsageError(f"min_tokens must be in 0…{self.max_tokens}, not {self.min_tokens}")


@dataclass(frozen=True, slots=True)
class Span:
    start: int
    end: int


def split(text: str, settings: SplitSettings, count_tokens: CountTokens, kind: str = "text") -> list[Span]:
    """Split a text into adjoining spans that cover it, each of at most `max_tokens` tokens when stripped; only a single
    character may have more. A text of only white space yields none."""
    if not text or text.isspace():
        return []
    work = _Work(text, settings.max_tokens, count_tokens)
    if work.fits_whole():
        return [Span(0, len(text))]
    groups = METHODS[settings.method](work, settings, kind)
    edges = [*(group[0].start for group in groups), len(text)]
    return [Span(start, end) for start, end in pairwise(edges)]


Group = list[Unit]
"""The units of one chunk."""


@dataclass(frozen=True, slots=True)
class _Limits:
    """Limits of a chunk in tokens: at most, at least, and from where on a heading always begins a new chunk."""

    most: int
    least: int
    section: int


@dataclass(frozen=True, slots=True)
class _Work:
    text: str
    most: int
    counter: CountTokens

    def fits_whole(self) -> bool:
        """Return True if the text is one chunk; texts of over 64 characters a token are not counted."""
        if len(self.text) > 64 * self.most:
            return False
        return self.count([self.text.strip()])[0] <= self.most

    def count(self, texts: Sequence[str]) -> list[int]:
        batches = (texts[i : i + _BATCH] for i in range(0, len(texts), _BATCH))
        return [count for batch in batches for count in self.counter(batch)]

    def sized(self, pieces: list[Unit]) -> tuple[list[Unit], list[int]]:
        ready = [part for piece in pieces for part in self._tamed(piece)]
        sizes = self.count([self._counted_text(unit) for unit in ready])
        large = [i for i, size in enumerate(sizes) if size > self.most]
        while cut := self._cut_large(ready, large):
            ready, sizes, fresh = _replaced(ready, sizes, cut)
            counts = self.count([self._counted_text(ready[i]) for i in fresh])
            for i, size in zip(fresh, counts, strict=True):
                sizes[i] = size
            large = [i for i, size in zip(fresh, counts, strict=True) if size > self.most]
        return ready, sizes

    def _cut_large(self, ready: list[Unit], large: list[int]) -> dict[int, list[Unit]]:
        counts = self.count([self._stripped(ready[i : i + 1]) for i in large])
        too_long = [i for i, count in zip(large, counts, strict=True) if count > self.most]
        parts = {i: finer(self.text, ready[i]) for i in too_long}
        return {i: units_ for i, units_ in parts.items() if len(units_) > 1}

    def packed(self, pieces: list[Unit], limits: _Limits) -> list[Group]:
        ready, sizes = self.sized(pieces)
        groups = _grouped(ready, _Packer(self.text, ready, sizes, limits).starts())
        while True:
            counts = self.count([self._stripped(group) for group in groups])
            parts = [
                self._repaired(group, count) if count > self.most else [group]
                for group, count in zip(groups, counts, strict=True)
            ]
            if all(part == [group] for part, group in zip(parts, groups, strict=True)):
                return self._without_tiny_tail(groups, counts, limits)
            groups = list(chain.from_iterable(parts))

    def _tamed(self, unit: Unit) -> Iterator[Unit]:
        todo = [unit]
        while todo:
            piece = todo.pop()
            parts = finer(self.text, piece) if piece.end - piece.start > _LONGEST_UNIT else [piece]
            if len(parts) == 1:
                yield piece
            else:
                todo.extend(reversed(parts))

    def _counted_text(self, unit: Unit) -> str:
        """The text to count for a unit: the space after a unit counts with the next one, as tokenizers cut words, so
        that the counts of units add up to that of their chunk."""
        before = self.text[max(0, unit.start - 16) : unit.start]
        carried = before[len(before.rstrip(" \t")) :]
        return carried + self.text[unit.start : unit.end].rstrip(" \t")

    def _stripped(self, group: Sequence[Unit]) -> str:
        return self.text[group[0].start : group[-1].end].strip()

    def _repaired(self, group: Group, count: int) -> list[Group]:
        """Cut a chunk of `count` > most tokens, sizes now being shares of its characters."""
        if len(group) == 1:
            pieces = finer(self.text, group[0])
            if len(pieces) == 1:
                return [group]
        else:
            pieces = group
        sizes = [piece.end - piece.start for piece in pieces]
        total = sum(sizes)
        most = max(1, min(total - 1, total * self.most // count))
        starts = _Packer(self.text, pieces, sizes, _Limits(most, most * 3 // 8, total)).starts()
        return _grouped(pieces, starts)

    def _without_tiny_tail(self, groups: list[Group], counts: list[int], limits: _Limits) -> list[Group]:
        if len(groups) < 2 or counts[-1] >= min(limits.least, limits.section):
            return groups
        joined = groups[-2] + groups[-1]
        if self.count([self._stripped(joined)])[0] > self.most:
            return groups
        return [*groups[:-2], joined]


def _replaced(
    ready: list[Unit], sizes: list[int], cut: dict[int, list[Unit]]
) -> tuple[list[Unit], list[int], list[int]]:
    """Replace the cut units by their parts; also returns the places of those parts."""
    units_: list[Unit] = []
    counts: list[int] = []
    fresh: list[int] = []
    for i, (unit, size) in enumerate(zip(ready, sizes, strict=True)):
        parts = cut.get(i)
        if parts is not None:
            fresh.extend(range(len(units_), len(units_) + len(parts)))
        units_.extend(parts or (unit,))
        counts.extend([0] * len(parts) if parts else (size,))
    return units_, counts, fresh


class _Packer:
    def __init__(self, text: str, units: Sequence[Unit], sizes: Sequence[int], limits: _Limits) -> None:
        self._text = text
        self._units = units
        self._sums = [0, *accumulate(sizes)]  # tokens before each unit, and the total at the end
        self._limits = limits

    def starts(self) -> list[int]:
        starts = [0]
        while (after := self._next_start(starts[-1])) < len(self._units):
            starts.append(after)
        return starts

    def _next_start(self, first: int) -> int:
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
        """Choose for units too large for the window: as full as possible, if need be after a heading."""
        return next((i for i in range(last, first, -1) if self._allowed(i)), last)


def _grouped(pieces: list[Unit], starts: list[int]) -> list[Group]:
    edges = [*starts, len(pieces)]
    return [pieces[a:b] for a, b in pairwise(edges)]


def _semantic(work: _Work, settings: SplitSettings, kind: str) -> list[Group]:
    """Cut at sections, then paragraphs, lines and sentences; among equals the content decides."""
    least = settings.min_tokens or settings.max_tokens * 3 // 8
    return work.packed(units(work.text, kind), _Limits(settings.max_tokens, least, least))


def _markdown(work: _Work, settings: SplitSettings, kind: str) -> list[Group]:
    """Make one chunk of a section where it fits; only sections of under max/8 tokens are joined."""
    del kind
    most = settings.max_tokens
    limits = _Limits(most, settings.min_tokens or most * 3 // 8, settings.min_tokens or most // 8)
    return work.packed(units(work.text, "markdown"), limits)


def _paragraph(work: _Work, settings: SplitSettings, kind: str) -> list[Group]:
    """Keep paragraphs whole, and cut one only if it is too long."""
    most = settings.max_tokens
    least = settings.min_tokens or most // 2
    return work.packed(paragraphs(work.text, kind), _Limits(most, least, least))


def _fixed(work: _Work, settings: SplitSettings, kind: str) -> list[Group]:
    """Take as many words as fit: the baseline, which is not stable under edits."""
    most = settings.max_tokens
    return work.packed(words(work.text, kind), _Limits(most, most, most))


METHODS: dict[str, Callable[[_Work, SplitSettings, str], list[Group]]] = {
    "semantic": _semantic,
    "markdown": _markdown,
    "paragraph": _paragraph,
    "fixed": _fixed,
}
