"""Sheets of Excel files, each with what its cells show; Open XML by the standard library, older formats by xlrd."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from kvtool.core.corpus.readers.containers import parsed
from kvtool.core.corpus.readers.document import UnreadableFile
from kvtool.core.corpus.readers.drawings import shape_texts
from kvtool.core.corpus.readers.ir import PAGE, Piece, comment, integer, line
from kvtool.core.corpus.readers.numberformats import GENERAL, code_of, shown
from kvtool.core.corpus.readers.openxml import Package

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
