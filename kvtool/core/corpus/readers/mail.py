"""Mail and saved web pages (MHTML). Each attachment is read as a document of the mail's file."""

from __future__ import annotations

import codecs
import email
import email.policy
import io
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from email.message import Message
from mimetypes import MimeTypes
from pathlib import Path

from kvtool.core.common.marks import Mark
from kvtool.core.corpus.readers import is_foreign, is_known, read_as, text
from kvtool.core.corpus.readers.document import Document, EmptyFile, MissingPackage, Parts, UnreadableFile, unread_note
from kvtool.core.corpus.readers.encoding import decode
from kvtool.core.corpus.readers.html import document_of, marked, page_text, visible

_SHOWN = ("Subject", "From", "To", "Cc", "Bcc", "Date")
_BEGINS = b"From "  # the line before each message of a mailbox
_COUNT = re.compile(rb"\s*(\d{1,18})[ \t]*\r?\n")  # the line before the message of an .emlx file: its length in bytes
_BOMS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_AS_IT_IS = ("", "7bit", "8bit", "binary")  # encodings that keep the lines of a text
_SEVEN_BITS = ("iso-2022-", "csiso2022", "hz", "utf-7")  # charsets whose bytes are ASCII, so pass for UTF-8
_REPORTS = ("message/delivery-status", "message/disposition-notification", "message/feedback-report")
_DEEPEST = 50  # levels of a message in a message
_PIECE, _MOST_PIECES = 6, 1 << 17  # letters of the pieces by which two texts are compared, and how many of them
_SAME = 0.7  # share of its pieces that another text has, from which on a text needs not be read again
_STUB = re.compile(r"\bhtml\b|browser|mail (?:app|client|program|reader)", re.IGNORECASE)
_LONGEST_STUB = 200  # pieces
_LINK = re.compile(r"https?://\S++")  # HTML does not show it
_PAGES = ("text/html", "application/xhtml+xml")
_MALFORMED = (ValueError, IndexError, AttributeError, TypeError)  # that the parser raises over malformed headers
_MOST_FILES, _MOST_BYTES = 100, 1 << 25  # of attachments that are read of one file
_MEDIA = ("image/", "audio/", "video/")
_SIGNATURES = ("application/pgp-", "application/pkcs7-signature", "application/x-pkcs7-signature")
_SEALED = b"-----BEGIN PGP MESSAGE"
_ENDINGS = MimeTypes()  # Python's own: a system's differ
_ENDINGS.add_type("text/calendar", ".ics")


def read(source: str, data: bytes) -> list[Document]:
    """Read messages and their attachments as documents."""
    if not data.strip():
        raise EmptyFile("empty")
    if data.startswith(_BOMS) or b"\0" in data[:2]:
        data = decode(data)[0].encode()
    made: list[Document] = []
    attachments, lost = _Attachments(), 0
    error: UnreadableFile = EmptyFile("empty: there is no text in it")
    for label, message, part, line in _messages(data):
        text = _Text(part, line)
        try:
            text.add_headers(message, _SHOWN)
            text.add(message)
            name = f"{source}#{label}" if label else source
            attached, lines = attachments.read(f"{name}/" if label else f"{name}#", text.files)
            text.add_lines("\n".join(lines))
            made += [text.made.document(name, "text"), *attached]
        except EmptyFile:
            continue
        except UnreadableFile as found:
            error, lost = found, lost + 1
    if not made:
        raise error
    notes = unread_note({"messages": lost, "attachments": attachments.unread})
    return [replace(made[0], notes=(*notes, *attachments.missing, *made[0].notes)), *made[1:]]


def read_page(source: str, data: bytes) -> list[Document]:
    pages = [part for part in _parsed(data).walk() if part.get_content_type() in _PAGES]
    if not pages:
        raise UnreadableFile("damaged: there is no web page in it")
    text, marks = "", list[Mark]()
    for page in pages:
        shown, places = marked(_decoded(page))
        lines = _lines(data, page)
        text += "\n" if text and shown else ""
        marks += [Mark(len(text) + mark.start, lines[min(int(mark.place), len(lines)) - 1]) for mark in places]
        text += shown
    return [document_of(source, text, marks)]


def _lines(data: bytes, page: Message) -> list[int]:
    first = data.count(b"\n", 0, _begin(data, page, 0)) + 1
    if _transfer(page) == "base64":
        return [first]
    lines = str(page.get_payload()).split("\n")
    return [first, *(first + at for at, line in enumerate(lines, 1) if not line.rstrip().endswith("="))]


def _messages(data: bytes) -> Iterator[tuple[str, Message, bytes, int]]:
    """Yield the label, the parts, the bytes and the first line of each message."""
    if not data.startswith(_BEGINS):
        stated = _COUNT.match(data)
        start, end = (stated.end(), stated.end() + int(stated[1])) if stated else (0, None)
        message = _parsed(data[start:end])
        if not any(name in message for name in (*_SHOWN, "Message-ID", "Received")):
            raise UnreadableFile("no mail: it has none of a message's headers")
        yield "", message, data[start:end], 1 + data.count(b"\n", 0, start)
        return
    first, count, lines = 0, 0, io.BytesIO(data).readlines()
    for number, line in enumerate([*lines, _BEGINS]):
        if line.startswith(_BEGINS) and (number == len(lines) or not number or not lines[number - 1].strip()):
            if number:
                count += 1
                one = b"".join(lines[first + 1 : number])
                yield str(count), _parsed(one), one, first + 2
            first = number


def _parsed(data: bytes) -> Message:
    try:
        return email.message_from_bytes(data, policy=email.policy.default)
    except _MALFORMED:
        return email.message_from_bytes(data)  # the older one leaves headers as they are


class _Text:
    def __init__(self, data: bytes, line: int) -> None:
        self.made = Parts("\n")
        self.files: list[tuple[str, str, bytes]] = []  # name, type and content of each part that is not in the text
        self._data = data
        self._line = line
        self._at = 0  # in the data, where that line is

    def add(self, part: Message, depth: int = 0, is_shown: bool = True) -> None:
        if depth > _DEEPEST:
            raise UnreadableFile(f"parts within parts, over {_DEEPEST} levels deep")
        kind = part.get_content_type()
        if parts := _parts(part):
            shown = _chosen(parts) if kind == "multipart/alternative" else parts
            for inner in parts:
                if is_shown and not kind.startswith("multipart/"):
                    self._move(self._data.find(f"\n{next(iter(inner.keys()), '')}:".encode(), self._at) + 1)
                    self.add_headers(inner, tuple(inner.keys()) if kind in _REPORTS else _SHOWN)
                self.add(inner, depth + 1, is_shown and inner in shown)
        elif not _is_text(part):
            self._add_file(part)
        elif is_shown:
            self._add_text(part)

    def add_headers(self, message: Message, names: Iterable[str]) -> None:
        headers = ((name, _header(message, name)) for name in names)
        self.add_lines("\n".join(f"{name}: {words}" for name, words in headers if words))

    def add_lines(self, text: str, step: int = 0) -> None:
        """Add lines after an empty one; each is `step` lines of the file below the one before."""
        gap = "\n\n"
        for number, words in enumerate(text.split("\n")):
            if words.strip():
                self.made.add(self._line + number * step, words, gap)
            gap = "\n" if words.strip() else "\n\n"

    def _move(self, at: int) -> None:
        if at > self._at:
            self._line += self._data.count(b"\n", self._at, at)
            self._at = at

    def _add_text(self, part: Message) -> None:
        self._move(_begin(self._data, part, self._at))
        try:
            text = self.made.without_data(_text(part))
        except UnreadableFile:
            return self._add_file(part)
        is_plain = not part.get_content_type().endswith("html")
        self.add_lines(text, int(is_plain and _keeps_lines(part)))

    def _add_file(self, part: Message) -> None:
        data = part.get_payload(decode=True)
        if isinstance(data, bytes):
            self.files.append((_name(part), part.get_content_type(), data))


class _Attachments:
    def __init__(self) -> None:
        self.unread = 0  # that may hold text
        self.missing: dict[str, None] = {}  # packages that attachments need, as notes
        self._files, self._bytes = _MOST_FILES, _MOST_BYTES

    def read(self, prefix: str, files: Iterable[tuple[str, str, bytes]]) -> tuple[list[Document], list[str]]:
        made: dict[str, Document] = {}
        shown: dict[str, list[str]] = {"Attachments": [], "Attachments, not read": []}
        seen: set[bytes] = set()  # an invitation may be a part and an attachment
        for number, (name, kind, data) in enumerate(files, 1):
            path = self._path(name, kind, number)
            base = prefix + path.name
            try:
                found = [] if data in seen else self._documents(path, base, kind, data)
            except MissingPackage as error:
                self.missing[f"{error.message} ({error.hint})"] = None
                shown["Attachments, not read"].append(name or path.name)
                continue
            except Exception:  # whatever a library raises over it: the message is sound
                kinds = (kind, _ENDINGS.guess_type(path.name)[0] or "")
                may_hold_text = not any(each.startswith((*_MEDIA, *_SIGNATURES)) for each in kinds)
                self.unread += may_hold_text
                shown["Attachments, not read"] += [name or path.name] if name or may_hold_text else []
                continue
            seen.add(data)
            shown["Attachments"].append(name or path.name)
            for document in found:
                source = base + document.source[len(base) :].replace("#", "/")
                while source in made:
                    source += "'"
                made[source] = replace(document, source=source)
        return list(made.values()), [f"{title}: {', '.join(names)}" for title, names in shown.items() if names]

    def _documents(self, path: Path, source: str, kind: str, data: bytes) -> list[Document]:
        if is_foreign(path) or kind.startswith(_SIGNATURES) or data.lstrip().startswith(_SEALED):
            raise UnreadableFile("encrypted, or a signature: no text to read")
        if not self._files or len(data) > self._bytes:
            raise UnreadableFile("too many or too large attachments")
        if not is_known(path):
            text.check(data[: text.SNIFFED], len(data))
        self._files, self._bytes = self._files - 1, self._bytes - len(data)
        return read_as(path, source, data)

    def _path(self, name: str, kind: str, number: int) -> Path:
        label = "".join(filter(str.isprintable, name)).replace("#", "_").replace("\\", "/").rpartition("/")[2]
        path = Path("/", label or f"part {number}")
        if is_known(path) or is_foreign(path) or kind == "application/octet-stream":
            return path
        return path.with_name(path.name + (_ENDINGS.guess_extension(kind) or ""))


def _parts(part: Message) -> list[Message]:
    """The parts of a part; the only one of an attached message, encoded or not, is that message."""
    parts = [inner for inner in part.get_payload() if isinstance(inner, Message)] if part.is_multipart() else []
    sealed = part if not parts and _name(part).lower().endswith(".eml") else None
    if parts and part.get_content_type() == "message/rfc822" and not (_keeps_lines(part) or parts[0].keys()):
        sealed = parts[0]
        sealed["Content-Transfer-Encoding"] = part["Content-Transfer-Encoding"]
    if sealed is not None and isinstance(data := sealed.get_payload(decode=True), bytes):
        message = _parsed(data)
        return [message] if message.keys() else parts
    return parts


def _is_text(part: Message) -> bool:
    kind = part.get_content_type()
    if part.get_content_disposition() == "attachment" or kind == "text/calendar":
        return False
    return kind in ("text/plain", "text/html") or (kind.startswith(("text/", "multipart/")) and not _name(part))


def _chosen(forms: list[Message]) -> list[Message]:
    """Choose the plain form unless it is a stub or contained in another one, and forms that say something else."""
    texts = [(form, _form_text(form)) for form in forms]
    said = [(form, text, pieces) for form, text in texts if (pieces := _pieces(text))]
    said.sort(key=lambda each: each[0].get_content_type() != "text/plain")
    chosen = said[:1]
    for each in said[1:]:
        if all(_share(each[2], others) < _SAME for _, _, others in chosen):
            chosen.append(each)
    if len(chosen) > 1:
        (_, text, pieces), (_, _, others) = chosen[:2]
        is_stub = len(pieces) < _LONGEST_STUB and (_STUB.search(text) or 3 * len(pieces) < len(others))
        del chosen[: bool(is_stub) or _share(pieces, others) >= _SAME]
    return [form for form, _, _ in chosen]


def _form_text(form: Message) -> str:
    texts = []
    for part in form.walk():
        with suppress(UnreadableFile):
            texts.append(_text(part) if not part.is_multipart() and _is_text(part) else "")
    return "".join(texts)


def _pieces(text: str) -> set[str]:
    letters = "".join(filter(str.isalnum, _LINK.sub("", text[: 2 * _MOST_PIECES]).casefold()))[:_MOST_PIECES]
    return {letters[at : at + _PIECE] for at in range(max(1, len(letters) - _PIECE + 1))} if letters else set()


def _share(pieces: set[str], others: set[str]) -> float:
    return len(pieces & others) / len(pieces)


def _text(part: Message) -> str:
    text = _decoded(part)
    return visible(text) if part.get_content_type().endswith("html") else text


def _decoded(part: Message) -> str:
    data, charset = part.get_payload(decode=True), str(part.get_content_charset() or "")
    if not isinstance(data, bytes):
        return ""
    if charset.startswith(_SEVEN_BITS) and data.isascii():
        with suppress(LookupError):
            data = data.decode(charset, "replace").encode("utf-8", "replace")
    return page_text(data, charset)


def _begin(data: bytes, part: Message, at: int) -> int:
    """The offset of a part's body in its message, after `at` and an empty line; `at` if it is not found."""
    body = part.get_payload(decode=True) if _keeps_lines(part) else str(part.get_payload()).encode("ascii", "replace")
    if not isinstance(body, bytes) or not body:
        return at
    found = ((data.find(empty + body, at), len(empty)) for empty in (b"\n\n", b"\n\r\n"))
    return min((start + length for start, length in found if start >= 0), default=at)


def _header(message: Message, name: str) -> str:
    raw = next((str(value) for key, value in message.raw_items() if key.lower() == name.lower()), "")
    try:
        if not raw.isascii():
            raw = decode(raw.encode("ascii", "surrogateescape"))[0]
        return " ".join(str(message.policy.header_fetch_parse(name, raw)).split())
    except (*_MALFORMED, UnreadableFile):
        return " ".join(raw.split())


def _name(part: Message) -> str:
    try:
        return " ".join(str(part.get_filename() or "").split())
    except _MALFORMED:
        return ""


def _keeps_lines(part: Message) -> bool:
    return _transfer(part) in _AS_IT_IS


def _transfer(part: Message) -> str:
    return str(part.get("Content-Transfer-Encoding", "")).strip().lower()
