"""Text for a terminal or a pipe: cleaning, streams that take any text, line breaks between words, tables and pages."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any
from unicodedata import east_asian_width

from kvtool.core.common.text import UNSEEN

if TYPE_CHECKING:
    from rich.table import Table

_LOOKALIKES = str.maketrans(
    {"…": "...", "–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "×": "x", "→": "->", "≥": ">="}
    | {"≤": "<=", "±": "+-", "─": "-", "━": "-", "│": "|", "•": "*", "√": "v", "\xa0": " "}
)
# C0 but tab and newline, DEL, C1, and what has no shape, marks of direction among it.
_UNSAFE = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{UNSEEN}]")
_BREAKS = str.maketrans("\u2028\u2029", "  ")
# Joiners and selectors of variants belong to the letter or emoji before them, one or two of them. Latin letters have
# none, and in a run any data may be hidden. A text may begin with one: it may be an answer's next piece.
_JOINERS, _VARIANTS = "\u200c\u200d", "\ufe00-\ufe0f\U000e0100-\U000e01ef"
_LOOSE = re.compile(f"(?<=[\x00-\x7f{_JOINERS}])[{_JOINERS}]|(?<=[{_JOINERS}{_VARIANTS}])[{_VARIANTS}]")


def clean(text: str) -> str:
    """Remove what steers a terminal, or cannot be seen, from foreign text: escape sequences' ESC, control characters,
    marks of direction and all other format characters.

    Arabic and Hebrew stay as they are, and so do the joiners that Persian, Indian scripts and emoji need. Flags of
    regions lose their tags, and become plain flags.
    """
    return text if text.isascii() and text.isprintable() else _LOOSE.sub("", _UNSAFE.sub("", text.translate(_BREAKS)))


def one_line(text: str) -> str:
    """`clean`, with every run of white space as one blank: a table's cell, a file name in a sentence."""
    return clean(" ".join(text.split()))


def degrade(text: str, encoding: str) -> str:
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        return text.translate(_LOOKALIKES).encode(encoding, errors="replace").decode(encoding)
    except LookupError:
        return text.encode("ascii", errors="replace").decode("ascii")


class SafeStream(io.TextIOBase):
    """A text stream that takes any text; what `rich` draws on, too."""

    def __init__(self, stream: IO[str] | None) -> None:
        self.stream = stream  # None where the process was started without it

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self.stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        with suppress(ValueError, AttributeError):
            return self.stream is not None and self.stream.isatty()
        return False

    @property
    def columns(self) -> int | None:
        """The width of the terminal in cells; None: it is none."""
        if not self.isatty():
            return None
        with suppress(OSError, ValueError):
            if columns := os.get_terminal_size(self.fileno()).columns:
                return columns
        return shutil.get_terminal_size().columns

    def is_beside(self, other: SafeStream) -> bool:
        if self.isatty() and other.isatty():
            return True
        with suppress(OSError, ValueError, AttributeError):
            return self.stream is not None and os.path.samestat(os.fstat(self.fileno()), os.fstat(other.fileno()))
        return False

    def fileno(self) -> int:
        if self.stream is None:
            raise OSError("the stream is closed")
        return self.stream.fileno()

    def write(self, text: str) -> int:
        if self.stream is not None:
            fitting = degrade(text, self.encoding)
            raw = getattr(self.stream, "buffer", None)
            if isinstance(raw, io.RawIOBase):
                _write_all(raw, fitting.encode(self.encoding, "replace"))
            else:
                self.stream.write(fitting)
        return len(text)

    def flush(self) -> None:
        if self.stream is not None:
            self.stream.flush()

    def close(self) -> None:
        """Leave the stream open and unflushed: the code that ends the process does both. Since
        Python 3.13 a flush that fails at garbage collection prints to standard error."""


def _write_all(raw: io.RawIOBase, data: bytes) -> None:
    """Write to a stream without a buffer, as PYTHONUNBUFFERED has it: where a disk takes only a part, Python itself
    passes over the rest. Raises OSError."""
    left = memoryview(data)
    while left:
        written = raw.write(left)
        if written is None:
            raise BlockingIOError(errno.EAGAIN, "it takes no more for now")
        left = left[written:]


def silence(stream: IO[str] | None) -> None:
    """Send what is still buffered to nowhere, so that the interpreter's last flush cannot fail."""
    with suppress(Exception):
        assert stream is not None
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


# Chinese and Japanese are written without blanks: a line may end after any letter, but not before a closing mark and
# not after an opening one. Korean has blanks, and breaks at them.
_WIDE = "\u2e80-\u312f\u31a0-\u31ff\u3400-\u9fff\uf900-\ufaff\uff00-\uff60\U00020000-\U0003fffd"
_OPENING, _CLOSING = "（「『【《〈", "、。，．！？：；）」』】》〉"
# Compiled at its first use: `--help` wraps nothing, and it takes 3 ms.
_UNIT = rf"\n|[ \t]+|[{_OPENING}]*[{_WIDE}][{_CLOSING}]*|[^ \t\n{_WIDE}]+[{_CLOSING}]*"
_FENCE = "```"  # begins and ends a block of code, whose lines are left as they are


class WordWrap:
    """Breaks a text that comes in pieces between words. A word is held back until its end is known."""

    def __init__(self) -> None:
        self._column = 0
        self._held = ""  # a word that may go on
        self._runs_on = self._is_code = False  # within a word that is longer than a line; within a block of code

    def take(self, text: str, columns: int) -> str:
        units = re.findall(_UNIT, self._held + text)
        self._held = units.pop() if units and units[-1].strip(" \t\n") else ""
        shown = "".join(self._placed(unit, columns) for unit in units)
        if self._held and (self._runs_on or _cells(self._held) > columns):
            shown, self._held = shown + self._placed(self._held, columns), ""
            self._runs_on = True
        return shown

    def rest(self, columns: int) -> str:
        return self._placed(self._held, columns) if self._held else ""

    def _placed(self, unit: str, columns: int) -> str:
        """A unit with the break before it; blanks beyond the end of a line are dropped."""
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


_GAP = 2  # blanks between the columns of a table that is too wide for its terminal
_BAR = "| "  # before each line of a foreign text
_FOLDED = 20  # a longer text may be folded, down to this width; what is shorter is broken between words only


def render_table(columns: Sequence[str], rows: list[list[Any]], title: str, stream: SafeStream) -> str:
    """Draw a table as text: fitted to a terminal, at its full width into a pipe.

    What is too wide for the terminal is folded between words; where that does not do, the table comes in bands that
    each begin with the first column.
    """
    drawn = [_Column(name, [row[index] for row in rows]) for index, name in enumerate(columns)]
    if not stream.isatty():
        return "".join(_lines(drawn))
    from rich.console import Console

    canvas = io.StringIO()
    console = Console(file=canvas, force_terminal=True, markup=False, highlight=False, emoji=False)
    for number, band in enumerate(_bands(drawn, console.width)):
        if number or not title:
            console.print()
        console.print(_table(band, "" if number else title, console.width))
    console.print()
    return "".join(line.rstrip() + "\n" for line in canvas.getvalue().splitlines())


class _Column:
    def __init__(self, name: str, values: Sequence[Any]) -> None:
        from rich.cells import cell_len

        self.name = name
        self.cells = [_cell(value) for value in values]
        self.numbers = bool(values) and all(
            value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values
        )
        texts = [name, *self.cells]
        self.natural = max(map(cell_len, texts))
        word = max((cell_len(word) for text in texts for word in text.split()), default=0)
        self.least = word if self.natural <= _FOLDED else min(self.natural, max(_FOLDED, cell_len(name)))


def _lines(columns: Sequence[_Column]) -> Iterator[str]:
    """The lines of a table for a pipe: it may have a million rows, so each is drawn separately."""
    from rich.cells import cell_len

    for row in zip(*([column.name, *column.cells] for column in columns), strict=True):
        blanks = (" " * (column.natural - cell_len(cell)) for column, cell in zip(columns, row, strict=True))
        cells = zip(columns, row, blanks, strict=True)
        padded = (blank + cell if column.numbers else cell + blank for column, cell, blank in cells)
        yield (" " * _GAP).join(padded).rstrip() + "\n"


def _bands(columns: list[_Column], width: int) -> Iterator[list[_Column]]:
    """All columns where they fit when folded, else as many at a time as fit unfolded, each after the first column."""
    if sum(column.least + _GAP for column in columns) - _GAP <= width:
        yield columns
        return
    first, band = columns[0], columns[:1]
    for column in columns[1:]:
        if len(band) > 1 and sum(each.natural + _GAP for each in (*band, column)) - _GAP > width:
            yield band
            band = [first]
        band.append(column)
    yield band


def _fitted(columns: Sequence[_Column], width: int) -> list[int]:
    widths = [column.least for column in columns]
    left = width - sum(widths) - _GAP * (len(columns) - 1)
    for index in sorted(range(len(columns)), key=lambda index: columns[index].natural - widths[index]):
        more = max(0, min(left, columns[index].natural - widths[index]))
        widths[index], left = widths[index] + more, left - more
    return widths


def _table(columns: Sequence[_Column], title: str, width: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    padding, heading = (0, _GAP - 1, 0, 0), Text(title) if title else None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=padding, title=heading)
    for column, cells in zip(columns, _fitted(columns, width), strict=True):
        table.add_column(Text(column.name), justify="right" if column.numbers else "left", overflow="fold", width=cells)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, row))
    return table


def render_quote(pieces: Iterable[tuple[str, str]], columns: int | None) -> str:
    """Draw a foreign text so that no line of it can be taken for one of the program's: each begins with a bar.

    `pieces`: parts of the text, each with a format such as `<b>{}</b>`. `columns`: cells of the terminal, if it is one.
    """
    known = [(clean(text).expandtabs(4), form) for text, form in pieces]
    ends = set() if columns is None else _line_ends("".join(text for text, _ in known), max(2, columns - len(_BAR)))
    lines, offset = [""], 0
    for text, form in known:
        start = 0
        for at, letter in enumerate(text):
            if letter == "\n" or offset + at in ends:
                lines[-1] += form.format(text[start:at]) if at > start else ""
                lines.append("")
                start = at + (letter in "\n ")
        lines[-1] += form.format(text[start:]) if text[start:] else ""
        offset += len(text)
    while len(lines) > 1 and not lines[-1].strip():
        lines.pop()
    return "".join(f"{_BAR}{line}".rstrip() + "\n" for line in lines)


def _line_ends(text: str, room: int) -> set[int]:
    ends, used, first = set[int](), 0, 0  # `first`: where the line begins
    blank: int | None = None  # its last one
    for at, letter in enumerate(text):
        if letter == "\n":
            used, first, blank = 0, at + 1, None
            continue
        cells = _most_cells(letter)
        if used + cells > room:
            end = at if letter == " " or blank is None else blank
            ends.add(end)
            first, blank = end + (text[end] == " "), None
            used = sum(map(_most_cells, text[first:at]))
        if at >= first:
            used += cells
            blank = at if letter == " " and text[first:at].strip() else blank
    return ends


def _most_cells(letter: str) -> int:
    """Return the most cells that a letter may take; terminals of East Asia draw some letters wide."""
    return 2 if not letter.isascii() and east_asian_width(letter) in "WFA" else 1


def render_markdown(text: str) -> str:
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.theme import Theme

    canvas = io.StringIO()
    console = Console(file=canvas, force_terminal=True, theme=Theme({"markdown.code": "cyan"}))
    page = Markdown(text, hyperlinks=False, code_theme="ansi_dark")
    console.print(page, width=min(console.width, 120))
    return canvas.getvalue()


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else one_line(str(value))
