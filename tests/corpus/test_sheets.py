"""Workbooks: what their cells show, where each row stands, and what lies on and beside the cells."""

from __future__ import annotations

import io
import re
import struct
import zipfile
from datetime import datetime
from pathlib import PurePath
from typing import Any

import pytest
from openpyxl import Workbook
from openpyxl.chart import BarChart
from openpyxl.comments import Comment
from openpyxl.utils.datetime import CALENDAR_MAC_1904, CALENDAR_WINDOWS_1900

from kvtool.core.corpus.readers import read_as
from kvtool.core.corpus.readers.document import Document, UnreadableFile
from kvtool.core.corpus.readers.office import shown
from tests.corpus.test_slides import MAIN, edited, saved
from tests.wording import refused


def read(data: bytes, ending: str = ".xlsx") -> Document:
    (document,) = read_as(PurePath(f"a{ending}"), f"a{ending}", data)
    return document


def rows(*cells: tuple[str, Any], title: str = "Costs") -> Workbook:
    book = Workbook()
    sheet: Any = book.active
    sheet.title = title
    for cell, value in cells:
        sheet[cell] = value
    return book


@pytest.mark.parametrize(
    ("value", "code", "text"),
    [
        (0.0825, "0.00%", "8.25%"),
        (-0.5, "0%", "-50%"),
        (1234567.885, "#,##0.00", "1,234,567.89"),
        (2.5, "0", "3"),
        (1.005, "0.00", "1.01"),
        (-1250.5, '"$"#,##0.00_);[Red]\\("$"#,##0.00\\)', "($1,250.50)"),
        (1250.5, "#,##0.00\\ [$€-407]", "1,250.50 €"),
        (0, '#,##0;-#,##0;"none"', "none"),
        (1.5, "[h]:mm", "36:00"),
        (47911.75, "yyyy-mm-dd hh:mm:ss", "2031-03-04 18:00:00"),
        (12, '0" kg"', "12 kg"),
        ("oak", '"Wood: "@', "Wood: oak"),
        (150, '[>=100]"many";"few"', "many"),
        (0.30000000000000004, "General", "0.3"),
        (123456789012, "General", "123456789012"),
        (50, '0"%"', "50%"),
        (float("inf"), "yyyy-mm-dd h:mm", "INF"),
        (47911.75, "dd.mm.yyyy", "04.03.2031"),
        (47911.75, "[$-407]d.m.yy h.mm;@", "4.3.31 18.00"),
        (47911.75, "dddd, d. mmmm yyyy", "Tuesday, 4. March 2031"),
        (47911.75, "yyyy.mm.dd. hh.mm.ss.000", "2031.03.04. 18.00.00.000"),
        (1.5, "[h].mm", "36.00"),
        (1.5, "[ss].0", "129600.0"),
        (47911, '[$-411]ggge"年"m"月"d"日"(aaa)', "2031年3月4日(Tue)"),
        (-4, "General;[Red]-General", "-4"),
        (-4, 'General" m"', "-4 m"),
        (-1500, '[>=1000000]0.0,,"M";[>=1000]0.0,"k";0', "-1500"),
        (-1500, '[<-1000]0.0,"k";0', "-1.5k"),
        (-5, "[>100]0.0;0", "-5"),
        (-5, "[>=100](0.0);(0)", "(5)"),
        (-5, '[>10]"high";"low"', "low"),
        (-5, "[<0]0.0;0", "5.0"),
        (1350, '"CHF "#,##0.-', "CHF 1,350.-"),
        (5, '0" No. "', "5 No."),
        ("oak", '0;0;0;@" A."', "oak A."),
        (42, ";;;", "42"),  # hidden from the eye, not from the reader
        (-5, "yyyy-mm-dd", "-5"),
        (3e6, "yyyy-mm-dd", "3000000"),
        (1e300, "#,##0", "1E+300"),
    ],
)
def test_values_are_written_as_excel_shows_them(value: float | str, code: str, text: str) -> None:
    assert " ".join(shown(value if isinstance(value, str) else float(value), code).split()) == text


def test_cells_show_dates_shares_flags_and_errors() -> None:
    book = rows(("A1", datetime(2031, 3, 4)), ("B1", 0.25), ("C1", True), ("D1", "#N/A"), ("E1", 14))
    book["Costs"]["A1"].number_format, book["Costs"]["B1"].number_format = "mmmm d, yyyy", "0%"
    book["Costs"]["D1"].data_type = "e"
    assert read(saved(book)).text == "# Costs\nMarch 4, 2031 | 25% | TRUE | #N/A | 14\n"


@pytest.mark.parametrize(("code", "epoch"), [("mm-dd-yy", CALENDAR_WINDOWS_1900), ("yyyy-mm-dd", CALENDAR_MAC_1904)])
def test_dates_are_written_in_the_order_of_the_standard(code: str, epoch: datetime) -> None:
    book = rows(("A1", datetime(2031, 3, 4)))
    book.epoch, book["Costs"]["A1"].number_format = epoch, code  # the first is what openpyxl calls format 14
    assert "2031-03-04" in read(saved(book)).text


def test_rows_keep_their_numbers_and_cells_their_columns() -> None:
    document = read(saved(rows(("C5", "Tree"), ("D5", "Jan"), ("E5", "Feb"), ("C9", "Alder"), ("E9", 7))))
    assert document.text == "# Costs\nTree | Jan | Feb\nAlder |  | 7\n"
    assert [mark.place for mark in document.marks] == ["Costs row 5", "Costs row 9"]
    assert document.text[document.marks[1].start :] == "Alder |  | 7\n"

    def bare(text: str) -> str:
        return f'<c t="inlineStr"><is><t>{text}</t></is></c>'

    sheet = f"<sheetData><row>{bare('oak')}{bare('ash')}</row><row/><row><c/>{bare('elm')}</row></sheetData>"
    document = read(edited(saved(rows(("A1", 1))), "xl/worksheets/sheet1.xml", lambda text: _with_data(text, sheet)))
    assert document.text == "# Costs\noak | ash\n | elm\n"
    assert [mark.place for mark in document.marks] == ["Costs row 1", "Costs row 3"]
    document = read(saved(rows(("A1", "first"), ("XFD1", "wide"), ("XFD1048576", "last"))))
    assert document.text == "# Costs\nfirst |  | wide\n |  | last\n"
    assert document.marks[-1].place == "Costs row 1048576"


def _with_data(text: str, sheet: str) -> str:
    return text[: text.index("<sheetData>")] + sheet + text[text.index("</sheetData>") + len("</sheetData>") :]


def test_merged_labels_stand_in_each_row_and_column_and_titles_once() -> None:
    cells = [
        *(("A1", "Place"), ("B1", "Rain"), ("B2", "Jan"), ("C2", "Feb"), ("A3", "Oslo"), ("B3", 1), ("C3", 2)),
        ("B4", 3),
    ]
    book = rows(*cells)
    for merged in ("B1:C1", "A3:A4", "A1:A2"):
        book["Costs"].merge_cells(merged)
    assert read(saved(book)).text == "# Costs\nPlace | Rain | Rain\nPlace | Jan | Feb\nOslo | 1 | 2\nOslo | 3\n"
    book = rows(("A1", "All costs"), ("A2", "oak"), ("B2", 1), ("C2", 2))
    book["Costs"].merge_cells("A1:C1")
    assert read(saved(book)).text == "# Costs\nAll costs\noak | 1 | 2\n"


def test_overlapping_merged_cells_take_no_time() -> None:
    book = rows(*((f"{column}{row}", "x") for column in "ABC" for row in range(1, 101)))
    many = "<mergeCells>" + '<mergeCell ref="A1:XFD1048576"/>' * 50_000 + "</mergeCells>"
    sheet = "xl/worksheets/sheet1.xml"
    data = edited(saved(book), sheet, lambda text: text.replace("<pageMargins", f"{many}<pageMargins"))
    assert read(data).text.count("x") == 300


def test_formulas() -> None:
    document = read(saved(rows(("A1", 2), ("A2", 3), ("A3", "=SUM(A1:A2)"))))
    assert "=SUM(A1:A2) (not calculated)" in document.text
    assert document.notes == ("formulas without a saved value: 1, read as formulas",)

    def calculated(text: str) -> str:
        return re.sub(r"(SUM\(A1:A2\)</f>)<v(?:></v>| ?/>)", r"\1<v>5</v>", text)

    data = edited(saved(rows(("A1", 2), ("A2", 3), ("A3", "=SUM(A1:A2)"))), "xl/worksheets/sheet1.xml", calculated)
    assert read(data).text == "# Costs\n2\n3\n5\n"


def _with_strings(strings: str, *cells: str) -> bytes:
    """Write a workbook whose cells refer to a table of strings."""
    sheet = "".join(f'<row r="{number}">{cell}</row>' for number, cell in enumerate(cells, 1))
    sheet = f"<sheetData>{sheet}</sheetData>"
    data = edited(saved(rows(("A1", 0))), "xl/worksheets/sheet1.xml", lambda text: _with_data(text, sheet))
    data = edited(data, "xl/sharedStrings.xml", lambda text: f'<sst xmlns="s">{strings}</sst>' if strings else "<sst")
    row = '<Relationship Id="s" Type="x/sharedStrings" Target="/xl/sharedStrings.xml"/></Relationships>'
    return edited(data, "xl/_rels/workbook.xml.rels", lambda text: re.sub("</Relationships>", row, text))


def test_strings_keep_their_runs_and_lose_their_readings() -> None:
    runs = "<si><r><t>10</t></r><r><rPr><vertAlign val='superscript'/></rPr><t>6</t></r><r><t> l_x000D_</t></r></si>"
    readings = "<si><t>灯台</t><rPh sb='0' eb='2'><t>とうだい</t></rPh></si>"
    data = _with_strings(runs + readings, '<c t="s"><v>0</v></c>', '<c t="s"><v>1</v></c>')
    assert read(data).text == "# Costs\n10^6 l\n灯台\n"


def test_comments_stand_after_their_row_with_cell_and_author() -> None:
    book = rows(("A1", "Berth"), ("B1", "Depth"), ("A2", "C4"), ("B2", 5.5))
    book["Costs"]["B2"].comment = Comment("Measured at\nlow tide", "Ines")
    book["Costs"]["D9"].comment = Comment("Nothing here", "Ines")
    document = read(saved(book))
    assert "C4 | 5.5\n[comment on B2 by Ines: Measured at low tide]\n" in document.text
    assert document.text.endswith("[comment on D9 by Ines: Nothing here]\n")
    assert document.marks[-1].place == "Costs row 9"


def test_discussions_are_read_once_with_their_authors() -> None:
    book = rows(("A1", "Depth"))
    book["Costs"]["A1"].comment = Comment("[Threaded comment] Your version of Excel ...", "tc=1")
    people = '<personList xmlns="t"><person displayName="Ines Moe" id="{P}"/></personList>'
    comment = '<threadedComment ref="A1" personId="{{P}}"><text>{}</text></threadedComment>'
    said = f'<Said xmlns="t">{comment.format("Which tide?")}{comment.format("Low.")}</Said>'
    data = _linked(saved(book), "xl/_rels/workbook.xml.rels", "person", "/xl/persons/person.xml", people)
    data = _linked(data, "xl/worksheets/_rels/sheet1.xml.rels", "threadedComment", "/xl/threadedComments/1.xml", said)
    expected = "# Costs\nDepth\n[comment on A1 by Ines Moe: Which tide?]\n[comment on A1 by Ines Moe: Low.]\n"
    assert read(data).text == expected


def _linked(data: bytes, rels: str, kind: str, part: str, content: str) -> bytes:
    row = f'<Relationship Id="x{kind}" Type="http://r/{kind}" Target="{part}"/></Relationships>'
    data = edited(data, rels, lambda text: text.replace("</Relationships>", row))
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(part[1:], content)
    return buffer.getvalue()


_CHART = """<c:chartSpace xmlns:c="http://schemas.openxmlformats.org/drawingml/2006/chart" xmlns:a="{a}"><c:chart>
<c:title><c:tx><c:rich><a:p><a:r><a:t>Catch </a:t></a:r><a:r><a:t>by year</a:t></a:r></a:p></c:rich></c:tx></c:title>
<c:plotArea><c:barChart>{series}</c:barChart><c:catAx><c:title><c:tx><c:rich><a:p><a:r><a:t>Year</a:t></a:r></a:p>
</c:rich></c:tx></c:title></c:catAx></c:plotArea></c:chart></c:chartSpace>"""
_LEVELS = """<c:ser><c:cat><c:multiLvlStrRef><c:multiLvlStrCache><c:lvl><c:pt idx="0"><c:v>oak</c:v></c:pt>
<c:pt idx="1"><c:v>elm</c:v></c:pt></c:lvl><c:lvl><c:pt idx="0"><c:v>North</c:v></c:pt></c:lvl></c:multiLvlStrCache>
</c:multiLvlStrRef></c:cat><c:val><c:numLit><c:pt idx="0"><c:v>4</c:v></c:pt><c:pt idx="1"><c:v>5</c:v></c:pt>
</c:numLit></c:val></c:ser>"""


def test_charts_are_tables_with_titles_and_categories() -> None:
    book = rows(("A1", "sea"))
    book.create_chartsheet("Plot").add_chart(BarChart())
    data = edited(saved(book), "xl/charts/chart1.xml", lambda text: _CHART.format(a=MAIN, series=_LEVELS))
    document = read(data)
    assert document.text == "# Costs\nsea\n# Plot\nChart: Catch by year — Year\nNorth oak | 4\nelm | 5\n"
    assert [mark.place for mark in document.marks] == ["Costs row 1", "Plot"]


def test_text_boxes_of_a_sheet_are_read_by_paragraphs() -> None:
    first = "<a:p><a:r><a:t>Mind</a:t></a:r><a:r><a:t> the gap</a:t></a:r></a:p><a:p><a:r><a:t>Second</a:t></a:r></a:p>"
    drawing = f"""<wsDr xmlns="d" xmlns:a="{MAIN}"><twoCellAnchor><grpSp><sp><txBody>{first}</txBody></sp></grpSp>
    </twoCellAnchor></wsDr>"""
    book = rows(("A1", "sea"))
    book["Costs"].add_chart(BarChart())
    data = edited(saved(book), "xl/drawings/drawing1.xml", lambda text: drawing)
    assert read(data).text == "# Costs\nsea\nMind the gap\nSecond\n"


def test_margins_of_printed_pages_are_read_without_their_controls() -> None:
    book = rows(("A1", "sea"))
    book["Costs"].oddHeader.left.text = book["Costs"].evenHeader.left.text = "Draft of May"
    book["Costs"].oddFooter.center.text = "Page &P of &N"
    assert read(saved(book)).text == "# Costs\nsea\nDraft of May\n"


def test_hidden_sheets_rows_and_columns_are_read_and_named() -> None:
    book = rows(("A1", "oak"), ("B1", "elm"), ("A2", "ash"))
    book["Costs"].row_dimensions[2].hidden = True
    book["Costs"].column_dimensions["B"].hidden = True
    for title, state in (("Pay", "hidden"), ("Deep", "veryHidden"), ("Bare", "hidden")):
        book.create_sheet(title).sheet_state = state
    book["Pay"]["A1"] = book["Deep"]["A1"] = "yew"
    document = read(saved(book))
    assert document.text == "# Costs\noak | elm\nash\n# Pay\nyew\n# Deep\nyew\n"
    assert document.notes == (
        "hidden sheets 'Pay', 'Deep': read like those that are shown",
        "hidden row 'Costs 2': read like those that are shown",
        "hidden column 'Costs B': read like those that are shown",
    )


def test_what_is_not_read_is_counted() -> None:
    data = _linked(saved(rows(("A1", "sea"))), "xl/_rels/workbook.xml.rels", "styles2", "/xl/none.xml", "<a/>")
    row = '<Relationship Id="o" Type="http://x/relationships/oleObject" Target="../e/1.bin"/>'
    rels = f'<Relationships xmlns="r">{row}</Relationships>'
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("xl/worksheets/_rels/sheet1.xml.rels", rels)
    assert read(buffer.getvalue()).notes == ("embedded files: 1 not read",)
    text_box = struct.pack("<HHHHHHH", 0x1B6, 18, 0, 0, 0, 0, 0) + struct.pack("<HHI", 5, 16, 0)
    chart = struct.pack("<HHHHHHII", 0x809, 16, 0x600, 0x20, 0, 0, 0, 0)
    document = read(_old_book() + text_box + chart + "MBD0012".encode("utf-16-le"), ".xls")
    assert document.notes == ("embedded files: 1, charts: 1, text boxes: 1 not read",)


@pytest.mark.parametrize("ending", [".xltx", ".xlsm", ".xltm", ".xls"])
def test_workbooks_are_read_by_their_content_whatever_their_ending(ending: str) -> None:
    data = saved(rows(("A1", "sea"))).replace(b"sheet.main+xml", b"template.main+xml")
    assert read(data, ending).text == "# Costs\nsea\n"


def test_damaged_and_missing_parts() -> None:
    book = rows(("A1", "sea"), ("A2", "lake"))
    book.create_sheet("Later")["A1"] = "river"
    book.create_sheet("Gone")["A1"] = "pond"
    data = edited(saved(book), "xl/worksheets/sheet1.xml", lambda text: text[: text.index('<row r="2"') + 20])
    data = edited(data, "xl/worksheets/sheet3.xml", lambda text: text, "xl/elsewhere.xml")
    document = read(data)
    assert document.text == "# Costs\nsea\n# Later\nriver\n"
    assert [note.split(":")[0] for note in document.notes] == ["damaged sheet 'Costs'", "damaged sheet 'Gone'"]
    data = _with_strings("", '<c s="1"><v>0.5</v></c><c t="s"><v>0</v></c>')
    document = read(edited(data, "xl/styles.xml", lambda text: text[:20]))
    assert document.text == "# Costs\n0.5\n"
    assert document.notes == ("damaged sheet 'Costs': not all of it is read",)


def test_refused_workbooks() -> None:
    data = edited(saved(rows(("A1", "sea"))), "xl/worksheets/sheet1.xml", lambda text: "<worksheet")
    with refused(UnreadableFile):
        read(data)
    with refused(UnreadableFile):
        read(b"version https://git-lfs.github.com/spec/v1\n", ".xlsx")
    head = _record(0x409, struct.pack("<HHH", 0, 0x10, 0)) + _record(0x2F, bytes(4))
    with refused(UnreadableFile):
        read(head + _record(10, b""), ".xls")


def _record(kind: int, body: bytes) -> bytes:
    return struct.pack("<HH", kind, len(body)) + body


def _old_book() -> bytes:
    """Write a workbook of Excel 4, with formats of its own."""

    def text(row: int, column: int, written: str) -> bytes:
        return _record(0x204, struct.pack("<HHHH", row, column, 0, len(written)) + written.encode("latin-1"))

    def number(row: int, column: int, value: float, style: int) -> bytes:
        return _record(0x203, struct.pack("<HHHd", row, column, style, value))

    formats = [_record(0x41E, b"\0\0" + bytes([len(code)]) + code) for code in (b"General", b"0.0%", b"[h]:mm")]
    styles = [_record(0x443, bytes([0, each]) + b"\1" + bytes(9)) for each in range(3)]
    fonts = [_record(0x231, struct.pack("<HHH", 200, 0, 0x7FFF) + b"\5Arial")] * 4
    cells = [text(2, 1, "Share"), text(2, 2, "Run"), number(3, 1, 0.475, 1), number(3, 2, 1.5, 2)]
    cells += [_record(0x205, struct.pack("<HHHBB", 5, *each)) for each in ((2, 0, 7, 1), (1, 0, 1, 0))]
    head = _record(0x409, struct.pack("<HHH", 0, 0x10, 0))
    return b"".join([head, *fonts, *formats, *styles, *cells, _record(10, b"")])


@pytest.mark.parametrize("ending", [".xls", ".xlt", ".xlsx"])
def test_old_workbooks_show_values_under_their_headings(ending: str) -> None:
    document = read(_old_book(), ending)
    assert document.text == "# Sheet 1\nShare | Run\n47.5% | 36:00\nTRUE | #DIV/0!\n"
    assert [mark.place for mark in document.marks] == ["Sheet 1 row 3", "Sheet 1 row 4", "Sheet 1 row 6"]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"<html><table><tr><td>oak<td>5</table></html>", "oak | 5"),
        (b"Tree;Age\noak;5\n", "Tree;Age\noak;5\n"),
        ("Tree\tAge\r\neiche\t5\r\n".encode("utf-16"), "eiche\t5"),
    ],
)
def test_reports_under_the_name_of_a_workbook_are_read_as_what_they_are(data: bytes, text: str) -> None:
    assert text in read(data, ".xls").text
