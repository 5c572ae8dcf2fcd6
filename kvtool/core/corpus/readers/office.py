"""Office files: presentations and workbooks."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any

from kvtool.core.corpus.readers.containers import checked
from kvtool.core.corpus.readers.document import Document, hidden_note, joined, numbered, opened



def read_slides(source: str, data: bytes) -> list[Document]:
    """Return one document, its slides marked, each with its notes. A note names hidden slides.

    Raises
    ------
    UnreadableFile
        If it is damaged, protected by a password, or unpacks to too much; so do the other readers here.
    """
    checked(data).close()
    with opened("presentation", "python-pptx"):
        from pptx import Presentation

        slides = [*Presentation(io.BytesIO(data)).slides]
        texts = ["\n".join(_slide_lines(slide)) for slide in slides]
        hidden = [number for number, slide in enumerate(slides, 1) if slide.element.get("show") in ("0", "false")]
    notes = hidden_note("slide", [number for number in hidden if texts[number - 1].strip()])
    return [numbered(source, "markdown", "slide", texts, notes)]


def _slide_lines(slide: Any) -> Iterator[str]:
    title = slide.shapes.title
    if title is not None and title.has_text_frame and title.text_frame.text.strip():
        yield f"# {' '.join(title.text_frame.text.split())}\n"
    title_id = None if title is None else title.shape_id
    yield from _of_shapes(shape for shape in slide.shapes if shape.shape_id != title_id)
    if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
        yield slide.notes_slide.notes_text_frame.text


def _of_shapes(shapes: Iterable[Any]) -> Iterator[str]:
    for shape in shapes:
        if hasattr(shape, "shapes"):  # a group
            yield from _of_shapes(shape.shapes)
        elif shape.has_text_frame:
            yield shape.text_frame.text.replace("\v", "\n")
        elif getattr(shape, "has_table", False):
            for row in shape.table.rows:
                yield " | ".join(" ".join(cell.text.split()) for cell in row.cells)


def read_sheets(source: str, data: bytes) -> list[Document]:
    """Return one document of all sheets, their rows marked; formulas by the values that were saved with them. A note
    names hidden sheets."""
    checked(data).close()
    with opened("workbook", "openpyxl"):
        from openpyxl import load_workbook

        book = load_workbook(io.BytesIO(data), read_only=True, data_only=True)
        sheets = [(sheet, [*_sheet_rows(sheet)]) for sheet in book.worksheets]
        book.close()
    hidden = [sheet.title for sheet, rows in sheets if rows and sheet.sheet_state != "visible"]
    parts = [row for _, rows in sheets for row in rows]
    return [joined(source, "markdown", parts, gap="\n", notes=hidden_note("sheet", hidden))]


def _sheet_rows(sheet: Any) -> Iterator[tuple[str, str]]:
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
