"""Office files: Word documents, presentations and workbooks."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kvtool.core.corpus.readers.containers import checked
from kvtool.core.corpus.readers.document import Document, hidden_note, joined, numbered, opened

if TYPE_CHECKING:
    from docx.table import Table
    from docx.text.paragraph import Paragraph

_HEADING = re.compile(r"heading (\d)")


def read_word(source: str, data: bytes) -> list[Document]:
    """Return one document, its paragraphs and the rows of its tables numbered, in their order.

    Raises
    ------
    UnreadableFile
        If it is damaged, protected by a password, or unpacks to too much; so do the other readers here.
    """
    checked(data).close()
    with opened("Word document", "python-docx"):
        import docx
        from docx.table import Table

        file = docx.Document(io.BytesIO(data))
        blocks = [
            block
            for each in file.iter_inner_content()
            for block in (_table_rows(each) if isinstance(each, Table) else [_paragraph(each)])
        ]
    return [numbered(source, "markdown", "¶", blocks)]


def _paragraph(paragraph: Paragraph) -> str:
    """Return a paragraph with the mark of a heading or of a list's item."""
    text = paragraph.text.strip()
    style = (paragraph.style.name or "").lower() if paragraph.style is not None else ""
    if not text:
        return ""
    if style == "title":
        return f"# {text}"
    if heading := _HEADING.fullmatch(style):
        return f"{'#' * min(6, max(1, int(heading[1])))} {text}"
    return f"- {text}" if style.startswith("list") else text


def _table_rows(table: Table) -> Iterator[str]:
    """Yield a table's rows, a cell that spans several columns once."""
    for row in table.rows:
        cells = {id(cell._tc): " ".join(cell.text.split()) for cell in row.cells}
        yield " | ".join(text for text in cells.values() if text)


def read_slides(source: str, data: bytes) -> list[Document]:
    """Return one document, its slides marked, each with its notes. A note names hidden slides."""
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
