"""Word documents: text outside plain runs, numbers of clauses, tables, variants of the format, and damaged parts."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvtool.core.corpus.readers import read_documents
from kvtool.core.corpus.readers.document import Document, UnreadableFile
from kvtool.core.corpus.readers.office import blocks, counter
from tests.wording import refused

_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006"
_SPACES = " ".join(
    f'xmlns:{name}="{space}"'
    for name, space in {
        "w": "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
        "r": f"{_OFFICE}/relationships",
        "m": f"{_OFFICE}/math",
        "mc": "http://schemas.openxmlformats.org/markup-compatibility/2006",
        "wp": "http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing",
        "wps": "http://schemas.microsoft.com/office/word/2010/wordprocessingShape",
        "a": "http://schemas.openxmlformats.org/drawingml/2006/main",
        "c": "http://schemas.openxmlformats.org/drawingml/2006/chart",
        "dgm": "http://schemas.openxmlformats.org/drawingml/2006/diagram",
        "v": "urn:schemas-microsoft-com:vml",
        "o": "urn:schemas-microsoft-com:office:office",
    }.items()
)
_REFERENCE = '<w:r><w:footnoteReference w:id="2"/></w:r>'
_RELS = "http://schemas.openxmlformats.org/package/2006/relationships"


def run(text: str, properties: str = "") -> str:
    return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def p(inside: str, properties: str = "") -> str:
    return f"<w:p><w:pPr>{properties}</w:pPr>{inside}</w:p>"


def cell(text: str, properties: str = "") -> str:
    return f"<w:tc><w:tcPr>{properties}</w:tcPr>{p(run(text))}</w:tc>"


def table(*rows: str) -> str:
    return "<w:tbl><w:tblPr/>" + "".join(f"<w:tr>{row}</w:tr>" for row in rows) + "</w:tbl>"


def field(instruction: str, result: str = "") -> str:
    marks = [f'<w:r><w:fldChar w:fldCharType="{kind}"/></w:r>' for kind in ("begin", "separate", "end")]
    return f"{marks[0]}<w:r><w:instrText>{instruction}</w:instrText></w:r>{marks[1]}{result}{marks[2]}"


def numbered(level: int = 0, list_id: int = 1) -> str:
    return f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{list_id}"/></w:numPr>'


def levels(*each: tuple[str, str], start: int = 1) -> str:
    """Levels of a list: each with its format and its text."""
    return "".join(
        f'<w:lvl w:ilvl="{level}"><w:start w:val="{start}"/><w:numFmt w:val="{form}"/>'
        f'<w:lvlText w:val="{text}"/></w:lvl>'
        for level, (form, text) in enumerate(each)
    )


def numbering(*plans: str) -> str:
    body = "".join(f'<w:abstractNum w:abstractNumId="{n}">{plan}</w:abstractNum>' for n, plan in enumerate(plans))
    body += "".join(f'<w:num w:numId="{n + 1}"><w:abstractNumId w:val="{n}"/></w:num>' for n in range(len(plans)))
    return f"<w:numbering {_SPACES}>{body}</w:numbering>"


def part(name: str, inside: str) -> str:
    return f"<w:{name} {_SPACES}>{inside}</w:{name}>"


def docx(body: str, parts: Mapping[str, str] = {}, main: str = "word/document.xml") -> bytes:
    """A Word file; `parts` by their kind, which is the id of their relationship, too."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(
            "[Content_Types].xml", '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"/>'
        )
        link = f'<Relationship Id="main" Type="{_OFFICE}/relationships/officeDocument" Target="/{main}"/>'
        archive.writestr("_rels/.rels", f'<Relationships xmlns="{_RELS}">{link}</Relationships>')
        archive.writestr(main, f"<w:document {_SPACES}><w:body>{body}</w:body></w:document>")
        links = ""
        for name, text in parts.items():
            archive.writestr(f"word/{name}.xml", text)
            kind = name.rstrip("0123456789")
            links += f'<Relationship Id="{name}" Type="{_OFFICE}/relationships/{kind}" Target="{name}.xml"/>'
        folder, _, base = main.rpartition("/")
        archive.writestr(f"{folder}/_rels/{base}.rels", f'<Relationships xmlns="{_RELS}">{links}</Relationships>')
    return made.getvalue()


def read(data: bytes, ending: str = ".docx") -> Document:
    (document,) = read_documents(Path(f"/in/a{ending}"), data)
    return document


def text_of(body: str, parts: Mapping[str, str] = {}) -> str:
    return read(docx(body, parts)).text.rstrip("\n")


def test_tracked_changes() -> None:
    moved = "".join(f"<w:{side}>{run('Pay by noon. ')}</w:{side}>" for side in ("moveFrom", "moveTo"))
    gone = '<w:del w:author="A"><w:r><w:delText>sixty</w:delText></w:r></w:del>'
    body = p(moved + run("Rent is ") + gone + f"<w:ins>{run('eighty')}</w:ins>" + run(" crowns."))
    assert text_of(body) == "Pay by noon. Rent is eighty crowns."
    body = p(run("The term ends "), "<w:rPr><w:del/></w:rPr>") + p(run("in May.")) + p(run("Signed."))
    assert text_of(body) == "The term ends in May.\n\nSigned."
    assert text_of(table(cell("kept"), f"<w:trPr><w:del/></w:trPr>{cell('gone')}")) == "kept"


def test_content_controls_are_read_at_every_level() -> None:
    control = "<w:sdt><w:sdtPr><w:dropDownList/></w:sdtPr><w:sdtContent>{}</w:sdtContent></w:sdt>"
    line = p(run("Berth ") + control.format(run("North")) + "<w:smartTag>" + run(" pier") + "</w:smartTag>")
    rows = "<w:tbl>" + control.format(f"<w:tr>{control.format(cell('Depth'))}{cell('4 m')}</w:tr>") + "</w:tbl>"
    assert text_of(control.format(p(run("Title"))) + line + rows) == "Title\n\nBerth North pier\n\nDepth | 4 m"


def test_text_boxes() -> None:
    box = f"<w:txbxContent>{p(run('Beware of the tide'))}</w:txbxContent>"
    choice = f'<mc:Choice Requires="wps"><w:drawing><wps:txbx>{box}</wps:txbx></w:drawing></mc:Choice>'
    drawn = f"<mc:AlternateContent>{choice}<mc:Fallback><w:pict>{box}</w:pict></mc:Fallback></mc:AlternateContent>"
    document = read(docx(p(run("before")) + p(f"{run('Pier')}<w:r>{drawn}</w:r>") + p(run("after"))))
    assert document.text == "before\n\nPier\n\nBeware of the tide\n\nafter\n"
    assert [mark.place for mark in document.marks] == ["¶ 1", "¶ 2", "¶ 3"]
    box = f"<w:txbxContent>{p(run('Old box'))}</w:txbxContent>"
    drawn = f'<w:pict><v:shape><v:textbox>{box}</v:textbox><v:textpath string="DRAFT"/></v:shape></w:pict>'
    only_old = f'<mc:AlternateContent><mc:Choice Requires="x"/><mc:Fallback>{drawn}</mc:Fallback></mc:AlternateContent>'
    for each in (drawn, only_old):
        assert text_of(p(f"<w:r>{each}</w:r>")) == "Old box\n\nDRAFT"


def test_notes_follow_their_paragraph_or_table() -> None:
    refer = '<w:r><w:{}Reference w:id="{}"/></w:r>'
    notes = {
        "footnotes": part("footnotes", f'<w:footnote w:id="7">{p(run("Not on Sundays."))}</w:footnote>'),
        "endnotes": part("endnotes", f'<w:endnote w:id="3">{p(run("See the log."))}</w:endnote>'),
    }
    body = p(run("Open daily.") + refer.format("footnote", 7) + refer.format("endnote", 3)) + p(run("Next."))
    assert text_of(body, notes) == "Open daily.[1][i]\n\n[1] Not on Sundays.\n\n[i] See the log.\n\nNext."
    notes = {"footnotes": part("footnotes", f'<w:footnote w:id="2">{p(run("in crowns"))}</w:footnote>')}
    head = f"<w:tc>{p(run('Fee') + _REFERENCE)}</w:tc>"
    assert text_of(table(head + cell("Pier"), cell("6") + cell("North")), notes) == (
        "Fee[1] | Pier\n6 | North\n\n[1] in crowns"
    )
    again = p(run("Loop") + _REFERENCE)
    notes = {"footnotes": part("footnotes", f'<w:footnote w:id="2">{again}</w:footnote>')}
    assert text_of(p(run("A") + _REFERENCE), notes) == "A[1]\n\n[1] Loop[1]"


def test_comments_are_marked_with_their_authors() -> None:
    said = f'<w:comment w:id="0" w:author="Ines">{p(run("Ask the harbour master."))}</w:comment>'
    end, reference = '<w:commentRangeEnd w:id="0"/>', '<w:r><w:commentReference w:id="0"/></w:r>'
    for mark in (reference, end + reference, end):  # some programs save only the range
        assert text_of(p(run("The crane is hired.") + mark), {"comments": part("comments", said)}) == (
            "The crane is hired.\n\n[comment by Ines: Ask the harbour master.]"
        )


def test_headers_and_footers_are_read_once_with_their_own_places() -> None:
    refer = '<w:headerReference w:type="{}" r:id="{}"/><w:footerReference r:id="footer1"/>'
    sections = refer.format("default", "header1"), refer.format("first", "header2"), refer.format("default", "header3")
    body = p(run("One."), f"<w:sectPr>{sections[0]}</w:sectPr>") + p(run("Two."))
    body += f"<w:sectPr>{sections[1]}{sections[2]}</w:sectPr>"
    parts = {
        "header1": part("hdr", p(run("Order 77"))),
        "header2": part("hdr", p(run("First page"))),
        "header3": part("hdr", p(run("Order 77"))),
        "footer1": part("ftr", p(run("Valid in May")) + p(field("PAGE", run("1")))),
    }
    document = read(docx(body, parts))
    assert document.text == "Order 77\n\nFirst page\n\nOne.\n\nTwo.\n\nValid in May\n"
    assert [mark.place for mark in document.marks] == ["header", "¶ 1", "¶ 2", "footer"]


def test_fields() -> None:
    nested = field(f"IF {field('MERGEFIELD x', run('secret'))} = 1", run("granted"))
    simple = f'<w:fldSimple w:instr="DATE">{run("4 May")}</w:fldSimple>'
    link = f'<w:hyperlink r:id="none">{run("the site")}</w:hyperlink>'
    assert text_of(p(run("Leave ") + nested + run(" on ") + simple + run(", see ") + link)) == (
        "Leave granted on 4 May, see the site"
    )
    begun = '<w:r><w:fldChar w:fldCharType="begin"/></w:r>'
    assert text_of(p(begun + run("lost")) + p(run("kept"))) == "kept"


def test_boxes_and_choices_of_old_forms_are_read() -> None:
    box = '<w:ffData><w:checkBox><w:default w:val="0"/><w:checked/></w:checkBox></w:ffData>'
    choice = '<w:ffData><w:ddList><w:result w:val="1"/><w:listEntry w:val="oak"/><w:listEntry w:val="elm"/></w:ddList>'
    made = "".join(
        f'<w:r><w:fldChar w:fldCharType="begin">{data}</w:fldChar></w:r><w:r><w:fldChar w:fldCharType="end"/></w:r>'
        for data in (box, choice + "</w:ffData>")
    )
    assert text_of(p(run("Paid ") + made)) == "Paid ☒elm"


@pytest.mark.parametrize(
    ("equation", "shown"),
    [
        ("<m:f><m:num>{a+b}</m:num><m:den>{2c}</m:den></m:f>", "(a+b)/(2c)"),
        ("<m:f><m:num>{x}</m:num><m:den>{y}</m:den></m:f>", "x/y"),
        ("<m:rad><m:deg/><m:e>{x}</m:e></m:rad>", "sqrt(x)"),
        ("<m:rad><m:deg>{3}</m:deg><m:e>{8}</m:e></m:rad>", "sqrt[3](8)"),
        ("{E=m}<m:sSup><m:e>{c}</m:e><m:sup>{2}</m:sup></m:sSup>", "E=mc^2"),
        ("<m:sSubSup><m:e>{x}</m:e><m:sub>{i}</m:sub><m:sup>{n+1}</m:sup></m:sSubSup>{y}", "x_i^(n+1) y"),
        (
            '<m:nary><m:naryPr><m:chr m:val="∑"/></m:naryPr><m:sub>{i=1}</m:sub><m:sup>{n}</m:sup>'
            "<m:e>{i}</m:e></m:nary>",
            "∑_(i=1)^n i",
        ),
        ('<m:d><m:dPr><m:begChr m:val="["/><m:endChr m:val="]"/></m:dPr><m:e>{a}</m:e><m:e>{b}</m:e></m:d>', "[a|b]"),
        ("<m:func><m:fName>{log}</m:fName><m:e>{x}</m:e></m:func>", "log x"),
        (
            "<m:m><m:mr><m:e>{1}</m:e><m:e>{0}</m:e></m:mr><m:mr><m:e>{0}</m:e><m:e>{1}</m:e></m:mr></m:m>",
            "[1, 0; 0, 1]",
        ),
        ("<m:acc><m:e>{x}</m:e></m:acc>", "x\u0302"),
    ],
)
def test_equations_are_read_in_one_line(equation: str, shown: str) -> None:
    written = equation.replace("{", "<m:r><m:t>").replace("}", "</m:t></m:r>")
    assert text_of(p(run("so ") + f"<m:oMath>{written}</m:oMath>" + run(" holds"))) == f"so {shown} holds"


def test_raised_and_lowered_characters_keep_their_sense() -> None:
    high, low = '<w:vertAlign w:val="superscript"/>', '<w:vertAlign w:val="subscript"/>'
    power, formula = run("10") + run("-", high) + run("6", high), run(" m of H") + run("2", low)
    assert text_of(p(power + formula + run("O, the 21") + run("st", high))) == "10^-6 m of H2O, the 21st"
    assert text_of(p(run("10") + run("5", '<w:position w:val="6"/>') + run("A", '<w:position w:val="6"/>'))) == "10^5A"


def test_symbols_hyphens_tabs_and_breaks() -> None:
    inside = (
        '<w:sym w:font="Wingdings" w:char="F0FE"/><w:t>co</w:t><w:softHyphen/><w:t>op</w:t><w:noBreakHyphen/>'
        "<w:t>x</w:t>"
        '<w:tab/><w:t>y</w:t><w:br/><w:t>z</w:t><w:br w:type="page"/>'
    )
    greek = run("\uf061 > \uf0a5", '<w:rFonts w:ascii="Symbol"/>')
    assert text_of(p(f"<w:r>{inside}</w:r>{greek}")) == "☑coop-x\ty\nz\nα > ∞"


def test_readings_follow_their_paragraph() -> None:
    ruby = f"<w:ruby><w:rt>{run('とうだい')}</w:rt><w:rubyBase>{run('灯台')}</w:rubyBase></w:ruby>"
    body = p(f"<w:r>{ruby}</w:r>" + run("の光") + f"<w:r>{ruby.replace('台', '火')}</w:r>") + p(run("港"))
    assert text_of(body) == "灯台の光灯火 (とうだい, とうだい)\n\n港"


def test_hidden_text_is_read_and_named() -> None:
    said = run("Our cost is 4.", "<w:vanish/>") + run(" Thanks.", '<w:vanish w:val="0"/>')
    document = read(docx(p(run("Fee 6. ") + said)))
    assert document.text == "Fee 6. Our cost is 4. Thanks.\n"
    assert document.notes == ("hidden passage 'Our cost is 4.': read like those that are shown",)


def test_diagrams_and_descriptions_of_drawings_are_read() -> None:
    points = "".join(f"<dgm:t><a:p><a:r><a:t>{text}</a:t></a:r></a:p></dgm:t>" for text in ("Cast", "Haul"))
    diagram = f"<dgm:dataModel {_SPACES}>{points}</dgm:dataModel>"
    drawn = '<w:r><w:drawing><wp:docPr descr="A plan"/><dgm:relIds r:dm="diagramData1"/></w:drawing></w:r>'
    assert text_of(p(run("Steps:") + drawn), {"diagramData1": diagram}) == "Steps:[image: A plan]\n\nCast\n\nHaul"


def test_embedded_files_and_documents_are_counted() -> None:
    file = p(run("See the sheet.") + '<w:r><w:object><o:OLEObject ProgID="Excel.Sheet.12"/></w:object></w:r>')
    document = read(docx(file + '<w:altChunk r:id="aFChunk1"/>'))
    assert document.notes == ("embedded files: 1, embedded documents: 1 not read",)
    with refused(UnreadableFile, numbers=True):
        read(docx(p("<w:r><w:object><o:OLEObject/></w:object></w:r>")))


def test_clauses_count_on_several_levels() -> None:
    lists = numbering(levels(("decimal", "%1."), ("decimal", "%1.%2"), ("lowerLetter", "(%3)"), ("bullet", "·")))
    body = "".join(p(run(name), numbered(level)) for name, level in zip("abcdefg", (0, 1, 2, 2, 1, 0, 1), strict=True))
    body += p(run("plain")) + p(run("h"), numbered(1)) + p(run("i"), numbered(3))
    assert text_of(body, {"numbering": lists}).split("\n\n") == [
        *("1. a", "1.1 b", "(a) c", "(b) d", "1.2 e", "2. f", "2.1 g", "plain", "2.2 h", "- i")
    ]


def test_starts_restarts_and_skipped_levels_of_lists() -> None:
    lists = numbering(levels(("decimal", "%1"), ("decimal", "%1.%2"), ("decimal", "%1.%2.%3")))
    body = "".join(p(run("x"), numbered(level)) for level in (0, 2, 1))
    assert text_of(body, {"numbering": lists}).split("\n\n") == ["1 x", "1.1.1 x", "1.2 x"]
    lists = numbering(levels(("decimal", "Article %1:"), start=4), levels(("upperRoman", "%1."))).replace(
        "</w:numbering>",
        '<w:num w:numId="9"><w:abstractNumId w:val="1"/><w:lvlOverride w:ilvl="0"><w:startOverride w:val="1"/>'
        "</w:lvlOverride></w:num></w:numbering>",
    )
    body = "".join(p(run("x"), numbered(0, list_id)) for list_id in (1, 2, 2, 1, 9, 9))
    assert text_of(body, {"numbering": lists}).split("\n\n") == [
        *("Article 4: x", "I. x", "II. x", "Article 5: x", "I. x", "II. x")
    ]
    plan = levels(("upperRoman", "%1"), ("decimal", "%1.%2")).replace(
        '<w:lvlText w:val="%1.%2"/>', '<w:lvlRestart w:val="0"/><w:isLgl/><w:lvlText w:val="%1.%2"/>'
    )
    body = "".join(p(run("x"), numbered(level)) for level in (0, 1, 0, 1))
    assert text_of(body, {"numbering": numbering(plan)}).split("\n\n") == ["I x", "1.1 x", "II x", "2.2 x"]


def test_headings_are_numbered_by_their_styles() -> None:
    styles = "".join(
        f'<w:style w:type="paragraph" w:styleId="{key}"><w:name w:val="{name}"/><w:basedOn w:val="{base}"/><w:pPr>'
        f"{numbered_by}</w:pPr></w:style>"
        for key, name, base, numbered_by in (
            ("H1", "heading 1", "", '<w:numPr><w:numId w:val="1"/></w:numPr>'),
            ("H2", "heading 2", "H1", ""),
            ("Own", "My heading", "H1", ""),
        )
    )
    plan = levels(("decimal", "%1"), ("decimal", "%1.%2")).replace(
        '<w:numFmt w:val="decimal"/><w:lvlText w:val="%1.%2"/>',
        '<w:numFmt w:val="decimal"/><w:pStyle w:val="H2"/><w:lvlText w:val="%1.%2"/>',
    )
    body = "".join(p(run("x"), f'<w:pStyle w:val="{key}"/>') for key in ("H1", "H2", "Own"))
    body += p(run("y"), '<w:pStyle w:val="H1"/><w:numPr><w:numId w:val="0"/></w:numPr>')
    parts = {"styles": part("styles", styles), "numbering": numbering(plan)}
    assert text_of(body, parts).split("\n\n") == ["# 1 x", "## 1.1 x", "# 2 x", "# y"]


@pytest.mark.parametrize(
    ("number", "style", "shown"),
    [
        *((4, "lowerRoman", "iv"), (1990, "upperRoman", "MCMXC"), (28, "upperLetter", "BB"), (7, "decimalZero", "07")),
        *((2, "ganada", "나"), (21, "chineseCounting", "二十一")),
        *((3, "decimalEnclosedCircle", "③"), (3, "none", ""), (0, "lowerLetter", "0"), (5, "cardinalText", "5")),
    ],
)
def test_styles_of_numbers(number: int, style: str, shown: str) -> None:
    assert counter(number, style) == shown


def test_cells_keep_their_columns() -> None:
    before = '<w:trPr><w:gridBefore w:val="1"/></w:trPr>'
    body = table(
        cell("Pier") + cell("May") + cell("June"),
        cell("North") + cell("") + cell("4"),
        before + cell("7") + cell("8"),
        cell("both", '<w:gridSpan w:val="2"/>') + cell("9"),
        cell("Closed in winter", '<w:gridSpan w:val="3"/>'),
    )
    assert text_of(body).replace("\n\n", "\n").split("\n") == [
        *("Pier | May | June", "North |  | 4", " | 7 | 8", "both | both | 9", "Closed in winter")
    ]


def test_merged_cells() -> None:
    first, more = '<w:vMerge w:val="restart"/>', "<w:vMerge/>"
    body = table(
        cell("North", first) + cell("May") + cell("3"),
        cell("", more) + cell("June") + cell("4"),
        cell("South", first) + cell("May") + cell("5"),
    )
    assert text_of(body).split("\n") == ["North | May | 3", "North | June | 4", "South | May | 5"]
    long = "word " * 80
    body = table(
        cell(long, '<w:gridSpan w:val="2"/>') + cell("a"), cell(long, '<w:vMerge w:val="restart"/>') + cell("b")
    )
    assert text_of(body).split("\n") == [f"{long.strip()} |  | a", f"{long.strip()} | b"]
    body = table(cell("a", '<w:gridSpan w:val="900000000"/>') + cell("b"), cell("c", '<w:gridSpan w:val="-4"/>'))
    text = text_of(p(run("before")) + body + p(run("after")))
    assert text.startswith("before\n\na | a")
    assert text.endswith("a | b\n\nc\n\nafter")


def test_tables_within_tables() -> None:
    inner = table(cell("high") + cell("3 m"), cell("low") + cell("1 m"))
    body = table(f"<w:tc>{p(run('Tide'))}{inner}{p('')}</w:tc>" + cell("Port"))
    assert text_of(body) == "Tide high, 3 m; low, 1 m | Port"
    inner = table(cell("a") + cell("b"), cell("c") + cell("d"))
    document = read(docx(table(cell("") + f"<w:tc>{p(run('Head'))}{inner}</w:tc>")))
    assert document.text == "Head\n\na | b\nc | d\n"
    assert [mark.place for mark in document.marks] == ["¶ 2", "¶ 3", "¶ 4"]


@pytest.mark.parametrize("ending", [".docx", ".docm", ".dotx", ".dotm", ".doc"])
def test_all_kinds_of_word_files_are_read(ending: str) -> None:
    document = read(docx(p(run("The winch needs oil.")), main="word/document2.xml"), ending)
    assert (document.text, document.kind) == ("The winch needs oil.\n", "markdown")


@pytest.mark.parametrize("damage", ["<w:broken", '<?xml version="1.0" encoding="none"?><a/>', ""])
@pytest.mark.parametrize("kind", ["footnotes", "styles", "numbering", "comments", "header1"])
def test_a_damaged_part_is_named_and_the_rest_is_read(kind: str, damage: str) -> None:
    refer = '<w:r><w:footnoteReference w:id="2"/></w:r><w:r><w:commentReference w:id="2"/></w:r>'
    body = p(run("The rest.") + refer) + '<w:sectPr><w:headerReference r:id="header1"/></w:sectPr>'
    document = read(docx(body, {kind: damage}))
    assert document.text == "The rest.\n"
    assert document.notes == (f"damaged: word/{kind}.xml: not read",)


def test_what_has_no_document_is_refused() -> None:
    with refused(UnreadableFile):
        read(docx("").replace(b"document.xml", b"elsewhere.xm"))
    data = b'<?xml version="1.0"?><w:wordDocument xmlns:w="http://schemas.microsoft.com/office/word/2003/wordml"/>'
    with refused(UnreadableFile):
        read(data, ".doc")


@pytest.mark.parametrize(
    ("ending", "data", "kind"),
    [
        (".doc", b"{\\rtf1\\ansi The lamp is lit.}", "text"),
        (".doc", b"<!DOCTYPE html><p>The lamp is lit.</p>", "html"),
        (".dot", b"The lamp is lit.\n", "text"),
    ],
)
def test_disguised_files_are_read_by_their_content(ending: str, data: bytes, kind: str) -> None:
    document = read(data, ending)
    assert (document.text.strip(), document.kind) == ("The lamp is lit.", kind)


def test_locked_files_are_refused() -> None:
    office = b"\xd0\xcf\x11\xe0" + bytes(500) + "EncryptedPackage".encode("utf-16-le") + bytes(500)
    for data in (office, doc("secret\r", flags=0x100)):
        with refused(UnreadableFile):
            read(data, ".doc")


def compound(streams: Mapping[str, bytes]) -> bytes:
    """Write a compound file whose streams are all of 4,096 bytes or more, so that there is no short one."""
    none, last, table_sector = 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFD
    sectors, fat = list[bytes](), list[int]()

    def chain(data: bytes) -> int:
        first = len(sectors)
        sectors.extend(data[at : at + 512].ljust(512, b"\0") for at in range(0, len(data), 512))
        fat.extend([*range(first + 1, len(sectors)), last])
        return first

    def entry(name: str, kind: int, right: int, child: int, start: int, size: int) -> bytes:
        head = struct.pack("<HBBIII36xIQ", 2 * len(name) + 2, kind, 1, none, right, child, start, size)
        return name.encode("utf-16-le").ljust(64, b"\0") + head

    directory = entry("Root Entry", 5, none, 1, last, 0)
    for number, (name, data) in enumerate(streams.items(), 1):
        directory += entry(name, 2, number + 1 if number < len(streams) else none, none, chain(data), len(data))
    at, fats = chain(directory), len(fat) // 127 + 1
    numbers = (0, fats, at, 0, 4096, last, 0, last, 0)
    head = struct.pack("<8s16xHHHHH6x9I", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", 62, 3, 0xFFFE, 9, 6, *numbers)
    listed = [*range(len(fat), len(fat) + fats), *[none] * (109 - fats)]
    table = [*fat, *[table_sector] * fats, *[none] * (128 * fats - len(fat) - fats)]
    packed = struct.pack(f"<{len(table)}I", *table)
    return head + struct.pack("<109I", *listed) + b"".join(sectors) + packed


def doc(text: str, flags: int = 0) -> bytes:
    """A Word 97 file of one piece: a header, the text, and a table that says where it is, in a compound file."""
    main = bytearray(8192)
    main[0x800 : 0x800 + 2 * len(text)] = text.encode("utf-16-le")
    struct.pack_into("<HHxxxxxxH", main, 0, 0xA5EC, 0xC1, 0x200 | flags)  # word 5: which table, encrypted or not
    struct.pack_into("<H", main, 0x20, 14)
    struct.pack_into("<H", main, 0x3E, 22)
    struct.pack_into("<I", main, 0x4C, len(text))
    struct.pack_into("<H", main, 0x98, 93)
    pieces = struct.pack("<IIHIH", 0, len(text), 0, 0x800, 0)
    struct.pack_into("<II", main, 0x1A2, 0, 5 + len(pieces))
    table = (b"\2" + struct.pack("<I", len(pieces)) + pieces).ljust(4096, b"\0")
    return compound({"1Table": table, "WordDocument": bytes(main)})


@pytest.mark.parametrize("ending", [".doc", ".dot", ".docx"])
def test_old_documents_are_read(ending: str) -> None:
    document = read(doc('The keeper, Zoë, lit it.\rSee \x13 HYPERLINK "x" \x14the log\x15.\r'), ending)
    assert document.text == "The keeper, Zoë, lit it.\n\nSee the log.\n"
    assert [mark.place for mark in document.marks] == ["¶ 1", "¶ 2"]


def _said(text: str, position: str = "") -> dict[str, object]:
    return {"type": "text", "text": text, "vertical_align": position}


def _paragraph(*content: Mapping[str, object]) -> dict[str, object]:
    return {"type": "paragraph", "content": [*content]}


def test_elements_of_the_tree() -> None:
    inner = {"ordered": True, "items": [{"content": [_paragraph(_said("b"))]}]}
    items = [{"content": [_paragraph(_said("a"))], "nested": inner}, {"content": [_paragraph(_said("c"))]}]
    assert [*blocks([{"type": "list", "ordered": True, "items": items}])] == ["- a", "- b", "- c"]
    elements = [
        {"type": "heading", "level": 2, "content": [_said("Head")]},
        {"type": "text_box", "content": [_paragraph(_said("10"), _said("6", "superscript"))]},
        {"type": "footnote", "id": 1, "content": [_paragraph(_said("Note"))]},
        {"type": "endnote", "id": 1, "author": "Ines", "content": [_paragraph(_said("Why?"))]},
        {"type": "image", "alt_text": "A plan of the pier"},
        {"type": "image", "alt_text": "image1.png"},
    ]
    assert [*blocks(elements)] == [
        *("## Head", "10^6", "[1] Note", "[comment by Ines: Why?]", "[image: A plan of the pier]", "")
    ]
