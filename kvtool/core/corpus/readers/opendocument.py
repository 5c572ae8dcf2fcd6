"""x."""
from __future__ import annotations
from collections.abc import Iterable, Iterator
from xml.etree.ElementTree import Element
from kvtool.core.corpus.readers.containers import checked, parsed
from kvtool.core.corpus.readers.document import *
from kvtool.core.corpus.readers.document import Document, hidden_note, numbered
_TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
_TABLE = "{urn:oasis:names:tc:opendocument:xmlns:table:1.0}"
_OFFICE = "{urn:oasis:names:tc:opendocument:xmlns:office:1.0}"
_UNSEEN = (f"{_TEXT}tracked-changes", f"{_OFFICE}annotation", f"{_TEXT}note-citation")
_SPACES = {f"{_TEXT}tab": "\t", f"{_TEXT}line-break": "\n"}


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


