"""Texts: plain ones, Markdown and code as they are, without embedded data; JSON and XML with their escapes as letters,
calendars with whole lines, LaTeX with accents as letters, by which words are found."""

from __future__ import annotations

import quopri
import re
import unicodedata
from html import unescape

from kvtool.core.corpus.readers.document import Document, cleaned, embedded_note, joined, without_data_uris
from kvtool.core.corpus.readers.encoding import of_text

_MARKS = {  # a command's name → the mark that Unicode puts after the letter
    **{"`": "\u0300", "'": "\u0301", "^": "\u0302", "~": "\u0303", '"': "\u0308", "=": "\u0304", ".": "\u0307"},
    **{"H": "\u030b", "c": "\u0327", "u": "\u0306", "v": "\u030c", "d": "\u0323", "b": "\u0331", "k": "\u0328"},
    **{"r": "\u030a"},
}
_ACCENT = re.compile(
    r"\\(?:([`'^~\"=.])[ \t]*|([Hcuvdbkr])(?=[ \t{]|\\[ij])[ \t]*)"
    r"(?:\{[ \t]*(\\?[A-Za-z])[ \t]*\}|(\\[ij](?![A-Za-z])|[A-Za-z]))"
)
_LETTERS = {
    **{"ss": "ß", "ae": "æ", "AE": "Æ", "oe": "œ", "OE": "Œ", "o": "ø", "O": "Ø"},
    **{"l": "ł", "L": "Ł", "aa": "å", "AA": "Å"},
}
_NAMES = "|".join(_LETTERS)
_LETTER = re.compile(rf"\{{\\({_NAMES})\}}|\\({_NAMES})(?![A-Za-z])(?:\{{\}}|[ \t]+)?")
_SECTION = re.compile(
    r"^[ \t]*\\(part|chapter|section|subsection|subsubsection|paragraph)\*?(?:\[[^\]\n]*\])?\{([^{}\n]+)\}",
    re.MULTILINE,
)
_RANKS = {"part": 1, "chapter": 1, "section": 2, "subsection": 3, "subsubsection": 4, "paragraph": 5}


# how XML, style sheets, scripts and catalogues of translations state an encoding
_CHARSET = re.compile(rb"""(?:coding|charset)[ \t]*+[:=]?[ \t]*+["']?([\w.-]++)""", re.I)
_ESCAPE = re.compile(
    r"\\(?:u(d[89ab][\da-f]{2})\\u(d[c-f][\da-f]{2})|u([\da-f]{4})|x([89a-f][\da-f])|.)", re.IGNORECASE | re.DOTALL
)
_ENTITY = re.compile(r"&(?:#\d{1,7}|#x[\da-f]{1,6}|[a-z]\w{1,30});", re.IGNORECASE | re.ASCII)
_CONTROLS = ("Cc", "Cs", "Zl", "Zp")  # Unicode's categories of what is no letter, sign or space
_UNFOLDED = re.compile(  # a line of a calendar or of a business card, with those that continue it
    r"[^\n:]*+QUOTED-PRINTABLE[^\n:]*+:[^\n]*+(?:(?<==)\n[^\n]*+)*+\n?|[^\n]*+(?:\n[ \t][^\n]*+)*+\n?"
)
_VALUE_ESCAPE = re.compile(r"\\([nN,;\\])")


def declared_encoding(data: bytes) -> str:
    """Find the encoding that the first lines of a file state; "": none."""
    match = _CHARSET.search(data[:512])
    return match[1].decode("ascii", "replace") if match else ""


@of_text()
def read(source: str, text: str) -> list[Document]:
    """Return one document, the text as it is."""
    return _document(source, text, "text")


@of_text()
def read_markdown(source: str, text: str) -> list[Document]:
    return _document(source, text, "markdown")


@of_text(declared_encoding)
def read_code(source: str, text: str) -> list[Document]:
    return _document(source, text, "code")


@of_text()
def read_json(source: str, text: str) -> list[Document]:
    """Return one document with the characters of `\\u` escapes, except quotes, backslashes and controls."""
    return _document(source, _ESCAPE.sub(_escaped, text), "code", base64=True)


@of_text(declared_encoding)
def read_xml(source: str, text: str) -> list[Document]:
    """Return one document with the characters of references, except XML's own and controls."""
    return _document(source, _ENTITY.sub(_referenced, text), "code", base64=True)


@of_text()
def read_calendar(source: str, text: str) -> list[Document]:
    """Return one document of unfolded lines (RFC 5545), marked with those of the file."""
    number, lines, plain = 1, [], cleaned(text)
    for found in _UNFOLDED.finditer(plain):
        lines.append((number, _unfolded(found[0])))
        number += found[0].count("\n")
    if "".join(line for _, line in lines) == plain:
        return _document(source, text, "text", base64=True)
    cut = [(number, without_data_uris(line, base64=True)) for number, line in lines]
    notes = embedded_note(text, "".join(line for _, line in cut))
    return [joined(source, "text", cut, "\n", notes)]


def _document(source: str, text: str, kind: str, *, base64: bool = False) -> list[Document]:
    cut = without_data_uris(text, base64=base64)
    return [Document(source, cut, kind, embedded_note(text, cut))]


def _escaped(found: re.Match[str]) -> str:
    units = "".join(unit.zfill(4) for unit in found.groups() if unit)
    letter = bytes.fromhex(units).decode("utf-16-be", "surrogatepass")
    return letter if letter and letter not in '"\\' and unicodedata.category(letter) not in _CONTROLS else found[0]


def _referenced(found: re.Match[str]) -> str:
    letters = unescape(found[0])
    kept = any(letter in "<>&\"'" or unicodedata.category(letter) in _CONTROLS for letter in letters)
    return found[0] if kept else letters


def _unfolded(line: str) -> str:
    name, colon, value = line.partition(":")
    if name.endswith("QUOTED-PRINTABLE"):
        return name + colon + quopri.decodestring(value.encode()).decode("utf-8", "replace")
    return _VALUE_ESCAPE.sub(lambda found: "\n" if found[1] in "nN" else found[1], re.sub(r"\n[ \t]", "", line))


@of_text()
def read_table(source: str, text: str) -> list[Document]:
    """Return one document of kind `table`, the text as it is."""
    return [Document(source, text, "table")]


@of_text()
def read_latex(source: str, text: str) -> list[Document]:
    """Return one document, its sections as headings; its lines are those of the file."""
    text = _LETTER.sub(lambda found: _LETTERS[found[1] or found[2]], _ACCENT.sub(_accented, text))
    text = _SECTION.sub(lambda found: f"{'#' * _RANKS[found[1]]} {found[2]}", text)
    return [Document(source, text, "markdown")]


def _accented(found: re.Match[str]) -> str:
    letter = (found[3] or found[4]).lstrip("\\")
    return unicodedata.normalize("NFC", letter + _MARKS[found[1] or found[2]])
