"""OpenDocument files: texts, spreadsheets and presentations, packed and flat."""

from __future__ import annotations

import pytest

from kvtool.core.corpus.readers.document import Document, UnreadableFile
from kvtool.core.corpus.readers.opendocument import read
from tests.corpus.test_archives import packed
from tests.wording import refused

_URN = "urn:oasis:names:tc:opendocument:xmlns"
_NAMES = {name: f"{_URN}:{name}:1.0" for name in ("office", "text", "table", "style", "presentation", "chart", "form")}
_NAMES |= {"draw": f"{_URN}:drawing:1.0", "svg": f"{_URN}:svg-compatible:1.0"}
_NAMES |= {"dc": "http://purl.org/dc/elements/1.1/", "xlink": "http://www.w3.org/1999/xlink"}
_NAMES |= {"math": "http://www.w3.org/1998/Math/MathML"}
SPACES = " ".join(f'xmlns:{name}="{uri}"' for name, uri in _NAMES.items())


def whole(kind: str, body: str, styles: str = "", masters: str = "") -> str:
    return (
        f"<office:document {SPACES}><office:automatic-styles>{styles}</office:automatic-styles>"
        f"<office:master-styles>{masters}</office:master-styles>"
        f"<office:body><office:{kind}>{body}</office:{kind}></office:body></office:document>"
    )


def flat(kind: str, body: str, styles: str = "", masters: str = "") -> Document:
    (made,) = read("/in/a.fodt", whole(kind, body, styles, masters).encode())
    return made


def lines(made: Document) -> list[str]:
    return [line for line in made.text.split("\n") if line]


def places(made: Document) -> list[int | str]:
    return [mark.place for mark in made.marks]


def test_notes_comments_and_text_boxes_follow_their_paragraph() -> None:
    note = (
        "<text:note><text:note-citation>{0}</text:note-citation><text:note-body><text:p>{1}</text:p>"
        "</text:note-body></text:note>"
    )
    comment = "<office:annotation><dc:creator>Ann</dc:creator><dc:date>2031</dc:date>"
    comment += "<text:p>Sure?</text:p></office:annotation>"
    box = (
        "<draw:frame><draw:text-box><text:p>Boxed</text:p><table:table><table:table-row><table:table-cell><text:p>a"
        "</text:p></table:table-cell><table:table-cell><text:p>b</text:p></table:table-cell></table:table-row>"
        "</table:table></draw:text-box><svg:desc>A map of the pier</svg:desc></draw:frame>"
    )
    body = (
        f"<text:p>The toll{note.format(1, 'Sundays free')} is{comment} 4{box} crowns."
        f"{note.format('ii', 'Old law')}</text:p><text:p>Next</text:p>"
    )
    made = flat("text", body)
    assert lines(made) == [
        *("The toll[1] is 4 crowns.[ii]", "[1] Sundays free", "[comment by Ann: Sure?]", "Boxed", "a | b"),
        *("[image: A map of the pier]", "[ii] Old law", "Next"),
    ]
    assert places(made) == ["¶ 1", "¶ 2"]


def test_changes_spaces_raised_digits_and_readings() -> None:
    body = (
        "<text:tracked-changes><text:changed-region><text:deletion><text:p>thirty</text:p></text:deletion>"
        "</text:changed-region></text:tracked-changes>"
        "<text:p>Notice is <text:change-start/>ninety<text:change-end/><text:change/> days.</text:p>"
    )
    assert lines(flat("text", body)) == ["Notice is ninety days."]
    styles = (
        '<style:style style:name="T1"><style:text-properties style:text-position="super 58%"/></style:style>'
        '<style:style style:name="T2"><style:text-properties style:text-position="-33% 58%"/></style:style>'
    )
    body = (
        '<text:p>a<text:s text:c="3"/>b<text:tab/>c 10<text:span text:style-name="T1">6</text:span> '
        'H<text:span text:style-name="T2">2</text:span>O <text:ruby><text:ruby-base>灯台</text:ruby-base>'
        "<text:ruby-text>とうだい</text:ruby-text></text:ruby>の\n   守り人</text:p><text:p>港</text:p>"
    )
    assert lines(flat("text", body, styles)) == ["a   b\tc 10^6 H2O 灯台の 守り人 (とうだい)", "港"]


_LEVEL = '<text:list-level-style-number text:level="{}" style:num-format="{}" {}/>'
_LEVELS = (
    '<text:list-style style:name="L1">'
    + _LEVEL.format(1, "1", 'style:num-suffix="."')
    + _LEVEL.format(2, "a", 'style:num-prefix="(" style:num-suffix=")"')
    + _LEVEL.format(3, "1", 'text:display-levels="3"')
    + '</text:list-style><text:list-style style:name="L2">'
    + '<text:list-level-style-bullet text:level="1" text:bullet-char="•"/></text:list-style>'
    + '<text:list-style style:name="L3">'
    + _LEVEL.format(1, "I", 'text:start-value="4"')
    + "</text:list-style>"
)


def listed(style: str, *items: str, more: str = "") -> str:
    return f'<text:list text:style-name="{style}" {more}>' + "".join(items) + "</text:list>"


def item(text: str, inner: str = "", more: str = "") -> str:
    return f"<text:list-item {more}><text:p>{text}</text:p>{inner}</text:list-item>"


def test_list_items_have_their_numbers() -> None:
    deep = listed("", item("deep")).replace(' text:style-name=""', "")
    inner = listed("", item("inner"), item("other", deep)).replace(' text:style-name=""', "")
    body = (
        listed("L1", item("one<text:line-break/>line"), item("two", "<text:p>still two</text:p>" + inner))
        + "<text:p>Between</text:p>"
        + listed("L1", item("three"), item("ten", more='text:start-value="10"'), more='text:continue-numbering="true"')
        + listed("L1", item("again"))
        + listed("L2", item("dot"))
        + listed("L3", item("four"), "<text:list-header><text:p>head</text:p></text:list-header>", item("five"))
    )
    assert lines(flat("text", body, _LEVELS)) == [
        *("1. one", "line", "2. two", "still two", "(a) inner", "(b) other", "2.b.1 deep", "Between"),
        *("3. three", "10. ten", "1. again", "- dot", "IV four", "head", "V five"),
    ]


def test_headings_have_their_numbers() -> None:
    outline = (
        '<text:outline-style><text:outline-level-style text:level="1" style:num-format="1"/>'
        '<text:outline-level-style text:level="2" style:num-format="1" text:display-levels="2"/></text:outline-style>'
        '<style:style style:name="Plain" style:list-style-name=""/>'
    )
    heads = [
        *(("1", "Tides", ""), ("2", "Spring", ""), ("2", "Neap", ""), ("1", "Index", "Plain"), ("1", "Winds", "")),
        ("2", "Gale", ""),
    ]
    body = "".join(f'<text:h text:outline-level="{n}" text:style-name="{s}">{t}</text:h>' for n, t, s in heads)
    assert lines(flat("text", body, outline)) == [
        *("# 1 Tides", "## 1.1 Spring", "## 1.2 Neap", "# Index", "# 2 Winds", "## 2.1 Gale")
    ]


def test_headers_and_footers_of_used_pages_are_read_once() -> None:
    master = (
        '<style:master-page style:name="{0}"><style:header><text:p>{1}</text:p></style:header><style:footer>'
        "<text:p>Page <text:page-number>1</text:page-number></text:p><text:p>valid to May</text:p></style:footer>"
        '<style:header-left style:display="false"><text:p>Not shown</text:p></style:header-left></style:master-page>'
    )
    masters = (
        master.format("Standard", "Contract 88") + master.format("Other", "Unused") + master.format("First", "Letter")
    )
    styles = '<style:style style:name="P1" style:master-page-name="First"/>'
    made = flat("text", '<text:p text:style-name="P1">Body</text:p>', styles, masters)
    assert made.text == "Contract 88\n\nLetter\n\nBody\n\nvalid to May\n"
    assert places(made) == ["header", "¶ 1", "footer"]


def test_merged_and_empty_cells_keep_their_columns() -> None:
    cell = "<table:table-cell{1}><text:p>{0}</text:p></table:table-cell>"
    rows = [
        cell.format("Pier", ' table:number-rows-spanned="2"')
        + cell.format("Depth", ' table:number-columns-spanned="2"')
        + "<table:covered-table-cell/>",
        "<table:covered-table-cell/>" + cell.format("low", "") + cell.format("high", ""),
        cell.format("East", "") + "<table:table-cell/>" + cell.format("4", ""),
    ]
    table = (
        f"<table:table><table:table-header-rows><table:table-row>{rows[0]}</table:table-row></table:table-header-rows>"
    )
    table += "".join(f"<table:table-row>{row}</table:table-row>" for row in rows[1:]) + "</table:table>"
    assert lines(flat("text", table)) == ["Pier | Depth | Depth", "Pier | low | high", "East |  | 4"]
    wide = '<table:table-cell table:number-columns-spanned="2"/><table:covered-table-cell/>'
    row = f"<table:table-row>{wide}<table:table-cell><text:p>May</text:p></table:table-cell></table:table-row>"
    assert lines(flat("text", f"<table:table>{row}</table:table>")) == [" |  | May"]


def test_hidden_sections_and_form_fields_are_noted() -> None:
    section = "<text:section text:name='{}' text:display='{}'><text:p>The mill is {}.</text:p></text:section>"
    made = flat("text", section.format("A", "true", "old") + section.format("B&#10;error: no", "none", "new"))
    assert lines(made) == ["The mill is old.", "The mill is new."]
    assert made.notes == ("hidden section 'B\\nerror: no': read like those that are shown",)
    made = flat("text", '<text:p>Sign here: <draw:control draw:control="c1"/></text:p>')
    assert made.notes == ("form fields: 1 not read",)


_FORMULA = (
    f"<math:math {SPACES}><math:semantics><math:mrow><math:mi>F</math:mi><math:mo>=</math:mo><math:mfrac><math:mrow>"
    "<math:mi>a</math:mi><math:mo>+</math:mo><math:mi>b</math:mi></math:mrow><math:msup><math:mi>v</math:mi>"
    "<math:mn>2</math:mn></math:msup></math:mfrac></math:mrow><math:annotation>F = {a+b} over v^2</math:annotation>"
    "</math:semantics></math:math>"
)
_CHART = (
    f"<office:document-content {SPACES}><office:body><office:chart><chart:chart><chart:title><text:p>Landings</text:p>"
    '</chart:title><table:table table:name="local-table"><table:table-row><table:table-cell><text:p>May</text:p>'
    "</table:table-cell><table:table-cell><text:p>9.1</text:p></table:table-cell></table:table-row></table:table>"
    "</chart:chart></office:chart></office:body></office:document-content>"
)


def test_formulas_and_charts_are_read_and_other_objects_counted() -> None:
    frame = '<draw:frame text:anchor-type="as-char"><draw:{1} xlink:href="./{0}"/><draw:image/></draw:frame>'
    body = f"<text:p>Drag {frame.format('Object 1', 'object')} newtons</text:p>"
    body += f"<text:p>{frame.format('Object 2', 'object')}</text:p>"
    body += f"<text:p>{frame.format('Object 3', 'object-ole')}{frame.format('gone', 'object')}</text:p>"
    members = {"content.xml": whole("text", body), "Object 1/content.xml": _FORMULA, "Object 2/content.xml": _CHART}
    (made,) = read("/in/a.odt", packed(members))
    assert lines(made) == ["Drag F=(a+b)/(v^2) newtons", "Landings", "May | 9.1"]
    assert made.notes == ("embedded objects: 2 not read",)
    assert lines(read("/in/a.odf", packed({"content.xml": _FORMULA}))[0]) == ["F=(a+b)/(v^2)"]


def test_damaged_and_encrypted_files() -> None:
    (made,) = read("/in/a.odt", packed({"content.xml": whole("text", "<text:p>Body</text:p>"), "styles.xml": "<a"}))
    assert made.text == "Body\n"
    assert made.notes == ("damaged parts: 1 not read",)
    manifest = '<manifest:manifest xmlns:manifest="m"><manifest:encryption-data/></manifest:manifest>'
    with refused(UnreadableFile):
        read("/in/a.ods", packed({"content.xml": "\x8f\x01", "META-INF/manifest.xml": manifest}))
    with pytest.raises(UnreadableFile):
        read("/in/a.fodt", b"<office:document>")


def cells(*texts: str) -> str:
    return "".join(
        f"<table:table-cell><text:p>{text}</text:p></table:table-cell>" if text else "<table:table-cell/>"
        for text in texts
    )


def sheet(name: str, *rows: str, style: str = "") -> str:
    made = "".join(f"<table:table-row>{row}</table:table-row>" for row in rows)
    return f'<table:table table:name="{name}" table:style-name="{style}">{made}</table:table>'


_EMPTY = (
    '<table:table-row table:number-rows-repeated="{}"><table:table-cell table:number-columns-repeated="16384"/>'
    "</table:table-row>"
)
_REPEATED = (
    '<table:table table:name="A"><table:table-row table:number-rows-repeated="{}">'
    '<table:table-cell table:number-columns-repeated="2"><text:p>7</text:p></table:table-cell>'
    "</table:table-row></table:table>"
)


def test_rows_of_sheets_have_their_numbers() -> None:
    row = f"<table:table-row>{cells('Rope', '', '47.5%')}</table:table-row>"
    costs = sheet("Costs", cells("Item", "", "Fee"), "GAP")
    costs = costs.replace("<table:table-row>GAP</table:table-row>", _EMPTY.format(40) + row + _EMPTY.format(1048534))
    made = flat("spreadsheet", costs + sheet("Empty", "") + sheet("More rows", cells("x")))
    assert made.text == "# Costs\n\nItem |  | Fee\nRope |  | 47.5%\n# More rows\n\nx\n"
    assert places(made) == ["Costs row 1", "Costs row 42", "More rows row 1"]


def test_cells() -> None:
    assert lines(flat("spreadsheet", _REPEATED.format(2))) == ["# A", "7 | 7", "7 | 7"]
    made = flat("spreadsheet", _REPEATED.format(5000))
    assert made.text.count("7 | 7") == 1000
    assert made.notes == ("repeated rows: 4000 not read",)
    row = (
        '<table:table-cell office:value-type="float" office:value="4.5"/>'
        '<table:table-cell office:value-type="date" office:date-value="2031-05-04"/>'
        "<table:table-cell><office:annotation><dc:creator>Bo</dc:creator><text:p>since May</text:p></office:annotation>"
        "<text:p>9</text:p></table:table-cell>"
    )
    assert lines(flat("spreadsheet", sheet("S", row))) == ["# S", "4.5 | 2031-05-04 | 9 [comment by Bo: since May]"]


def test_hidden_sheets_and_rows_are_named() -> None:
    style = '<style:style style:name="ta2"><style:table-properties table:display="false"/></style:style>'
    made = flat("spreadsheet", sheet("Shown", cells("a")) + sheet("Pay", cells("b"), style="ta2"), style)
    assert made.notes == ("hidden sheet 'Pay': read like those that are shown",)
    book = sheet("Pay", cells("a"), cells("b"))
    book = book.replace("<table:table-row>", '<table:table-row table:visibility="filter">').replace(
        "filter", "visible", 1
    )
    assert flat("spreadsheet", book).notes == ("hidden row 'Pay 2': read like those that are shown",)


def test_deleted_cells_are_left_out_and_charts_of_a_sheet_give_their_title() -> None:
    chart = _CHART.replace(f" {SPACES}", "").replace("document-content", "document")
    shapes = f"<table:shapes><draw:frame><draw:object>{chart}</draw:object></draw:frame></table:shapes>"
    gone = "<table:tracked-changes><table:deletion><text:p>old</text:p></table:deletion></table:tracked-changes>"
    row = f"<table:table-row>{cells('May', '9.1')}</table:table-row>"
    made = flat("spreadsheet", f'{gone}<table:table table:name="S">{shapes}{row}</table:table>')
    assert lines(made) == ["# S", "May | 9.1", "Landings"]


def frame(text: str, kind: str) -> str:
    box = f"<draw:text-box><text:p>{text}</text:p></draw:text-box>"
    return f'<draw:frame presentation:class="{kind}">{box}</draw:frame>'


def test_slides_have_titles_notes_and_tables() -> None:
    hidden = "<style:drawing-page-properties presentation:visibility='hidden'/>"
    table = f"<table:table><table:table-row>{cells('A', '', '3')}</table:table-row></table:table>"
    page = (
        f'<draw:page draw:name="p">{frame("Berths", "title")}'
        "<draw:g><draw:custom-shape><text:p>Oak pier</text:p></draw:custom-shape></draw:g>"
        f"<draw:frame>{table}<draw:image/></draw:frame>"
        f"<presentation:notes>{frame('Ask Maja', 'notes')}{frame('7', 'page-number')}</presentation:notes></draw:page>"
        '<draw:page draw:style-name="dp2"><draw:rect><text:p>Second</text:p></draw:rect></draw:page>'
    )
    made = flat("presentation", page, f'<style:style style:name="dp2">{hidden}</style:style>')
    assert lines(made) == ["# Berths", "Oak pier", "A |  | 3", "Ask Maja", "Second"]
    assert places(made) == ["slide 1", "slide 2"]
    assert made.notes == ("hidden slide 2: read like those that are shown",)
