"""Outlook items (.msg, [MS-OXMSG]): made into a message that is read like any other mail."""

from __future__ import annotations

import email.policy
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.message import Message
from email.mime.application import MIMEApplication
from email.mime.message import MIMEMessage
from email.mime.multipart import MIMEMultipart
from email.mime.text import MIMEText
from email.parser import HeaderParser
from email.utils import format_datetime
from typing import Any

from kvtool.core.corpus.readers import mail
from kvtool.core.corpus.readers.document import Document, UnreadableFile, opened
from kvtool.core.corpus.readers.encoding import decode
from kvtool.core.corpus.readers.html import declared_encoding

_BODY, _HTML, _RICH_TEXT, _HEADERS = 0x1000, 0x1013, 0x1009, 0x007D
_SHOWN = {"Subject": 0x0037, "To": 0x0E04, "Cc": 0x0E03, "Bcc": 0x0E02}
_SENDER, _ADDRESSES, _TIMES = 0x0C1A, (0x5D01, 0x0C1F), (0x0039, 0x0E06)  # when it was sent, or else received
_DATA, _FILE_NAMES = 0x3701, (0x3707, 0x3704, 0x3001)
_CODE_PAGE, _HTML_CODE_PAGE = 0x3FFD, 0x3FDE
_OBJECT, _INTEGER, _STRING8, _STRING, _TIME, _BINARY = 0x000D, 0x0003, 0x001E, 0x001F, 0x0040, 0x0102


def read(source: str, data: bytes) -> list[Document]:
    with opened("Outlook message", "olefile"):
        from olefile import OleFileIO

        with OleFileIO(data) as file:
            message = _message(file, "")
    return mail.documents(source, [("", message, b"", 0)])


class _Properties:
    def __init__(self, file: Any, folder: str) -> None:
        self._file, self._folder = file, folder
        self._fixed = self._stream("__properties_version1.0")

    def data(self, tag: int, kind: int = _BINARY) -> bytes:
        return self._stream(f"__substg1.0_{tag:04X}{kind:04X}")

    def number(self, tag: int, kind: int = _INTEGER) -> int:
        """A number of four bytes or a time of eight; 0 if there is none."""
        at = self._fixed.find(kind.to_bytes(2, "little") + tag.to_bytes(2, "little"))
        return int.from_bytes(self._fixed[at + 8 : at + (16 if kind == _TIME else 12)], "little") if at >= 0 else 0

    def text(self, tag: int) -> str:
        if data := self.data(tag, _STRING):
            return data.decode("utf-16-le", "replace").rstrip("\0")
        return _decoded(self.data(tag, _STRING8).rstrip(b"\0"), f"cp{self.number(_CODE_PAGE)}")

    def _stream(self, name: str) -> bytes:
        path = self._folder + name
        return bytes(self._file.openstream(path).read()) if self._file.exists(path) else b""


def _decoded(data: bytes, charset: str) -> str:
    with suppress(UnreadableFile):
        return decode(data, charset)[0]
    return ""


def _message(file: Any, folder: str) -> Message:
    item, message = _Properties(file, folder), MIMEMultipart()
    headers = HeaderParser(policy=email.policy.default).parsestr(item.text(_HEADERS))
    sender, address = item.text(_SENDER), next((each for tag in _ADDRESSES if "@" in (each := item.text(tag))), "")
    values = {name: item.text(tag) for name, tag in _SHOWN.items()}
    values |= {"From": f"{sender} <{address}>" if address else sender, "Date": _date(item)}
    for name, value in values.items():
        message[name] = " ".join(str(headers.get(name) or value).split())
    message.attach(_body(item))
    depth = folder.count("/") + 1
    for path in file.listdir(streams=False, storages=True):
        name = "/".join(path)
        if len(path) == depth and name.startswith(f"{folder}__attach"):
            message.attach(_attachment(file, f"{name}/"))
    return message


def _date(item: _Properties) -> str:
    sent = next((each for tag in _TIMES if (each := item.number(tag, _TIME))), 0)  # units of 100 ns since 1601
    with suppress(OverflowError):
        return format_datetime(datetime(1601, 1, 1, tzinfo=UTC) + timedelta(microseconds=sent // 10)) if sent else ""
    return ""


def _body(item: _Properties) -> Message:
    body, page = MIMEMultipart("alternative"), item.data(_HTML)
    html = _decoded(page, declared_encoding(page) or f"cp{item.number(_HTML_CODE_PAGE)}") or item.text(_HTML)
    for text, kind in ((item.text(_BODY), "plain"), (html, "html")):
        if text.strip():
            body.attach(MIMEText(text.replace("\r\n", "\n"), kind, "utf-8"))
    if not body.get_payload() and (rich := item.data(_RICH_TEXT)):
        body.attach(_file("text.rtf", rich[16:] if rich[8:12] == b"MELA" else rich))  # MELA: not compressed
    return body


def _attachment(file: Any, folder: str) -> Message:
    attached, inner = _Properties(file, folder), f"{folder}__substg1.0_{_DATA:04X}{_OBJECT:04X}/"
    if file.exists(f"{inner}__properties_version1.0"):
        return MIMEMessage(_message(file, inner))
    name = next((each for tag in _FILE_NAMES if (each := attached.text(tag))), "")
    return _file(name, attached.data(_DATA))


def _file(name: str, data: bytes) -> Message:
    part = MIMEApplication(data)
    part.add_header("Content-Disposition", "attachment", filename=name)
    return part
