"""PDF by pdfium: the text of each page, in the order that the library gives it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvtool.core.corpus.readers.document import Document, UnreadableFile, numbered, opened

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument

_HYPHENS = ("\x02", "\ufffe")  # what pdfium gives for a hyphen at the end of a line
_PASSWORD = 4  # FPDF_ERR_PASSWORD


def read(source: str, data: bytes) -> list[Document]:
    """Return one document, its pages marked; pages that hold pictures and no text are noted.

    Raises
    ------
    UnreadableFile
        If it is damaged, protected by a password, or holds no text.
    """
    with opened("PDF", "pypdfium2"):
        import pypdfium2
    try:
        file = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        raise _refused(error) from error
    try:
        count = len(file)
        pages = {number: _text(file, number) for number in range(1, count + 1)}
        scanned = [number for number, text in pages.items() if not text.strip() and _is_picture(file, number)]
    finally:
        file.close()
    if not any(text.strip() for text in pages.values()):
        what = f"no text on its {count} page(s)" + (", which are scanned" if scanned else "")
        raise UnreadableFile(what, "run it through OCR first, such as `ocrmypdf`")
    notes = (f"page {_ranges(scanned)}: scanned, no text to read",) if scanned else ()
    return [replace(numbered(source, "text", "p.", pages.values()), notes=notes)]


def _refused(error: Any) -> UnreadableFile:
    if error.err_code == _PASSWORD:
        return UnreadableFile("protected by a password", "save a copy without one")
    return UnreadableFile("damaged: not a PDF that can be opened")


def _text(file: PdfDocument, number: int) -> str:
    """Return the text of a page; words that are cut at line ends are joined."""
    import pypdfium2

    try:
        page = file[number - 1]
    except pypdfium2.PdfiumError:  # one broken page
        return ""
    try:
        text = str(page.get_textpage().get_text_bounded())
    finally:
        page.close()
    text = text.replace("\r\n", "\n")
    for hyphen in _HYPHENS:
        text = text.replace(hyphen + "\n", "").replace(hyphen, "-")
    return text


def _is_picture(file: PdfDocument, number: int) -> bool:
    """Return True if a page without text shows anything."""
    import pypdfium2

    try:
        return any(True for _ in file[number - 1].get_objects(max_depth=2))
    except pypdfium2.PdfiumError:
        return False


def _ranges(numbers: Sequence[int]) -> str:
    """`1, 3-5` of 1, 3, 4, 5."""

    def runs() -> Iterator[str]:
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
            first, *more = [number for _, number in run]
            yield f"{first}-{more[-1]}" if more else str(first)

    return ", ".join(runs())
