"""Web pages, books, notebooks, calendars, JSON, XML and Markdown: what they say is read, and embedded data is not."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import pytest

from kvtool.core.common.marks import place_of
from kvtool.core.corpus.readers import read_documents
from kvtool.core.corpus.readers.document import Document, UnreadableFile, without_data_uris
from kvtool.core.corpus.readers.html import lowered, raised

PICTURE = base64.b64encode(b"\x89PNG\r\n\x1a\n" + random.Random(1).randbytes(6000)).decode()
FONT = base64.b64encode(random.Random(2).randbytes(3000)).decode()


def read(data: bytes | str, name: str = "a.html") -> Document:
    (document,) = read_documents(Path("/in") / name, data.encode() if isinstance(data, str) else data)
    return document


def lines(page: str) -> list[str]:
    return [line for line in read(page).text.split("\n") if line]


def place(document: Document, words: str) -> str:
    start = document.text.index(words)
    return place_of(document.text, document.marks, start, start + len(words)).cite("a")


def test_embedded_data() -> None:
    for attribute in (f'src="data:image/png;base64,{PICTURE}"', f"data-page='{'<b>{x: 1} ' * 2000}'"):
        assert read(f"<p>Before.</p><img {attribute}><p>After.").text == "Before.\n\nAfter.\n"
    text = f"# Map\n\n![plan](data:image/png;base64,{PICTURE})\n\n[a]: data:font/woff2;base64,{FONT}\nAfter."
    document = read(text, "a.md")
    assert document.text == "# Map\n\n![plan]([image])\n\n[a]: [data]\nAfter."
    assert document.notes == ("embedded data: 1 not read",)
    for line in ("data:," + "1.5," * 100, "Metadata:;3;" + "1,5;" * 100):
        assert read(line + "\n", "a.csv").text == line + "\n"


@pytest.mark.parametrize(
    "tag", ['<td width="10"">', "<td title=it's>", '<td title="x > y" class="\'">', '<td a="b"c="d">']
)
def test_stray_quotes_do_not_make_a_tag_text(tag: str) -> None:
    assert read(f'<table><tr>{tag}A</td>{tag}B</td></tr></table><p>it\'s "C"').text == 'A | B\n\nit\'s "C"\n'


def test_wrapped_data_uris_keep_their_lines() -> None:
    wrapped = "\n".join(PICTURE[at : at + 76] for at in range(0, 760, 76))
    assert without_data_uris(f"(data:image/png;base64,{wrapped}\niV=)\nnext") == f"([image]{chr(10) * 10})\nnext"
    document = read(f"Subject: Plan\n\n(data:image/png;base64,{wrapped}\niV=)\nnext\n", "a.eml")
    assert document.text.split() == ["Subject:", "Plan", "([image]", ")", "next"]
    assert place(document, "next") == "a:14"


@pytest.mark.parametrize(
    "text", ["data:text/plain,hello", "data:image/gif;base64,R0lGODdhAQ==", "the data: all of it", "DATA:" + "x" * 500]
)
def test_short_examples_stay(text: str) -> None:
    assert without_data_uris(text, base64=True) == text


@pytest.mark.parametrize(
    ("name", "written", "shown"),
    [
        ("a.csv", 'id,plan\n1,"{}"\n', 'id,plan\n1,"{}"\n'),
        ("a.tsv", "id\tplan\n1\t{}\tAlma\n", "id\tplan\n1\t{}\tAlma\n"),
        ("a.rtf", "{{\\rtf1\\ansi See {} end\\par}}", "See {} end\n"),
        ("a.eml", "Subject: Plan\n\nSee ({})\nend\n", "Subject: Plan\n\nSee ({})\nend\n"),
        ("a.jsonl", '{{"text": "See {}"}}', "See {}"),
    ],
)
@pytest.mark.parametrize(("kind", "data", "mark"), [("image/png", PICTURE, "[image]"), ("font/woff2", FONT, "[data]")])
def test_data_uris_are_cut_from_all_texts(name: str, written: str, shown: str, kind: str, data: str, mark: str) -> None:
    document = read(written.format(f"data:{kind};base64,{data}"), name)
    assert document.text == shown.format(mark)
    assert document.notes == (("embedded data: 1 not read",) if mark == "[data]" else ())


def test_data_in_json_and_style_sheets() -> None:
    page = {"a": f"data:image/png;base64,{PICTURE}", "b": FONT, "c": PICTURE, "d": "acgt" * 500}
    document = read(json.dumps(page), "a.json")
    assert json.loads(document.text) == {"a": "[image]", "b": "[data]", "c": "[image]", "d": "acgt" * 500}
    assert document.notes == ("embedded data: 1 not read",)
    assert read(f"a {{src: url(data:font/woff;base64,{FONT})}}", "a.css").text == "a {src: url([data])}"


def test_spans() -> None:
    table = (
        "<tr><th rowspan=2>Depot<th colspan=2>Pallets<th>Chief<tr><th>in<th>out<th>name"
        "<tr><td rowspan='0'>North<td>4<td></td><td>Ida<tr><td>5<td>6"
    )
    assert lines(f"<table>{table}<tbody><tr><td>South<td>1</table>") == [
        "Depot | Pallets | Pallets | Chief",
        "Depot | in | out | name",
        "North | 4 |  | Ida",
        "North | 5 | 6",
        "South | 1",
    ]
    page = "<table>" + "<tr><td rowspan=65534 colspan=1000>ab<td colspan=9 rowspan=99999>c" * 2000
    text = read(page).text
    assert text.startswith("ab | c")
    assert len(text) < 10 * len(page)


def test_tables_that_lay_out_a_page() -> None:
    long = "word " * 120
    page = f"<table><tr><td><h1>Head</h1><p>One<p>Two<td><p>Side</table><table><tr><td><td>{long}</table>"
    assert lines(page) == ["# Head", "One", "Two", "Side", long.strip()]


_RAISED = [
    *(("10", "6", "^6"), ("10", "-3", "^-3"), ("5 km", "2", "^2"), ("(a+b)", "2", "^2"), ("x", "n+1", "^(n+1)")),
    *(("Ca", "2+", "^2+"), ("2", "n", "^n"), ("sin", "2", "^2"), ("1", "st", "st"), ("3", "e", "e")),
    *(("Limit", "3", "[3]"), ("the end.", "3, 4", "[3, 4]"), ("in 1987", "4", "[4]"), ("(see above)", "1", "[1]")),
    *(("Limit", "a", "[a]"), ("", "3", "[3]"), ("of ", "14", "14"), ("Wiki", "[1]", "[1]"), ("Limit", "*", "*")),
    ("XVII", "e", "e"),
]
_LOWERED = [
    *(("H", "2", "2"), ("log", "2", "_2"), ("101", "2", "_2"), ("x", "i", "_i"), ("V", "max", "max")),
    ("a", "n+1", "_(n+1)"),
]


def test_superscripts_and_subscripts() -> None:
    assert [raised(before, text, is_link=False) for before, text, _ in _RAISED] == [shown for *_, shown in _RAISED]
    assert [lowered(before, text) for before, text, _ in _LOWERED] == [shown for *_, shown in _LOWERED]


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (
            "<table><tr><td><th>Mon<th>Tue<tr><td>Red<td>&nbsp;<td>4<tr><td>Blue<td>2<td></table>",
            " | Mon | Tue\nRed |  | 4\nBlue | 2\n",
        ),
        (
            "<table><tr><td>Depot<td><table><tr><td>Mon<td>7<tr><td>Tue<td>9</table><td>end</table><p>x",
            "Depot |  | end\nMon | 7\nTue | 9\n\nx\n",
        ),
        ("<table><tr><td>Fruit<td><ul><li>apple<li>pear</ul><td>7</table>", "Fruit | - apple - pear | 7\n"),
        ("<table><caption>Fleet</caption><td>a<td>b<tr><td>c</table>", "Fleet\n\na | b\nc\n"),
        (
            '<div role="row"><span role="cell">X</span><span role="cell"></span><span role=cell>Z</span></div>',
            "X | | Z\n",
        ),
        ("a<input type=hidden>b (<button>Go</button>)", "ab (Go)\n"),
        (
            "a<input type=password value=pw><meter>3 of 5</meter><progress>50 %</progress><button>Go</button>.",
            "a 3 of 5 50 % Go.\n",
        ),
        ("a<datalist><option>no</datalist>", "a\n"),
        (
            '<p>Map <map><area alt="North dock"></map> <input type=image alt="Send form">',
            "Map [image: North dock] [image: Send form]\n",
        ),
        (
            '9 m<sup><a href="#n">2</a></sup>, 9 m<sup>2</sup>, 1<sup>1</sup>/<sub>2</sub> cups of CO<sub>2</sub>',
            "9 m[2], 9 m^2, 1 1/2 cups of CO2\n",
        ),
        ('10<span style="vertical-align:super;font-size:6pt">6</span><span> litres</span>', "10^6 litres\n"),
        ("Note<a style='font-size:.6em; vertical-align: super' href='#n'>3</a> says", "Note[3] says\n"),
        ('5 m<span style="VERTICAL-ALIGN: SUPER"><span>2</span></span> a<span>b', "5 m^2 ab\n"),
        ('x<span style="vertical-align:sub">i</span>, H<sub>2</sub>O', "x_i, H2O\n"),
        ('10<sup><span style="vertical-align:super">9</span></sup> l', "10^9 l\n"),
        (
            'a<span style="vertical-align:super"> new </span>b<p>c<span style="vertical-align:super">d<p>e',
            "a new b\n\ncd\n\ne\n",
        ),
        ('a<span style="vertical-align:top">2</span>', "a2\n"),
        ("<p><ruby>港<rp>(</rp><rt>みなと</rt><rp>)</rp>町<rt>まち</ruby>の朝<p>次", "港町の朝 (みなと, まち)\n\n次\n"),
        (
            "<math alttext='\\pi'><mi>p</mi></math>. <math><mi>m</mi><mi>c</mi><annotation>no</annotation></math>",
            "\\pi . mc\n",
        ),
        (
            '<p>Plan: <img alt="Fire exit &amp; stairs"><img alt=""><img alt="IMG_7.jpg"> <img alt="🙂">',
            "Plan: [image: Fire exit & stairs] 🙂\n",
        ),
        ('<p>a<img alt="t" width="1" height="1"><img alt="logo" aria-hidden="true">', "a\n"),
        (
            '<input value="Ida &amp; co" placeholder=no> <input type=hidden value=h><input type=submit value=s>',
            "Ida & co\n",
        ),
        ("<input type=checkbox checked> tea <input type=radio> milk", "[x] tea [ ] milk\n"),
        (
            "<select><option>Oslo<option selected>Moss</select> <select><option>A<option>B</select>",
            "Oslo [x] Moss A B\n",
        ),
        ("<ol start=4><li>a<li>b<li value=9>c</ol>", "4. a\n5. b\n9. c\n"),
        ("<script>x()</script><noscript><p>Closed on Sunday.</noscript>", "Closed on Sunday.\n"),
        ("<p>Open.</p><noscript>Closed.</noscript>", "Open.\n"),
        (
            "<script>if (a<b) x='</p>', c='it</script>one <!-- <a title='--> two<script src='x'/><p>three",
            "one two\n\nthree\n",
        ),
    ],
)
def test_text_of_a_page(page: str, text: str) -> None:
    assert read(page).text == text


def test_escapes_and_references_are_letters() -> None:
    text = '{"a": "\\u041c\\u0430\\ud83d\\ude00 \\u0022 \\u005c \\u000a \\\\u0041 \\ud800 \\u003cb\\n"}\r\n'
    expected = '{"a": "Ма😀 \\u0022 \\u005c \\u000a \\\\u0041 \\ud800 <b\\n"}\r\n'
    assert read(text, "a.json").text == expected
    assert read('a: "\\xe9 \\u2019"', "a.yaml").text == 'a: "é ’"'
    text = "<a b='&#38;&quot;'>&#1052;&#x430;&eacute;&#8212;&lt;&amp;&#10;&unknown;</a>"
    assert read(text, "a.xml").text == "<a b='&#38;&quot;'>Маé—&lt;&amp;&#10;&unknown;</a>"


def test_declared_encodings() -> None:
    for name, text, encoding in (
        ("a.rss", '<?xml version="1.0" encoding="windows-1251"?><a>Пристань</a>', "cp1251"),
        ("a.css", '@charset "koi8-r"; /* Пристань */', "koi8-r"),
        ("a.py", "# -*- coding: iso8859-5 -*-\nx = 'Пристань'", "iso8859-5"),
    ):
        assert read(text.encode(encoding), name).text == text


def test_saved_pages() -> None:
    frame = base64.b64encode("<p>Frère".encode("latin-1")).decode()
    page = (
        'From: x\r\nMIME-Version: 1.0\r\nContent-Type: multipart/related; boundary="b"\r\n\r\n--b\r\n'
        "Content-Type: text/html\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\n"
        "<p>Caf=C3=A9 by the har=\r\nbour\r\n<p>Open\r\n--b\r\nContent-Type: text/html; charset=iso-8859-1\r\n"
        f"Content-Transfer-Encoding: base64\r\n\r\n{frame}\r\n--b\r\nContent-Type: image/png\r\n\r\nx\r\n--b--\r\n"
    )
    document = read(page, "a.mht")
    assert document.text == "Café by the harbour\n\nOpen\n\nFrère\n"
    assert [place(document, words) for words in ("Café", "Open", "Frère")] == ["a:9", "a:11", "a:16"]
    with pytest.raises(UnreadableFile):
        read("From: x\n\nno page", "a.mhtml")


def test_calendars_and_business_cards() -> None:
    text = "BEGIN:VEVENT\r\nSUMMARY:Buoy sur\r\n vey\\, west\\nbring\r\n\t rope\r\nEND:VEVENT\r\n"
    document = read(text, "a.ics")
    assert document.text == "BEGIN:VEVENT\nSUMMARY:Buoy survey, west\nbring rope\nEND:VEVENT\n"
    assert place(document, "bring rope") == "a:2"
    assert place(document, "END") == "a:5"
    plain = "BEGIN:VEVENT\r\nSUMMARY:a\r\nEND:VEVENT\r\n"
    assert read(plain, "a.ics").text == plain.replace("\r", "")
    wrapped = "\n ".join(FONT[at : at + 72] for at in range(0, len(FONT), 72))
    document = read(f"FN:Jörg\n  Ek\nPHOTO;ENCODING=b:{wrapped}\nEND:VCARD\n", "a.vcf")
    assert document.text == "FN:Jörg Ek\nPHOTO;ENCODING=b:[data]\nEND:VCARD\n"
    assert document.notes == ("embedded data: 1 not read",)


@pytest.mark.parametrize("start", [1, 2])
def test_calendar_lines_folded_within_a_character(start: int) -> None:
    letters = "é€".encode()
    data = (
        b"SUMMARY:Caf" + letters[:start] + b"\r\n " + letters[start:4] + b"\r\n\t" + letters[4:] + b" meeting\r\nB\r\n"
    )
    assert read_documents(Path("/corpus/a.ics"), data)[0].text == "SUMMARY:Café€ meeting\nB\n"


def notebook(*outputs: object, **cell: object) -> Document:
    code = {"cell_type": "code", "source": "x", "outputs": outputs, **cell}
    return read(json.dumps({"cells": [code]}), "a.ipynb")


def test_outputs_of_notebooks() -> None:
    trace = ["\x1b[31mTraceback\x1b[0m", "line 1"]
    long = {"output_type": "stream", "text": "\x1b[1mx" * 3000}
    document = notebook(long, {"output_type": "error", "ename": "KeyError", "evalue": "'tide'", "traceback": trace})
    assert "KeyError: 'tide'\nTraceback\nline 1\nxxx" in document.text
    assert document.notes == ("ends of long outputs: 1 not read",)
    shown = {"data": {"text/html": "<b>41</b> boats", "text/plain": "<IPython.core.display.HTML object>"}}
    assert "\n\n41 boats\n# 7" in notebook(shown, {"data": {"text/markdown": ["# 7"]}}).text
    assert "\n\n3\n4\n" in notebook({"data": {"text/plain": "3"}}, {"data": {"text/plain": "4"}}).text


def test_cells_of_notebooks() -> None:
    sheets = [{"cells": [{"cell_type": "heading", "level": 2, "source": word}]} for word in ("North", "South")]
    assert read(json.dumps({"worksheets": sheets}), "a.ipynb").text == "## North\n\n## South\n"
    cell = {"cell_type": "markdown", "source": f"![a](data:image/png;base64,{PICTURE})"}
    assert read(json.dumps({"cells": [cell]}), "a.ipynb").text == "![a]([image])\n"
