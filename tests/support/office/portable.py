"""A small PDF by hand: text set in fonts that every reader has, so that nothing has to be embedded."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

_HEAD = b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n"
_LINES_A_PAGE = 40


def pdf(pages: Sequence[Sequence[str]], korean: bool = False) -> bytes:
    """A PDF with the paragraphs of each page.

    Parameters
    ----------
    korean : set it in a Korean font, by its code points in UTF-16; else in Helvetica.
    """
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = {
        1: b"<< /Type /Catalog /Pages 2 0 R >>",
        2: f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        3: _font(4 + 2 * len(pages)) if korean else b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    }
    for number, paragraphs in enumerate(pages):
        page = 4 + 2 * number
        objects[page] = (
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents {page + 1} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        ).encode()
        objects[page + 1] = _stream(_drawn(paragraphs, korean))
    if korean:
        objects |= _descendant(4 + 2 * len(pages))
    return _file(objects)


def scanned(pages: int) -> bytes:
    """A PDF whose pages show a grey square and no text."""
    kids = " ".join(f"{3 + 2 * number} 0 R" for number in range(pages))
    objects = {1: b"<< /Type /Catalog /Pages 2 0 R >>", 2: f"<< /Type /Pages /Kids [{kids}] /Count {pages} >>".encode()}
    for number in range(pages):
        page = 3 + 2 * number
        objects[page] = (
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents {page + 1} 0 R /Resources << >> >>"
        ).encode()
        objects[page + 1] = _stream(b"q 0.5 g 100 100 300 300 re f Q")
    return _file(objects)


def drawing(contents: Sequence[str], annotations: Sequence[str] = (), catalog: str = "") -> bytes:
    """A PDF of content streams, one a page, whose font F1 is Helvetica.

    Parameters
    ----------
    annotations : dictionaries of the first page's annotations, without brackets; each is also a field of the form.
    catalog : more entries of the catalogue.
    """
    first = 4 + 2 * len(contents)
    notes = " ".join(f"{first + number} 0 R" for number in range(len(annotations)))
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(contents)))
    objects = {
        1: f"<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [{notes}] >> {catalog} >>".encode(),
        2: f"<< /Type /Pages /Kids [{kids}] /Count {len(contents)} >>".encode(),
        3: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    }
    for number, content in enumerate(contents):
        page = 4 + 2 * number
        objects[page] = (
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents {page + 1} 0 R "
            f"/Resources << /Font << /F1 3 0 R >> >> /Annots [{notes if number == 0 else ''}] >>"
        ).encode()
        objects[page + 1] = _stream(content.encode("latin-1"))
    objects |= {first + at: f"<< /Type /Annot {note} >>".encode() for at, note in enumerate(annotations)}
    return _file(objects)


def _drawn(paragraphs: Sequence[str], korean: bool) -> bytes:
    lines = [line for text in paragraphs for line in [*textwrap.wrap(text, 38 if korean else 85), ""]]
    assert len(lines) <= _LINES_A_PAGE, "the paragraphs do not fit on a page"
    drawn = [b"BT /F1 11 Tf 60 780 Td 16 TL"]
    for line in lines:
        shown = f"<{line.encode('utf-16-be').hex()}>" if korean else f"({_escaped(line)})"
        drawn.append(shown.encode("latin-1") + b" Tj T*")
    return b"\n".join([*drawn, b"ET"])


def _escaped(line: str) -> str:
    return line.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")


def _font(descendant: int) -> bytes:
    return (
        "<< /Type /Font /Subtype /Type0 /BaseFont /HYSMyeongJo-Medium /Encoding /UniKS-UTF16-H "
        f"/DescendantFonts [{descendant} 0 R] >>"
    ).encode()


def _descendant(number: int) -> dict[int, bytes]:
    font = (
        "<< /Type /Font /Subtype /CIDFontType0 /BaseFont /HYSMyeongJo-Medium /DW 1000 "
        "/CIDSystemInfo << /Registry (Adobe) /Ordering (Korea1) /Supplement 2 >> "
        f"/FontDescriptor {number + 1} 0 R >>"
    )
    descriptor = (
        "<< /Type /FontDescriptor /FontName /HYSMyeongJo-Medium /Flags 6 /FontBBox [0 -200 1000 900] "
        "/ItalicAngle 0 /Ascent 900 /Descent -200 /CapHeight 700 /StemV 80 >>"
    )
    return {number: font.encode(), number + 1: descriptor.encode()}


def _stream(data: bytes) -> bytes:
    return b"<< /Length %d >>\nstream\n%s\nendstream" % (len(data), data)


def _file(objects: dict[int, bytes]) -> bytes:
    data, places = bytearray(_HEAD), {}
    for number, body in sorted(objects.items()):
        places[number] = len(data)
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start, count = len(data), max(objects) + 1
    data += b"xref\n0 %d\n0000000000 65535 f \n" % count
    for number in range(1, count):
        data += b"%010d 00000 n \n" % places[number]
    data += b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (count, start)
    return bytes(data)
