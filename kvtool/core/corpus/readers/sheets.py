"""Excel files: workbooks and templates, of today's formats and of the one before 2007; values as Excel shows them.
Open XML is read by the standard library, older formats by xlrd."""

from __future__ import annotations

import io
import re
import zipfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from kvtool.core.corpus.readers import html, text
from kvtool.core.corpus.readers.containers import Package, checked, embedded, is_old, parsed
from kvtool.core.corpus.readers.document import (
    Document,
    UnreadableFile,
    hidden_note,
    joined,
    opened,
    table_row,
    unread_note,
)
from kvtool.core.corpus.readers.office import GENERAL, PAGE, Piece, code_of, comment, integer, line, shown
from kvtool.core.corpus.readers.slides import shape_texts

_DAMAGE = (ElementTree.ParseError, UnreadableFile, ValueError)
_ESCAPE = re.compile("_x([0-9A-Fa-f]{4})_")
_TAKEN = ("}row", "}mergeCell", "}col", "Header", "Footer")
_CONTROL = re.compile(r'&(?:"[^"]*"|K[0-9A-Fa-f]{6}|[0-9]+|[A-Z])')  # fonts, sizes, numbers of printed pages
_FLAGS = {"1": True, "true": True}


@dataclass(slots=True)
class Sheet:
    """A sheet; rows and columns count from 1. `merged`: first row and column, last row and column. `hidden_columns`:
    first and last of each run."""

    title: str
    is_hidden: bool = False
    is_damaged: bool = False
    rows: dict[int, dict[int, str]] = field(default_factory=dict)
    merged: list[tuple[int, int, int, int]] = field(default_factory=list)
    hidden_rows: list[int] = field(default_factory=list)
    hidden_columns: list[tuple[int, int]] = field(default_factory=list)
    comments: dict[int, list[str]] = field(default_factory=dict)
    shapes: list[str] = field(default_factory=list)
    uncalculated: int = 0
    last_row: int = 0

    def add_comment(self, cell: str, author: str, text: str) -> None:
        author = "" if text.strip().startswith(author) else author
        self.comments.setdefault(place(cell)[0], []).append(comment(text, author, cell))


class _Book(NamedTuple):
    strings: Sequence[str]
    codes: Sequence[str]
    is_1904: bool


def sheets_of(archive: zipfile.ZipFile) -> Iterator[Sheet]:
    package = Package(archive)
    main = package.main("xl/workbook.xml")
    book, links = parsed(archive, main), package.links(main)
    parts = {link.kind: link.name for link in links.values()}
    properties = book.find("{*}workbookPr")
    is_1904 = properties is not None and properties.get("date1904") in _FLAGS
    shared = _Book([*_strings(package, parts)], _codes(package, parts), is_1904)
    people = package.part(parts.get("person", ""))
    persons = {} if people is None else {each.get("id", ""): each.get("displayName", "") for each in people}
    for each in book.iterfind("{*}sheets/{*}sheet"):
        sheet = Sheet(each.get("name", ""), each.get("state", "visible") != "visible")
        part = next((links[value].name for key, value in each.items() if key.endswith("}id") and value in links), "")
        try:
            for _, element in ElementTree.iterparse(io.BytesIO(package.data(part))):
                if element.tag.endswith(_TAKEN):
                    _take(element, sheet, shared)
        except _DAMAGE:
            sheet.is_damaged = True
        with suppress(ValueError):  # a comment on no cell
            _take_linked(package, part, sheet, persons)
        sheet.is_damaged |= bool(package.damaged)  # a drawing, the comments, the formats
        package.damaged.clear()
        yield sheet


def _take_linked(package: Package, part: str, sheet: Sheet, persons: Mapping[str, str]) -> None:
    discussed = set()
    for link in sorted(package.links(part).values(), reverse=True):  # discussions before comments
        tree = package.part(link.name) if link.kind in ("drawing", "threadedComment", "comments") else None
        if tree is None:
            continue
        if link.kind == "drawing":
            sheet.shapes.extend(shape_texts(package, package.links(link.name), tree))
        for each in tree.iterfind("threadedComment"):
            author = persons.get(each.get("personId", ""), "")
            discussed.add(each.get("ref"))
            sheet.add_comment(each.get("ref", ""), author, each.findtext("text") or "")
        authors = dict(enumerate(each.text or "" for each in tree.iterfind("authors/author")))
        for each in tree.iterfind("commentList/comment"):
            if each.get("ref") not in discussed:
                said = "".join(map(_words, each.iterfind("text")))
                sheet.add_comment(each.get("ref", ""), authors.get(int(each.get("authorId", -1)), ""), said)


def _strings(package: Package, parts: Mapping[str, str]) -> Iterator[str]:
    with suppress(*_DAMAGE):
        for _, element in ElementTree.iterparse(io.BytesIO(package.data(parts.get("sharedStrings", "")))):
            if element.tag.endswith("}si"):
                yield _words(element)
                element.clear()


def _words(element: Element) -> str:
    if len(element) == 1 and element[0].tag.endswith("}t") and "_x" not in (text := element[0].text or ""):
        return text  # nearly all of them
    pieces: list[Piece] = []
    for child in element:
        kind = child.tag.rpartition("}")[2]
        position = child.find("{*}rPr/{*}vertAlign")
        if kind in ("t", "r"):
            text = (child.text if kind == "t" else child.findtext("{*}t")) or ""
            pieces.append((text, "" if position is None else position.get("val", "")))
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), line(pieces))


def _codes(package: Package, parts: Mapping[str, str]) -> list[str]:
    styles = package.part(parts.get("styles", ""))
    if styles is None:
        return []
    own = {integer(each, "numFmtId"): each.get("formatCode", "") for each in styles.iterfind("numFmts/numFmt")}
    return [code_of(integer(each, "numFmtId"), own) for each in styles.iterfind("cellXfs/xf")]


def _take(element: Element, sheet: Sheet, book: _Book) -> None:
    space, _, kind = element.tag.rpartition("}")
    if kind == "row":
        _take_row(element, f"{space}}}", sheet, book)
        element.clear()
    elif kind == "mergeCell":
        first, _, last = element.get("ref", "").partition(":")
        sheet.merged.append((*place(first), *place(last or first)))
    elif kind == "col" and element.get("hidden") in _FLAGS:
        sheet.hidden_columns.append((integer(element, "min"), integer(element, "max")))
    elif kind.endswith(("Header", "Footer")):
        printed = " ".join(_CONTROL.sub(" ", element.text or "").split())
        sheet.shapes += [] if PAGE.fullmatch(printed) or printed in sheet.shapes else [printed]


def _take_row(row: Element, space: str, sheet: Sheet, book: _Book) -> None:
    sheet.last_row = number = int(row.get("r") or sheet.last_row + 1)
    cells: dict[int, str] = {}
    column = 0
    for cell in row:
        reference = cell.get("r")
        column = _column(reference.rstrip("0123456789")) if reference else column + 1
        try:
            text = _shown(cell, space, book)
        except (LookupError, ValueError):
            sheet.is_damaged = True  # the cell refers to a string that is not in the file
            continue
        if text is None:
            sheet.uncalculated += 1
            text = f"={cell.findtext(f'{space}f') or '…'} (not calculated)"
        if text:
            cells[column] = text
    if cells:
        sheet.rows[number] = cells
        if row.get("hidden") in _FLAGS:
            sheet.hidden_rows.append(number)


def _shown(cell: Element, space: str, book: _Book) -> str | None:
    """What a cell shows; None for a formula whose value is not saved."""
    kind, value = cell.get("t", "n"), cell.findtext(f"{space}v")
    style = int(cell.get("s", 0))
    code = book.codes[style] if style < len(book.codes) else GENERAL
    if kind == "inlineStr":
        inline = cell.find(f"{space}is")
        return "" if inline is None else _words(inline)
    if not value:
        return "" if kind == "str" or cell.find(f"{space}f") is None else None
    if kind == "n":
        return shown(float(value), code, book.is_1904)
    if kind == "b":
        return "TRUE" if value in _FLAGS else "FALSE"
    text = book.strings[int(value)] if kind == "s" else value
    return shown(text, code) if "@" in code else text


def place(reference: str) -> tuple[int, int]:
    """Row and column of a cell, `B7`. Raises ValueError."""
    letters = reference.replace("$", "").rstrip("0123456789")
    return int(reference[len(letters) :].replace("$", "")), _column(letters)


@lru_cache(maxsize=1 << 15)
def _column(letters: str) -> int:
    if not re.fullmatch("[A-Za-z]{1,3}", letters):
        raise ValueError(letters)
    return sum((ord(letter) - 64) * 26**at for at, letter in enumerate(reversed(letters.upper())))


def old_sheets(data: bytes) -> Iterator[Sheet]:
    import xlrd

    options = ("formatting_info", "ragged_rows", "on_demand", "ignore_workbook_corruption")
    book = xlrd.open_workbook(file_contents=data, logfile=io.StringIO(), **dict.fromkeys(options, True))
    own = {key: each.format_str for key, each in book.format_map.items()}
    if book.biff_version >= 50:  # earlier ones number all formats themselves
        own |= {14: "", 22: ""}
    codes = {number: code_of(style.format_key, own) for number, style in enumerate(book.xf_list)}
    for number, title in enumerate(book.sheet_names()):
        try:
            each = book.sheet_by_index(number)
        except Exception:  # whatever the library raises over a broken sheet
            yield Sheet(title, is_damaged=True)
            continue
        sheet = Sheet(title, each.visibility != 0)
        for row in range(each.nrows):
            texts = [_old_shown(cell, codes.get(cell.xf_index, GENERAL), book.datemode == 1) for cell in each.row(row)]
            if any(texts):
                sheet.rows[row + 1] = {column: text for column, text in enumerate(texts, 1) if text}
        sheet.merged = [(top + 1, left + 1, bottom, right) for top, bottom, left, right in each.merged_cells]
        for (row, column), note in each.cell_note_map.items():
            sheet.add_comment(xlrd.cellname(row, column), note.author or "", note.text)
        sheet.hidden_rows = [row + 1 for row, how in each.rowinfo_map.items() if how.hidden and row + 1 in sheet.rows]
        sheet.hidden_columns = [(column + 1, column + 1) for column, how in each.colinfo_map.items() if how.hidden]
        yield sheet


def _old_shown(cell: Any, code: str, is_1904: bool) -> str:
    import xlrd

    if cell.ctype == xlrd.XL_CELL_BOOLEAN:
        return "TRUE" if cell.value else "FALSE"
    if cell.ctype == xlrd.XL_CELL_ERROR:
        return str(xlrd.error_text_from_code.get(cell.value, "#ERROR!"))
    return shown(cell.value, code, is_1904)


_STREAM = re.compile(rb"\t[\0\x02\x04\x08][\x04-\x10]\0")  # beginning of a workbook of before 1995
_OLD = {  # what the library for older formats passes over, by its records
    "embedded files": re.compile(rb"M\0B\0D\0[0-9A-F]\0"),
    "charts": re.compile(rb"\t\x08\x10\0\0\x06 \0"),
    "text boxes": re.compile(rb"\xb6\x01\x12\0.{10}(?!\0\0)", re.DOTALL),  # comments among them
}
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_HTML = re.compile(rb"(?:\xef\xbb\xbf)?\s*+<(?:!doctype|html|head|meta|table|body|style|div)\b", re.IGNORECASE)


def read(source: str, data: bytes) -> list[Document]:
    if _HTML.match(data):
        return html.read(source, data)
    if source.lower().endswith((".xls", ".xlt")) and (b"\0" not in data[:1024] or data[:2] in _UTF16):
        return text.read(source, data)  # the reports of many programs
    with opened("workbook", "xlrd"):
        if is_old(data) or _STREAM.match(data):
            sheets, count = [*old_sheets(data)], {name: len(each.findall(data)) for name, each in _OLD.items()}
            comments = sum(len(each) for sheet in sheets for each in sheet.comments.values())
            notes = unread_note({**count, "text boxes": max(0, count["text boxes"] - comments)})
        else:
            with checked(data) as archive:
                sheets = [*sheets_of(archive)]
                notes = unread_note({"embedded files": embedded(archive)})
        notes = (*_notes(sheets), *notes)
    parts = [part for sheet in sheets for part in _parts(sheet)]
    if not parts and any(sheet.is_damaged for sheet in sheets):
        raise UnreadableFile("damaged: none of its sheets can be read")
    return [joined(source, "markdown", parts, gap="\n", notes=notes)]


def _notes(sheets: Sequence[Sheet]) -> Iterator[str]:
    from xlrd import colname

    columns: list[str] = []
    yield from hidden_note("sheet", [each.title for each in sheets if each.is_hidden and (each.rows or each.shapes)])
    yield from hidden_note("row", [f"{each.title} {number}" for each in sheets for number in each.hidden_rows])
    for sheet in sheets:
        runs = [range(first, last + 1) for first, last in sheet.hidden_columns]
        columns += [f"{sheet.title} {colname(at - 1)}" for at in _columns(sheet) if any(at in run for run in runs)]
    yield from hidden_note("column", columns)
    yield from (f"damaged sheet {each.title!r}: not all of it is read" for each in sheets if each.is_damaged)
    if count := sum(sheet.uncalculated for sheet in sheets):
        yield f"formulas without a saved value: {count}, read as formulas"


def _parts(sheet: Sheet) -> Iterator[tuple[str, str]]:
    columns = _columns(sheet)
    _repeat_labels(sheet, columns)
    heading = f"# {sheet.title}\n"
    for number in sorted(sheet.rows.keys() | sheet.comments.keys()):
        cells = sheet.rows.get(number, {})
        row = table_row(cells.get(column, "") for column in columns)
        for written in (heading, row, *sheet.comments.get(number, ())):
            yield f"{sheet.title} row {number}", written
        heading = ""
    for written in (heading, *sheet.shapes) if any(map(str.strip, sheet.shapes)) else ():
        yield sheet.title, written


def _columns(sheet: Sheet) -> list[int]:
    used = sorted({column for cells in sheet.rows.values() for column in cells})
    gaps = [before + 1 for before, column in pairwise(used) if column - before > 1]
    return sorted({*used, *gaps})


def _repeat_labels(sheet: Sheet, columns: Sequence[int]) -> None:
    numbers = sorted(sheet.rows)
    left_over = len(numbers) * len(columns)  # cells of the table; whole files of overlapping ones are no table
    for top, left, bottom, right in sheet.merged if columns else ():
        across = columns[bisect_left(columns, left) : bisect_right(columns, right)]
        down = numbers[bisect_left(numbers, top) : bisect_right(numbers, bottom)]
        label = sheet.rows.get(top, {}).get(left)
        left_over -= len(across) * len(down)
        is_title = left <= columns[0] and len(sheet.rows.get(top, {})) == 1 and len(across) > 1
        if label and left_over >= 0 and not is_title:
            for number in down:
                sheet.rows[number].update((column, label) for column in across if column not in sheet.rows[number])
