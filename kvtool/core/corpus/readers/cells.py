"""Sheets of Excel files, each with what its cells show; Open XML by the standard library, older formats by xlrd."""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from kvtool.core.corpus.readers.containers import parsed
from kvtool.core.corpus.readers.document import UnreadableFile
from kvtool.core.corpus.readers.ir import line
from kvtool.core.corpus.readers.numberformats import GENERAL, code_of, shown
from kvtool.core.corpus.readers.ooxml import Links, kind_of, link, links_of, shape_texts

_DAMAGE = (ElementTree.ParseError, zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, ValueError)
_ESCAPE = re.compile("_x([0-9A-Fa-f]{4})_")
_CELL = re.compile(r"\$?([A-Z]{1,3})\$?([0-9]+)")
_FLAGS = {"1": True, "true": True}


@dataclass(slots=True)
class Sheet:
    """A sheet of a file; rows and columns count from 1.

    Attributes
    ----------
    rows : row → column → what the cell shows, empty cells left out.
    merged : first row, first column, last row and last column of cells that were made one.
    hidden_columns : the first and the last of each run.
    comments : row → what is said about its cells.
    shapes : texts of text boxes, charts and diagrams.
    uncalculated : how many formulas have no saved value.
    last_row : the row that was read last.
    """

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

    def comment(self, cell: str, author: str, text: str) -> None:
        """Add a comment to its row; many begin with the author's name. Raises ValueError if there is no such cell."""
        said = " ".join(text.split())
        by = f" by {author}" if author and not said.startswith(author) else ""
        self.comments.setdefault(place(cell)[0], []).append(f"[comment on {cell}{by}: {said}]")


class _Book(NamedTuple):
    strings: Sequence[str]
    codes: Sequence[str]
    is_1904: bool


def sheets_of(archive: zipfile.ZipFile) -> Iterator[Sheet]:
    """Yield the sheets of an Open XML workbook, a damaged one as far as it can be read.

    Raises
    ------
    UnreadableFile : there is no list of sheets.
    """
    main = dict(links_of(archive, "").values()).get("officeDocument", "xl/workbook.xml")
    book, links = parsed(archive, main), links_of(archive, main)
    kinds = dict(links.values())
    properties = book.find("{*}workbookPr")
    shared = _Book(
        _strings(archive, kinds.get("sharedStrings", "")),
        _codes(archive, kinds.get("styles", "")),
        properties is not None and properties.get("date1904") in _FLAGS,
    )
    persons = _persons(archive, kinds.get("person", ""))
    for each in book.iterfind("{*}sheets/{*}sheet"):
        sheet = Sheet(each.get("name", ""), each.get("state", "visible") != "visible")
        part = link(each, links)
        try:
            with archive.open(part) as file:
                for _, element in ElementTree.iterparse(file):
                    _take(element, sheet, shared)
        except _DAMAGE:
            sheet.is_damaged = True
        _take_linked(archive, links_of(archive, part), sheet, persons)
        yield sheet


def _persons(archive: zipfile.ZipFile, part: str) -> dict[str, str]:
    with suppress(UnreadableFile):
        return {each.get("id", ""): each.get("displayName", "") for each in parsed(archive, part)}
    return {}


def _take_linked(archive: zipfile.ZipFile, links: Links, sheet: Sheet, persons: Mapping[str, str]) -> None:
    """Put the comments and drawings of a sheet into it; of a discussion also the copy for older programs is saved."""
    discussed = set()
    for kind, part in sorted(links.values(), reverse=True):  # discussions before comments
        with suppress(UnreadableFile, ValueError):
            tree = parsed(archive, part) if kind in ("threadedComment", "comments", "drawing") else ()
            if kind == "drawing" and tree:
                sheet.shapes.extend(shape_texts(archive, links_of(archive, part), tree))
            elif kind == "threadedComment":
                for each in tree:
                    discussed.add(each.get("ref"))
                    author = persons.get(each.get("personId", ""), "")
                    sheet.comment(each.get("ref", ""), author, each.findtext("{*}text") or "")
            elif kind == "comments" and tree:
                authors = [each.text or "" for each in tree.iterfind("{*}authors/{*}author")]
                for each in tree.iterfind("{*}commentList/{*}comment"):
                    author = dict(enumerate(authors)).get(int(each.get("authorId", -1)), "")
                    if each.get("ref") not in discussed:
                        sheet.comment(each.get("ref", ""), author, "".join(map(_words, each.iterfind("{*}text"))))


def _strings(archive: zipfile.ZipFile, part: str) -> list[str]:
    strings = []
    with suppress(*_DAMAGE), archive.open(part) as file:
        for _, element in ElementTree.iterparse(file):
            if element.tag.endswith("}si"):
                strings.append(_words(element))
                element.clear()
    return strings


def _words(element: Element) -> str:
    """Return the text of a string and of its runs, without the readings of its characters."""
    pieces = []
    for child in element:
        kind = kind_of(child)
        if kind == "t":
            pieces.append((child.text or "", ""))
        elif kind == "r":
            position = child.find("{*}rPr/{*}vertAlign")
            pieces.append((child.findtext("{*}t") or "", "" if position is None else position.get("val", "")))
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), line(pieces))


def _codes(archive: zipfile.ZipFile, part: str) -> list[str]:
    """Return the format of each style."""
    with suppress(UnreadableFile):
        styles = parsed(archive, part)
        formats = styles.iterfind("{*}numFmts/{*}numFmt")
        own = {int(each.get("numFmtId", 0)): each.get("formatCode", "") for each in formats}
        return [code_of(int(each.get("numFmtId", 0)), own) for each in styles.iterfind("{*}cellXfs/{*}xf")]
    return []


def _take(element: Element, sheet: Sheet, book: _Book) -> None:
    """Put what an element says into its sheet."""
    space, _, kind = element.tag.rpartition("}")
    if kind == "row":
        _take_row(element, f"{space}}}", sheet, book)
        element.clear()
    elif kind == "mergeCell":
        first, _, last = element.get("ref", "").partition(":")
        sheet.merged.append((*place(first), *place(last or first)))
    elif kind == "col" and element.get("hidden") in _FLAGS:
        sheet.hidden_columns.append((int(element.get("min", 0)), int(element.get("max", 0))))


def _take_row(row: Element, space: str, sheet: Sheet, book: _Book) -> None:
    sheet.last_row = number = int(row.get("r") or sheet.last_row + 1)
    cells: dict[int, str] = {}
    column = 0
    for cell in row:
        reference = cell.get("r")
        column = place(reference)[1] if reference else column + 1
        try:
            text = _shown(cell, space, book)
        except (LookupError, ValueError):
            sheet.is_damaged = True
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
    """Return what a cell shows; None for a formula whose value is not saved."""
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


@lru_cache(maxsize=1 << 15)
def place(reference: str) -> tuple[int, int]:
    """Return row and column of a cell, `B7`. Raises ValueError if it is none."""
    found = _CELL.fullmatch(reference)
    if found is None:
        raise ValueError(reference)
    column = 0
    for letter in found[1]:
        column = 26 * column + ord(letter) - ord("A") + 1
    return int(found[2]), column


def old_sheets(data: bytes) -> Iterator[Sheet]:
    """Yield the sheets of a workbook of the format before 2007."""
    import xlrd

    book = xlrd.open_workbook(file_contents=data, formatting_info=True, ragged_rows=True, logfile=io.StringIO())
    own = {key: each.format_str for key, each in book.format_map.items()}
    codes = [code_of(style.format_key, {**own, 14: "", 22: ""}) for style in book.xf_list]
    for each in book.sheets():
        sheet = Sheet(each.name, each.visibility != 0)
        for row in range(each.nrows):
            cells = {
                column: _old_shown(cell, codes[cell.xf_index], book.datemode == 1)
                for column, cell in enumerate(each.row(row), 1)
            }
            if cells := {column: text for column, text in cells.items() if text}:
                sheet.rows[row + 1] = cells
        sheet.merged = [(top + 1, left + 1, bottom, right) for top, bottom, left, right in each.merged_cells]
        for (row, column), note in each.cell_note_map.items():
            sheet.comment(xlrd.cellname(row, column), note.author or "", note.text)
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
