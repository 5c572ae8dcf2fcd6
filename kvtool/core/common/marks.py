"""Place of a text's part in its file: a line, a page, a slide, a cell, as its readers mark it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_NUMBERED = re.compile(r"(.*?)(?<!\d)(\d{1,18}+)")  # linear: digits are tried once, from the first of a run


@dataclass(frozen=True, slots=True)
class Mark:
    """The place of the text from `start` up to the next mark: a line, from 1, or a label: `p. 12`, `slide 3`."""

    start: int
    place: int | str


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a document's file: a line, from 1, or, where people see no lines, a label: `p. 12`, `p. 12–13`."""

    line: int | None = None
    label: str = ""

    def cite(self, source: str) -> str:
        return f"{source} {self.label}" if self.label else source if self.line is None else f"{source}:{self.line}"


def as_named_here(source: str) -> str:
    with suppress(ValueError, OSError):
        return str(Path(source).relative_to(Path.cwd()))
    return source


def place_of(text: str, marks: Sequence[Mark], start: int, end: int) -> Place:
    """Place of the characters from `start` to `end`, without leading space; without marks, lines are counted."""
    inside = text[start:end]
    start += len(inside) - len(inside.lstrip())
    if not marks:
        return Place(text.count("\n", 0, start) + 1)
    first = _mark_at(marks, start).place
    if isinstance(first, int):
        return Place(first)
    last = _mark_at(marks, max(start, start + len(inside.strip()) - 1)).place
    return Place(None, _joined(first, str(last)))


def _mark_at(marks: Sequence[Mark], position: int) -> Mark:
    return marks[max(0, bisect_right(marks, position, key=lambda mark: mark.start) - 1)]


def start_of(text: str, marks: Sequence[Mark], number: int) -> int | None:
    """Find the character at which a line, page, slide or paragraph begins; None if the file has no such."""
    lines = [(mark.place, -mark.start) for mark in marks if isinstance(mark.place, int) and mark.place <= number]
    if lines:
        return -max(lines)[1]
    if marks:
        named = (
            mark.start for mark in marks if (match := _NUMBERED.fullmatch(str(mark.place))) and int(match[2]) == number
        )
        return next(named, None)
    at = 0
    for _ in range(number - 1):
        at = text.find("\n", at) + 1
        if not at:
            return None
    return at if 0 <= at < len(text) and number > 0 else None


def end_of(text: str, marks: Sequence[Mark], start: int) -> int:
    if marks:
        return next((mark.start for mark in marks if mark.start > start), len(text))
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def _joined(first: str, last: str) -> str:
    if first == last:
        return first
    first_match, last_match = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(last)
    if first_match and last_match and first_match[1] == last_match[1]:
        return f"{first}–{last_match[2]}"
    return f"{first} – {last}"
