"""Subtitles (SubRip and WebVTT): what is said, without numbers, times and markup."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from kvtool.core.corpus.readers.document import Document, cleaned, joined, shortened_references
from kvtool.core.corpus.readers.encoding import of_text

# Possessive, and no part of a mark runs over the beginning of another: so each takes linear time on any line.
_TIMES = re.compile(r"\s*+(?:\d++:)?\d++:\d\d[.,]\d++\s++-->\s")
_VOICE = re.compile(r"<v(?:\.[\w.]++)?\s++([^<>]*+)>")
_MARKUP = re.compile(r"</?[a-z][^<>]*+>|<[\d:.]++>|\{\\[^{}]*+\}", re.IGNORECASE)


@of_text()
def read(source: str, text: str) -> list[Document]:
    """Return one document, a line for each spoken line, marked with the lines of the file."""
    return [joined(source, "text", _said(text), gap="\n")]


def _said(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of each cue: those after its times, up to an empty one."""
    inside = False
    for number, line in enumerate(cleaned(text).split("\n"), 1):
        if _TIMES.match(line):
            inside = True
        elif not line.strip():
            inside = False
        elif inside:
            plain = _MARKUP.sub("", _VOICE.sub(r"\1: ", line))
            yield number, html.unescape(shortened_references(plain)).strip()
