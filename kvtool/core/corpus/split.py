"""KVSplit (EPIC, arXiv 2410.15332): documents → chunks along their own structure. Boundaries are content-defined: the
best level wins, and among equals the smallest hash of the following unit. So an edit changes the chunks it touches and
few others."""

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
_LONGEST_TOKEN = 64  # characters; longer texts are cut without being counted
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
    if len(text) <= _LONGEST_TOKEN * work.most and work.count([text.strip()])[0] <= work.most:
        return [Span(0, len(text))]
    cut, *shares = METHODS[settings.method]
    most, least = settings.max_tokens, settings.min_tokens
    limits = _Limits(most, *(most if share == 8 else least or most * share // 8 for share in shares))
    groups = work.packed(cut(text, kind), limits)
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

    def count(self, texts: Sequence[str]) -> list[int]:
        batches = (texts[i : i + _BATCH] for i in range(0, len(texts), _BATCH))
        return [count for batch in batches for count in self.counter(batch)]

    def sized(self, pieces: list[Unit]) -> tuple[list[Unit], list[int]]:
        fresh = ready = [part for piece in pieces for part in self._tamed(piece)]
        sizes: dict[Unit, int] = {}
        while fresh:
            counts = self.count([self._counted_text(unit) for unit in fresh])
            sizes |= zip(fresh, counts, strict=True)
            large = [unit for unit in fresh if sizes[unit] > self.most]
            # those that stay too long without the space around them
            counts = self.count([self._stripped([unit]) for unit in large])
            parts = {unit: finer(self.text, unit) for unit, n in zip(large, counts, strict=True) if n > self.most}
            fresh = [part for cut in parts.values() if len(cut) > 1 for part in cut]
            ready = [part for unit in ready for part in parts.get(unit, (unit,))]
        return ready, [sizes[unit] for unit in ready]

    def packed(self, pieces: list[Unit], limits: _Limits) -> list[Group]:
        ready, sizes = self.sized(pieces)
        groups = _Packer(self.text, ready, sizes, limits).groups()
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
        """The text to count for a unit: tokenizers count the space after it with the next unit."""
        before = self.text[max(0, unit.start - 16) : unit.start]
        carried = before[len(before.rstrip(" \t")) :]
        return carried + self.text[unit.start : unit.end].rstrip(" \t")

    def _stripped(self, group: Sequence[Unit]) -> str:
        return self.text[group[0].start : group[-1].end].strip()

    def _repaired(self, group: Group, count: int) -> list[Group]:
        if len(group) == 1:
            pieces = finer(self.text, group[0])
            if len(pieces) == 1:
                return [group]
        else:
            pieces = group
        sizes = [piece.end - piece.start for piece in pieces]
        total = sum(sizes)
        most = max(1, min(total - 1, total * self.most // count))
        return _Packer(self.text, pieces, sizes, _Limits(most, most * 3 // 8, total)).groups()

    def _without_tiny_tail(self, groups: list[Group], counts: list[int], limits: _Limits) -> list[Group]:
        if len(groups) < 2 or counts[-1] >= min(limits.least, limits.section):
            return groups
        joined = groups[-2] + groups[-1]
        if self.count([self._stripped(joined)])[0] > self.most:
            return groups
        return [*groups[:-2], joined]


class _Packer:
    def __init__(self, text: str, units: list[Unit], sizes: Sequence[int], limits: _Limits) -> None:
        self._text = text
        self._units = units
        self._sums = [0, *accumulate(sizes)]  # tokens before each unit, and the total at the end
        self._limits = limits

    def groups(self) -> list[Group]:
        edges = [0]
        while edges[-1] < len(self._units):
            edges.append(self._next_start(edges[-1]))
        return [self._units[start:end] for start, end in pairwise(edges)]

    def _next_start(self, first: int) -> int:
        limits, count = self._limits, len(self._units)
        last = max(first + 1, bisect_right(self._sums, self._sums[first] + limits.most) - 1)
        low = bisect_left(self._sums, self._sums[first] + limits.section, first + 1)
        inside = range(low, min(last + 1, count))
        section = next((i for i in inside if self._units[i].level == Level.SECTION and self._allowed(i)), None)
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
        if window:
            return self._best(window)
        return next((i for i in range(last, first, -1) if self._allowed(i)), last)

    def _rest(self, index: int) -> int:
        return self._sums[-1] - self._sums[index]

    def _allowed(self, index: int) -> bool:
        return not self._units[index - 1].heading

    def _balanced(self, window: list[int]) -> int:
        half = self._sums[-1] / 2
        return max(window, key=lambda i: (self._units[i].level, -abs(self._sums[i] - half), -i))

    def _best(self, window: list[int]) -> int:
        level = max(self._units[i].level for i in window)
        equals = [i for i in window if self._units[i].level == level]
        if len(equals) == 1:
            return equals[0]
        texts = {i: self._text[self._units[i - 1].start : self._units[i - 1].end] for i in equals}
        return min(equals, key=lambda i: blake2b(texts[i].encode("utf-8", "surrogatepass"), digest_size=8).digest())


# how a method cuts a text, and from which eighth of a chunk on it seeks a boundary, and begins a new one at a heading
METHODS: dict[str, tuple[Callable[[str, str], list[Unit]], int, int]] = {
    "semantic": (units, 3, 3),
    "markdown": (lambda text, kind: units(text, "markdown"), 3, 1),
    "paragraph": (paragraphs, 4, 4),
    "fixed": (words, 8, 8),  # the baseline, which is not stable under edits
}
