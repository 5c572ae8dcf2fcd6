"""Office files: Word documents, OpenDocument texts, and rich text."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from kvtool.core.corpus.readers.containers import checked, parsed
from kvtool.core.corpus.readers.document import Document, UnreadableFile, hidden_note, numbered, opened

if TYPE_CHECKING:
    from docx.table import Table
    from docx.text.paragraph import Paragraph

_HEADING = re.compile(r"heading (\d)")
_TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
_TABLE = "{urn:oasis:names:tc:opendocument:xmlns:table:1.0}"
_OFFICE = "{urn:oasis:names:tc:opendocument:xmlns:office:1.0}"
_UNSEEN = (f"{_TEXT}tracked-changes", f"{_OFFICE}annotation", f"{_TEXT}note-citation")
_SPACES = {f"{_TEXT}tab": "\t", f"{_TEXT}line-break": "\n"}


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


def read_opendocument(source: str, data: bytes) -> list[Document]:
    """Return one document, its paragraphs and the rows of its tables numbered. A note names hidden sections."""
    with checked(data) as archive:
        content = parsed(archive, "content.xml")
    body = content.find(f"{_OFFICE}body")
    blocks = () if body is None else _blocks(body, "")
    sections = content.iter(f"{_TEXT}section")
    hidden = [each.get(f"{_TEXT}name", "") for each in sections if each.get(f"{_TEXT}display", "true") != "true"]
    return [numbered(source, "markdown", "¶", blocks, hidden_note("section", hidden))]


def _blocks(element: Element, bullet: str) -> Iterator[str]:
    """Yield the blocks below an element, in their order; `bullet` precedes each paragraph."""
    for child in element:
        if child.tag == f"{_TEXT}h":
            rank = child.get(f"{_TEXT}outline-level", "1")
            yield f"{'#' * min(6, int(rank) if rank.isdecimal() else 1)} {_words(child)}"
        elif child.tag == f"{_TEXT}p":
            yield bullet + words if (words := _words(child)) else ""
        elif child.tag == f"{_TABLE}table-row":
            cells = (" ".join(_words(cell).split()) for cell in child)
            yield " | ".join(cell for cell in cells if cell)
        elif child.tag not in _UNSEEN:
            yield from _blocks(child, "- " if child.tag == f"{_TEXT}list" else bullet)


def _words(element: Element) -> str:
    """Return all text in an element, with a space between paragraphs inside of it."""
    parts = [element.text or ""]
    for child in element:
        if child.tag == f"{_TEXT}s":
            parts.append(" ")
        elif child.tag not in _UNSEEN:
            parts.append(_SPACES.get(child.tag) or _words(child))
            parts.append(" " if child.tag == f"{_TEXT}p" else "")
        parts.append(child.tail or "")
    return "".join(parts).strip(" ") if element.tag in (f"{_TEXT}p", f"{_TEXT}h") else "".join(parts)


def read_rtf(source: str, data: bytes) -> list[Document]:
    """Read one document, its paragraphs numbered."""
    if not data.lstrip().startswith(b"{\\rtf"):
        raise UnreadableFile("damaged: not the rich text that its name says")
    with opened("rich text", "striprtf"):
        from striprtf.striprtf import rtf_to_text

        text = rtf_to_text(data.decode("latin-1"), errors="replace")  # type: ignore[no-untyped-call]
    return [numbered(source, "text", "¶", text.split("\n"))]
