"""Files whose name does not say what they are: read where their content is text that somebody wrote."""

from __future__ import annotations

import re
from collections.abc import Collection

from kvtool.core.corpus.readers.containers import gunzip_start
from kvtool.core.corpus.readers.document import BinaryFile, Document, SecretFile
from kvtool.core.corpus.readers.encoding import decode

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
