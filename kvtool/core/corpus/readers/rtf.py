"""Rich text (RTF): paragraphs and rows of tables, with the notes, comments and text boxes that belong to them."""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

from kvtool.core.corpus.readers.document import Document, UnreadableFile, hidden_note, joined, table_row, unread_note
from kvtool.core.corpus.readers.html import raised
from kvtool.core.corpus.readers.office import line

_TOKEN = re.compile(
    r"\\([a-z]{1,32})(-?\d{1,10})? ?|\\'([\da-f]{2})|\\(.)|([{}])|([^\\{}\r\n]+)|\\|[\r\n]+", re.I | re.S
)
_CHARSETS = {
    **{0: 1252, 2: 42, 78: 932, 128: 932, 129: 949, 130: 1361, 134: 936, 136: 950, 161: 1253, 162: 1254, 163: 1258},
    **{177: 1255, 178: 1256, 186: 1257, 204: 1251, 222: 874, 238: 1250, 254: 437, 255: 850, 77: 10000},
}
_CODECS = {42: "latin-1", 936: "gbk", 1361: "johab", 10000: "mac_roman", 65001: "utf-8"}  # others: `cp1252`
_PAGES = {"ansi": 1252, "mac": 10000, "pc": 437, "pca": 850}
_CHARACTERS = {
    **{"tab": "\t", "emdash": "—", "endash": "–", "emspace": "\u2003", "enspace": "\u2002", "qmspace": "\u2005"},
    **{"bullet": "•", "lquote": "‘", "rquote": "’", "ldblquote": "“", "rdblquote": "”", "~": "\xa0", "_": "\u2011"},
    **{"\\": "\\", "{": "{", "}": "}", "nestcell": ", ", "nestrow": "; "},
}
_BREAKS = {**dict.fromkeys(("par", "line", "\n", "\r"), 1), **dict.fromkeys(("sect", "page"), 2)}  # paragraphs ended
_UNSEEN = frozenset(
    "fonttbl colortbl stylesheet info pict fldinst xe tc txe rxe sp shprslt nonesttables objclass objname objdata "
    "filetbl listtable listname ftnsep ftnsepc ftncn aftnsep aftnsepc aftncn mmathPict mtype".split()
)
_COLLECTED = frozenset(
    "footnote annotation atnauthor header headerl headerr headerf footer footerl footerr footerf shptxt "
    "dptxbxtext".split()
)
_KNOWN = _COLLECTED.union("shpinst do moMath nesttableprops".split())  # read although the mark `\*` precedes them
_FLAGS = {"v": "hidden", "deleted": "deleted", "mvf": "deleted", "intbl": "table"}
_FLAGS |= {"super": "superscript", "sub": "subscript", "up": "raised", "dn": "lowered"}
_POSITIONS = {"superscript": "superscript", "subscript": "subscript", "raised": "superscript", "lowered": "subscript"}
_RESET = {"pard": {"table"}, "nosupersub": {"superscript", "subscript"}, "plain": {*_FLAGS.values()} - {"table"}}


@dataclass(slots=True)
class _Group:
    pieces: list[tuple[str, str]]
    kind: str = ""
    font: int = 0
    skip: int = 1
    is_unseen: bool = False
    flags: frozenset[str] = frozenset()


def read(source: str, data: bytes) -> list[Document]:
    if not data.lstrip().startswith(b"{\\rtf"):
        raise UnreadableFile("damaged: not the rich text that its name says")
    return [_Reader(data.decode("latin-1")).document(source)]


class _Reader:
    def __init__(self, text: str) -> None:
        self._body: list[tuple[str, str]] = []
        self._groups = [_Group(self._body)]
        self._blocks: list[str] = []
        self._margins: dict[str, dict[str, None]] = {"header": {}, "footer": {}}
        self._attached: list[str] = []  # notes, comments and text boxes of the current paragraph
        self._rows, self._cells = list[str](), list[str]()  # of the open table, and of its open row
        self._hidden, self._notes, self._objects, self._author = list[str](), {"": 0, "endnote ": 0}, 0, ""
        self._page, self._fonts, self._font = "cp1252", dict[int, str](), 0
        self._bytes, self._skipped, self._is_starred = bytearray(), 0, False
        at = text.index("{")
        while token := _TOKEN.match(text, at):
            at = self._take(token)
            if len(self._groups) == 1:
                break
        self._decode()
        while len(self._groups) > 1:
            self._close()
        self._end_paragraph(1)

    def document(self, source: str) -> Document:
        places = [("header", text) for text in self._margins["header"]]
        places += [(f"¶ {number}", text) for number, text in enumerate(self._blocks, 1)]
        places += [("footer", text) for text in self._margins["footer"]]
        notes = (*hidden_note("text", self._hidden), *unread_note({"embedded objects": self._objects}))
        paired = ((place, text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")) for place, text in places)
        return joined(source, "text", paired, notes=notes)

    def _take(self, token: re.Match[str]) -> int:
        word, number, code, symbol, brace, literal = token.groups()
        if code or literal:
            data = bytes.fromhex(code) if code else literal.encode("latin-1")
            self._bytes += data[self._skipped :]
            self._skipped = max(0, self._skipped - len(data))
        elif name := word or symbol or brace:
            self._decode()
            self._skipped = 0
            is_starred, self._is_starred = self._is_starred, symbol == "*"
            if brace == "{":
                self._groups.append(replace(self._groups[-1], kind=""))
            elif brace:
                self._close()
            elif word == "bin":
                return token.end() + max(0, int(number or 0))
            else:
                self._control(name, None if number is None else int(number), is_starred)
        return token.end()

    def _control(self, word: str, number: int | None, is_starred: bool) -> None:
        group = self._groups[-1]
        if self._set(word, number or 0, group):
            return
        if word == "ud" and "upr" in group.flags:
            group.is_unseen, group.flags = False, group.flags - {"upr"}
        elif word == "upr" and not group.is_unseen:  # a text in a code page, then in Unicode
            group.is_unseen, group.flags = True, group.flags | {"upr"}
        elif word in _UNSEEN or (is_starred and word not in _KNOWN) or (word[0] == "m" and word.endswith("Pr")):
            group.is_unseen = True
            self._objects += word == "objdata"
        elif group.is_unseen:
            return
        elif word in _COLLECTED:
            group.kind, group.pieces = word, []
        elif word in _FLAGS:
            group.flags = group.flags - {_FLAGS[word]} if number == 0 else group.flags | {_FLAGS[word]}
        elif word == "ftnalt":
            group.kind = "endnote "
        elif word in _CHARACTERS:
            self._write(_CHARACTERS[word])
        elif "deleted" not in group.flags:
            self._lay_out(word, group)

    def _set(self, word: str, number: int, group: _Group) -> bool:
        match word:
            case "u":
                code = number % 0x10000 if number < 0x10000 else number
                self._write(chr(min(code, sys.maxunicode)))
                self._skipped = group.skip
            case "uc":
                group.skip = max(0, number)
            case "f":
                group.font = number
            case "fcharset" if number in _CHARSETS:
                self._fonts[group.font] = _codec(_CHARSETS[number])
            case "ansicpg" | "ansi" | "mac" | "pc" | "pca":
                self._page = _codec(_PAGES.get(word, number))
            case "deff":
                self._font = group.font = number
            case "plain" | "pard" | "nosupersub":
                group.font = self._font if word == "plain" else group.font
                group.flags -= _RESET[word]
            case _:
                return False
        return True

    def _lay_out(self, word: str, group: _Group) -> None:
        if word in _BREAKS:
            self._end_paragraph(_BREAKS[word])
        elif word in ("cell", "row") and group.pieces is not self._body:
            group.pieces.append((" | " if word == "cell" else "\n", ""))
        elif word == "cell":
            self._cells.append(_line(self._body))
            self._body.clear()
        elif word == "row":
            self._end_row()

    def _write(self, text: str) -> None:
        group = self._groups[-1]
        if not group.is_unseen and "deleted" not in group.flags:
            group.pieces.append((text, next((_POSITIONS[name] for name in _POSITIONS if name in group.flags), "")))
            if "hidden" in group.flags and text.strip():
                self._hidden.append(text.strip())

    def _decode(self) -> None:
        if self._bytes:
            codec = self._fonts.get(self._groups[-1].font, self._page)
            try:
                text = self._bytes.decode(codec)
            except UnicodeDecodeError:  # the font's character set does not fit the bytes
                text = self._bytes.decode(self._page, "replace")
            self._write(text)
            self._bytes.clear()

    def _close(self) -> None:
        group = self._groups.pop()
        if not group.kind or group.is_unseen:
            return
        text, parent = _line(group.pieces).strip(), self._groups[-1] if self._groups else group
        if group.kind in ("footnote", "endnote "):
            kind = group.kind.removeprefix("footnote")
            self._notes[kind] += 1
            parent.pieces.append((mark := f"[{kind}{self._notes[kind]}]", ""))
            self._attached.append(f"{mark} {text}")
        elif group.kind == "atnauthor":
            self._author = text
        elif group.kind == "annotation":
            self._attached.append(f"[comment by {self._author}: {text}]")
        elif text and group.kind[:6] in self._margins:
            self._margins[group.kind[:6]].setdefault(text)
        elif text:
            self._attached.append(text)

    def _end_paragraph(self, count: int) -> None:
        group = self._groups[-1]
        if group.pieces is not self._body or "table" in group.flags:
            group.pieces.append(("\n", ""))
            return
        if self._cells:
            self._end_row()
        self._blocks += [*self._rows, "\n".join([_line(self._body), *self._attached]), *[""] * (count - 1)]
        self._rows, self._attached = [], []
        self._body.clear()

    def _end_row(self) -> None:
        self._rows.append("\n".join([table_row(self._cells), *self._attached]))
        self._cells, self._attached = [], []


def _line(pieces: Iterable[tuple[str, str]]) -> str:
    shown, before = list[tuple[str, str]](), ""
    for position, group in groupby((piece for piece in pieces if piece[0]), key=itemgetter(1)):
        text = "".join(text for text, _ in group)
        mark = raised(before, text, False) if position == "superscript" and before.strip() else ""
        shown.append((text.replace(text.strip(), mark), "") if mark.startswith("[") else (text, position))
        before = (before + text)[-24:]
    return line(shown)


def _codec(page: int) -> str:
    try:
        return codecs.lookup(_CODECS.get(page, f"cp{page}")).name
    except LookupError:
        return "cp1252"
