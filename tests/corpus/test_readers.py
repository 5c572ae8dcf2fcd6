"""Readers of texts: encodings, mostly English texts in legacy ones, the user's own choice, binary files, HTML."""

from __future__ import annotations

import codecs
import time
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtool.core.corpus.readers import read_documents
from kvtool.core.corpus.readers.document import BinaryFile, Document, EmptyFile
from kvtool.core.corpus.reading import Reading
from kvtool.core.errors import UsageError
from kvtool.core.ingest.options import IngestOptions
from tests.wording import refused

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
    ("name", "data"),
    [
        *(("a.txt", data) for data in (b"", b" \n\t\r\n", codecs.BOM_UTF8, "\ufeff \n".encode("utf-16-le"))),
        *(("a.html", page) for page in (b"<script>x</script>", b"<p> </p>", b"<!-- only -->")),
    ],
)
def test_empty(name: str, data: bytes) -> None:
    with refused(EmptyFile):
        read(data, name)


@pytest.mark.parametrize(
    "data",
    [
        *(b"%PDF-1.7\nhello", b"\x89PNG\r\n\x1a\n", bytes(range(256)), b"text\0with NUL", b"\x01\x02\x03\x04"),
        *(b"\x7fELF\2\1\1\0\0\0\0", bytes(range(1, 256)) * 3, codecs.BOM_UTF8 + b"a\0b"),
        *(b"SQLite format 3\0\x10\0\x01\x01" + bytes(40), b"a\0b" + bytes(30), b"ab\1\2cd" + bytes(60), bytes(80)),
        *(bytes(50) + bytes(range(128, 256)), b"a" + bytes(9) + b"\xff\xfe\x84"),
    ],
    ids=lambda data: repr(data[:16]),
)
def test_binary(data: bytes) -> None:
    with refused(BinaryFile):
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


ENGLISH = "The ferry leaves at noon, and the harbour office closes at five.\n" * 30
SENTENCES = {
    "Паром отходит в полдень, касса закрыта.": ("cp1251", "koi8_r", "iso8859_5", "cp866", "mac_cyrillic", "cp855"),
    "Пором відходить опівдні, каса зачинена.": ("cp1251", "koi8_u"),
    "Το πλοίο φεύγει το μεσημέρι.": ("cp1253", "iso8859_7"),
    "המעבורת יוצאת בצהריים מהנמל.": ("cp1255", "iso8859_8"),
    "العبارة تغادر الميناء عند الظهر.": ("cp1256", "iso8859_6"),
    "Vapur öğlen kalkıyor, gişe şimdi kapalı.": ("cp1254", "iso8859_9"),
    "เรือออกจากท่าตอนเที่ยงวัน": ("cp874", "tis_620"),
    "Keltas išplaukia vidurdienį, kasa uždaryta šį vakarą.": ("cp1257", "iso8859_13", "iso8859_4"),
    "Prāmis atiet pusdienlaikā, kase ir slēgta.": ("cp1257", "iso8859_13"),
    "Phà rời bến lúc giữa trưa, quầy vé đóng cửa.": ("cp1258",),
    "Prom odpływa w południe, kasa już zamknięta.": ("cp1250", "iso8859_2", "cp852"),
    "Převoz odplouvá v poledne, pokladna je zavřená.": ("cp1250", "iso8859_2"),
    "Trajekt odlazi u podne, šalter je već zatvoren.": ("cp1250", "iso8859_2"),
    "A komp délben indul, a pénztár már bezárt, később gyűlünk.": ("cp1250", "iso8859_2"),
    "Le bac coûte 12 €, guichet fermé à midi.": ("cp1252", "iso8859_15"),
    "El transbordador zarpa mañana a mediodía.": ("cp1252", "latin-1", "mac_roman", "cp850"),
    "Die Fähre fährt mittags, die Kasse schließt früh.": ("cp1252", "latin-1", "mac_roman", "cp850"),
    "Færgen sejler på søndag, lugen er lukket i går.": ("cp1252", "latin-1"),
    "フェリーは正午に出港します。": ("shift_jis", "euc_jp", "iso2022_jp"),
    "渡轮中午出发，售票处已经关门。": ("gbk", "gb18030"),
    "渡輪中午出發，售票處已經關門。": ("big5",),
    "배는 정오에 떠나고 매표소는 닫혔습니다.": ("cp949", "iso2022_kr"),
}
CASES = [(text, codec) for text, codecs in SENTENCES.items() for codec in codecs]


def encoded(text: str, codec: str) -> bytes:
    """Encode; a letter that Vietnamese's code page lacks as the letter and a tone."""
    if codec != "cp1258":
        return text.encode(codec)
    tones = str.maketrans(dict.fromkeys("\u0300\u0301\u0303\u0309\u0323", ""))
    made = b""
    for char in text:
        apart = unicodedata.normalize("NFD", char)
        letter = unicodedata.normalize("NFC", apart.translate(tones))
        made += (letter + "".join(part for part in apart if not part.translate(tones))).encode(codec)
    return made


@pytest.mark.some(12)
@pytest.mark.parametrize(("text", "codec"), CASES)
def test_a_sentence_alone_and_among_english_lines(text: str, codec: str) -> None:
    data = encoded(text, codec)
    document = read(ENGLISH.encode() + data + b"\n" + ENGLISH.encode())
    assert document.text == f"{ENGLISH}{data.decode(codec)}\n{ENGLISH}"
    assert codec.startswith("iso2022") or "`--encoding NAME` sets another" in document.notes[0]
    assert read(data).text == data.decode(codec)


@pytest.mark.some(6)
@pytest.mark.parametrize(
    ("name", "codec"),
    [
        *(("Анна Соколова", "cp1251"), ("Дмитрий Орлов", "koi8_r"), ("Ελένη Παπαδοπούλου", "cp1253")),
        *(("משה כהן", "cp1255"), ("فاطمة حسين", "cp1256"), ("Ayşe Yıldırım", "cp1254"), ("Žydrūnas Šarūnas", "cp1257")),
        *(("Małgorzata Wójcik", "cp1250"), ("Jiří Dvořák", "iso8859_2"), ("José Núñez", "cp1252")),
        *(("Søren Åkesson", "latin-1"), ("山田太郎", "shift_jis"), ("王小明", "gbk"), ("김영희", "cp949")),
    ],
)
def test_a_name_in_an_english_table(name: str, codec: str) -> None:
    rows = [f"{number};Client {number};Springfield\n" for number in range(40)]
    table = "".join((*rows[:20], f"20;{name};Springfield\n", *rows[20:]))
    assert read(table.encode(codec), "clients.csv").text == table


ROWS = """day{},1{}°C | day{};Köln;1{}°C | rope{};1{}€ | at {} it was 1{}° | see §{} and §1{} | {} ±1{} mm | {};1{}µm
 | {};£1{}.50 | {};Müller;£1{}.50 | {};1{}½ | {};Größe1{}ü"""


WORDS = {
    "cp1252": (
        *("25°C±2°C; 6µV; 45°N; £5, €6, ¥7; 1996–2000; «10»; Nº5; 2ª", "it’s “quoted” – really…", "20 °C", "£40"),
        *("§ 5", "½ cup", "5 µm", "© 2031", "café", "Zoë", "Perù"),
    ),
    **{"cp1255": ("שלום לכולם", "שלום"), "iso8859_8": ("מנהל המעגן",), "cp1251": ("план",), "cp1253": ("την",)},
    **{"euc_jp": ("灯台の鍵", "港の門", "カメラ"), "big5": ("數量",)},
}


@pytest.mark.parametrize(("codec", "text"), [(codec, text) for codec, texts in WORDS.items() for text in texts])
def test_words_among_english_ones(codec: str, text: str) -> None:
    assert read(f"Notes: {text} (page 4).\n".encode(codec)).text == f"Notes: {text} (page 4).\n"


@pytest.mark.parametrize("row", ROWS.split(" | "))
def test_signs_at_many_numbers_are_western(row: str) -> None:
    text = "".join(row.format(number, number) + "\n" for number in range(30))
    assert read(text.encode("cp1252"), "a.csv").text == text


def test_an_ambiguous_sign_of_currency_is_the_euro() -> None:
    assert read(b"item;10\xa4\nother;11\xa4\n", "a.csv").text == "item;10€\nother;11€\n"


@pytest.mark.parametrize(
    ("label", "codec", "text"),
    [
        *((label, "cp1252", "1996–2000, 40 €, “fine”") for label in ("iso-8859-1", "ISO_8859-1", "latin1", "us-ascii")),
        *((label, "cp1255", "שלום עולם") for label in ("iso-8859-8-i", "logical", "windows-1255")),
        *((label, "cp932", "①鍵") for label in ("shift_jis", "x-sjis", "windows-31j")),
        *(("iso-8859-9", "cp1254", "Şişli – “açık”"), ("tis-620", "cp874", "ก…"), ("windows-874", "cp874", "ก…")),
        *(("x-euc-jp", "euc_jp", "鍵"), ("gb2312", "gb18030", "王镕"), ("ks_c_5601-1987", "cp949", "똠")),
        *(("big5", "big5hkscs", "碁"), ("win-1251", "cp1251", "Да"), ("x-mac-cyrillic", "mac_cyrillic", "Да")),
    ],
)
def test_declared_encodings_are_read_as_by_browsers(label: str, codec: str, text: str) -> None:
    page = f'<html><head><meta charset="{label}"></head><p>{text}</p></html>'
    mail = f"From: a@b.c\nContent-Type: text/plain; charset={label}\n\n{text}\n"
    assert text in read(page.encode(codec), "a.html").text
    assert text in read(mail.encode(codec), "a.eml").text


@pytest.mark.parametrize(
    "data",
    [
        "The café opens, Größe".encode() + b"\xc3",
        "Line one: Größe\n".encode() + b"Line two: Gr\xf6e\n",
        "Zoë’s 20 °C, caf".encode() + b"\xc3 \n",
        "à la café".encode() + b"\xe9",
    ],
)
def test_utf8_with_few_accents_and_a_broken_one(data: bytes) -> None:
    document = read(data)
    assert document.text == data.decode("utf-8", "replace")
    assert document.notes == ("1 invalid utf-8 bytes replaced by U+FFFD",)


def test_a_log_with_terminal_colours_is_no_japanese() -> None:
    text = "\x1b[31mfailed\x1b[0m pump 3 $B\n"
    assert read(text.encode()) == Document("/corpus/a.txt", text, "text")


@pytest.mark.parametrize("codec", ["utf-8", "cp1252"])
def test_runs_of_nul_bytes_are_left_out_of_a_log(codec: str) -> None:
    data = b"pump 3 on\npump 3" + bytes(600) + b"off\n" + bytes(12) + "Größe E7\n".encode(codec) + bytes(500)
    document = read(data)
    assert document.text == "pump 3 on\npump 3 off\nGröße E7\n"
    assert document.notes[0] == "1112 NUL bytes left out"


@pytest.mark.parametrize("ending", [".txt", ".html", ".md"])  # HTML is read in another process
def test_the_given_encoding_is_used_where_utf8_fails(tmp_path: Path, ending: str) -> None:
    path, text = tmp_path / f"a{ending}", "Київ і Львів"
    with Reading(encoding="cp1251") as reading:
        assert not reading.documents(path, text.encode("cp1251"))[0].notes
        assert reading.documents(path, text.encode("cp1251"))[0].text.strip() == text
        assert reading.documents(path, text.encode())[0].text.strip() == text
        assert reading.documents(path, text.encode("utf-16"))[0].text.strip() == text
    with Reading() as reading:
        assert "not UTF-8" in reading.documents(path, text.encode("cp1251"))[0].notes[0]


def test_a_given_encoding_yields_to_a_declared_one_and_changes_settings(tmp_path: Path) -> None:
    page = '<meta charset="iso8859-7"><p>Η Αθήνα'
    with Reading(encoding="cp1251") as reading:
        assert "Αθήνα" in reading.documents(tmp_path / "a.html", page.encode("iso8859-7"))[0].text
    path, other = Path("a.txt"), Reading(encoding="cp1251")
    assert Reading().settings(path) != other.settings(path)
    assert other.settings(path) == Reading(encoding="windows-1251").settings(path)
    assert Reading().means(path) != other.means(path)


def test_an_unknown_encoding_is_an_error_of_usage() -> None:
    for name in ("cp1251", "Latin-1", "shift_jis", "windows-1252", "utf-16"):
        IngestOptions(encoding=name).check()
    for name in ("klingon", "rot13", "punycode", "base64", ""):
        with refused(UsageError):
            IngestOptions(encoding=name).check()
