"""PDF by pdfium: the text of each page, in the order that the library gives it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvtool.core.corpus.readers.document import Document, UnreadableFile, numbered, opened

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument

_HYPHENS = ("\x02", "\ufffe")  # what pdfium gives for a hyphen at the end of a line
_NUMBER = re.compile(r"(\d{1,9})")
_PAGE = re.compile(r".*\d ?(?:/|of) ?\d+\W*|\W*[^\W\d]{0,6}\W*\d+\W*[^\W\d]{0,2}\W*")
_RUNNING = 3  # pages that have the same head, at least
_HEAD_LINES, _LONGEST_HEAD = 2, 200  # lines of a head, and characters of a line, at most
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
        pages = [_text(file, number) for number in range(1, count + 1)]
        scanned = [at for at, text in enumerate(pages, 1) if not text.strip() and _is_picture(file, at)]
    finally:
        file.close()
    if not any(text.strip() for text in pages):
        what = f"no text on its {count} page(s)" + (", which are scanned" if scanned else "")
        raise UnreadableFile(what, "run it through OCR first, such as `ocrmypdf`")
    notes = (f"page {_ranges(scanned)}: scanned, no text to read",) if scanned else ()
    return [replace(numbered(source, "text", "p.", _without_running_lines(pages)), notes=notes)]


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


def _without_running_lines(pages: list[str]) -> list[str]:
    """Take away running heads and page numbers: what most pages begin or end with. Only the first is kept."""
    texts = [page.strip("\n").split("\n") for page in pages]
    for end in (0, -1):
        kept = []
        for _ in range(_HEAD_LINES):
            taken = [(at, texts[at].pop(end)) for at in _running(texts, end)]
            kept += taken[:1]
        for at, line in reversed(kept):
            texts[at].insert(0 if end == 0 else len(texts[at]), line)
    return ["\n".join(lines) for lines in texts]


def _running(texts: list[list[str]], end: int) -> list[int]:
    """Return the pages whose first or last lines are the same, but for the page's number; none if they are few, or
    would be left empty."""
    lines = {at: page[end] for at, page in enumerate(texts) if len(page) > 1 and len(page[end]) <= _LONGEST_HEAD}
    shapes = Counter(_NUMBER.sub("", line) for line in lines.values() if line.strip())
    shape, count = next(iter(shapes.most_common(1)), ("", 0))
    if count < (least := max(_RUNNING, len(texts) * 2 // 3)):
        return []
    first = next(at for at, line in lines.items() if line.strip() and _NUMBER.sub("", line) == shape)
    same = [at for at, line in lines.items() if _is_same(lines[first], line, at - first)]
    return same if len(same) >= least else []


def _is_same(line: str, other: str, pages: int) -> bool:
    """Return True if a line is the same so many pages later, but for the page's number ("Question 3" has none)."""
    if line == other or not _PAGE.fullmatch(line):
        return line == other
    parts, later = _NUMBER.split(line), _NUMBER.split(other)  # every other one is a number
    return len(parts) == len(later) and all(
        one == two or (at % 2 == 1 and int(two) - int(one) == pages)
        for at, (one, two) in enumerate(zip(parts, later, strict=True))
    )


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
