"""Page of a PDF by pdfium: its text, in lines of positioned pieces with cells, columns, superscripts and words cut at
line ends; the values of its form fields, and the comments on it."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pypdfium2
import pypdfium2.raw as pdfium

from kvtool.core.corpus.readers.pdf_layout import CELL, HYPHEN, Edges, Piece, page_text

_LINE = re.compile(rf"[^\r\n{HYPHEN}]+{HYPHEN}?")
_DIGIT = re.compile(r"\d")
_NOTE = re.compile(r"\s*\d{1,2}(?=\D|$)")
_WIDE, _HIGH = 0.6, 0.27  # width of a character, and rise of its lower edge, that plain text does not have, in heights
_ABOVE = 1e6  # added to the distance of a label above its field: one on the same line comes first
_MOST_FIELDS, _MOST_OPTIONS = 1000, 1000  # fields of a page whose labels are looked for; options of a list
_TALL, _UNEVEN = 1.8, 0.1  # heights of a line that is not turned, and of a difference between two characters
_BLANK = 0.2  # points that the drawing of a space may be high
_HIDDEN = 2 | 32  # flags of an annotation: hidden, not shown
_BUTTONS = (pdfium.FPDF_FORMFIELD_CHECKBOX, pdfium.FPDF_FORMFIELD_RADIOBUTTON)
_NO_NOTES = (pdfium.FPDF_ANNOT_LINK, pdfium.FPDF_ANNOT_POPUP)


class Page:
    """One page. `extra`: form values without a label, and comments; `heads`: first lines of tables; `hidden`: names of
    fields that are filled in; `unknown`: number of characters without a meaning in Unicode."""

    def __init__(self, file: pypdfium2.PdfDocument, number: int) -> None:
        self.text, self.files, self.fields, self.unknown = "", 0, 0, 0
        self.extra: list[str] = []
        self.heads: set[str] = set()
        self.hidden: list[str] = []
        self.is_picture, self.is_broken = False, False
        try:
            page = file[number]
        except pypdfium2.PdfiumError:
            self.is_broken = True
            return
        try:
            lines, self.unknown = _lines(page.get_textpage(), page.get_bbox())
            self._add_annotations(page, lines)
            paths = partial(page.get_objects, filter=[pdfium.FPDF_PAGEOBJ_PATH])
            units, self.heads = page_text(lines, cache(lambda: [path.get_bounds() for path in paths()]))
            self.text = units.encode("utf-16", "surrogatepass").decode("utf-16", "ignore").replace("\0", "")
            self.is_picture = not self.text.strip() and any(True for _ in page.get_objects(max_depth=2))
        except pypdfium2.PdfiumError:
            self.is_broken = True
        finally:
            page.close()

    def _add_annotations(self, page: pypdfium2.PdfPage, lines: list[list[Piece]]) -> None:
        count = pdfium.FPDFPage_GetAnnotCount(page)
        for at in range(count):
            note = pdfium.FPDFPage_GetAnnot(page, at)
            kind = pdfium.FPDFAnnot_GetSubtype(note)
            if kind == pdfium.FPDF_ANNOT_WIDGET:
                self.fields += 1
                if page.formenv:
                    self._add_field(page.formenv, note, lines if count < _MOST_FIELDS else [])
            elif kind not in _NO_NOTES:
                self.files += kind == pdfium.FPDF_ANNOT_FILEATTACHMENT
                text, author = (_string(pdfium.FPDFAnnot_GetStringValue, note, key) for key in (b"Contents", b"T"))
                if text:
                    self.extra.append(f"[note{author and f' by {author}'}: {text}]")
            pdfium.FPDFPage_CloseAnnot(note)

    def _add_field(self, form: Any, field: Any, lines: list[list[Piece]]) -> None:
        kind = pdfium.FPDFAnnot_GetFormFieldType(form, field)
        is_button = kind in _BUTTONS
        value = " ".join(_value(form, field, kind).split())
        if not value:
            return
        name = _string(pdfium.FPDFAnnot_GetFormFieldAlternateName, form, field)
        name = name or _string(pdfium.FPDFAnnot_GetFormFieldName, form, field)
        if pdfium.FPDFAnnot_GetFlags(field) & _HIDDEN:
            self.hidden.append(name)
            lines = []
        rect = pdfium.FS_RECTF()
        pdfium.FPDFAnnot_GetRect(field, rect)
        box = Piece(value, rect.left, rect.bottom, rect.right, rect.top)
        pieces = ((row, at, piece) for row, line in enumerate(lines) for at, piece in enumerate(line))
        near = ((_distance(piece, box, is_button), row, at) for row, at, piece in pieces)
        distance, row, at = min(near, default=(math.inf, 0, 0))
        if distance == math.inf:
            self.extra.append(f"{name}: {value}")
            return
        label = lines[row][at]
        label = label._replace(text=label.text.rstrip() + ":" * label.text.rstrip()[-1:].isalnum())
        if is_button or distance >= _ABOVE:
            lines[row][at] = label._replace(text=f"{label.text} {value}")
        else:
            lines[row][at : at + 1] = label, box


def _value(form: Any, field: Any, kind: int) -> str:
    if kind in _BUTTONS:
        is_set = pdfium.FPDFAnnot_IsChecked(form, field)
        return "yes" if is_set else "no" if kind == pdfium.FPDF_FORMFIELD_CHECKBOX else ""
    if kind == pdfium.FPDF_FORMFIELD_PUSHBUTTON:
        return ""
    options = range(min(pdfium.FPDFAnnot_GetOptionCount(form, field), _MOST_OPTIONS))
    chosen = [at for at in options if pdfium.FPDFAnnot_IsOptionSelected(form, field, at)]
    labels = (_string(pdfium.FPDFAnnot_GetOptionLabel, form, field, at) for at in chosen)
    return ", ".join(labels) or _string(pdfium.FPDFAnnot_GetFormFieldValue, form, field)


def _distance(piece: Piece, box: Piece, is_button: bool) -> float:
    """The distance of a text from a form field; infinite if it cannot be its label."""
    if piece.is_beside(box):
        if piece.right < box.left + 2:
            return max(0.0, box.left - piece.right)
        return piece.left - box.right if is_button and piece.left > box.right - 2 else math.inf
    gap = piece.bottom - box.top
    is_above = -2 < gap < piece.height and piece.left < box.right and box.left < piece.right
    return _ABOVE + gap if is_above and not is_button else math.inf


def _string(get: Callable[..., int], *arguments: Any) -> str:
    size = get(*arguments, None, 0)
    buffer = ctypes.create_string_buffer(size)
    get(*arguments, ctypes.cast(buffer, ctypes.POINTER(pdfium.FPDF_WCHAR)), size)
    return buffer.raw.decode("utf-16-le", "ignore").rstrip("\0").strip()


def _lines(textpage: pypdfium2.PdfTextPage, bounds: Edges) -> tuple[list[list[Piece]], int]:
    lines: list[list[Piece]] = []
    content, unknown = _text(textpage)
    page, count_rects, get_rect = textpage.raw, pdfium.FPDFText_CountRects, pdfium.FPDFText_GetRect
    x0, y1, x1, y0 = corners = [ctypes.c_double() for _ in range(4)]
    pointers = [ctypes.byref(corner) for corner in corners]
    box, get_box = pdfium.FS_RECTF(), pdfium.FPDFText_GetLooseCharBox
    for found in _LINE.finditer(content):
        start, text = found.start(), found[0]
        left, bottom, right, top, gap, highest = math.inf, math.inf, -math.inf, -math.inf, 0.0, -math.inf
        for at in range(count_rects(page, start, len(text))):
            get_rect(page, at, *pointers)
            gap = max(gap, x0.value - right) if at else 0.0
            left, bottom, highest = min(left, x0.value), min(bottom, y0.value), max(highest, y0.value)
            right, top = max(right, x1.value), max(top, y1.value)
        if left > bounds[2] or right < bounds[0] or bottom > bounds[3] or top < bounds[1]:
            continue
        get_box(page, start + len(text) - len(text.lstrip()), box)
        first = Piece(text, box.left, box.bottom, box.right, box.top)
        height = first.height
        is_wide = right - left > _WIDE * height * len(text) and text.isascii()
        is_raised = highest > first.bottom + _HIGH * height and _DIGIT.search(text)
        is_raised = is_raised or (bottom < first.bottom and _NOTE.match(text))
        if top - bottom > _TALL * height:  # turned text, which is beside no other line
            lines.append([Piece(text, left, bottom, right, bottom)])
        elif is_wide or is_raised or gap > CELL * height:
            lines.append(_pieces(textpage, start, text))
        else:
            lines.append([Piece(text, left, min(first.bottom, bottom), right, max(first.top, top))])
    return lines, unknown


def _text(textpage: pypdfium2.PdfTextPage) -> tuple[str, int]:
    """The text of a page, one UTF-16 unit for each of pdfium's characters, and how many have no meaning."""
    count = textpage.count_chars()
    text = textpage.get_text_range() if count else ""
    if len(text) == count:
        return text, 0
    # there are surrogates, or control characters that fonts without Unicode give and that pdfium leaves out
    codes = [pdfium.FPDFText_GetUnicode(textpage, at) for at in range(count)]
    unknown = 0
    for at, code in enumerate(codes):
        if code < ord(" ") and not pdfium.FPDFText_IsGenerated(textpage, at):
            _, bottom, _, top = textpage.get_charbox(at)
            is_blank = top - bottom < _BLANK
            codes[at] = ord(HYPHEN) if pdfium.FPDFText_IsHyphen(textpage, at) else ord(" ") if is_blank else 0
            unknown += codes[at] == 0
    return "".join(map(chr, codes)), unknown


def _pieces(textpage: pypdfium2.PdfTextPage, start: int, text: str) -> list[Piece]:
    pieces: list[Piece] = []
    page, box, get_box = textpage.raw, pdfium.FS_RECTF(), pdfium.FPDFText_GetLooseCharBox
    pointer = ctypes.byref(box)
    begin, left, bottom, right, height = 0, 0.0, 0.0, 0.0, 0.0
    for at, character in enumerate(text):
        if (character.isspace() or character == HYPHEN) and height:
            continue
        get_box(page, start + at, pointer)
        x, y, size = box.left, box.bottom, box.top - box.bottom
        is_uneven = abs(y - bottom) + abs(size - height) > _UNEVEN * size
        if height and (is_uneven or x - right > CELL * size):
            pieces.append(Piece(text[begin:at], left, bottom, right, bottom + height))
            height = 0.0
        if height:
            left, right = min(left, x), max(right, box.right)
        else:
            begin, left, bottom, right, height = at if pieces else 0, x, y, box.right, size
    return [*pieces, Piece(text[begin:], left, bottom, right, bottom + height)]
