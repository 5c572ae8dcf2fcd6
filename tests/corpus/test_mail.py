"""Mail: forms of a text, forwarded messages, attachments, encodings."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from kvtool.core.corpus.readers import file_of, read_documents
from kvtool.core.corpus.readers import mail as mail_reader
from kvtool.core.corpus.readers.document import Document

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
