"""Texts: plain ones, Markdown and code as they are, without embedded data; JSON and XML with their escapes as letters,
calendars with whole lines; files whose name does not say what they are, where their content is text that somebody
wrote."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from kvtool.core.corpus.readers.containers import gunzip_start
from kvtool.core.corpus.readers.document import (
    BinaryFile,
    Document,
    SecretFile,
    cleaned,
    embedded_note,
    joined,
    without_data_uris,
)
from kvtool.core.corpus.readers.encoding import Reader, declared_by, decode, of_text

# how XML, style sheets, scripts and catalogues of translations state an encoding
_DECLARED = declared_by(rb"""(?:coding|charset)[ \t]*+[:=]?[ \t]*+["']?([\w.-]++)""", 512)
_ESCAPE = re.compile(
    r"\\(?:u(d[89ab][\da-f]{2})\\u(d[c-f][\da-f]{2})|u([\da-f]{4})|x([89a-f][\da-f])|.)", re.IGNORECASE | re.DOTALL
)
_ENTITY = re.compile(r"&(?:#\d{1,7}|#x[\da-f]{1,6}|[a-z]\w{1,30});", re.IGNORECASE | re.ASCII)
_CONTROLS = ("Cc", "Cs", "Zl", "Zp")  # Unicode's categories of what is no letter, sign or space
_UNFOLDED = re.compile(r"[^\n]*+(?:\n[ \t][^\n]*+)*+\n?")  # a line, with those that continue it
_SPLIT = re.compile(rb"([\xc2-\xf4][\x80-\xbf]{0,2})(\r?\n[ \t])([\x80-\xbf]{1,3})")  # a character of UTF-8
_VALUE_ESCAPE = re.compile(r"\\([nN,;\\])")


def read_unknown(source: str, data: bytes) -> list[Document]:
    """Read a file whose name does not say what it is."""
    (document,) = read(source, data)
    return [replace(document, kind="code") if document.text.startswith("#!") else document]


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


def _escaped(found: re.Match[str]) -> str:
    units = "".join(unit.zfill(4) for unit in found.groups() if unit)
    letter = bytes.fromhex(units).decode("utf-16-be", "surrogatepass")
    return letter if letter and letter not in '"\\' and unicodedata.category(letter) not in _CONTROLS else found[0]


def _referenced(found: re.Match[str]) -> str:
    letters = html.unescape(found[0])
    kept = any(letter in "<>&\"'" or unicodedata.category(letter) in _CONTROLS for letter in letters)
    return found[0] if kept else letters


def _reader(
    kind: str, declared: Callable[[bytes], str] | None = None, unescape: Callable[[str], str] | None = None
) -> Reader:
    """Make a reader of texts of a kind. Those with escapes hold data in base64, too."""

    def read_text(source: str, text: str) -> list[Document]:
        text = unescape(text) if unescape else text
        cut = without_data_uris(text, base64=unescape is not None)
        return [Document(source, cut, kind, embedded_note(text, cut))]

    return of_text(declared)(read_text)


read = _reader("text")
read_markdown = _reader("markdown")
read_table = _reader("table")
read_code = _reader("code", _DECLARED)
read_json = _reader("code", None, partial(_ESCAPE.sub, _escaped))
read_xml = _reader("code", _DECLARED, partial(_ENTITY.sub, _referenced))


SNIFFED = 1 << 16  # bytes at the beginning of a file by which a text is recognised
_MOST_BYTES = 1 << 24  # of such a text that nobody has named
_FEWEST_BREAKS = 0.02  # white space in a text; base64 in lines of 64 has 0.015, prose 0.15
_WORD = 20  # characters of a text that may be one word
_KEY = re.compile(r"-{4,5} ?BEGIN [A-Z0-9 ]*PRIVATE KEY|^\s*(?:PuTTY-User-Key-File|AGE-SECRET-KEY-1)", re.MULTILINE)
_NAME_IT = "name the file to have it read"


def check(beginning: bytes, size: int) -> None:
    """Refuse an empty file, a private key, and a text for machines, by the first `SNIFFED` bytes."""
    written = decode(gunzip_start(beginning, SNIFFED))[0].strip()
    _refuse(written, size)
    breaks = sum(map(str.isspace, written))
    if written.isascii() and len(written) > _WORD and breaks < _FEWEST_BREAKS * len(written):
        raise BinaryFile("text without words: hashes, base64, or code on one line", _NAME_IT)


def check_text(documents: Collection[Document]) -> None:
    """Refuse a key that follows the first bytes, and an unpacked file that is too long."""
    size = sum(len(document.text) for document in documents)
    for document in documents:
        _refuse(document.text, size)


def _refuse(text: str, size: int) -> None:
    if _KEY.search(text):
        raise SecretFile("holds a private key", _NAME_IT)
    if size > _MOST_BYTES:
        raise BinaryFile(f"over {_MOST_BYTES >> 20} MiB of text of an unknown kind", _NAME_IT)
