"""Texts: plain ones, Markdown and code as they are, without embedded data; JSON and XML with their escapes as letters,
calendars with whole lines."""

from __future__ import annotations

import re
import unicodedata
from html import unescape

from kvtool.core.corpus.readers.document import Document, cleaned, embedded_note, joined, without_data_uris
from kvtool.core.corpus.readers.encoding import of_text

# how XML, style sheets, scripts and catalogues of translations state an encoding
_CHARSET = re.compile(rb"""(?:coding|charset)[ \t]*+[:=]?[ \t]*+["']?([\w.-]++)""", re.I)
_ESCAPE = re.compile(
    r"\\(?:u(d[89ab][\da-f]{2})\\u(d[c-f][\da-f]{2})|u([\da-f]{4})|x([89a-f][\da-f])|.)", re.IGNORECASE | re.DOTALL
)
_ENTITY = re.compile(r"&(?:#\d{1,7}|#x[\da-f]{1,6}|[a-z]\w{1,30});", re.IGNORECASE | re.ASCII)
_CONTROLS = ("Cc", "Cs", "Zl", "Zp")  # Unicode's categories of what is no letter, sign or space
_UNFOLDED = re.compile(r"[^\n]*+(?:\n[ \t][^\n]*+)*+\n?")  # a line, with those that continue it
_SPLIT = re.compile(rb"([\xc2-\xf4][\x80-\xbf]{0,2})(\r?\n[ \t])([\x80-\xbf]{1,3})")  # a character of UTF-8
_VALUE_ESCAPE = re.compile(r"\\([nN,;\\])")


def declared_encoding(data: bytes) -> str:
    match = _CHARSET.search(data[:512])
    return match[1].decode("ascii", "replace") if match else ""


@of_text()
def read(source: str, text: str) -> list[Document]:
    return document_of(source, text, "text")


@of_text()
def read_markdown(source: str, text: str) -> list[Document]:
    return document_of(source, text, "markdown")


@of_text(declared_encoding)
def read_code(source: str, text: str) -> list[Document]:
    return document_of(source, text, "code")


@of_text()
def read_json(source: str, text: str) -> list[Document]:
    return document_of(source, _ESCAPE.sub(_escaped, text), "code", base64=True)


@of_text(declared_encoding)
def read_xml(source: str, text: str) -> list[Document]:
    return document_of(source, _ENTITY.sub(_referenced, text), "code", base64=True)


def read_calendar(source: str, data: bytes) -> list[Document]:
    return _read_calendar(source, _SPLIT.sub(rb"\1\3\2", data))


@of_text()
def _read_calendar(source: str, text: str) -> list[Document]:
    number, lines = 1, []
    for found in _UNFOLDED.finditer(cleaned(text)):
        line = _VALUE_ESCAPE.sub(lambda each: "\n" if each[1] in "nN" else each[1], re.sub(r"\n[ \t]", "", found[0]))
        lines.append((number, without_data_uris(line, base64=True)))
        number += found[0].count("\n")
    notes = embedded_note(text, "".join(line for _, line in lines))
    return [joined(source, "text", lines, "\n", notes)]


def document_of(source: str, text: str, kind: str, *, base64: bool = False) -> list[Document]:
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


@of_text()
def read_table(source: str, text: str) -> list[Document]:
    return document_of(source, text, "table")
