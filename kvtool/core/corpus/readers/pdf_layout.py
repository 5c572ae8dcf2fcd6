"""Lines of a PDF page from positioned pieces of text: cells, columns, superscripts and words cut at line ends."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

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
