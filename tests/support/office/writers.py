"""Writers, one for each format: puts a fact's paragraphs into a file, and returns the place of its answer."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from email.message import EmailMessage
from email.policy import SMTPUTF8
from html import escape
from pathlib import Path

from tests.support.office.facts import Fact
from tests.support.office.portable import pdf

Writer = Callable[[Path, Fact], str]
"""Writes a file and returns its answer's place, as it stands behind the file's name in a source."""


def _line(path: Path, fact: Fact) -> str:
    """Return the line of the file that has the answer."""
    lines = path.read_text("utf-8").splitlines()
    return f":{next(number for number, line in enumerate(lines, 1) if fact.answer in line)}"


def _text(form: Callable[[Fact], str]) -> Writer:
    """A writer of a file whose lines are what people see."""

    def write(path: Path, fact: Fact) -> str:
        path.write_text(form(fact), "utf-8")
        return _line(path, fact)

    return write


def _plain(fact: Fact) -> str:
    return "\n\n".join((fact.title, *fact.paragraphs)) + "\n"


def _markdown(fact: Fact) -> str:
    return f"# {fact.title}\n\n" + "\n\n".join(fact.paragraphs) + "\n"


def _rst(fact: Fact) -> str:
    return f"{fact.title}\n{'=' * 2 * len(fact.title)}\n\n" + "\n\n".join(fact.paragraphs) + "\n"


def _latex(fact: Fact) -> str:
    body = "\n\n".join(fact.paragraphs)
    return f"\\documentclass{{article}}\n\\begin{{document}}\n\\section{{{fact.title}}}\n{body}\n\\end{{document}}\n"


def _html(fact: Fact) -> str:
    body = "\n".join(f"<p>\n  {escape(text)}\n</p>" for text in fact.paragraphs)
    return (
        f"<!doctype html>\n<html><head><meta charset='utf-8'><title>{fact.title}</title>\n"
        f"<style>p {{ margin: 1em }}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _python(fact: Fact) -> str:
    body = "\n\n".join(f"    {text}" for text in fact.paragraphs)
    return f'"""{fact.title}\n\n{body}\n"""\n\n\ndef visit() -> None:\n    pass\n'


def _csv(fact: Fact) -> str:
    return "number,note\n" + "\n".join(f'{number},"{text}"' for number, text in enumerate(fact.paragraphs)) + "\n"


def _jsonl(path: Path, fact: Fact) -> str:
    rows = [{"id": f"part-{number}", "text": text} for number, text in enumerate(fact.paragraphs)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return f"#part-{fact.gold}{_line(path, fact)}"


def _pdf(path: Path, fact: Fact) -> str:
    pages = [[fact.title, *fact.paragraphs[:2]], fact.paragraphs[2:]]
    path.write_bytes(pdf(pages, korean=fact.lang == "ko"))
    return " p. 2"


def _docx(path: Path, fact: Fact) -> str:
    from docx import Document

    file = Document()
    file.add_heading(fact.title, 1)
    for text in fact.paragraphs:
        file.add_paragraph(text)
    table = file.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "kept by", fact.title
    file.save(str(path))
    return f" ¶ {fact.gold + 2}"


def _pptx(path: Path, fact: Fact) -> str:
    from pptx import Presentation

    deck = Presentation()
    for text in fact.paragraphs:
        slide = deck.slides.add_slide(deck.slide_layouts[1])
        slide.shapes.title.text, slide.placeholders[1].text = fact.title, text
    deck.save(str(path))
    return f" slide {fact.gold + 1}"


def _xlsx(path: Path, fact: Fact) -> str:
    from openpyxl import Workbook

    book = Workbook()
    book.active.title = "Notes"
    for number, text in enumerate(fact.paragraphs):
        book.active.append([number, fact.title, text])
    book.create_sheet("Empty")
    book.save(path)
    return f" Notes row {fact.gold + 1}"


def _odt(path: Path, fact: Fact) -> str:
    spaces = " ".join(
        f'xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"' for name in ("office", "text", "table")
    )
    body = "".join(f"<text:p>{escape(text)}</text:p>" for text in fact.paragraphs)
    content = (
        f'<?xml version="1.0" encoding="UTF-8"?><office:document-content {spaces}><office:body><office:text>'
        f'<text:h text:outline-level="1">{fact.title}</text:h>{body}'
        "</office:text></office:body></office:document-content>"
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.text")
        archive.writestr("content.xml", content)
    return f" ¶ {fact.gold + 2}"


def _rtf(path: Path, fact: Fact) -> str:
    def escaped(text: str) -> str:
        codes = (code if code < 0x8000 else code - 0x10000 for code in map(ord, text))
        return "".join(chr(code) if 32 <= code < 127 else f"\\u{code}?" for code in codes)

    paragraphs = "\\par\n".join(map(escaped, (fact.title, *fact.paragraphs)))
    path.write_text(f"{{\\rtf1\\ansi{{\\fonttbl\\f0 Serif;}}\\f0 {paragraphs}\\par}}\n", "ascii")
    return f" ¶ {fact.gold + 2}"


def _epub(path: Path, fact: Fact) -> str:
    names = [f"part{number}.xhtml" for number in range(len(fact.paragraphs))]
    items = "".join(
        f'<item id="i{n}" href="{name}" media-type="application/xhtml+xml"/>' for n, name in enumerate(names)
    )
    spine = "".join(f'<itemref idref="i{number}"/>' for number in range(len(names)))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mimetype", "application/epub+zip")
        archive.writestr(
            "META-INF/container.xml",
            '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
            '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>',
        )
        archive.writestr(
            "OEBPS/book.opf",
            f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{spine}</spine></package>',
        )
        for name, text in zip(names, fact.paragraphs, strict=True):
            page = f"<html xmlns='http://www.w3.org/1999/xhtml'><body><h2>{fact.title}</h2><p>{escape(text)}</p></body></html>"
            archive.writestr(f"OEBPS/{name}", page)
    return f" ch. {fact.gold + 1}"


def _message(fact: Fact) -> EmailMessage:
    message = EmailMessage(policy=SMTPUTF8.clone(linesep="\n", cte_type="8bit"))
    message["From"], message["To"] = "guide@example.org", "visitor@example.org"
    message["Subject"] = fact.title
    message["Date"] = "Mon, 02 Nov 2026 09:00:00 +0000"
    message.set_content("\n\n".join(fact.paragraphs) + "\n", cte="8bit")
    message.add_attachment(b"\0\1", maintype="application", subtype="octet-stream", filename="plan.bin")
    return message


def _eml(path: Path, fact: Fact) -> str:
    path.write_bytes(_message(fact).as_bytes())
    return _line(path, fact)


def _mbox(path: Path, fact: Fact) -> str:
    first = EmailMessage()
    first["From"], first["Subject"] = "guide@example.org", "Tomorrow"
    first.set_content("Bring boots, and something against the wind.\n")
    mails = (first.as_bytes(), _message(fact).as_bytes())
    path.write_bytes(b"\n".join(b"From guide@example.org Mon Nov  2 09:00:00 2026\n" + mail for mail in mails))
    return f"#2{_line(path, fact)}"


def _ipynb(path: Path, fact: Fact) -> str:
    cells: list[dict[str, object]] = [
        {"cell_type": "markdown", "metadata": {}, "source": [text]} for text in (f"# {fact.title}", *fact.paragraphs)
    ]
    output = {"output_type": "stream", "name": "stdout", "text": ["five paragraphs\n"]}
    cells.append({"cell_type": "code", "metadata": {}, "source": ["print('five')"], "outputs": [output]})
    path.write_text(json.dumps({"cells": cells, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}), "utf-8")
    return f" cell {fact.gold + 2}"


WRITERS: Mapping[str, Writer] = {
    "txt": _text(_plain),
    "md": _text(_markdown),
    "rst": _text(_rst),
    "tex": _text(_latex),
    "html": _text(_html),
    "py": _text(_python),
    "csv": _text(_csv),
    "jsonl": _jsonl,
    "pdf": _pdf,
    "docx": _docx,
    "pptx": _pptx,
    "xlsx": _xlsx,
    "odt": _odt,
    "epub": _epub,
    "rtf": _rtf,
    "eml": _eml,
    "mbox": _mbox,
    "ipynb": _ipynb,
}
"""File ending → writer."""
