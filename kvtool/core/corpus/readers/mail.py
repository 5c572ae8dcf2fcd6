"""Mail: one message, or all messages of a mailbox file, by the standard library's parser."""

from __future__ import annotations

import email
import email.policy
import io
from collections.abc import Callable, Iterator
from email.message import EmailMessage, Message

from kvtool.core.corpus.readers.document import Document, EmptyFile, Parts, UnreadableFile
from kvtool.core.corpus.readers.encoding import decode
from kvtool.core.corpus.readers.html import visible

_SHOWN = ("Subject", "From", "To", "Cc", "Date")
_BEGINS = b"From "  # the line before each message of a mailbox
_TEXT_KINDS: dict[str, Callable[[str], str]] = {"text/plain": str, "text/html": visible}
_AS_IT_IS = ("", "7bit", "8bit", "binary")  # encodings that keep the lines of a text
_DEEPEST = 50  # levels of a message in a message


def read(source: str, data: bytes) -> list[Document]:
    """Return one document for each message, marked with lines of the file.

    Raises
    ------
    UnreadableFile
        If it is no mail.
    """
    if not data.strip():
        raise EmptyFile("empty")
    if not data.startswith(_BEGINS):
        return [_document(source, data, 1)]
    documents = []
    for number, (line, message) in enumerate(_messages(data), 1):
        try:
            documents.append(_document(f"{source}#{number}", message, line))
        except EmptyFile:
            continue
    if not documents:
        raise EmptyFile("empty: there is no text in it")
    return documents


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the messages of a mailbox, each with the line on which it begins."""
    first, lines = 0, io.BytesIO(data).readlines()
    for number, line in enumerate([*lines, _BEGINS]):
        if line.startswith(_BEGINS) and (number == len(lines) or not number or not lines[number - 1].strip()):
            if number:
                yield first + 2, b"".join(lines[first + 1 : number])
            first = number


def _document(source: str, data: bytes, line: int) -> Document:
    message = email.message_from_bytes(data, policy=email.policy.default)
    if not any(name in message for name in (*_SHOWN, "Message-ID", "Received")):
        raise UnreadableFile("no mail: it has none of a message's headers")
    made = Parts("\n")
    for header in _SHOWN:
        if shown := _header(message, header):
            made.add(line, f"{header}: {shown}")
    at = 0
    for part in _text_parts(message, 0):
        at = _begin(data, part, at)
        _add_lines(made, part, line + data.count(b"\n", 0, at))
    if names := [name for part in message.walk() if (name := part.get_filename())]:
        made.add(line + data.count(b"\n", 0, at), f"Attachments, not read: {', '.join(names)}", gap="\n\n")
    return made.document(source, "text")


def _begin(data: bytes, part: Message, at: int) -> int:
    """Return the offset of a part's body in its message, after `at` and an empty line; `at` if it is not found."""
    body = part.get_payload(decode=True) if _keeps_lines(part) else str(part.get_payload()).encode("ascii", "replace")
    found = (
        (data.find(empty + body, at), len(empty)) for empty in (b"\n\n", b"\n\r\n") if isinstance(body, bytes) and body
    )
    return min((start + length for start, length in found if start >= 0), default=at)


def _header(message: EmailMessage, name: str) -> str:
    """Return a header in words; unparsed if the parser fails."""
    try:
        return " ".join(str(message.get(name, "")).split())
    except (ValueError, IndexError, AttributeError, TypeError):  # the parser's own, on malformed headers
        return " ".join(str(dict(message.raw_items()).get(name, "")).split())


def _keeps_lines(part: Message) -> bool:
    return str(part.get("Content-Transfer-Encoding", "")).strip().lower() in _AS_IT_IS


def _text_parts(message: Message, depth: int) -> Iterator[Message]:
    """Yield the parts to read: of several forms of one text the plain one."""
    if depth > _DEEPEST:
        raise UnreadableFile(f"parts within parts, over {_DEEPEST} levels deep")
    if not message.is_multipart():
        if message.get_content_type() in _TEXT_KINDS and message.get_content_disposition() != "attachment":
            yield message
        return
    parts = [part for part in message.get_payload() if isinstance(part, Message)]
    if message.get_content_type() == "multipart/alternative":
        plain = [part for part in parts if part.get_content_type() == "text/plain"]
        parts = (plain or parts)[:1]
    for part in parts:
        yield from _text_parts(part, depth + 1)


def _add_lines(made: Parts, part: Message, line: int) -> None:
    """Add a part's text, marked with each line of the file if its encoding keeps them."""
    data = part.get_payload(decode=True)
    if not isinstance(data, bytes) or not data.strip():
        return
    kind = part.get_content_type()
    text = _TEXT_KINDS[kind](decode(data, str(part.get_content_charset() or ""))[0])
    step, gap = int(kind == "text/plain" and _keeps_lines(part)), "\n\n"
    for number, words in enumerate(text.split("\n")):
        made.add(line + number * step, words, gap)
        gap = "\n" if words.strip() else "\n\n"
