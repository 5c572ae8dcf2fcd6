"""HTML → its visible text, with headings, paragraphs, list items and table rows as lines.

By the standard library's parser, since answers cite lines: selectolax (1.0) knows no lines of a page, and lxml only
those of elements, up to 65,535.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser

from kvtool.core.common.marks import Mark
from kvtool.core.corpus.readers.document import Document, EmptyFile, UnreadableFile, shortened_references
from kvtool.core.corpus.readers.encoding import of_text

_CHARSET = re.compile(rb"""<(?:meta|\?xml)[^>]*?(?:charset|encoding)\s*+=\s*+["']?\s*+([\w.:-]++)""", re.I)

_UNSEEN = frozenset(("script", "style", "template", "noscript", "svg", "iframe", "canvas", "object"))
_SECTION = re.compile(r"<!\[[^<>]*+>")  # <![if …]> and the like, which a browser drops
_LOOSE = re.compile(  # a < that begins nothing complete
    r"""<(?!/?[a-z](?:[^<>"']|"[^"]{0,4000}"|'[^']{0,4000}')*+>|!--|!doctype[^<>]*+>|\?[^<>]*+>)""", re.I
)
_DEEPEST = 12  # levels of a list that are shown by indentation: without a limit, its text grows with depth squared
_HEADINGS = {f"h{rank}": "#" * rank for rank in range(1, 7)}
_BLOCKS = frozenset(
    "address article aside blockquote body caption center dd details dialog div dl dt fieldset figcaption figure "
    "footer form header hgroup hr html legend main p section summary table tbody tfoot thead".split()
)
_VOID = frozenset(
    ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr")
)


def declared_encoding(data: bytes) -> str:
    """Return the encoding that the file states; "": none."""
    match = _CHARSET.search(data[:4096])
    return match[1].decode("ascii", "replace") if match else ""


@of_text(declared_encoding)
def read(source: str, text: str) -> list[Document]:
    """Return one document of kind `html`: visible text only, marked with the page's lines.

    Raises
    ------
    UnreadableFile
        If nothing in the page is visible.
    """
    blocks = _visible(text)
    if not blocks:
        raise EmptyFile("empty: the page has no visible text")
    rendered, starts = _joined(blocks)
    marks = tuple(Mark(start, block.line) for start, block in zip(starts, blocks, strict=True))
    return [Document(source, rendered, "html", marks=marks)]


def visible(text: str) -> str:
    """Return the visible text of a page; it may be empty. Raises UnreadableFile."""
    return _joined(_visible(text))[0]


@dataclass(frozen=True, slots=True)
class _Block:
    """A piece of a page. `form` is text, heading, item, row or pre; `line` of the file, where its text begins."""

    form: str
    text: str
    line: int


def _visible(text: str) -> list[_Block]:
    # an unclosed <nav> would hide the whole page: then it is better kept
    return _blocks(text, _UNSEEN | {"nav"}) or _blocks(text, _UNSEEN)


def _joined(blocks: Sequence[_Block]) -> tuple[str, list[int]]:
    """Join blocks: lists and tables as adjoining lines, everything else with blank lines between; and return where each
    begins."""
    parts: list[str] = []
    starts: list[int] = []
    length, last = 0, ""
    for block in blocks:
        close = block.form == last and block.form in ("item", "row")
        gap = ("\n" if close else "\n\n") if parts else ""
        starts.append(length + len(gap))
        parts += [gap, block.text]
        length += len(gap) + len(block.text)
        last = block.form
    return "".join(parts) + "\n" if parts else "", starts


def _blocks(text: str, unseen: frozenset[str]) -> list[_Block]:
    """Return the visible blocks of a page, without the elements in `unseen`."""
    page = _Page(unseen)
    try:
        page.feed(_defused(text))
        page.close()
    except AssertionError as error:  # html.parser's way to give up on a broken declaration
        raise UnreadableFile(f"broken HTML: {error}") from error
    return page.finished()


def _defused(text: str) -> str:
    """Escape each `<` that begins no tag, and shorten numbers: html.parser raises or becomes quadratic on some."""
    text = shortened_references(text)
    text = _LOOSE.sub("&lt;", _SECTION.sub(lambda found: "\n" * found[0].count("\n"), text))
    last = text.rfind("-->") + 1  # after it no comment closes
    return text[:last] + text[last:].replace("<!--", "&lt;!--")


class _Page(HTMLParser):
    """Turns parser events into blocks."""

    def __init__(self, unseen: frozenset[str]) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[_Block] = []
        self.title: _Block | None = None
        self._unseen = unseen
        self._hidden_by = ""  # the element that hides what follows, until it closes
        self._hidden_depth = 0
        self._words: list[str] = []
        self._line = 0  # line of the first word that is more than white space; 0: none yet
        self._form = "text"
        self._prefix = ""
        self._lists: list[int] = []  # open lists: −1 for bullets, else the last number
        self._cells: list[str] | None = None
        self._row_line = 0
        self._pre = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._hidden_by:
            self._hidden_depth += tag == self._hidden_by
        elif tag in self._unseen or (tag not in _VOID and any(name == "hidden" for name, _ in attrs)):
            self._hidden_by, self._hidden_depth = tag, 1
        else:
            self._open(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID:  # <div/> opens a div in HTML, <br/> is a br
            self.handle_starttag(tag, attrs)
        elif not self._hidden_by and tag not in self._unseen:
            self._open(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._hidden_by:
            self._hidden_depth -= tag == self._hidden_by
            if not self._hidden_depth:
                self._hidden_by = ""
        else:
            self._close(tag)

    def handle_data(self, data: str) -> None:
        if not self._hidden_by:
            self._words.append(data)
            if not self._line and data.strip():
                self._line = self.getpos()[0] + data.count("\n", 0, len(data) - len(data.lstrip()))

    def finished(self) -> list[_Block]:
        """Return all blocks, the page's title first if it has no heading of the first rank."""
        self._flush()
        if self.title is not None and not any(block.text.startswith("# ") for block in self.blocks):
            self.blocks.insert(0, self.title)
        return self.blocks

    def _open(self, tag: str) -> None:
        if tag == "br":
            self._words.append("\n" if self._pre else "\v")  # \v: a break that survives collapsing
        elif tag in _HEADINGS:
            self._begin("heading", _HEADINGS[tag] + " ")
        elif tag in ("ul", "ol", "menu"):
            self._flush()
            self._lists.append(0 if tag == "ol" else -1)
        elif tag == "li":
            self._begin("item", self._bullet())
        elif tag == "tr":
            self._flush()
            self._cells = []
        elif tag in ("td", "th"):
            self._end_cell()
        elif tag in ("pre", "textarea"):
            self._flush()
            self._form, self._pre = "pre", True
        elif tag in _BLOCKS:
            self._block_break()
        elif tag == "title":
            self._flush()

    def _close(self, tag: str) -> None:
        if tag == "title":
            if self.title is None and (title := _collapsed("".join(self._words))):
                self.title = _Block("heading", f"# {title}", self._line)
            self._clear()
        elif tag in ("ul", "ol", "menu"):
            self._flush()
            del self._lists[-1:]
        elif tag in ("td", "th"):
            self._end_cell()
        elif tag == "tr":
            self._end_row()
        elif tag == "li" or tag in _HEADINGS or tag in ("pre", "textarea"):
            self._flush()
        elif tag in _BLOCKS:
            self._block_break()

    def _begin(self, form: str, prefix: str) -> None:
        self._flush()
        self._form, self._prefix = form, prefix

    def _block_break(self) -> None:
        """End a paragraph; inside a cell, or before an item's first word, only add a space."""
        if self._cells is not None or (self._prefix and not self._line):
            self._words.append(" ")
        else:
            self._flush()

    def _bullet(self) -> str:
        if not self._lists:
            return "- "
        indent = "  " * min(len(self._lists) - 1, _DEEPEST)
        if self._lists[-1] < 0:
            return indent + "- "
        self._lists[-1] += 1
        return f"{indent}{self._lists[-1]}. "

    def _end_cell(self) -> None:
        if self._cells is not None:
            cell = _collapsed("".join(self._words)).replace("\n", " ")
            if cell:
                self._row_line = self._row_line if self._cells else self._line
                self._cells.append(cell)
            self._clear()

    def _end_row(self) -> None:
        if self._cells is not None:
            self._end_cell()
            cells, self._cells = self._cells, None
            if cells:
                self.blocks.append(_Block("row", " | ".join(cells), self._row_line))

    def _clear(self) -> None:
        self._words.clear()
        self._line = 0

    def _flush(self) -> None:
        if self._cells is not None:
            self._end_row()
        raw = "".join(self._words)
        text = raw.replace("\v", "\n").strip("\n") if self._pre else _collapsed(raw)
        if text.strip():
            self.blocks.append(_Block(self._form, self._prefix + text, self._line))
        self._clear()
        self._form, self._prefix, self._pre = "text", "", False


def _collapsed(text: str) -> str:
    """Collapse white space as a browser does: runs are one space, \\v is a line break."""
    lines = (" ".join(re.split(r"[ \t\n\r\f]+", line)).strip(" ") for line in text.split("\v"))
    return "\n".join(line for line in lines if line)
