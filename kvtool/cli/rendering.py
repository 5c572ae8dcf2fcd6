"""Tables and pages as text for a terminal, or for a pipe."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

from kvtool.cli.streams import SafeStream
from kvtool.cli.text import clean, one_line

if TYPE_CHECKING:
    from rich.table import Table

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
    if _wide(drawn) + len(drawn) + 2 <= console.width:  # the roomy form has a blank more, and edges
        console.print(_table(drawn, title))
    else:
        for number, band in enumerate(_bands(drawn, console.width)):
            if number or not title:
                console.print()
            console.print(_table(band, "" if number else title, console.width))
        console.print()
    return "".join(line.rstrip() + "\n" for line in canvas.getvalue().splitlines())


class _Column:
    """A column as it is drawn, and how many cells of a terminal it wants (`natural`) and needs (`least`)."""

    def __init__(self, name: str, values: Sequence[Any]) -> None:
        from rich.cells import cell_len

        self.name = name
        self.cells = [_cell(value) for value in values]
        self.numbers = bool(values) and all(_is_number(value) for value in values)
        texts = [name, *self.cells]
        self.natural = max(map(cell_len, texts))
        word = max((cell_len(word) for text in texts for word in text.split()), default=0)
        self.least = word if self.natural <= _FOLDED else min(self.natural, max(_FOLDED, cell_len(name)))


def _lines(columns: Sequence[_Column]) -> Iterator[str]:
    """The lines of a table for a pipe: it may have a million rows, of which each is drawn by itself."""
    from rich.cells import cell_len

    for row in zip(*([column.name, *column.cells] for column in columns), strict=True):
        blanks = (" " * (column.natural - cell_len(cell)) for column, cell in zip(columns, row, strict=True))
        cells = zip(columns, row, blanks, strict=True)
        padded = (blank + cell if column.numbers else cell + blank for column, cell, blank in cells)
        yield (" " * _GAP).join(padded).rstrip() + "\n"


def _wide(columns: Sequence[_Column]) -> int:
    return sum(column.natural + _GAP for column in columns)


def _bands(columns: list[_Column], width: int) -> Iterator[list[_Column]]:
    """All columns where they fit when folded, else as many at a time as fit unfolded, each behind the first column."""
    if sum(column.least + _GAP for column in columns) - _GAP <= width:
        yield columns
        return
    first, band = columns[0], columns[:1]
    for column in columns[1:]:
        if len(band) > 1 and _wide([*band, column]) - _GAP > width:
            yield band
            band = [first]
        band.append(column)
    yield band


def _fitted(columns: Sequence[_Column], width: int) -> list[int]:
    """The columns' widths: what each needs, and of what is left over first those that want little more."""
    widths = [column.least for column in columns]
    left = width - sum(widths) - _GAP * (len(columns) - 1)
    for index in sorted(range(len(columns)), key=lambda index: columns[index].natural - widths[index]):
        more = max(0, min(left, columns[index].natural - widths[index]))
        widths[index], left = widths[index] + more, left - more
    return widths


def _table(columns: Sequence[_Column], title: str, width: int | None = None) -> Table:
    """A table for a terminal, or squeezed into `width` cells of one."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=width is None,
        show_edge=width is None,
        padding=(0, 1) if width is None else (0, _GAP - 1, 0, 0),
        title=Text(title) if title else None,
    )
    widths = [None] * len(columns) if width is None else _fitted(columns, width)
    for column, cells in zip(columns, widths, strict=True):
        table.add_column(Text(column.name), justify="right" if column.numbers else "left", overflow="fold", width=cells)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, row))
    return table


def render_quote(pieces: Iterable[tuple[str, str]], columns: int | None) -> str:
    """Draw a foreign text so that no line of it can be taken for one of the program's: each begins with a bar.

    Parameters
    ----------
    pieces : parts of the text, each with a format such as `<b>{}</b>`.
    columns : cells of the terminal, which would go on with a wider line in its first column; None: it is none.
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
    """Where a line of so many cells ends: at a blank, which goes, or before a letter where it has none."""
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
    """How many cells of any terminal a letter may take; those of East Asia draw some wide that others draw narrow."""
    return 2 if not letter.isascii() and east_asian_width(letter) in "WFA" else 1


def render_markdown(text: str) -> str:
    """Draw a page of the documentation for a terminal, no wider than is good to read."""
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.theme import Theme

    canvas = io.StringIO()
    console = Console(file=canvas, force_terminal=True, theme=Theme({"markdown.code": "cyan"}))
    page = Markdown(text, hyperlinks=False, code_theme="ansi_dark")
    console.print(page, width=min(console.width, 120))
    return canvas.getvalue()


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else one_line(str(value))
