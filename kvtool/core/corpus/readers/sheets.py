"""Workbooks by openpyxl: the values of each sheet, a row a line."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from kvtool.core.corpus.readers.document import Document, hidden_note, joined, opened
from kvtool.core.corpus.readers.zipped import checked

ENDINGS = (".xlsx", ".xlsm", ".xltx")
LIBRARY = "openpyxl"


def read(source: str, data: bytes) -> list[Document]:
    """Return one document of all sheets, their rows marked; formulas by the values that were saved with them. A note
    names hidden sheets.

    Raises
    ------
    UnreadableFile
        If it is damaged, protected by a password, or unpacks to too much.
    """
    checked(data).close()
    with opened("workbook", LIBRARY):
        from openpyxl import load_workbook

        book = load_workbook(io.BytesIO(data), read_only=True, data_only=True)
        sheets = [(sheet, [*_rows(sheet)]) for sheet in book.worksheets]
        book.close()
    hidden = [sheet.title for sheet, rows in sheets if rows and sheet.sheet_state != "visible"]
    parts = [row for _, rows in sheets for row in rows]
    return [joined(source, "markdown", parts, gap="\n", notes=hidden_note("sheet", hidden))]


def _rows(sheet: Any) -> Iterator[tuple[str, str]]:
    sheet.reset_dimensions()  # what the file says of itself would be padded to
    named = False
    for number, row in enumerate(sheet.iter_rows(values_only=True), 1):
        cells = [" ".join(str(value).split()) for value in row if value is not None]
        if not any(cells):
            continue
        if not named:
            yield f"{sheet.title} row {number}", f"# {sheet.title}\n"
            named = True
        yield f"{sheet.title} row {number}", " | ".join(cells)
