"""Word documents by python-docx: paragraphs, headings, lists and tables in their order."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvtool.core.corpus.readers.document import Document, numbered, opened
from kvtool.core.corpus.readers.zipped import checked

if TYPE_CHECKING:
    from docx.table import Table
    from docx.text.paragraph import Paragraph

ENDINGS = (".docx", ".docm", ".dotx")
LIBRARY = "python-docx"

_HEADING = re.compile(r"heading (\d)")


def read(source: str, data: bytes) -> list[Document]:
    """Return one document, its paragraphs and the rows of its tables numbered.

    Raises
    ------
    UnreadableFile
        If it is damaged, protected by a password, or unpacks to too much.
    """
    checked(data).close()
    with opened("Word document", LIBRARY):
        import docx
        from docx.table import Table

        file = docx.Document(io.BytesIO(data))
        blocks = [
            block
            for each in file.iter_inner_content()
            for block in (_rows(each) if isinstance(each, Table) else [_paragraph(each)])
        ]
    return [numbered(source, "markdown", "¶", blocks)]


def _paragraph(paragraph: Paragraph) -> str:
    """A paragraph with the mark of a heading or of a list's item."""
    text = paragraph.text.strip()
    style = (paragraph.style.name or "").lower() if paragraph.style is not None else ""
    if not text:
        return ""
    if style == "title":
        return f"# {text}"
    if heading := _HEADING.fullmatch(style):
        return f"{'#' * min(6, max(1, int(heading[1])))} {text}"
    return f"- {text}" if style.startswith("list") else text


def _rows(table: Table) -> Iterator[str]:
    """A table's rows, a cell that spans several columns once."""
    for row in table.rows:
        cells = {id(cell._tc): " ".join(cell.text.split()) for cell in row.cells}
        yield " | ".join(text for text in cells.values() if text)
