"""Mail: forms of a text, forwarded messages, attachments, encodings, and Outlook items."""

from __future__ import annotations

import base64
import struct
from email.message import EmailMessage
from itertools import pairwise
from pathlib import Path

import pytest

from kvtool.core.corpus.readers import file_of, read_documents
from kvtool.core.corpus.readers import mail as mail_reader
from kvtool.core.corpus.readers.document import Document, UnreadableFile

HEAD = "From: Alma Reyes <alma@example.org>\nSubject: Harbour\n"
REPORT = (
    "The harbour office opens at seven. The crane is inspected on the first Monday of each month by the harbour "
    "master. Boats over twelve metres need a berth permit, which costs forty crowns and is valid for one season. "
    "The slipway is closed between November and March, and the fuel dock only takes cash.\n"
)


def mail(text: str | bytes, name: str = "a.eml") -> Document:
    return read(text, name)[0]


def read(text: str | bytes, name: str = "a.eml") -> list[Document]:
    return read_documents(Path("/in") / name, text.encode() if isinstance(text, str) else text)


def multipart(kind: str, *parts: str, boundary: str = "B") -> str:
    body = "".join(f"--{boundary}\n{part}\n" for part in parts)
    return f"Content-Type: multipart/{kind}; boundary={boundary}\n\n{body}--{boundary}--\n"


def plain(text: str) -> str:
    return f"Content-Type: text/plain; charset=utf-8\n\n{text}"


def page(text: str) -> str:
    return f"Content-Type: text/html; charset=utf-8\n\n<html><body><p>{text}</p></body></html>"


def attached(name: str, data: bytes, kind: str = "application/octet-stream") -> str:
    return (
        f'Content-Type: {kind}; name="{name}"\nContent-Disposition: attachment; filename="{name}"\n'
        f"Content-Transfer-Encoding: base64\n\n{base64.encodebytes(data).decode()}"
    )


def place(document: Document, words: str) -> int | str:
    start = document.text.index(words)
    return next(mark.place for mark in reversed(document.marks) if mark.start <= start)


@pytest.mark.parametrize(
    "stub",
    [
        "To see this message, use a mail client that shows HTML.",
        "View this mail in your browser: https://example.org/view?id=12345678901234567890",
        "Newsletter of May.",
        "",
    ],
)
def test_a_stub_gives_way_to_the_html_form(stub: str) -> None:
    text = mail(HEAD + multipart("alternative", plain(stub), page(REPORT))).text
    assert "costs forty crowns" in text
    assert stub == "" or stub[:17] not in text


def test_the_html_form_is_read_where_the_plain_one_says_less() -> None:
    text = mail(HEAD + multipart("alternative", plain(REPORT[:110]), page(REPORT))).text
    assert text.count("opens at seven") == text.count("costs forty crowns") == 1
    picture = "Content-Type: image/png\nContent-Transfer-Encoding: base64\n\niVBORw0KGgo="
    related = multipart("related", page(REPORT), picture, boundary="R")
    document = mail(HEAD + multipart("alternative", plain("Please use an HTML mail reader."), related))
    assert "fuel dock only takes cash" in document.text
    assert "part" not in document.text
    assert document.notes == ()


def test_which_form_is_read() -> None:
    wrapped = REPORT.replace(". ", ".\n> ") + "Map: https://example.org/a-very-long-link/that-html-does-not-show\n"
    text = mail(HEAD + multipart("alternative", page(REPORT), plain(wrapped))).text
    assert text.endswith(wrapped)
    assert text.count("opens at seven") == 1
    chinese = "港口办公室七点开门。起重机每月第一个星期一检查。船位许可证四十克朗。" * 3
    form = plain("\n".join(chinese[at : at + 9] for at in range(0, len(chinese), 9)))
    assert mail(HEAD + multipart("alternative", form, page(chinese))).text.count("七点开门") == 3
    other = (
        "The lighthouse was painted in white and red last spring. Visitors may climb it on Sundays, if the keeper is "
        "at home; children under ten pay nothing, and dogs have to wait at the bottom of the stairs."
    )
    text = mail(HEAD + multipart("alternative", plain(other), page(REPORT))).text
    assert "painted in white" in text
    assert "costs forty crowns" in text


def test_forwarded_and_returned_messages() -> None:
    inner = "From: Bruno Falk <b@x>\nDate: Mon, 3 Mar 2031 10:00:00 +0000\nSubject: Crane\n\nIt lifts nine tons.\n"
    document = mail(HEAD + multipart("mixed", plain("See below."), f"Content-Type: message/rfc822\n\n{inner}"))
    assert "See below.\n\nSubject: Crane\nFrom: Bruno Falk <b@x>\nDate: Mon, 03 Mar 2031" in document.text
    assert (place(document, "From: Bruno"), place(document, "It lifts")) == (12, 16)
    status = (
        "Content-Type: message/delivery-status\n\nReporting-MTA: dns; mx\n\nFinal-Recipient: rfc822; c@x\nStatus: 5.1.1"
    )
    returned = "Content-Type: text/rfc822-headers\n\nSubject: Lost letter\n"
    text = mail(HEAD + multipart("report", plain("Not delivered."), status, returned)).text
    assert "Final-Recipient: rfc822; c@x\nStatus: 5.1.1" in text
    assert "Subject: Lost letter" in text


@pytest.mark.parametrize("kind", ["message/rfc822", "application/octet-stream"])
def test_an_encoded_message_is_read(kind: str) -> None:
    inner = (
        f"From: Bruno Falk <b@x>\nSubject: Crane\n{multipart('mixed', plain('Nine tons.'), attached('a.txt', b'Rope'))}"
    )
    found = read(HEAD + multipart("mixed", plain("See."), attached("crane.eml", inner.encode(), kind), boundary="O"))
    assert "Subject: Crane\nFrom: Bruno Falk <b@x>\n\nNine tons." in found[0].text
    assert [document.source for document in found] == ["/in/a.eml", "/in/a.eml#a.txt"]


@pytest.mark.parametrize("kind", ["multipart/mixed; boundary=B", "text/plain; charset*"])
def test_broken_headers_do_not_lose_the_message(kind: str) -> None:
    assert "Nine tons." in mail(f"{HEAD}Content-Type: {kind}\n\nNine tons.\n").text


def test_attachments_are_documents_with_their_own_places() -> None:
    rows = b'{"id": "x", "text": "rope"}\n{"id": 7, "text": "tar"}\n'
    found = read(
        HEAD
        + multipart(
            "mixed",
            plain("Two files."),
            attached("list.md", b"# List\n\nNine ropes\n", "text/markdown"),
            attached("rows.jsonl", rows),
            attached("no ending", b"The keeper has the only key to the old store.\n"),
            attached("list.md", b"# Other\n"),
            attached("C:/in/tide#1.html", b"<p>High tide at noon</p>", "text/html"),
        )
    )
    names = ["list.md", "rows.jsonl/x", "rows.jsonl/7", "no ending", "list.md'", "tide_1.html"]
    assert [document.source for document in found] == ["/in/a.eml", *(f"/in/a.eml#{name}" for name in names)]
    assert {file_of(document.source) for document in found} == {"/in/a.eml"}
    assert [document.kind for document in found] == ["text", "markdown", "text", "text", "text", "markdown", "html"]
    assert found[0].text.endswith("\n\nAttachments: list.md, rows.jsonl, no ending, list.md, C:/in/tide#1.html\n")
    assert found[3].marks[0].place == 2
    assert found[0].notes == ()


def test_mailboxes() -> None:
    one = f"From x\n{HEAD}{multipart('mixed', plain('One.'), attached('a.txt', b'Rope'))}\n"
    found = read(one + one, "a.mbox")
    assert [document.source for document in found] == [
        f"/in/a.mbox#{name}" for name in ("1", "1/a.txt", "2", "2/a.txt")
    ]
    assert {file_of(document.source) for document in found} == {"/in/a.mbox"}
    deep = "".join(f"Content-Type: multipart/mixed; boundary={n}\n\n--{n}\n" for n in range(60))
    found = read(f"From a\n\nNo headers.\n\nFrom b\n{HEAD}\nNine tons.\n\nFrom c\n{deep}\nx\n", "a.mbox")
    assert [document.text.splitlines()[-1] for document in found] == ["No headers.", "Nine tons."]
    assert found[0].notes == ("messages: 1 not read",)


def test_attachments_that_are_not_read_are_counted() -> None:
    parts = {
        "a.pdf": b"%PDF-1.4 broken",
        "b.zip": b"PK\3\4",
        "winmail.dat": b"\x78\x9f\x3e\x22\0\0",
        "c.png": b"\x89PNG",
    }
    signature = attached("smime.p7s", b"\x30\x82\0\1", "application/pkcs7-signature")
    files = [attached(name, data) for name, data in parts.items()]
    document = mail(HEAD + multipart("mixed", plain("Here."), *files, signature))
    assert document.text.endswith("Here.\n\nAttachments, not read: a.pdf, b.zip, winmail.dat, c.png, smime.p7s\n")
    assert document.notes == ("attachments: 3 not read",)
    control = "Content-Type: application/pgp-encrypted\n\nVersion: 1\n"
    sealed = "Content-Type: application/octet-stream\n\n-----BEGIN PGP MESSAGE-----\nVersion: 2\n\nhIwD\n"
    document = mail(HEAD + multipart("encrypted", control, sealed))
    assert "hIwD" not in document.text
    assert document.notes == ("attachments: 1 not read",)


def test_attachments_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail_reader, "_MOST_FILES", 2)
    monkeypatch.setattr(mail_reader, "_MOST_BYTES", 10)
    files = [attached(f"{number}.txt", b"%d" % number * size) for number, size in enumerate((8, 3, 1, 1), 1)]
    found = read(HEAD + multipart("mixed", plain("Four."), *files))
    assert [document.source for document in found[1:]] == ["/in/a.eml#1.txt", "/in/a.eml#3.txt"]
    assert "Attachments, not read: 2.txt, 4.txt" in found[0].text
    assert found[0].notes == ("attachments: 2 not read",)


def test_a_calendar_beside_a_text_is_read_once() -> None:
    calendar = b"BEGIN:VCALENDAR\r\nSUMMARY:Crane inspection\r\nLOCATION:Pier 4\r\nEND:VCALENDAR\r\n"
    coded = base64.b64encode(calendar).decode()
    part = f"Content-Type: text/calendar; method=REQUEST\nContent-Transfer-Encoding: base64\n\n{coded}"
    forms = multipart("alternative", plain("Invitation"), page("Invitation"), part, boundary="A")
    found = read(HEAD + multipart("mixed", forms, attached("invite.ics", calendar, "application/ics")))
    assert len(found) == 2
    assert "Pier 4" in found[1].text


def test_parts_of_text_types() -> None:
    inline = 'Content-Type: text/plain\nContent-Disposition: inline; filename="a.txt"\n\nNine tons.'
    assert mail(HEAD + multipart("mixed", plain("See."), inline)).text.endswith("See.\n\nNine tons.\n")
    document = mail((HEAD + multipart("mixed", plain("See."), plain("PK\3\4 \0\1"))).encode())
    assert "See." in document.text
    assert document.notes == ("attachments: 1 not read",)


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_saved_mail_in_unicode_with_a_bom_is_read(codec: str) -> None:
    bom = "\ufeff" if codec == "utf-16-be" else ""
    document = mail(f"{bom}{HEAD}\r\nCafé at pier 4\r\n".encode(codec))
    assert document.text == "Subject: Harbour\nFrom: Alma Reyes <alma@example.org>\n\nCafé at pier 4\n"


@pytest.mark.parametrize(
    ("charset", "words"), [("iso-2022-jp", "灯台の鍵は港にある"), ("utf-7", "Schlüssel"), ("hz", "钥匙")]
)
def test_charsets_of_seven_bits_are_decoded(charset: str, words: str) -> None:
    head = f"{HEAD}Content-Type: text/plain; charset={charset}\n\n"
    assert words in mail(head.encode() + words.encode(charset)).text


def test_encoded_headers_and_names_are_decoded() -> None:
    text = mail("Subject: Grüße aus Łódź\nFrom: =?utf-8?q?J=C3=B6rg?= <j@x>\n\nx\n".encode()).text
    assert text.startswith("Subject: Grüße aus Łódź\nFrom: Jörg <j@x>\n")
    plain_name = "filename*0=prü; filename*1=fung.txt"
    for name in ("filename*=utf-8''pr%C3%BCfung.txt", 'filename="=?utf-8?B?cHLDvGZ1bmcudHh0?="', plain_name):
        part = f"Content-Type: text/plain\nContent-Disposition: attachment; {name}\n\nNine tons."
        message, file = read(HEAD + multipart("mixed", plain("x"), part))
        assert file.text.strip() == "Nine tons."
        assert name == plain_name or "prüfung.txt" in message.text


def test_emlx_is_read_without_its_count_and_its_list() -> None:
    message = f"{HEAD}\nNine tons.\n"
    document = mail(f"{len(message)}      \n{message}<?xml version='1.0'?>\n<plist><dict/></plist>\n", "1.emlx")
    assert document.text.endswith("\n\nNine tons.\n")
    assert place(document, "Nine") == 5


Tree = dict[str, "bytes | Tree"]


def compound(tree: Tree) -> bytes:
    """Write a compound file whose streams are all of 4,096 bytes or more, so that there is no short one."""
    sectors: list[bytes] = []
    fat: list[int] = []
    entries: list[list[object]] = []

    def chain(data: bytes) -> int:
        first = len(sectors)
        sectors.extend(data[at : at + 512].ljust(512, b"\0") for at in range(0, len(data), 512))
        fat.extend([*range(first + 1, len(sectors)), 0xFFFFFFFE])
        return first

    def add(name: str, node: bytes | Tree) -> int:
        number = len(entries)
        start, size = (chain(node), len(node)) if isinstance(node, bytes) else (0, 0)
        entry: list[object] = [name, 2 if isinstance(node, bytes) else 1, 0xFFFFFFFF, 0xFFFFFFFF, start, size]
        entries.append(entry)
        children = [] if isinstance(node, bytes) else [add(*item) for item in node.items()]
        for left, right in pairwise(children):
            entries[left][2] = right
        entry[3] = children[0] if children else 0xFFFFFFFF
        return number

    add("Root Entry", tree)
    entries[0][1] = 5
    entries[0][4] = 0xFFFFFFFE
    directory = b"".join(
        str(name).encode("utf-16-le").ljust(64, b"\0")
        + struct.pack("<HBBIII36xIQ", 2 * len(str(name)) + 2, kind, 1, 0xFFFFFFFF, right, child, start, size)
        for name, kind, right, child, start, size in entries
    )
    at = chain(directory)
    fats = len(fat) // 127 + 1
    first = len(fat)
    table = struct.pack(
        f"<{128 * fats}I", *[*fat, *[0xFFFFFFFD] * fats, *[0xFFFFFFFF] * (128 * fats - len(fat) - fats)]
    )
    begin, numbers = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", (0, fats, at, 0, 4096, 0xFFFFFFFE, 0, 0xFFFFFFFE, 0)
    head = struct.pack("<8s16xHHHHH6x9I", begin, 62, 3, 0xFFFE, 9, 6, *numbers)
    listed = struct.pack("<109I", *[*range(first, first + fats), *[0xFFFFFFFF] * (109 - fats)])
    return head + listed + b"".join(sectors) + table


def item(inner: Tree | None = None, code_page: int = 0, **texts: str) -> Tree:
    """Make an item of its strings, by tag; with a code page as bytes of it."""
    kind, codec = ("001E", f"cp{code_page}") if code_page else ("001F", "utf-16-le")
    strings: Tree = {f"__substg1.0_{tag[1:]}{kind}": f"{words:\0<4096}".encode(codec) for tag, words in texts.items()}
    sent = struct.pack("<IIQ", 0x00390040, 6, 0x01F0_0000_0000_0000) + struct.pack("<III4x", 0x3FFD0003, 6, code_page)
    return {"__properties_version1.0": (bytes(32) + sent).ljust(4096, b"\0"), **strings, **(inner or {})}


NOTE = {"t0037": "Harbour", "t0C1A": "Reyes, Alma", "t0C1F": "alma@example.org", "t0E04": "Bruno; Cara"}


def attachment(name: str, data: bytes) -> Tree:
    return {
        "__substg1.0_3707001F": f"{name:\0<4096}".encode("utf-16-le"),
        "__substg1.0_37010102": data.ljust(4096, b"\n"),
    }


def test_outlook_headers() -> None:
    document = mail(compound(item(**NOTE, t1000="The crane lifts nine tons.\r\nIt is old.")), "a.msg")
    date = "Sun, 31 May 2043 11:40:44 +0000"
    head = f"Subject: Harbour\nFrom: Reyes, Alma <alma@example.org>\nTo: Bruno; Cara\nDate: {date}\n"
    assert document.text == f"{head}\nThe crane lifts nine tons.\nIt is old.\n"
    assert (place(document, "Subject"), place(document, "It is old")) == ("¶ 1", "¶ 6")
    date = "Date: Mon, 3 Mar 2031 10:00:00 +0000\r\n"
    headers = f"From: =?utf-8?q?J=C3=B6rg?= <j@x>\r\nTo: Bruno <b@x>,\r\n Cara <c@x>\r\n{date}"
    text = mail(compound(item(**NOTE, t007D=headers)), "a.msg").text
    assert (
        text
        == "Subject: Harbour\nFrom: Jörg <j@x>\nTo: Bruno <b@x>, Cara <c@x>\nDate: Mon, 03 Mar 2031 10:00:00 +0000\n"
    )


def test_outlook_texts_are_read() -> None:
    words = "Маяк стоит на северном берегу, ключ хранит Инес."
    assert words in mail(compound(item(code_page=1251, t0037="Маяк", t1000=words)), "a.msg").text
    html = f"<html><meta charset=windows-1252><p>Crêpes at the pier</p>{'<br>' * 1024}".encode("cp1252")
    assert "Crêpes at the pier" in mail(compound(item({"__substg1.0_10130102": html}, **NOTE)), "a.msg").text
    inner = EmailMessage()
    inner["Subject"] = "Crane"
    inner.set_content("Nine tons.")
    tree: Tree = {"__attach_version1.0_#00000000": attachment("a.eml", inner.as_bytes())}
    assert "Subject: Crane\n\nNine tons." in mail(compound(item(tree, **NOTE)), "a.msg").text


def test_outlook_rich_text_that_is_not_read_is_counted() -> None:
    rich: Tree = {"__substg1.0_10090102": b"\0" * 8 + b"LZFu" + b"x" * 4096}
    assert mail(compound(item(rich, **NOTE)), "a.msg").notes == ("attachments: 1 not read",)
    assert mail(compound(item(rich, **NOTE, t1000="Nine tons.")), "a.msg").notes == ()
    clear: Tree = {"__substg1.0_10090102": (b"\0" * 8 + b"MELA\0\0\0\0{\\rtf1 Nine tons.}").ljust(4096, b"\n")}
    assert "Nine tons." in read(compound(item(clear, **NOTE)), "a.msg")[1].text


def test_outlook_attachments_and_attached_items_are_read() -> None:
    inner = item(
        {"__attach_version1.0_#00000000": attachment("b.txt", b"Inner rope")}, t0037="Inner", t1000="Nine tons."
    )
    tree: Tree = {
        "__attach_version1.0_#00000000": attachment("a.md", b"# Rope"),
        "__attach_version1.0_#00000001": {"__substg1.0_3701000D": inner},
        "__attach_version1.0_#00000002": attachment("c.zip", b"PK"),
    }
    found = read(compound(item(tree, **NOTE, t1000="See below.")), "a.msg")
    assert [document.source for document in found] == ["/in/a.msg", "/in/a.msg#a.md", "/in/a.msg#b.txt"]
    assert "See below.\n\nSubject: Inner\n" in found[0].text
    assert found[0].text.endswith("Nine tons.\n\nAttachments: a.md, b.txt\nAttachments, not read: c.zip\n")
    assert {file_of(document.source) for document in found} == {"/in/a.msg"}


def test_a_damaged_outlook_file_is_refused() -> None:
    whole = compound(item(**NOTE, t1000="Nine tons."))
    for data in (b"no compound file", whole[:600], whole[:512] + b"\xff" * (len(whole) - 512)):
        with pytest.raises(UnreadableFile):
            read(data, "a.msg")
