"""HTML, and EPUB books of it → their visible text, by own code, since answers cite lines: selectolax knows no lines of
a page, lxml only those of elements, up to 65,535, and the standard library's parser takes quadratic time on quotes that
do not close."""

from __future__ import annotations

import posixpath
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import unescape
from urllib.parse import unquote

from kvtool.core.common.marks import Mark
from kvtool.core.corpus.readers.containers import checked, member, parsed
from kvtool.core.corpus.readers.document import (
    Document,
    EmptyFile,
    Grid,
    UnreadableFile,
    numbered,
    shortened_references,
    without_data_uris,
)
from kvtool.core.corpus.readers.encoding import declared_by, decode, of_text

declared_encoding = declared_by(rb"""<(?:meta|\?xml)[^>]*?(?:charset|encoding)\s*+=\s*+["']?\s*+([\w.:-]++)""", 4096)

_UNSEEN = frozenset(
    "script style template noscript svg iframe canvas object datalist annotation annotation-xml".split()
)
_MARKUP = re.compile(r"<(?:(/?[a-z][^\s<>/=\"']*+)|(!--)|!doctype[^<>]*+>|!\[[^<>]*+>|\?[^<>]*+>)", re.I)
_TO_QUOTE = re.compile(r"""[^<>=]*+(?:=(?!\s*+["'])[^<>=]*+)*+(?:(>)|=\s*+(["']))?""")  # a value's quote, or the end
_ATTRIBUTE = re.compile(r"""([^\s"'=<>/]++)(?:\s*+=\s*+("[^"]*+"|'[^']*+'|[^\s"'>]++))?""")
_RAW = {tag: re.compile(rf"</{tag}[\s/>]", re.I) for tag in ("script", "style")}
_DEEPEST = 12  # levels of a list or table that are shown: without a limit, text and work grow with depth squared
_WIDEST = 100  # columns of a cell; more mean all there are
_LONGEST_LABEL = 200  # characters of a cell that are repeated in each row and column that it covers
_HEADINGS = {f"h{rank}": "#" * rank for rank in range(1, 7)}
_BLOCKS = frozenset(
    "address article aside blockquote body caption center dd details dialog div dl dt fieldset figcaption figure "
    "footer form header hgroup hr html legend main p section summary".split()
)
_VOID = frozenset("area base br col embed hr img input link meta param source track wbr".split())
_ASIDES = frozenset(("sup", "sub", "rt", "rp"))  # written apart from the words before them
_CONTROLS = frozenset(("button", "input", "meter", "output", "progress", "select"))
_STYLED = frozenset(("a", "b", "big", "em", "font", "i", "small", "span", "strong", "u"))
_SHIFT = re.compile(r"vertical-align\s*+:\s*+(sup|sub)(?:er)?\b", re.I)  # as Google Docs and Word write <sup>
_VALUED = frozenset(("", "text", "search", "tel", "url", "email", "number", "range", "date", "time", "month", "week"))
_PICTURE = re.compile(r"[\w.-]+\.(?:png|jpe?g|gif|svg|webp|bmp|ico)|(?:image|img|photo|picture|spacer|blank)?", re.I)
_BASE = re.compile(  # of an exponent: a number, a unit, a function, or brackets without words
    r"(?:\d|(?<![^\W\d_])(?:[^\W\d_]{1,2}|sin|cos|tan|log|exp|mol|min|sec)|\((?![^()]*[^\W\d_]{3})[^()]*\))$"
)
_YEAR = re.compile(r"(?<![\d.,])(?:1[5-9]|20)\d\d$")
_MARK = re.compile(r"[^\W\d_]|\d{1,3}(?:[\s,;–-]+\d{1,3})*|[ivx]{1,5}")  # of a note
_TABLE = frozenset(("table", "thead", "tbody", "tfoot", "tr", "td", "th"))
_ALL_ROWS = 65_534
_LONGEST_PROSE = 500  # characters of a cell's paragraphs that are still a row's
_BOOK = "META-INF/container.xml"
_BOOK_PAGES = ("application/xhtml+xml", "text/html")


@of_text(declared_encoding)
def read(source: str, text: str) -> list[Document]:
    return [document_of(source, *marked(text))]


def read_epub(source: str, data: bytes) -> list[Document]:
    with checked(data) as archive:
        if "META-INF/encryption.xml" in archive.namelist() and "META-INF/rights.xml" in archive.namelist():
            raise UnreadableFile("protected by its seller (DRM)")
        pages = [visible(page_text(member(archive, name))) for name in _spine(archive)]
        return [numbered(source, "html", "ch.", pages)]


def _spine(archive: zipfile.ZipFile) -> Iterator[str]:
    root = next((e.get("full-path", "") for e in parsed(archive, _BOOK).iterfind(".//{*}rootfile")), "")
    book = parsed(archive, root)
    pages = {e.get("id"): e.get("href", "") for e in book.iter() if e.get("media-type") in _BOOK_PAGES}
    for item in book.iterfind(".//{*}itemref"):
        if href := pages.get(item.get("idref")):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(root), unquote(href.partition("#")[0])))


def document_of(source: str, text: str, marks: Sequence[Mark]) -> Document:
    if not marks:
        raise EmptyFile("empty: the page has no visible text")
    return Document(source, text, "html", marks=tuple(marks))


def page_text(data: bytes, charset: str = "") -> str:
    return decode(data, charset or declared_encoding(data))[0] if data.strip() else ""


def visible(text: str) -> str:
    return marked(text)[0]


def marked(text: str) -> tuple[str, list[Mark]]:
    # an unclosed <nav> would hide the whole page: then it is better kept, and so is what stands in for a script
    hidden = (_UNSEEN | {"nav"}, _UNSEEN, _UNSEEN - {"noscript"})
    blocks = next((blocks for unseen in hidden if (blocks := _Page(unseen, text).blocks)), [])
    parts, marks = list[str](), list[Mark]()
    length, last = 0, ""
    for block in blocks:
        close = block.form == last and block.form in ("item", "row")  # lists and tables are adjoining lines
        gap = ("\n" if close else "\n\n") if parts else ""
        marks.append(Mark(length + len(gap), block.line))
        parts += [gap, block.text]
        length += len(gap) + len(block.text)
        last = block.form
    return "".join(parts) + "\n" if parts else "", marks


@dataclass(frozen=True, slots=True)
class _Block:
    form: str
    text: str
    line: int


@dataclass(slots=True)
class _Cell:
    blocks: list[_Block]
    rows: int
    columns: int

    def label(self) -> str:
        return " ".join(block.text for block in self.blocks if block.form != "row")


@dataclass(slots=True)
class _Table:
    cells: list[_Cell] | None = None  # of the open row; None between rows
    outer: tuple[list[_Block], list[int]] | None = None  # blocks and lists around the open cell; None between cells
    grid: Grid = field(default_factory=lambda: Grid(_LONGEST_LABEL))


class _Page:
    def __init__(self, unseen: frozenset[str], text: str) -> None:
        self.blocks: list[_Block] = []
        self._title: _Block | None = None
        self._unseen = unseen
        self._hidden_by = ""  # the element that hides what follows, until it closes
        self._hidden_depth = 0
        self._words: list[str] = []
        self._at = 1  # line of the file
        self._line = 0  # line of the first word that is more than white space; 0: none yet
        self._form = "text"
        self._prefix = ""
        self._lists: list[int] = []  # open lists: −1 for bullets, else the last number
        self._tables: list[_Table] = []
        self._deeper = 0  # open tables that are not shown as such
        self._spare = 4 * len(text) + 10_000  # characters of labels that are repeated
        self._aside = ("", 0, False)  # the open one, its first word, and whether it is a link
        self._shifted = ("", 0)  # the element whose style opened the aside, and how many of that name are open
        self._readings: list[str] = []  # of the block's ruby words
        self._formula = ""
        self._feed(shortened_references(text))
        while self._tables:
            self._end_row()
            self._tables.pop()
        self._flush()
        if self._title is not None and not any(block.text.startswith("# ") for block in self.blocks):
            self.blocks.insert(0, self._title)

    def _feed(self, text: str) -> None:
        at, dead, last = 0, set[int](), text.rfind("-->")  # after `last` no comment closes
        for found in _MARKUP.finditer(text):
            start, end = found.span()
            if start < at or (found[2] and start > last):
                continue
            if found[1]:
                end = _tag_end(text, end, dead)
            elif found[2]:
                end = text.find("-->", start + 2) + 3
            if end < 0:
                continue
            self._hear(text[at:start])
            self._at += text.count("\n", at, start)
            at = end
            if found[1]:
                tag = found[1].lower()
                self._tag(tag, text[found.end() : end - 1])
                if tag in _RAW and text[end - 2] != "/":
                    closing = _RAW[tag].search(text, end)
                    at = closing.start() if closing else len(text)
            self._at += text.count("\n", start, at)
        self._hear(text[at:])

    def _hear(self, text: str) -> None:
        if text and not self._hidden_by:
            self._say(unescape(text))

    def _say(self, text: str) -> None:
        self._words.append(text)
        if not self._line and text.strip():
            self._line = self._at + text.count("\n", 0, len(text) - len(text.lstrip()))

    def _tag(self, tag: str, rest: str) -> None:
        if tag.startswith("/"):
            self._end(tag[1:])
        elif self._hidden_by:
            self._hidden_depth += tag == self._hidden_by and not rest.endswith("/")
        else:
            found = _ATTRIBUTE.findall(rest)
            attributes = {name.lower(): value[1:-1] if value[:1] in "\"'" else value for name, value in found}
            unseen = tag in self._unseen or "hidden" in attributes
            if unseen and tag not in _VOID and not rest.endswith("/"):
                self._hidden_by, self._hidden_depth = tag, 1
            elif not unseen:
                self._open(tag, attributes)

    def _end(self, tag: str) -> None:
        if not self._hidden_by:
            return self._close(tag)
        self._hidden_depth -= tag == self._hidden_by
        if not self._hidden_depth:
            self._hidden_by = ""

    def _open(self, tag: str, attributes: dict[str, str]) -> None:
        if tag in _ASIDES or tag in ("rb", "rtc"):
            self._end_aside()
            self._aside = (tag, len(self._words), False)
        elif tag == "br":
            self._words.append("\n" if self._form == "pre" else "\v")  # \v: a break that survives collapsing
        elif tag in _HEADINGS:
            self._flush("heading", _HEADINGS[tag] + " ")
        elif tag in ("ul", "ol", "menu"):
            self._flush()
            self._lists.append(_number(attributes, "start", 1) - 1 if tag == "ol" else -1)
        elif tag == "li":
            self._flush("item", self._bullet(_number(attributes, "value", -1)))
        elif tag in _TABLE:
            self._open_table(tag, attributes)
        elif tag in ("pre", "textarea"):
            self._flush("pre")
        elif tag in _BLOCKS:
            self._block_break()
        elif tag == "title":
            self._flush()
        else:
            self._open_inline(tag, attributes)

    def _open_inline(self, tag: str, attributes: dict[str, str]) -> None:
        kind = attributes.get("type", "").lower()
        last = self._words[-1][-1:] if self._words else ""
        if tag in _CONTROLS and kind != "hidden" and (last.isalnum() or last == "%"):
            self._words.append(" ")
        if tag == "span" and self._line and attributes.get("role", "").lower() in ("cell", "gridcell", "columnheader"):
            self._words.append(" | ")
        self._shift(tag, attributes.get("style", ""))
        if tag == "a":
            self._aside = (*self._aside[:2], True)
        elif tag in ("img", "area") or (tag == "input" and kind == "image"):
            self._say(self._alternative(attributes))
        elif tag == "input" and kind in ("checkbox", "radio"):
            self._say("[x] " if "checked" in attributes else "[ ] ")
        elif tag == "input" and kind in _VALUED and (value := attributes.get("value")):
            self._say(f" {unescape(value)} ")
        elif tag == "option":
            self._say(" [x] " if "selected" in attributes else " ")
        elif tag == "math" and (formula := unescape(attributes.get("alttext", ""))):
            self._formula = formula
            self._say(f" {formula} ")
            self._hidden_by, self._hidden_depth = "math", 1

    def _shift(self, tag: str, style: str) -> None:
        shift = _SHIFT.search(style) if tag in _STYLED else None
        if tag == self._shifted[0]:
            self._shifted = tag, self._shifted[1] + 1
        elif shift and not self._aside[0]:
            self._aside, self._shifted = (shift[1].lower(), len(self._words), False), (tag, 1)

    def _close(self, tag: str) -> None:
        if tag in _ASIDES or tag in ("ruby", "rb", "rtc"):
            self._end_aside()
        elif tag == self._shifted[0]:
            self._shifted = tag, self._shifted[1] - 1
            if not self._shifted[1]:
                self._end_aside()
        elif tag == "title":
            if self._title is None and (title := _collapsed("".join(self._words))):
                self._title = _Block("heading", f"# {title}", self._line)
            self._words.clear()
            self._line = 0
        elif tag in ("ul", "ol", "menu"):
            self._flush()
            del self._lists[-1:]
        elif tag in _TABLE:
            self._close_table(tag)
        elif tag == "li" or tag in _HEADINGS or tag in ("pre", "textarea"):
            self._flush()
        elif tag in _BLOCKS:
            self._block_break()

    def _alternative(self, attributes: dict[str, str]) -> str:
        text = " ".join(unescape(attributes.get("alt", "")).split())
        tiny = {attributes.get("width"), attributes.get("height")} & {"0", "1", "0px", "1px"}
        if tiny or attributes.get("aria-hidden") == "true" or _PICTURE.fullmatch(text) or text == self._formula:
            return ""
        return f" [image: {text}] " if re.search(r"\w", text) else text

    def _end_aside(self) -> None:
        (kind, start, is_link), self._aside = self._aside, ("", 0, False)
        is_styled, self._shifted = bool(self._shifted[0]), ("", 0)
        if kind not in _ASIDES:
            return
        text = "".join(self._words[start:])
        del self._words[start:]
        if kind == "rt":
            self._readings.append(_collapsed(text))
        elif kind != "rp":
            before = "".join(self._words[-4:])[-24:]
            if kind == "sub" and before[-1:] in ("/", "⁄") and self._words[-2:-1] and self._words[-2].startswith("^"):
                self._words[-2] = " " + self._words[-2][1:]  # 1 1/2
            shown = raised(before, text, is_link) if kind == "sup" else lowered(before, text)
            self._words.append(text if is_styled and shown == _collapsed(text) else shown)

    def _open_table(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == "table" and len(self._tables) == _DEEPEST:
            self._deeper += 1
        elif tag == "table" or not self._tables:
            self._flush()
            self._tables.append(_Table())
        table = self._tables[-1]
        if tag in ("td", "th"):
            self._end_cell()
            self._flush()
            table.cells = table.cells or []
            rows, columns = _number(attributes, "rowspan", 1) or _ALL_ROWS, _number(attributes, "colspan", 1)
            table.cells.append(_Cell([], rows, columns if 0 < columns <= _WIDEST else 1))
            table.outer = (self.blocks, self._lists)
            self.blocks, self._lists = table.cells[-1].blocks, []
        elif tag != "table":
            self._end_row()
            table.cells = [] if tag == "tr" else None
            if tag != "tr":
                table.grid.covered.clear()

    def _close_table(self, tag: str) -> None:
        if not self._tables:
            self._flush()
        elif tag in ("td", "th"):
            self._end_cell()
        elif tag == "table" and self._deeper:
            self._deeper -= 1
        else:
            self._end_row()
            if tag == "table":
                self._tables.pop()

    def _end_cell(self) -> None:
        table = self._tables[-1]
        if table.outer is not None:
            self._flush()
            (self.blocks, self._lists), table.outer = table.outer, None

    def _end_row(self) -> None:
        self._end_cell()
        table = self._tables[-1]
        cells, table.cells = table.cells, None
        if cells is None:
            return
        blocks = [block for cell in cells for block in cell.blocks]
        covered = table.grid.covered
        if not covered and _lays_out(cells, blocks):
            self.blocks += blocks
            return
        if len(cells) == 1 and not covered:
            cells[0].columns = 1
        cost = sum((len(cell.label()) + 3) * cell.columns for cell in cells)
        self._spare -= cost + sum(len(label) + 3 for _, label in covered.values())
        if self._spare < 0:
            covered.clear()
            for cell in cells:
                cell.rows = cell.columns = 1
        row = table.grid.row((cell.label(), cell.columns, cell.rows) for cell in cells)
        if any(block.form != "row" for block in blocks):
            self.blocks.append(_Block("row", row, blocks[0].line))
        self.blocks += (block for block in blocks if block.form == "row")

    def _block_break(self) -> None:
        if self._prefix and not self._line:
            self._words.append(" ")
        else:
            self._flush()

    def _bullet(self, number: int) -> str:
        if not self._lists:
            return "- "
        indent = "  " * min(len(self._lists) - 1, _DEEPEST)
        if self._lists[-1] < 0:
            return indent + "- "
        self._lists[-1] = number if number >= 0 else self._lists[-1] + 1
        return f"{indent}{self._lists[-1]}. "

    def _flush(self, form: str = "text", prefix: str = "") -> None:
        self._end_aside()
        raw = "".join(self._words)
        text = without_data_uris(raw.replace("\v", "\n").strip("\n") if self._form == "pre" else _collapsed(raw))
        if self._readings:
            text += f" ({', '.join(self._readings)})"
        if text.strip():
            if self._tables and self._tables[-1].outer is None and self._tables[-1].cells:
                self._end_row()  # a text between cells
            self.blocks.append(_Block(self._form, self._prefix + text, self._line))
        self._words.clear()
        self._readings.clear()
        self._form, self._prefix, self._line = form, prefix, 0


def _tag_end(text: str, at: int, dead: set[int]) -> int:
    """Find the end of a tag; −1: none. Beginnings of values in unclosed tags are `dead`: each is searched once."""
    values: list[int] = []
    while (found := _TO_QUOTE.match(text, at)) and (quote := found[2]) and (start := found.end()) not in dead:
        values.append(start)
        at = text.find(quote, start) + 1
        if not at:
            break
    else:
        if found and found[1]:
            return found.end()
    dead.update(values)
    return -1


def _number(attributes: dict[str, str], name: str, default: int) -> int:
    found = re.match(r"\s*(\d{1,5})(?!\d)", attributes.get(name, ""), re.ASCII)
    return int(found[1]) if found else default


def _lays_out(cells: Sequence[_Cell], blocks: Sequence[_Block]) -> bool:
    if sum(bool(cell.blocks) for cell in cells) == 1:
        return len(blocks) > 1 or blocks[0].form != "text" or len(blocks[0].text) > _LONGEST_PROSE
    if any(block.form == "heading" or (block.form == "pre" and "\n" in block.text) for block in blocks):
        return True
    return any(len(cell.blocks) > 1 and len(cell.label()) > _LONGEST_PROSE for cell in cells)


def _collapsed(text: str) -> str:
    """Collapse white space as a browser does; \\v is a line break."""
    lines = (" ".join(re.split(r"[ \t\n\r\f]+", line)).strip(" ") for line in text.split("\v"))
    return "\n".join(line for line in lines if line)


def raised(before: str, text: str, is_link: bool) -> str:
    """Write a superscript: 10^6, an ordinal unchanged, a note's mark, which is often a link, as [1]."""
    text = " ".join(text.split())
    if is_link and _MARK.fullmatch(text):
        return f"[{text}]"
    if re.search(r"[+−=*/-]", text) and re.match(r"[\w+−-]", text):
        return "^" + (text if re.fullmatch(r"\W?\w+\W?", text) else f"({text})")
    if _MARK.fullmatch(text) and text[0].isdigit():
        if _BASE.search(before) and not _YEAR.search(before):
            return f"^{text}"
        return text if before[-1:].isspace() else f"[{text}]"
    if len(text) == 1 and text.isalpha():
        if re.search(r"[^\W\d_]{3}$|[.,;:]$", before) and not re.search(r"\b[IVXLCDM]++$", before):
            return f"[{text}]"
        return text if text in "eoards" else f"^{text}"
    return text


def lowered(before: str, text: str) -> str:
    text = " ".join(text.split())
    if re.search(r"\d$|[^\W\d_]{3}$" if text[:1].isdigit() else r"\d$|(?<![^\W\d_])[a-zα-ω]$|[a-z]{3}$", before):
        return "_" + (text if re.fullmatch(r"\w+", text) else f"({text})")
    return text
