"""Word documents of today's formats, by an own walk, with their styles and automatic numbers, and of the one before
2007, by office_oxide."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import cache, lru_cache
from pathlib import PurePath
from xml.etree.ElementTree import Element

from kvtool.core.corpus.readers import read_as
from kvtool.core.corpus.readers.containers import Link, Package, checked, is_old, named
from kvtool.core.corpus.readers.document import Document, UnreadableFile, hidden_note, opened, table_row, unread_note
from kvtool.core.corpus.readers.office import (
    LONGEST_LABEL,
    PAGE,
    Piece,
    blocks,
    comment,
    counter,
    framed,
    glyphs,
    image,
    integer,
    line,
    linear,
    symbol,
)
from kvtool.core.corpus.readers.slides import GRAPHICS, graphic_texts
from kvtool.core.corpus.readers.text import read_unknown

_NUMBER = "w-pPr/w-numPr/w-"


def find(element: Element | None, path: str) -> Element | None:
    return None if element is None else element.find(path)


def value(element: Element | None, path: str, usual: str = "") -> str:
    found = find(element, path)
    return usual if found is None else found.get("val", usual)


def count(element: Element | None, path: str, usual: int = 0) -> int:
    return integer(find(element, path), "val", usual)


def is_on(element: Element | None, path: str) -> bool:
    found = find(element, path)
    return found is not None and found.get("val") not in ("0", "false", "off")


class Styles:
    def __init__(self, root: Element | None) -> None:
        self._styles = {} if root is None else {each.get("styleId", ""): each for each in root.findall("w-style")}
        usual = (key for key, each in self._styles.items() if each.get("type") == "paragraph" and each.get("default"))
        self.usual = next(usual, "")
        self.chain = cache(self._find_chain)
        self.find = cache(self._find)

    def _find_chain(self, key: str) -> dict[str, Element]:
        found: dict[str, Element] = {}
        while key in self._styles and key not in found:
            found[key] = self._styles[key]
            key = value(found[key], "w-basedOn")
        return found

    def _find(self, key: str, path: str) -> Element | None:
        chain = self.chain(key).values()
        return next((found for style in chain if (found := style.find(path)) is not None), None)


class Clauses:
    def __init__(self, root: Element | None, styles: Styles) -> None:
        self._styles = styles
        self._lists = {} if root is None else {each.get("numId", ""): each for each in root.findall("w-num")}
        plans = [] if root is None else root.findall("w-abstractNum")
        self._plans = {each.get("abstractNumId", ""): each for each in plans}
        self._levels = cache(self._find_levels)
        self._counts: dict[str, dict[int, int]] = {}
        self._begun: set[tuple[str, int]] = set()

    def _find_levels(self, list_id: str) -> tuple[str, dict[int, Element]]:
        listed = self._lists[list_id]
        linked = value(self._plans.get(value(listed, "w-abstractNumId")), "w-numStyleLink")
        other = self._lists.get(value(self._styles.find(linked, f"{_NUMBER}numId"), "."), listed)
        plan = self._plans.get(key := value(other, "w-abstractNumId"), other)
        levels = (*plan.findall("w-lvl"), *listed.findall("w-lvlOverride/w-lvl"))
        return key, {int(at): each for each in levels if (at := each.get("ilvl", "")) in tuple("012345678")}

    def next(self, properties: Element | None, style: str) -> str | None:
        """Count a paragraph and return its number: `-` for a bullet, "" if none is shown, None outside of lists."""
        list_id, own = value(properties, "w-numPr/w-numId"), find(properties, "w-numPr/w-ilvl")
        by_style = list_id or value(self._styles.find(style, f"{_NUMBER}numId"), ".")
        if by_style not in self._lists:
            return None
        key, levels = self._levels(by_style)
        level = min(8, count(own, "."))
        if own is None and not list_id:
            names = {value(each, "w-pStyle"): at for at, each in levels.items()}
            usual = min(8, count(self._styles.find(style, f"{_NUMBER}ilvl"), "."))
            level = next((names[name] for name in self._styles.chain(style) if name in names), usual)
        return self._counted(by_style, key, levels, level)

    def _counted(self, list_id: str, key: str, levels: dict[int, Element], level: int) -> str:
        counts = self._counts.setdefault(key, {})
        start = f"w-lvlOverride[@ilvl='{level}']/w-startOverride"
        if (list_id, level) not in self._begun and find(self._lists[list_id], start) is not None:
            counts.pop(level, None)
        self._begun.add((list_id, level))
        for upper in range(level):  # a level that was skipped counts
            counts.setdefault(upper, count(levels.get(upper), "w-start"))
        first = count(self._lists[list_id], start, count(levels.get(level), "w-start"))
        counts[level] = counts.get(level, first - 1) + 1
        for lower in [lower for lower in counts if lower > level]:
            if level < count(levels.get(lower), "w-lvlRestart", lower):
                del counts[lower]
        if level not in levels or _form(levels[level]) == "bullet":
            return "-"
        is_legal = is_on(levels[level], "w-isLgl")

        def number(found: re.Match[str]) -> str:
            form = _form(levels.get(upper := int(found[1]) - 1))
            return counter(counts.get(upper, 0), "decimal" if is_legal and form != "none" else form)

        return re.sub("%([1-9])", number, value(levels[level], "w-lvlText")).strip()


def _form(level: Element | None) -> str:
    return value(level, "w-numFmt") or value(level, ".//Fallback/w-numFmt", "decimal")


_HEADING = re.compile(r"title|heading (\d)")
_DISGUISED = {  # what other programs save under a Word document's name
    ".rtf": re.compile(rb"\s*\{\\rtf"),
    ".html": re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE),
    ".mhtml": re.compile(rb"(?:[\w-]+:[^\n]*\n)*MIME-Version:", re.IGNORECASE),
}
_WORD_XML = re.compile(rb"office/word/2003/wordml|office/2006/xmlPackage")
_EMBEDDED = re.compile(r"^\[Embedded .*\]$", re.MULTILINE)
_LETTER = re.compile(r"[^\W\d_]")
_BODY = 9  # outline level of what is no heading
_MOST_COLUMNS = 63  # of a Word table
_UNSEEN = frozenset(
    "w-pPr w-rPr w-del w-moveFrom w-instrText w-delText w-delInstrText w-sectPr w-tblPr w-tblPrEx w-tblGrid w-trPr "
    "w-tcPr w-sdtPr w-sdtEndPr w-ffData w-rubyPr Fallback".split()
)
_SAID: dict[str, Callable[[Element], str]] = {
    **dict.fromkeys(("w-t", "a-t"), lambda element: element.text or ""),
    **dict.fromkeys(("w-tab", "w-ptab"), lambda _: "\t"),
    **dict.fromkeys(("w-cr", "w-br"), lambda _: "\n"),
    "w-noBreakHyphen": lambda _: "-",
    "w-sym": lambda element: symbol(element.get("char", ""), element.get("font", "")),
    **dict.fromkeys(("m-oMath", "m-oMathPara"), linear),
    "docPr": lambda element: image(element.get("descr", "")) and f"{image(element.get('descr', ''))} ",
}
_UNREAD = {"w-subDoc": "linked documents", "w-altChunk": "embedded documents", "w-control": "controls"}
_UNREAD |= {"OLEObject": "embedded files"}
_NOTES = {"w-footnoteReference": "footnote", "w-endnoteReference": "endnote"}
_NOTES |= dict.fromkeys(("w-commentReference", "w-commentRangeEnd"), "comment")  # some programs save no reference


def read(source: str, data: bytes) -> list[Document]:
    ending = next((ending for ending, form in _DISGUISED.items() if form.match(data)), "")
    if data.startswith(b"PK"):
        return [_read_new(source, data)]
    if is_old(data) and "worddocument".encode("utf-16-le") in data.lower():
        return [_read_old(source, data)]
    if ending:
        return read_as(PurePath(f"a{ending}"), source, data)
    if _WORD_XML.search(data[:4096]):
        raise UnreadableFile("a Word document as one XML file", "save it as .docx")
    if data.startswith(b"\xd0\xcf\x11\xe0") or not source.lower().endswith((".doc", ".dot")):
        checked(data)
    return read_unknown(source, data)


def _read_old(source: str, data: bytes) -> Document:
    with opened("Word document", "office-oxide"):
        from office_oxide import Document as Office

        file = Office.from_bytes(data, "doc")
        sections, embedded = file.to_ir()["sections"], len(_EMBEDDED.findall(file.plain_text()))
    heads = [(name, each[name]) for each in sections for name in each if name.endswith(("header", "footer"))]
    margins = [(name[-6:], text) for name, part in heads for text in blocks(part["content"])]
    body = [*blocks(element for each in sections for element in each["elements"] if element["type"] != "image")]
    numbers = sum(text.startswith("- ") for text in body)
    return framed(source, body, margins, unread_note({"numbers of lists": numbers, "embedded files": embedded}))


def _read_new(source: str, data: bytes) -> Document:
    with checked(data) as archive, opened("Word document", "the standard library"):
        package = Package(archive)
        main = package.main("word/document.xml")
        root = package.part(main)
        body = None if root is None else root.find("w-body")
        if body is None:
            raise UnreadableFile("damaged: there is no Word document in it")
        walk = _Walk(package, main)
        groups = [[text, *walk.drained()] for text in walk.blocks(body)]
        margins = [*walk.margins(body)]
    notes = hidden_note("passage", walk.hidden) + unread_note(walk.unread)
    notes += tuple(f"damaged: {name}: not read" for name in package.damaged)
    return framed(source, groups, margins, notes)


class _Walk:
    def __init__(self, package: Package, main: str) -> None:
        self.hidden: list[str] = []
        self.unread: Counter[str] = Counter()
        self._package = package
        self._links = self._main_links = package.links(main)
        self._styles = Styles(self._named("styles"))
        self._clauses = Clauses(self._named("numbering"), self._styles)
        self._level = lru_cache(maxsize=None)(self._find_level)
        self._fields: list[bool] = []  # open fields, innermost last: has its result begun?
        self._aside: list[str] = []  # text boxes, notes and charts of the current block
        self._carried: list[Piece] = []  # of paragraphs whose mark is deleted
        self._notes: dict[str, tuple[dict[str, Element], dict[str, Link], dict[str, str]]] = {}
        self._readings: list[str] = []  # of the paragraph's ruby words
        self._is_in_cell = False

    def _named(self, kind: str) -> Element | None:
        return self._package.part(named(self._main_links, kind))

    def drained(self) -> list[str]:
        aside, self._aside = self._aside, []
        return aside

    def _texts(self, element: Element, links: dict[str, Link] | None = None) -> list[str]:
        inner = copy(self)
        inner._links = self._links if links is None else links
        inner._fields, inner._aside, inner._carried, inner._readings, inner._is_in_cell = [], [], [], [], False
        return [each for text in inner.blocks(element) for each in (text, *inner.drained())]

    def margins(self, body: Element) -> Iterator[Piece]:
        tags = {"w-headerReference": "header", "w-footerReference": "footer"}
        names = {each.get("id", ""): tags[each.tag] for each in body.iter() if each.tag in tags}
        parts = {self._main_links[key].name: name for key, name in names.items() if key in self._main_links}
        for key, name in parts.items():
            part = self._package.part(key)
            if part is not None:
                texts = self._texts(part, self._package.links(key))
                yield from ((name, text) for text in texts if not PAGE.fullmatch(text))

    def blocks(self, element: Element) -> Iterator[str]:
        for child in element:
            if child.tag == "w-p":
                yield self._paragraph(child)
            elif child.tag == "w-tbl":
                yield from self._table(child)
            elif child.tag in ("m-oMath", "m-oMathPara"):
                yield linear(child)
            elif child.tag in _UNREAD:
                self.unread[_UNREAD[child.tag]] += 1
            elif child.tag not in _UNSEEN:
                yield from self.blocks(child)
        if self._carried:
            carried, self._carried = self._carried, []
            yield line(carried)

    def _paragraph(self, paragraph: Element) -> str:
        self._fields = [has_result for has_result in self._fields if has_result]  # an instruction ends with it
        pieces = [*self._carried, *self._pieces(paragraph, "")]
        properties = paragraph.find("w-pPr")
        if any(find(properties, f"w-rPr/w-{change}") is not None for change in ("del", "moveFrom")):
            self._carried = pieces
            return ""
        self._carried = []
        text = line(pieces).strip()
        if self._readings:
            text += f" ({', '.join(self._readings)})"
            self._readings.clear()
        style = value(properties, "w-pStyle") or self._styles.usual
        number = self._clauses.next(properties, style)
        is_listed = value(self._styles.find(style, "w-name"), ".").lower().startswith("list")
        if number is None and is_listed and find(properties, "w-numPr") is None:
            number = "-"
        rank = 0 if self._is_in_cell else self._rank(properties, style)
        if number == "-" and (rank or self._is_in_cell):
            number = ""
        return " ".join(filter(None, ("#" * rank, number, text))) if text else ""

    def _rank(self, properties: Element | None, style: str) -> int:
        level = count(properties, "w-outlineLvl", self._level(style))
        return min(6, level + 1) if level < _BODY else 0

    def _find_level(self, style: str) -> int:
        for each in self._styles.chain(style).values():
            if heading := _HEADING.fullmatch(value(each, "w-name").lower()):
                return max(0, int(heading[1] or 1) - 1)
        return count(self._styles.find(style, "w-pPr/w-outlineLvl"), ".", _BODY)

    def _table(self, table: Element) -> Iterator[str]:
        rows: list[str] = []
        above: list[str] = []
        for row in _below(table, "w-tr"):
            if row.find("w-trPr/w-del") is not None:
                continue
            cells = [*_below(row, "w-tc")]
            filled = [cell for cell in cells if any((each.text or "").strip() for each in cell.iter("w-t"))]
            if len(filled) == 1 and not self._is_in_cell and next(_below(filled[0], "w-tbl"), None) is not None:
                rows += (text for cell in cells for text in self.blocks(cell))
                above = []
            else:
                above = self._row(row, cells, above)
                texts = above[:1] if len(cells) == 1 == len(set(above)) else above  # a row of one cell is a heading
                inner = ", ".join(texts).rstrip(", ")
                rows.append((inner and f"{inner};") if self._is_in_cell else table_row(texts))
        if rows:
            aside = self.drained()  # after the whole table
            yield from rows[:-1]
            self._aside = aside
            yield rows[-1]

    def _row(self, row: Element, cells: Iterable[Element], above: list[str]) -> list[str]:
        texts = [""] * min(_MOST_COLUMNS, count(row, "w-trPr/w-gridBefore"))
        for cell in cells:
            if cell.find("w-tcPr/w-cellDel") is not None:
                continue
            text = self._cell(cell)
            if cell.find("w-tcPr/w-vMerge") is not None and value(cell, "w-tcPr/w-vMerge") != "restart":
                labels = above[len(texts) : len(texts) + 1]
                text = text or "".join(label for label in labels if len(label) <= LONGEST_LABEL)
            span = max(1, min(count(cell, "w-tcPr/w-gridSpan", 1), _MOST_COLUMNS - len(texts)))
            texts += [text] + [text if len(text) <= LONGEST_LABEL else ""] * (span - 1)
        return texts

    def _cell(self, cell: Element) -> str:
        outer, self._is_in_cell = self._is_in_cell, True
        text = " ".join(" ".join(self.blocks(cell)).split()).removesuffix(";")
        self._is_in_cell = outer
        return text

    def _pieces(self, element: Element, position: str) -> Iterator[Piece]:
        last = ""
        for child in element:
            if (tag := child.tag) in _UNSEEN:
                continue
            if tag == "w-r":
                yield from self._run(child)
            elif tag == "w-fldChar":
                yield from self._field(child)
            elif not all(self._fields):
                yield from self._pieces(child, position)  # of an instruction: only the ends of fields count
            elif (said := _SAID.get(tag)) is not None:
                yield (" " if last == tag == "m-oMath" else "") + said(child), position
            elif tag in _NOTES:
                yield self._note(_NOTES[tag], child), ""
            elif tag == "AlternateContent" and not any(len(each) for each in child if each.tag == "Choice"):
                yield from (piece for each in child.iterfind("Fallback") for piece in self._pieces(each, position))
            elif tag == "w-ruby":
                parts = (child.find("w-rubyBase"), child.find("w-rt"))
                base, reading = ("" if part is None else line(self._pieces(part, "")) for part in parts)
                self._readings += [reading] if reading else []
                yield base, position
            else:
                self._beside(child)
                if tag != "w-txbxContent":
                    yield from self._pieces(child, position)
                yield " " * (tag == "a-p"), ""
            last = tag

    def _run(self, run: Element) -> Iterator[Piece]:
        names = ("w-vanish", "w-vertAlign", "w-position", "w-rFonts")
        vanish, script, height, font = (self._of_run(run, name) for name in names)
        name = "" if font is None else font.get("ascii", "")
        pieces = [(glyphs(text, name), where) for text, where in self._pieces(run, value(script, "."))]
        if count(height, ".") > 0 and not any(where or _LETTER.search(text) for text, where in pieces):
            pieces = [(text, "superscript") for text, _ in pieces]
        if is_on(vanish, ".") and (text := "".join(text for text, _ in pieces).strip()):
            self.hidden.append(text)
        yield from pieces

    def _of_run(self, run: Element, name: str) -> Element | None:
        own = run.find("w-rPr")
        if own is None or own.find(name) is not None or not (style := value(own, "w-rStyle")):
            return find(own, name)
        return self._styles.find(style, f"w-rPr/{name}")

    def _field(self, char: Element) -> Iterator[Piece]:
        kind = char.get("fldCharType")
        if kind == "begin":
            box, choice = char.find("w-ffData/w-checkBox"), char.find("w-ffData/w-ddList")
            if all(self._fields) and box is not None:
                yield "☒" if is_on(box, "w-default" if box.find("w-checked") is None else "w-checked") else "☐", ""
            if all(self._fields) and choice is not None:
                at = count(choice, "w-result", count(choice, "w-default"))
                yield "".join(value(each, ".") for each in choice.findall("w-listEntry")[at : at + 1]), ""
            self._fields.append(False)
        elif self._fields:
            self._fields.pop()
            self._fields += [True] if kind == "separate" else []

    def _note(self, kind: str, reference: Element) -> str:
        if kind not in self._notes:
            part = self._named(f"{kind}s")
            notes = {} if part is None else {each.get("id", ""): each for each in part}
            self._notes[kind] = notes, self._package.links(named(self._main_links, f"{kind}s")), {}
        notes, links, marks = self._notes[kind]
        key = reference.get("id", "")
        if key in marks or key not in notes:
            return marks.get(key, "")
        has_own = kind == "comment" or reference.get("customMarkFollows", "0") not in ("0", "false", "off")
        style = "lower_roman" if kind == "endnote" else "decimal"
        marks[key] = "" if has_own else f"[{counter(len(marks) + 1, style)}]"
        text = " ".join(" ".join(self._texts(notes[key], links)).split())
        if kind == "comment":
            text = text and comment(text, notes[key].get("author", ""))
        self._aside += [f"{marks[key]} {text}".strip()] if text else []
        return marks[key]

    def _beside(self, element: Element) -> None:
        if element.tag == "w-txbxContent":
            self._aside += self._texts(element)
        elif element.tag == "textpath":
            self._aside.append(element.get("string", ""))
        elif element.tag in _UNREAD:
            self.unread[_UNREAD[element.tag]] += 1
        elif element.tag in GRAPHICS:
            rows = [*graphic_texts(self._package, self._links, element)]
            self.unread["charts"] += not any(rows)
            self._aside += rows


def _below(element: Element, tag: str) -> Iterator[Element]:
    for child in element:
        if child.tag == tag:
            yield child
        elif child.tag not in _UNSEEN and child.tag not in ("w-p", "w-tbl", "w-tr", "w-tc"):
            yield from _below(child, tag)
