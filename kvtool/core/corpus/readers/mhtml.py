"""Saved web pages (MHTML): the page and its frames, by the standard library's parser of mail."""

from __future__ import annotations

import email
import email.policy
from collections.abc import Sequence
from email.message import Message

from kvtool.core.common.marks import Mark
from kvtool.core.corpus.readers import html
from kvtool.core.corpus.readers.document import Document, EmptyFile, UnreadableFile
from kvtool.core.corpus.readers.encoding import decode

_PAGES = ("text/html", "application/xhtml+xml")


def read(source: str, data: bytes) -> list[Document]:
    """Return one document of a page and its frames, marked with lines of the file.

    Raises
    ------
    UnreadableFile
        If there is no page in it.
    """
    message = email.message_from_bytes(data, policy=email.policy.default)
    pages = [part for part in message.walk() if part.get_content_type() in _PAGES]
    if not pages:
        raise UnreadableFile("damaged: there is no web page in it")
    length, texts, marks = 0, list[str](), list[Mark]()
    for page in pages:
        body = page.get_payload(decode=True)
        if not isinstance(body, bytes) or not body.strip():
            continue
        text, _ = decode(body, str(page.get_content_charset() or "") or html.declared_encoding(body))
        shown, places = html.marked(text)
        lines = _lines(data, page)
        marks += [Mark(length + mark.start, lines[min(int(mark.place), len(lines)) - 1]) for mark in places]
        texts.append(shown)
        length += len(shown) + 1
    if not marks:
        raise EmptyFile("empty: the page has no visible text")
    return [Document(source, "\n".join(texts), "html", marks=tuple(marks))]


def _lines(data: bytes, page: Message) -> Sequence[int]:
    """Return the line of the file on which each line of a decoded page begins."""
    raw = str(page.get_payload()).encode("ascii", "surrogateescape")
    first = data.count(b"\n", 0, max(0, data.find(raw))) + 1
    if page.get("Content-Transfer-Encoding", "").strip().lower() == "base64":
        return [first]
    return [first, *(first + at for at, line in enumerate(raw.splitlines(), 1) if not line.rstrip().endswith(b"="))]
