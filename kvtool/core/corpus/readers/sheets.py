"""Excel files: workbooks and templates, of today's formats and of the one before 2007; values as Excel shows them.
Open XML is read by the standard library, older formats by xlrd."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from kvtool.core.corpus.readers import html, text
from kvtool.core.corpus.readers.cells import Sheet, old_sheets, sheets_of
from kvtool.core.corpus.readers.containers import checked, embedded, is_old
from kvtool.core.corpus.readers.document import (
    Document,
    UnreadableFile,
    hidden_note,
    joined,
    opened,
    table_row,
    unread_note,
)

_STREAM = re.compile(rb"\t[\0\x02\x04\x08][\x04-\x10]\0")  # beginning of a workbook of before 1995
_OLD = {  # what the library for older formats passes over, by its records
    "embedded files": re.compile(rb"M\0B\0D\0[0-9A-F]\0"),
    "charts": re.compile(rb"\t\x08\x10\0\0\x06 \0"),
    "text boxes": re.compile(rb"\xb6\x01\x12\0.{10}(?!\0\0)", re.DOTALL),  # comments among them
}
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_HTML = re.compile(rb"(?:\xef\xbb\xbf)?\s*+<(?:!doctype|html|head|meta|table|body|style|div)\b", re.IGNORECASE)


def read(source: str, data: bytes) -> list[Document]:
    if _HTML.match(data):
        return html.read(source, data)
    if source.lower().endswith((".xls", ".xlt")) and (b"\0" not in data[:1024] or data[:2] in _UTF16):
        return text.read(source, data)  # the reports of many programs
    with opened("workbook", "xlrd"):
        if is_old(data) or _STREAM.match(data):
            sheets, count = [*old_sheets(data)], {name: len(each.findall(data)) for name, each in _OLD.items()}
            comments = sum(len(each) for sheet in sheets for each in sheet.comments.values())
            notes = unread_note({**count, "text boxes": max(0, count["text boxes"] - comments)})
        else:
            with checked(data) as archive:
                sheets = [*sheets_of(archive)]
                notes = unread_note({"embedded files": embedded(archive)})
        notes = (*_notes(sheets), *notes)
    parts = [part for sheet in sheets for part in _parts(sheet)]
    if not parts and any(sheet.is_damaged for sheet in sheets):
        raise UnreadableFile("damaged: none of its sheets can be read")
    return [joined(source, "markdown", parts, gap="\n", notes=notes)]


def _notes(sheets: Sequence[Sheet]) -> Iterator[str]:
    from xlrd import colname

    columns: list[str] = []
    yield from hidden_note("sheet", [each.title for each in sheets if each.is_hidden and (each.rows or each.shapes)])
    yield from hidden_note("row", [f"{each.title} {number}" for each in sheets for number in each.hidden_rows])
    for sheet in sheets:
        runs = [range(first, last + 1) for first, last in sheet.hidden_columns]
        columns += [f"{sheet.title} {colname(at - 1)}" for at in _columns(sheet) if any(at in run for run in runs)]
    yield from hidden_note("column", columns)
    yield from (f"damaged sheet {each.title!r}: not all of it is read" for each in sheets if each.is_damaged)
    if count := sum(sheet.uncalculated for sheet in sheets):
        yield f"formulas without a saved value: {count}, read as formulas"


def _parts(sheet: Sheet) -> Iterator[tuple[str, str]]:
    columns = _columns(sheet)
    _repeat_labels(sheet, columns)
    heading = f"# {sheet.title}\n"
    for number in sorted(sheet.rows.keys() | sheet.comments.keys()):
        cells = sheet.rows.get(number, {})
        row = table_row(cells.get(column, "") for column in columns)
        for written in (heading, row, *sheet.comments.get(number, ())):
            yield f"{sheet.title} row {number}", written
        heading = ""
    for written in (heading, *sheet.shapes) if any(map(str.strip, sheet.shapes)) else ():
        yield sheet.title, written


def _columns(sheet: Sheet) -> list[int]:
    used = sorted({column for cells in sheet.rows.values() for column in cells})
    gaps = [before + 1 for before, column in pairwise(used) if column - before > 1]
    return sorted({*used, *gaps})


def _repeat_labels(sheet: Sheet, columns: Sequence[int]) -> None:
    numbers = sorted(sheet.rows)
    left_over = len(numbers) * len(columns)  # cells of the table; whole files of overlapping ones are no table
    for top, left, bottom, right in sheet.merged if columns else ():
        across = columns[bisect_left(columns, left) : bisect_right(columns, right)]
        down = numbers[bisect_left(numbers, top) : bisect_right(numbers, bottom)]
        label = sheet.rows.get(top, {}).get(left)
        left_over -= len(across) * len(down)
        is_title = left <= columns[0] and len(sheet.rows.get(top, {})) == 1 and len(across) > 1
        if label and left_over >= 0 and not is_title:
            for number in down:
                sheet.rows[number].update((column, label) for column in across if column not in sheet.rows[number])
