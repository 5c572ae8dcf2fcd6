"""PDF by pdfium: the text, form values and comments of each page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from kvtool.core.corpus.readers.document import Document, UnreadableFile, hidden_note, numbered, opened, unread_note

_NUMBER = re.compile(r"(\d{1,9})")
_PAGE_WORD = "page|pag|p|pg|seite|side|sida|str|página|pagina|pág|стр|страница|第"
_PAGE = re.compile(rf".*\d ?(?:/|of) ?\d+\W*|\W*(?:(?:{_PAGE_WORD})\W*)?\d+\W*[页頁쪽]?\W*", re.IGNORECASE)
_RUNNING = 3  # pages that have the same head, at least
_HEAD_LINES, _LONGEST_HEAD = 2, 200  # lines of a head, and characters of a line, at most
_PASSWORD = 4  # FPDF_ERR_PASSWORD
_XFA = (2, 3)  # FORMTYPE_XFA_FULL, FORMTYPE_XFA_FOREGROUND


def read(source: str, data: bytes) -> list[Document]:
    with opened("PDF", "pypdfium2"):
        import pypdfium2

        from kvtool.core.corpus.readers.pdf_page import Page, with_whole_words
    try:
        file = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if error.err_code == _PASSWORD:
            raise UnreadableFile("protected by a password", "save a copy without one") from error
        raise UnreadableFile("damaged: not a PDF that can be opened") from error
    try:
        file.init_forms()
        pages = [Page(file, number) for number in range(len(file))]
        has_xfa = file.get_formtype() in _XFA and not any(page.fields for page in pages)
        files = file.count_attachments() + sum(page.files for page in pages)
    finally:
        file.close()
    texts = _without_running_lines(with_whole_words([page.text for page in pages]), [page.heads for page in pages])
    texts = ["\n".join(filter(None, (text, *page.extra))) for text, page in zip(texts, pages, strict=True)]
    scanned = [at for at, page in enumerate(pages, 1) if page.is_picture and not texts[at - 1].strip()]
    broken = [at for at, page in enumerate(pages, 1) if page.is_broken]
    if not any(text.strip() for text in texts):
        if broken and not scanned:
            raise UnreadableFile(f"damaged: page {_ranges(broken)} cannot be opened")
        what = f"no text on its {len(pages)} page(s)" + (", which are scanned" if scanned else "")
        raise UnreadableFile(what, "run it through OCR first, such as `ocrmypdf`")
    notes = [f"page {_ranges(scanned)}: scanned, no text to read"] if scanned else []
    notes += [f"page {_ranges(broken)}: damaged, not read"] if broken else []
    notes += hidden_note("field", [name for page in pages for name in page.hidden])
    unknown = sum(page.unknown for page in pages)
    notes += unread_note({"embedded files": files, "XFA forms": int(has_xfa), "characters without a meaning": unknown})
    return [numbered(source, "text", "p.", texts, tuple(notes))]


def _without_running_lines(pages: list[str], heads: list[set[str]]) -> list[str]:
    texts = [page.strip("\n").split("\n") for page in pages]
    for end in (0, -1):
        kept = []
        for _ in range(_HEAD_LINES):
            taken = [(at, texts[at].pop(end)) for at in _running(texts, end, heads)]
            kept += taken[:1]
        for at, line in reversed(kept):
            texts[at].insert(0 if end == 0 else len(texts[at]), line)
    return ["\n".join(lines) for lines in texts]


def _running(texts: list[list[str]], end: int, heads: list[set[str]]) -> list[int]:
    lines = {at: page[end] for at, page in enumerate(texts) if len(page) > 1 and len(page[end]) <= _LONGEST_HEAD}
    lines = {at: line for at, line in lines.items() if line not in heads[at]}
    shapes = Counter(_NUMBER.sub("", line) for line in lines.values() if line.strip())
    shape, count = next(iter(shapes.most_common(1)), ("", 0))
    if count < (least := max(_RUNNING, len(texts) * 2 // 3)):
        return []
    first = next(at for at, line in lines.items() if line.strip() and _NUMBER.sub("", line) == shape)
    same = [at for at, line in lines.items() if _is_same(lines[first], line, at - first)]
    return same if len(same) >= least else []


def _is_same(line: str, other: str, pages: int) -> bool:
    """Whether a line is the same so many pages later, but for the page's number ("Question 3" has none)."""
    if line == other or not _PAGE.fullmatch(line):
        return line == other
    parts, later = _NUMBER.split(line), _NUMBER.split(other)  # every other one is a number
    return len(parts) == len(later) and all(
        one == two or (at % 2 == 1 and int(two) - int(one) == pages)
        for at, (one, two) in enumerate(zip(parts, later, strict=True))
    )


def _ranges(numbers: Sequence[int]) -> str:
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ends = [(pairs[0][1], pairs[-1][1]) for _, run in runs if (pairs := [*run])]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
