"""OpenDocument files, packed or flat: texts, spreadsheets, presentations, drawings and formulas."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from xml.etree.ElementTree import Element
from zipfile import ZipFile

from kvtool.core.corpus.readers.containers import checked, parsed, parsed_xml
from kvtool.core.corpus.readers.document import Document, UnreadableFile, hidden_note, joined, numbered, unread_note
from kvtool.core.corpus.readers.office import (
    PAGE,
    Cell,
    Piece,
    comment,
    counter,
    framed,
    image,
    integer,
    line,
    linear,
    rows,
)

_SPACE = re.compile(r"\{(?:.*[:/])?([A-Za-z]+)[-a-z]*(?:[:/][\d.]+)?/?\}")  # ends in `text:1.0}`, `MathML}`
_WHITE = re.compile(r"[ \t\r\n]+")
_MANIFEST = "META-INF/manifest.xml"
_UNSEEN = frozenset("text:tracked-changes table:tracked-changes office:forms drawing:image text:number".split())
_SPACES = {"text:s": " ", "text:tab": "\t", "text:line-break": "\n"}
_PLACEHOLDERS = frozenset("header footer date-time page-number".split())
_ROWS = frozenset("table:table-header-rows table:table-rows table:table-row-group".split())
_FORMATS = {"i": "lower_roman", "I": "upper_roman", "a": "lower_alpha", "A": "upper_alpha"}
_FORMATS |= {"가, 나, 다, ...": "ganada", "一, 二, 三, ...": "chineseCounting", "①, ②, ③, ...": "decimalEnclosedCircle"}
_MOST_COPIES = 1000  # of a row, or of an empty cell between others, that a file repeats by a number


def read(source: str, data: bytes) -> list[Document]:
    if b"<" in data[:4]:
        return [_Reader(None, [_named(parsed_xml(data, "the file"))]).document(source)]
    with checked(data) as archive:
        parts: dict[str, Element] = {}
        names = [name for name in (_MANIFEST, "styles.xml") if name in archive.NameToInfo]
        for name in names:
            with suppress(UnreadableFile):
                parts[name] = _named(parsed(archive, name))
        if any(each.tag.endswith(":encryption-data") for part in parts.values() for each in part.iter()):
            raise UnreadableFile("protected by a password", "save a copy without one")
        parts["content.xml"] = _named(parsed(archive, "content.xml"))
        return [_Reader(archive, [*parts.values()], len(names) + 1 - len(parts)).document(source)]


def _named(root: Element) -> Element:
    for element in root.iter():
        element.tag = _short(element.tag)
        element.attrib = {_short(name): value for name, value in element.items()}
    return root


@lru_cache(4096)
def _short(name: str) -> str:
    return _SPACE.sub(r"\1:", name, 1)


class _Reader:
    def __init__(self, archive: ZipFile | None, roots: list[Element], damaged: int = 0) -> None:
        self._archive, self._roots = archive, roots
        self._styles: dict[str, dict[str, str]] = {}  # by name: attributes, and those of its properties
        self._levels: dict[tuple[str, int], Element] = {}  # how items of a list are numbered; "": headings
        for element in (each for root in roots for each in root.iter()):
            if element.tag in ("text:list-style", "text:outline-style"):
                name = element.get("style:name", "") if element.tag == "text:list-style" else ""
                self._levels |= {(name, integer(level, "text:level", 1)): level for level in element}
            elif element.tag == "style:style":
                properties = (item for each in (element, *element) for item in each.items())
                self._styles[element.get("style:name", "")] = dict(properties)
        self._numbers: dict[tuple[str, int], int] = {}  # the last one given, by list style and level
        self._list = ("", 0)  # style and level
        self._readings: list[str] = []  # of the paragraph's ruby words
        self._is_book = False
        self._objects: set[str] = set()
        self._unread = Counter({"damaged parts": damaged})
        self._hidden: dict[str, list[object]] = {"section": [], "sheet": [], "row": [], "slide": []}

    def document(self, source: str) -> Document:
        root = self._roots[-1]
        body = next((each for each in root if each.tag == "office:body"), root)
        content = next((each for each in body if each.tag.startswith("office:")), body)
        if content.tag == "office:spreadsheet":
            self._is_book = True
            rows = [part for sheet in _children(content, "table:table") for part in self._sheet(sheet)]
            return joined(source, "markdown", rows, "\n", self._notes())
        if content.tag in ("office:presentation", "office:drawing"):
            pages = [self._page(page, number) for number, page in enumerate(_children(content, "drawing:page"), 1)]
            label = "slide" if content.tag == "office:presentation" else "p."
            return numbered(source, "markdown", label, pages, self._notes())
        texts = [linear(root)] if root.tag == "MathML:math" else [*self._blocks(content)]
        sections = (each for each in content.iter("text:section") if each.get("text:display", "true") != "true")
        self._hidden["section"] += [each.get("text:name", "") for each in sections]
        return framed(source, texts, [*self._margins()], self._notes())

    def _notes(self) -> tuple[str, ...]:
        hidden = (note for kind, names in self._hidden.items() for note in hidden_note(kind, names))
        return (*hidden, *unread_note(self._unread))

    def _page(self, page: Element, number: int) -> str:
        text = "\n".join(filter(None, self._blocks(page)))
        if text and self._property(page, "drawing:style-name", "presentation:visibility") == "hidden":
            self._hidden["slide"].append(number)
        return text

    def _sheet(self, sheet: Element) -> Iterator[Piece]:
        name, rows = sheet.get("table:name", ""), [(number, text) for number, text in self._rows(sheet) if text]
        shapes = (text for each in _children(sheet, "table:shapes") for text in self._blocks(each))
        rows += [(rows[-1][0] if rows else 1, text) for text in shapes if text]
        for at, (number, text) in enumerate(rows):
            yield f"{name} row {number}", text if at else f"# {name}\n\n{text}"
        if rows and self._property(sheet, "table:style-name", "table:display") == "false":
            self._hidden["sheet"].append(name)

    def _property(self, element: Element, style: str, name: str) -> str:
        return self._styles.get(element.get(style, ""), {}).get(name, "")

    def _margins(self) -> Iterator[Piece]:
        pages = {each.get("style:name", ""): each for root in self._roots for each in root.iter("style:master-page")}
        used = {*[*pages][:1], *(style.get("style:master-page-name", "") for style in self._styles.values())}
        used |= {pages[name].get("style:next-style-name", "") for name in used & pages.keys()}
        for element in (each for name, page in pages.items() if name in used for each in page):
            if element.get("style:display") != "false":
                yield from ((element.tag[6:12], text) for text in self._blocks(element) if not PAGE.fullmatch(text))

    def _blocks(self, element: Iterable[Element]) -> Iterator[str]:
        for child in element:
            tag, kind = child.tag, child.get("presentation:class", "")
            if tag in ("text:p", "text:h"):
                yield self._paragraph(child)
            elif tag == "drawing:control":
                self._unread["form fields"] += 1
            elif tag in _BLOCKS:
                yield from _BLOCKS[tag](self, child)
            elif kind == "title":
                yield from (f"# {text}" for text in [" ".join(filter(None, self._blocks(child)))] if text)
            elif tag not in _UNSEEN and kind not in _PLACEHOLDERS:
                yield from self._blocks(child)

    def _paragraph(self, element: Element, mark: str = "") -> str:
        attached: list[str] = []
        outer, self._readings = self._readings, []
        text = line(self._pieces(element, "", attached)) if len(element) else _WHITE.sub(" ", element.text or "")
        words = text.strip(" ") + (f" ({', '.join(self._readings)})" if self._readings else "")
        self._readings = outer
        if words and element.tag == "text:h":
            rank = min(6, max(1, integer(element, "text:outline-level", 1)))
            words = f"{'#' * rank} {mark or self._outline(element, rank)}{words}"
        elif words:
            words = mark + words
        return "\n".join(filter(None, [words, *attached]))

    def _pieces(self, element: Element, position: str, attached: list[str]) -> Iterator[Piece]:
        yield _WHITE.sub(" ", element.text or ""), position
        for child in element:
            tag = child.tag
            if tag in _SPACES:
                yield _SPACES[tag] * min(_MOST_COPIES, integer(child, "text:c", 1)), ""
            elif tag == "text:note":
                yield from self._note(child, attached)
            elif tag == "text:ruby":
                base, reading, *_ = [*map(self._paragraph, child), "", ""]
                self._readings += [reading] if reading else []
                yield base, position
            elif tag == "office:annotation" or (tag.startswith("drawing:") and tag != "drawing:a"):
                texts = [*filter(None, self._blocks([child]))]
                if child.get("text:anchor-type") == "as-char" and len(texts) == 1:
                    yield texts[0], position
                else:
                    attached += texts
            elif tag not in _UNSEEN:
                raised = self._property(child, "text:style-name", "style:text-position")
                yield from self._pieces(child, _position(raised) or position, attached)
                yield " " if tag == "text:p" else "", position
            yield _WHITE.sub(" ", child.tail or ""), position

    def _note(self, note: Element, attached: list[str]) -> Iterator[Piece]:
        mark = "".join(text for each in note.iter("text:note-citation") for text in each.itertext())
        body = " ".join(text for each in note if each.tag == "text:note-body" for text in self._blocks(each))
        attached.append(f"[{mark}] {body}")
        yield f"[{mark}]", ""

    def _comment(self, element: Element) -> Iterator[str]:
        author = "".join(each.text or "" for each in element if each.tag == "elements:creator")
        yield comment(" ".join(self._blocks(element)), author)

    def _object(self, embedded: Element) -> Iterator[str]:
        path = embedded.get("xlink:href", "").removeprefix("./")
        root = next((each for each in embedded if each.tag in ("office:document", "MathML:math")), None)
        if root is None and self._archive is not None and path not in self._objects:
            self._objects.add(path)
            with suppress(UnreadableFile):
                root = _named(parsed(self._archive, f"{path}/content.xml"))
        if root is None or embedded.tag == "drawing:object-ole":
            self._unread["embedded objects"] += 1
        elif root.tag == "MathML:math":
            yield linear(root)
        else:
            yield from self._blocks(root)

    def _listed(self, listed: Element) -> Iterator[str]:
        outer = self._list
        style, level = self._list = listed.get("text:style-name", outer[0]), outer[1] + 1
        if listed.get("text:continue-numbering") != "true" and not listed.get("text:continue-list"):
            self._numbers.pop((style, level), None)
        for item in listed:
            has_mark = item.tag == "text:list-item"
            if start := integer(item, "text:start-value", 0):
                self._numbers[style, level] = start - 1
            for child in item:
                if has_mark and child.tag in ("text:p", "text:h"):
                    yield self._paragraph(child, self._next_mark(style, level) or "- ")
                    has_mark = False
                else:
                    yield from self._blocks([child])
        self._list = outer

    def _outline(self, heading: Element, rank: int) -> str:
        style = self._styles.get(heading.get("text:style-name", ""), {})
        if heading.get("text:is-list-header") == "true" or style.get("style:list-style-name") == "":
            return ""
        for deeper in range(rank + 1, 11):
            self._numbers.pop(("", deeper), None)
        return self._next_mark("", rank)

    def _next_mark(self, style: str, level: int) -> str:
        form = self._levels.get((style, level))
        key = (style, level)
        self._numbers[key] = self._numbers.get(key, integer(form, "text:start-value", 1) - 1) + 1
        if form is None or not form.get("style:num-format"):
            return ""
        shown = range(max(1, level + 1 - integer(form, "text:display-levels", 1)), level + 1)
        kinds = {each: self._levels.get((style, each), form).get("style:num-format", "") for each in shown}
        counts = ((self._numbers.get((style, each), 1), kind) for each, kind in kinds.items() if kind)
        numbers = [counter(count, _FORMATS.get(kind, "decimal")) for count, kind in counts]
        mark = form.get("style:num-prefix", "") + ".".join(numbers) + form.get("style:num-suffix", "")
        return mark.strip() + " "

    def _table(self, table: Element) -> Iterator[str]:
        if table.get("table:name") == "local-table" and self._is_book:
            return  # a chart's values, which are those of a sheet
        yield from (text for _, text in self._rows(table))

    def _rows(self, table: Element) -> Iterator[tuple[int, str]]:
        last = 0

        def items() -> Iterator[list[Cell]]:
            nonlocal last
            for row in _table_rows(table):
                cells, first = [*self._cells(row)], last + 1
                copies = integer(row, "table:number-rows-repeated", 1)
                for last in range(first, first + min(copies, _MOST_COPIES)):  # noqa: B007
                    yield cells
                if cells:
                    if row.get("table:visibility") in ("collapse", "filter"):
                        self._hidden["row"].append(f"{table.get('table:name', '')} {first}".strip())
                    self._unread["repeated rows"] += max(0, copies - _MOST_COPIES)
                last = first + copies - 1

        for text in rows(items()):
            yield last, text

    def _cells(self, row: Element) -> Iterator[Cell]:
        empty = 0
        for cell in row:
            if cell.tag != "table:table-cell":
                continue  # what a merged cell covers
            copies = min(_MOST_COPIES, integer(cell, "table:number-columns-repeated", 1))
            width, height = (integer(cell, f"table:number-{what}-spanned", 1) for what in ("columns", "rows"))
            text = self._cell(cell)
            if text or width > 1 or height > 1:
                yield from [("", 1, 1)] * empty
                yield from [(text, width, height)] * copies
            empty = 0 if text or width > 1 or height > 1 else empty + copies

    def _cell(self, cell: Element) -> str:
        blocks = sorted(filter(None, self._blocks(cell)), key=lambda text: text.startswith("[comment"))
        text = " ".join(blocks)
        if " | " in text and any(each.tag == "table:table" for each in cell.iter()):
            text = text.replace(" | ", ", ")
        values = (cell.get(f"office:{kind}-value", "") for kind in ("string", "date", "time", "boolean"))
        return text or next(filter(None, values), cell.get("office:value", ""))


_BLOCKS: dict[str, Callable[[_Reader, Element], Iterable[str]]] = {
    "text:list": _Reader._listed,
    "table:table": _Reader._table,
    "office:annotation": _Reader._comment,
    "drawing:object": _Reader._object,
    "drawing:object-ole": _Reader._object,
    "svg:title": lambda reader, title: [image(title.text or "")],
    "svg:desc": lambda reader, title: [image(title.text or "")],
}


def _children(element: Element, tag: str) -> Iterator[Element]:
    return (each for each in element if each.tag == tag)


def _table_rows(table: Element) -> Iterator[Element]:
    for child in table:
        if child.tag == "table:table-row":
            yield child
        elif child.tag in _ROWS:
            yield from _table_rows(child)


def _position(value: str) -> str:
    if value.startswith(("sub", "-")):
        return "subscript"
    return "superscript" if value and not value.startswith("0%") else ""
