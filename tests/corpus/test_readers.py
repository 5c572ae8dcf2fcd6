"""Readers: encodings, binary files, HTML, JSON lines."""

from __future__ import annotations

import codecs
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtool.core.corpus.readers import read_documents
from kvtool.core.corpus.readers.document import Document, UnreadableFile

KOREAN = "오늘은 날씨가 참 좋습니다. 산책을 나갔다."
JAPANESE = "今日は良い天気ですね。散歩に行きましょう。"
CHINESE = "今天天气很好。我们去公园散步吧。"
FRENCH = "Le café est très bon, élève déjà prêt à partir."

ENCODED = [
    *((KOREAN, codec) for codec in ("utf-8", "utf-8-sig", "euc-kr", "utf-16", "utf-16-le", "utf-16-be")),
    *((JAPANESE, codec) for codec in ("utf-8", "utf-16", "utf-32")),
    *((FRENCH, codec) for codec in ("utf-8", "utf-16-le", "utf-16-be")),
    ("\ufeff" + KOREAN, "utf-16-be"),
    (CHINESE, "gb2312"),
    ("안녕하세요.", "cp949"),
    ("커피 2잔 주세요 (Americano, no sugar)", "cp949"),
    ("Äpfel", "latin-1"),
]


def read(data: bytes, name: str = "a.txt") -> Document:
    (document,) = read_documents(Path("/corpus") / name, data)
    return document


@pytest.mark.parametrize(("text", "codec"), ENCODED)
def test_encodings(text: str, codec: str) -> None:
    document = read(text.encode(codec))
    assert document.text == text.removeprefix("\ufeff")
    assert bool(document.notes) == (not codec.startswith("utf"))


@pytest.mark.slow
@given(st.text(st.characters(blacklist_categories=["Cs", "Cc", "Co", "Cn"]), min_size=1).filter(str.strip))
def test_utf8_comes_back_exactly(text: str) -> None:
    text = text.removeprefix("\ufeff") or "x"
    if text.strip():
        assert read(codecs.BOM_UTF8 + text.encode()).text == text
        assert read(codecs.BOM_UTF16_LE + text.encode("utf-16-le")).text == text


def test_broken_bytes_are_replaced_and_newlines_kept() -> None:
    text = " a\r\nb\rc\n\fd\u2028e\n\n"
    assert read(text.encode()).text == text
    document = read(KOREAN.encode() + b"\xff\xfe " + KOREAN.encode())
    assert document.text == f"{KOREAN}\ufffd\ufffd {KOREAN}"
    assert "2 invalid" in document.notes[0]
    document = read((CHINESE * 9000).encode("gbk") + b"\xff\xff\n" + CHINESE.encode("gbk"))
    assert document.text.count("\ufffd") == 2
    assert document.notes[0].startswith("not UTF-8, read as gb18030")
    assert document.notes[1:] == ("2 invalid gb18030 bytes replaced by U+FFFD",)


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        *(("a.txt", data, "empty") for data in (b"", b" \n\t\r\n", codecs.BOM_UTF8, "\ufeff \n".encode("utf-16-le"))),
        *(("a.html", page, "no visible text") for page in (b"<script>x</script>", b"<p> </p>", b"<!-- only -->")),
    ],
)
def test_empty(name: str, data: bytes, why: str) -> None:
    with pytest.raises(UnreadableFile, match=why):
        read(data, name)


@pytest.mark.parametrize(
    "data",
    [
        *(b"%PDF-1.7\nhello", b"\x89PNG\r\n\x1a\n", bytes(range(256)), b"text\0with NUL", b"\x01\x02\x03\x04"),
        *(b"\x7fELF\2\1\1\0\0\0\0", bytes(range(1, 256)) * 3, codecs.BOM_UTF8 + b"a\0b"),
        *(b"SQLite format 3\0\x10\0\x01\x01" + bytes(40), b"a\0b" + bytes(30), b"ab\1\2cd" + bytes(60), bytes(80)),
        *(bytes(50) + bytes(range(128, 256)), b"a" + bytes(9) + b"\xff\xfe\x84"),
    ],
)
def test_binary(data: bytes) -> None:
    with pytest.raises(UnreadableFile, match="binary"):
        read(data)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("a.txt", "text"), ("a.MD", "markdown"), ("a.rs", "code"), ("Makefile", "code"), ("a.unknown", "text")),
        ("README", "text"),
        ("a.tex", "text"),
        ("a.srt", "text"),
        ("a.man", "text"),
        ("a.svg", "code"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert read(b"# hello\n", name) == Document(f"/corpus/{name}", "# hello\n", kind)


PAGE = """<!DOCTYPE html><html><head><title>Page</title><style>b{}</style><script>var x = "<p>no</p>";</script></head>
<body><nav><ul><li>Home</ul></nav><h1>The  <em>Head</em></h1><p>One &amp; two<br>three&nbsp;four&#33;
<p>Second   paragraph<div>third</div>
<ul><li>first<li><p>second <b>bold</b></p><ol><li>inner</li></ol></li></ul>
<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td><p>2</p><p>3</p></td></tr></table>
<pre>  x = 1
  y</pre><span hidden>gone</span><h3>Sub</h3>tail</body></html>"""


def test_html() -> None:
    document = read(PAGE.encode(), "a.html")
    assert document.kind == "html"
    assert document.text == (
        "# The Head\n\nOne & two\nthree\xa0four!\n\nSecond paragraph\n\nthird\n\n- first\n- second bold\n  1. inner\n\n"
        "a | b\n1 | 2 3\n\n  x = 1\n  y\n\n### Sub\n\ntail\n"
    )


def test_html_deep_and_broken() -> None:
    assert read(b"<div>" * 20_000 + b"deep", "a.html").text == "deep\n"
    assert "x" in read(b"<![foo <p>x</p> <", "a.html").text
    assert read(b"<title>T</title><p>x", "a.htm").text == "# T\n\nx\n"
    assert read(b"<nav><a>menu</a><p>text", "a.html").text == "menu\n\ntext\n"
    assert read(b"<p>1 < 2 <![if a]>&lt;b<![endif]> <a", "a.html").text == "1 < 2 <b <a\n"
    page = b"<ul><li>item " * 6_000
    text = read(page, "a.html").text
    assert text.startswith("- item\n  - item\n    - item\n")
    assert len(text) < 4 * len(page)


@pytest.mark.parametrize(("text", "codec"), [("Andrés", "cp1252"), (KOREAN, "cp949"), ("świeże pieczywo", "cp1250")])
def test_a_large_file_whose_beginning_is_ascii(text: str, codec: str) -> None:
    """The guess looks at the bytes that are not ASCII, wherever they are."""
    data = ("A log line with nothing in it. " * 5000 + f"\nName: {text}\n" + "and so on " * 100).encode(codec)
    document = read(data)
    assert text in document.text
    assert document.notes[0].startswith("not UTF-8, read as")


@pytest.mark.parametrize("start", ["", "a", "x" * 200_000])
def test_a_large_file_without_a_break(start: str) -> None:
    """The sample ends within a character, which is no evidence against the encoding."""
    text = start + CHINESE * 9000
    assert read(text.encode("gb2312")).text == text


@pytest.mark.parametrize("name", ["punycode", "idna", "unicode_escape", "undefined", "rot13", "no-such", "x" * 3000])
def test_a_page_that_names_what_is_no_encoding(name: str) -> None:
    begun = time.process_time()
    page = f'<meta charset="{name}"><p>café {"-a" * 20_000}'
    assert "café" in read(page.encode("latin-1"), "a.html").text
    assert time.process_time() - begun < 2
