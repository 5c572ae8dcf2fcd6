"""Excel files: workbooks and templates, of today's formats and of the one before 2007; values as Excel shows them."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal, cast

from kvtool.core.corpus.readers import html, text
from kvtool.core.corpus.readers.cells import Sheet, old_sheets, sheets_of
from kvtool.core.corpus.readers.containers import checked, embedded, is_old
from kvtool.core.corpus.readers.document import (
    Document,
    MissingPackage,
    UnreadableFile,
    hidden_note,
    joined,
    opened,
    table_row,
    unread_note,
)
from kvtool.core.corpus.readers.ir import Item, blocks
from kvtool.core.corpus.readers.slides import chart_rows

_DRAWN = re.compile("xl/(?:charts/|comments|threadedcomments/)", re.IGNORECASE)
_STREAM = re.compile(rb"\t[\0\x02\x04\x08][\0-\x08]\0")  # beginning of a workbook of before 1995
_HTML = re.compile(rb"(?:\xef\xbb\xbf)?\s*+<(?:!doctype|html|head|meta|table|body|style|div)\b", re.IGNORECASE)
_COMMENTED = re.compile("[A-Z]+([0-9]+)")


def read(source: str, data: bytes) -> list[Document]:
    """Return one document of all sheets, their rows marked, whatever kind of table the file really holds. Notes name
    hidden sheets, rows and columns, damaged sheets, and formulas without a value.

    Raises
    ------
    UnreadableFile
        If it is damaged, protected by a password, or unpacks to too much.
    """
    is_before_2007 = is_old(data) or _STREAM.match(data) is not None
    if not is_before_2007 and not data.startswith(b"PK") and b"\0" not in data[:1024]:
        return (html.read if _HTML.match(data) else text.read)(source, data)
    notes: tuple[str, ...] = ()
    with opened("workbook", "xlrd"):
        if is_before_2007:
            sheets, sections = [*old_sheets(data)], _drawn(data, "xls")
        else:
            with checked(data) as archive:
                sheets = [*sheets_of(archive)]
                sections = _drawn(data, "xlsx") if any(map(_DRAWN.match, archive.namelist())) else ()
                notes = unread_note({"embedded files": embedded(archive)})
        parts = [*_parts(sheets, sections or ())]
        notes = (*_notes(sheets), *notes)
    if sections is None:
        notes = (*notes, "comments, charts and text boxes: not read")
    if not parts and any(sheet.is_damaged for sheet in sheets):
        raise UnreadableFile("damaged: none of its sheets can be read")
    return [joined(source, "markdown", parts, gap="\n", notes=notes)]


def _drawn(data: bytes, kind: Literal["xls", "xlsx"]) -> Sequence[Item] | None:
    """Return sections with the comments, text boxes and charts of a workbook, or None if they cannot be read."""
    try:
        with opened("workbook", "office-oxide"):
            from office_oxide import Document as Office

            return cast(Sequence[Item], Office.from_bytes(data, kind).to_ir()["sections"])
    except MissingPackage:
        raise
    except UnreadableFile:
        return None


def _notes(sheets: Sequence[Sheet]) -> Iterator[str]:
    """Yield what a reader of the sheets has to know."""
    from xlrd import colname

    yield from hidden_note("sheet", [sheet.title for sheet in sheets if sheet.is_hidden and sheet.rows])
    yield from hidden_note("row", [f"{sheet.title} {number}" for sheet in sheets for number in sheet.hidden_rows])
    columns = [
        f"{sheet.title} {colname(column - 1)}"
        for sheet in sheets
        for column in _columns(sheet)
        if any(first <= column <= last for first, last in sheet.hidden_columns)
    ]
    yield from hidden_note("column", columns)
    for sheet in sheets:
        if sheet.is_damaged:
            yield f"damaged sheet {sheet.title!r}: not all of it is read"
    if count := sum(sheet.uncalculated for sheet in sheets):
        yield f"formulas without a saved value: {count}, read as formulas"


def _parts(sheets: Iterable[Sheet], sections: Sequence[Item]) -> Iterator[tuple[str, str]]:
    """Yield the rows of all sheets, each with its place and followed by its comments; then what lies on the sheet."""
    drawn = {section["title"]: section for section in sections if section.get("sheet_kind")}
    for sheet in sheets:
        comments, texts = _beside_cells(drawn.get(sheet.title, {}))
        others = [text_line for text_line in (*sheet.shapes, *texts) if text_line.strip()]
        columns = _columns(sheet)
        _repeat_labels(sheet, columns)
        heading = f"# {sheet.title}\n"
        for number in sorted(sheet.rows.keys() | comments.keys()):
            cells = sheet.rows.get(number, {})
            row = table_row(cells.get(column, "") for column in columns)
            for text_line in (heading, row, *comments.get(number, ())):
                yield f"{sheet.title} row {number}", text_line
            heading = ""
        for text_line in (heading, *others) if others else ():
            yield sheet.title, text_line
    charts = [each for section in sections if not section.get("sheet_kind") for each in section["elements"]]
    for number, chart in enumerate((each for each in charts if each["type"] == "paragraph"), 1):
        yield f"chart {number}", f"\n# Chart {number}\n"
        yield f"chart {number}", "\n".join(chart_rows("".join(blocks([chart])).split("\n")))


def _beside_cells(section: Item) -> tuple[dict[int, list[str]], list[str]]:
    """Return the comments on a sheet's cells, by row, and the texts of a sheet that is a chart."""
    comments: dict[int, list[str]] = {}
    others: list[str] = []
    for element in section.get("elements", ()):
        cell = _COMMENTED.match(element.get("marker") or "")
        if element["type"] == "endnote" and cell:
            author, said = element.get("author"), " ".join(" ".join(blocks(element["content"])).split())
            by = f" by {author}" if author and not said.startswith(author) else ""
            comments.setdefault(int(cell[1]), []).append(f"[comment on {cell[0]}{by}: {said}]")
        elif section["sheet_kind"] != "worksheet":
            others.extend(blocks([element]))
    return comments, others


def _columns(sheet: Sheet) -> list[int]:
    """Return the columns of a sheet that hold something, and one for those between them that are empty."""
    used = sorted({column for cells in sheet.rows.values() for column in cells})
    gaps = [before + 1 for before, column in pairwise(used) if column - before > 1]
    return sorted({*used, *gaps})


def _repeat_labels(sheet: Sheet, columns: Sequence[int]) -> None:
    """Write the label of merged cells in each row and column that they cover; a title alone in its row stands once."""
    numbers = sorted(sheet.rows)
    left_over = len(numbers) * len(columns)  # cells of the table; whole files of overlapping ones are no table
    for top, left, bottom, right in sheet.merged:
        across = columns[bisect_left(columns, left) : bisect_right(columns, right)]
        down = numbers[bisect_left(numbers, top) : bisect_right(numbers, bottom)]
        label = sheet.rows.get(top, {}).get(left)
        left_over -= len(across) * len(down)
        is_title = left <= columns[0] and len(sheet.rows.get(top, {})) == 1 and len(across) > 1
        if label and left_over >= 0 and not is_title:
            for number in down:
                sheet.rows[number].update((column, label) for column in across if column not in sheet.rows[number])
