"""Line breaks between words, for a terminal that would break a line anywhere."""

from __future__ import annotations

import re

# Chinese and Japanese are written without blanks: a line may end after any letter, but not before a closing mark and
# not after an opening one. Korean has blanks, and breaks at them.
_WIDE = "\u2e80-\u312f\u31a0-\u31ff\u3400-\u9fff\uf900-\ufaff\uff00-\uff60\U00020000-\U0003fffd"
_OPENING, _CLOSING = "（「『【《〈", "、。，．！？：；）」』】》〉"
_UNIT = re.compile(rf"\n|[ \t]+|[{_OPENING}]*[{_WIDE}][{_CLOSING}]*|[^ \t\n{_WIDE}]+[{_CLOSING}]*")
_FENCE = "```"  # begins and ends a block of code, whose lines are left as they are


class WordWrap:
    """Breaks a text that comes in pieces between words. A word is held back until its end is known."""

    def __init__(self) -> None:
        self._column = 0
        self._held = ""  # a word that may go on
        self._runs_on = self._is_code = False  # within a word that is longer than a line; within a block of code

    def take(self, text: str, columns: int) -> str:
        """Return what can be shown of the text so far, on lines of so many cells."""
        units = _UNIT.findall(self._held + text)
        self._held = units.pop() if units and units[-1].strip(" \t\n") else ""
        shown = "".join(self._placed(unit, columns) for unit in units)
        if self._held and (self._runs_on or _cells(self._held) > columns):
            shown, self._held = shown + self._placed(self._held, columns), ""
            self._runs_on = True
        return shown

    def rest(self, columns: int) -> str:
        """Return what was held back: the text has ended."""
        return self._placed(self._held, columns) if self._held else ""

    def _placed(self, unit: str, columns: int) -> str:
        """A unit with the break before it; blanks that a line has no room for go."""
        if unit == "\n":
            self._column, self._runs_on = 0, False
            return unit
        width = _cells(unit)
        full, fits = self._column == columns, self._column + width <= columns
        if unit.isspace():
            self._runs_on = False
            self._column = min(self._column + width, columns)
            return unit if fits or self._is_code else ""
        if not self._column and unit.startswith(_FENCE):
            self._is_code = not self._is_code
        breaks = self._column and not fits and (width <= columns or full) and not self._runs_on and not self._is_code
        self._column = ((0 if breaks else self._column) + width - 1) % columns + 1
        return "\n" * bool(breaks) + unit


def wrapped(text: str, columns: int | None) -> str:
    """Break a whole text between words; None: nothing breaks its lines."""
    if columns is None:
        return text
    wrap = WordWrap()
    return wrap.take(text, columns) + wrap.rest(columns)


def _cells(text: str) -> int:
    if text.isascii():
        return len(text) + 7 * text.count("\t")  # a tab takes up to eight cells
    from rich.cells import cell_len

    return cell_len(text)
