"""Texts: plain ones, Markdown and code as they are; LaTeX with accents as letters, by which words are found."""

from __future__ import annotations

import re
import unicodedata

from kvtool.core.corpus.readers.document import Document
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


@of_text()
def read(source: str, text: str) -> list[Document]:
    """Return one document, the text as it is."""
    return [Document(source, text, "text")]


@of_text()
def read_markdown(source: str, text: str) -> list[Document]:
    return [Document(source, text, "markdown")]


@of_text()
def read_code(source: str, text: str) -> list[Document]:
    return [Document(source, text, "code")]


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
