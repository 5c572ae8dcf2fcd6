"""Page of a PDF by pdfium: its text, in lines of positioned pieces with cells, columns, superscripts and words cut at
line ends; the values of its form fields, and the comments on it."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import pypdfium2
import pypdfium2.raw as pdfium

from kvtool.core.corpus.readers.document import table_row

HYPHEN = "\ufffe"  # what pdfium gives for a hyphen between the letters of a cut word, without a newline
CELL = 0.9  # the least gap between two cells, in heights of the text
_SPACE = 0.15  # that between two words
_SMALL, _RAISED = 0.85, 0.12  # greatest height of a superscript, and least rise, in heights of the text before it
_NUMBER = re.compile(r"[-\u2212\u2013+]?\d[\d,\u2013-]*")
_POWER = re.compile(  # has an exponent: 10, m, km, but not a year
    r"(?:[\d)\ud800-\udfff]|(?<![^\W\d_])[^\W\d_]{1,2})(?<!\b1[5-9]\d\d)(?<!\b20\d\d)$"
)
_COMPOUND = re.compile(r"[^\W\d_]+-[^\W\d_]+")
_CUT = re.compile(rf"([^\W_]+)(?:[-\u2010\xad]\n|{HYPHEN})(?=([^\W_]+))")
_BREAK = re.compile(rf"[-{HYPHEN}]\n")
_SHORT = 2
_FIRST = re.compile(  # first parts of compounds that keep their hyphen
    r"(?:half|self|well|left|two|three|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|high(?!-(?:light|way|land|er))"
    r"|low(?!-(?:land|er)))-|[^\W\d_]-"
)
_AND = frozenset(("and", "or", "und", "oder", "bis"))  # as in German "Ein- und Ausfuhr"
_PROSE_ROWS, _PROSE_WORDS, _PROSE_FLOW = 3, 2.5, 0.5  # rows, words a line, share of lines that begin in lower case
_LONG_WORDS = 4  # words a line of prose that may begin in upper case
_TABLE_COLUMNS, _TABLE_ROWS = 3, 3
_ROW_GAP, _MOST_ROWS = 3.0, 200  # between the rows of a block, in heights of the text; rows of one
_FRAME = 40.0  # points that the frame of a table is higher than its rows, at most
_MOST_LINES, _MOST_DRAWN = 8, 5000  # lines of text in a row of a drawn table; lines drawn on a page that has one
Edges = tuple[float, float, float, float]  # left, bottom, right, top


class Piece(NamedTuple):
    text: str
    left: float
    bottom: float
    right: float
    top: float

    @property
    def height(self) -> float:
        return self.top - self.bottom

    def is_beside(self, other: Piece) -> bool:
        shared = min(self.top, other.top) - max(self.bottom, other.bottom)
        return shared > 0.5 * min(self.height, other.height)


def page_text(lines: Sequence[Sequence[Piece]], drawn: Callable[[], list[Edges]]) -> tuple[str, set[str]]:
    rows: list[list[Piece]] = []
    for line in lines:
        last, begin = rows[-1][-1] if rows else None, line[0]
        follows = last and last.is_beside(begin) and begin.left > last.right - last.height / 3
        if last and follows and last.text[-1:] != HYPHEN:
            rows[-1] += line
        else:
            rows.append([*line])
    texts, heads = [], set()
    for block in _blocks(_whole_rows([_cells(row) for row in rows], drawn)):
        texts += (written := _written(block, drawn))
        first = block[:_TABLE_ROWS]
        if len(first) == _TABLE_ROWS and len(_columns(first)) == max(map(len, first)) <= len(first[0]) + 1:
            heads.add(written[0])
    return "\n".join(texts).replace(HYPHEN + "\n", HYPHEN), heads


def _cells(row: list[Piece]) -> list[Piece]:
    cells, base = [row[0]], row[0]
    if row[1:] and row[1].text.lstrip()[:1].isalnum() and _is_raised(row[0], row[1], row[1].left - row[0].right):
        mark = f"[{row[0].text.strip()}]" + " " * (not row[1].text[:1].isspace())
        cells, base = [row[0]._replace(text=mark)], row[1]
    for piece, after in pairwise([*row[1:], base]):
        last, text = cells[-1], piece.text
        gap = piece.left - last.right
        if _is_raised(piece, base, gap):
            if not last.text[-1:].isspace() and not after.text.startswith(("/", "\u2044")):  # else a fraction
                power = _POWER.search(last.text)
                text = text.replace(mark := text.strip(), f"^{mark}" if power else f"[{mark}]")
        else:
            base = piece
            if gap > CELL * piece.height:
                cells.append(piece)
                continue
            is_apart = gap > _SPACE * piece.height or (last.text[-1:].isdigit() and text[:1].isdigit())
            if is_apart and not last.text[-1:].isspace() and not text[:1].isspace():
                text = " " + text
        edges = min(last.bottom, piece.bottom), max(last.right, piece.right), max(last.top, piece.top)
        cells[-1] = Piece(last.text + text, last.left, *edges)
    return cells


def _is_raised(piece: Piece, base: Piece, gap: float) -> bool:
    is_small = piece.height < _SMALL * base.height and gap < base.height / 2
    rise = (piece.bottom - base.bottom) / (base.height or 1)
    return is_small and _RAISED < rise < 1 and _NUMBER.fullmatch(piece.text.strip()) is not None


def _whole_rows(rows: list[list[Piece]], drawn: Callable[[], list[Edges]]) -> list[list[Piece]]:
    whole: list[list[Piece]] = []
    joined = None
    for row in rows:
        group, last = [row], whole[-1] if whole else []
        is_next = last and (last is joined or row[0].top > last[0].bottom + row[0].height / 3)
        band = _band(row, drawn()) if is_next else None
        while band and len(group) <= len(whole) and _band(whole[-len(group)], drawn()) == band:
            group.insert(0, whole[-len(group)])
        columns, cells = _columns(group), [cell for each in group for cell in each]
        lines = [[cell for cell in cells if left <= cell.left <= right] for left, right in columns]
        is_row = all(_spanned(one, two) < 2 for one, two in combinations(group, 2))
        is_row &= lines == sorted(lines, key=lambda column: cells.index(column[0]))
        if is_row and len(columns) > 1 < len(group):
            low, high = min(cell.bottom for cell in cells), max(cell.top for cell in cells)
            texts = (_BREAK.sub(HYPHEN, "\n".join(cell.text.strip() for cell in column)) for column in lines)
            row = joined = [Piece(next(texts).replace("\n", " "), left, low, right, high) for left, right in columns]
            del whole[1 - len(group) :]
        whole.append(row)
    return whole


def _spanned(row: list[Piece], other: list[Piece]) -> int:
    pairs = ((one, two) for one in row for two in other) if len(row) > 1 < len(other) else ()
    return sum(one.left < two.right and two.left < one.right for one, two in pairs)


def _band(row: list[Piece], drawn: list[Edges]) -> tuple[float, float] | None:
    bands = set()
    for cell in row if len(drawn) < _MOST_DRAWN else ():
        x, y = (cell.left + cell.right) / 2, (cell.bottom + cell.top) / 2
        heights = [height for x0, y0, x1, y1 in drawn if x0 < x < x1 for height in (y0, y1)]
        low = max((height for height in heights if height < y), default=-math.inf)
        high = min((height for height in heights if height > y), default=math.inf)
        bands.add((round(low), round(high)) if high - low < _MOST_LINES * cell.height else None)
    return bands.pop() if len(bands) == 1 else None


def _blocks(rows: list[list[Piece]]) -> Iterator[list[list[Piece]]]:
    block: list[list[Piece]] = []
    wide: list[Piece] = []  # the last row of several cells
    for row in rows:
        fits = wide and row[0].bottom < block[-1][0].bottom and len(block) < _MOST_ROWS
        gap = (block[-1][0].bottom - row[0].top) / (row[0].height or 1) if fits else 0
        spanned = sum(row[0].left < cell.right and cell.left < row[0].right for cell in wide)
        if block and not (fits and gap < _ROW_GAP and (len(row) > 1 or (gap < 1 and spanned < 2))):
            yield block
            block, wide = [], []
        block.append(row)
        wide = row if len(row) > 1 else wide
    if block:
        yield block


def _written(rows: list[list[Piece]], drawn: Callable[[], list[Edges]]) -> list[str]:
    if len(rows) == 1:
        return [_line(rows[0])]
    columns = _columns([row for row in rows if len(row) > 1])
    grid, is_prose = [["" for _ in columns] for _ in rows], True
    for texts, row in zip(grid, rows, strict=True):
        for cell in row:
            at = [n for n, (left, right) in enumerate(columns) if cell.left <= right and left <= cell.right]
            if len(at) == 1:
                texts[at[0]] = f"{texts[at[0]]} {cell.text.strip()}".lstrip()
            elif len(row) > 1:
                return [_line(each) for each in rows]
            else:  # a caption
                is_prose = False
    wide = [texts for texts, row in zip(grid, rows, strict=True) if len(row) > 1]
    is_cut = all(column[0].endswith(("-", HYPHEN)) for column in zip(*grid, strict=True))
    if is_prose and (len(wide) >= _PROSE_ROWS or is_cut) and all(map(_is_prose, zip(*grid, strict=True))):
        gaps = [(right, rows[-1][0].bottom, left, rows[0][0].top) for (_, right), (left, _) in pairwise(columns)]
        if not any(_is_ruled(drawn(), gap) for gap in gaps):
            return [text for column in zip(*grid, strict=True) for text in column if text]
    has_gap = any("" in texts[: max(n for n, text in enumerate(texts) if text)] for texts in wide)
    has_corner = all(wide[0][1:]) and sum(texts[0] != "" for texts in wide) > len(wide) / 2 > 1
    if len(columns) >= _TABLE_COLUMNS and has_gap and (has_corner or any(map(all, wide))):
        return [table_row(texts) if len(row) > 1 else _line(row) for texts, row in zip(grid, rows, strict=True)]
    return [_line(row) for row in rows]


def _is_ruled(drawn: list[Edges], edges: Edges) -> bool:
    left, bottom, right, top = edges
    return any(
        x0 < left and right < x1 and bottom < (y0 + y1) / 2 < top and y1 - y0 < top - bottom + _FRAME
        for x0, y0, x1, y1 in drawn
    )


def _columns(rows: list[list[Piece]]) -> list[tuple[float, float]]:
    columns: list[tuple[float, float]] = []
    for left, right in sorted((cell.left, cell.right) for row in rows for cell in row):
        if columns and left <= columns[-1][1]:
            columns[-1] = (columns[-1][0], max(columns[-1][1], right))
        else:
            columns.append((left, right))
    return columns


def _is_prose(column: tuple[str, ...]) -> bool:
    """Whether the lines of a column continue one another, which those of a table's cells do not."""
    lines = [text for text in column if text]
    words = sum(len(text.split()) for text in lines)
    ends = sum(text[-1] in ".!?" for text in lines)  # of sentences: not at all lines, as in other cells
    is_long = words >= _LONG_WORDS * len(lines) and 0 < ends < len(lines)
    is_lower = sum(text[0].islower() for text in lines) >= _PROSE_FLOW * len(lines)
    return words >= _PROSE_WORDS * len(lines) and (is_long or is_lower)


def _line(cells: list[Piece]) -> str:
    text = ""
    for cell in cells:
        text += " " * (text[-1:].strip() != "" and not cell.text[:1].isspace()) + cell.text
    return text


def with_whole_words(pages: list[str]) -> list[str]:
    """Join words that are cut at line ends; X-ray, DN-150 and compounds that the text has keep the hyphen."""
    known = {word.lower() for page in pages for word in _COMPOUND.findall(page)}

    def joined(cut: re.Match[str]) -> str:
        first, second = cut[1], cut[2]
        is_word = first[-1].isalpha() and second[0].islower() and not (len(first) > 1 and first.isupper())
        is_word &= len(second) > _SHORT  # no word is cut before so few letters: built-in
        whole, before = f"{first}-{second}".lower(), cut.string[cut.start() - 1 : cut.start()]
        if second in _AND:  # not rock-and-roll
            after = cut.string[cut.end(2) : cut.end(2) + 1]
            return first + ("-" if after in ("-", HYPHEN) or whole in known else "- ")
        is_compound = whole in known or before == "-"
        is_compound |= _FIRST.match(whole) is not None and before not in ("'", "\u2019")
        return first if is_word and not is_compound else first + "-"

    return [_CUT.sub(joined, page).replace(HYPHEN, "-") for page in pages]


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
