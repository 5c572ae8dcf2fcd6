"""Presentations: what each slide shows, in the order of the file, with its notes and comments."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import pytest
from pptx import Presentation
from pptx.chart.data import CategoryChartData, XyChartData
from pptx.enum.chart import XL_CHART_TYPE
from pptx.util import Inches

from kvtool.core.corpus.readers import read_as
from kvtool.core.corpus.readers.document import Document, UnreadableFile
from tests.wording import refused

MAIN = "http://schemas.openxmlformats.org/drawingml/2006/main"
_BOX = (0, 0, Inches(4), Inches(3))


def edited(data: bytes, name: str, change: Callable[[str], str], renamed: str = "") -> bytes:
    """Change a part of a file, or add it if there is none; give it another name if asked to."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for each in old.namelist():
            if each != name:
                new.writestr(each, old.read(each))
        new.writestr(renamed or name, change(old.read(name).decode() if name in old.namelist() else ""))
    return buffer.getvalue()


def diagram_point(text: str) -> str:
    names = f'xmlns:m="http://x/diagram" xmlns:a="{MAIN}"'
    return f"<m:pt {names}><m:t><a:p><a:r><a:t>{text}</a:t></a:r></a:p></m:t></m:pt>"


def deck(count: int = 1, layout: int = 5) -> Any:
    made = Presentation()
    for number in range(1, count + 1):
        slide = made.slides.add_slide(made.slide_layouts[layout])
        if slide.shapes.title is not None:
            slide.shapes.title.text = f"Berth {number}"
    return made


def saved(made: Any) -> bytes:
    buffer = io.BytesIO()
    made.save(buffer)
    return buffer.getvalue()


def read(data: bytes, ending: str = ".pptx") -> Document:
    (document,) = read_as(PurePath(f"a{ending}"), f"a{ending}", data)
    return document


def test_shapes_are_read_in_the_order_of_the_file_with_groups_opened() -> None:
    made = deck()
    shapes = made.slides[0].shapes
    shapes.add_textbox(0, Inches(5), *_BOX[2:]).text_frame.text = "low but first"
    group = shapes.add_group_shape()
    group.shapes.add_textbox(*_BOX).text_frame.text = "in a group"
    group.shapes.add_group_shape().shapes.add_textbox(*_BOX).text_frame.text = "deeper"
    shapes.add_textbox(*_BOX).text_frame.text = "high but last\nof all"
    text = "# Berth 1\n\nlow but first\nin a group\ndeeper\nhigh but last\nof all\n"
    assert read(saved(made)).text == text


def test_levels_are_indented_and_numbers_counted() -> None:
    made = deck(layout=1)
    frame = made.slides[0].placeholders[1].text_frame
    frame.text = "Moor\nat noon\nPay\nLeave"
    frame.paragraphs[1].level = 1
    for number in (0, 2, 3):
        properties = frame.paragraphs[number]._p.get_or_add_pPr()
        properties.append(properties.makeelement(f"{{{MAIN}}}buAutoNum", {"type": "romanUcPeriod"}))
    assert read(saved(made)).text == "# Berth 1\n\nI. Moor\n  at noon\nII. Pay\nIII. Leave\n"


def test_raised_characters_are_marked() -> None:
    made = deck()
    paragraph = made.slides[0].shapes.add_textbox(*_BOX).text_frame.paragraphs[0]
    paragraph.add_run().text = "Depth 10"
    raised = paragraph.add_run()
    raised.text = "3"
    raised.font._element.set("baseline", "30000")
    assert "Depth 10^3" in read(saved(made)).text


def test_merged_cells_of_a_table_repeat_their_text_and_empty_ones_their_column() -> None:
    made = deck()
    table = made.slides[0].shapes.add_table(3, 3, *_BOX).table
    for row, column, text in [
        *((0, 0, "Place"), (0, 1, "Rain"), (1, 1, "Jan"), (1, 2, "Feb"), (2, 0, "Oslo"), (2, 2, "7"))
    ]:
        table.cell(row, column).text = text
    table.cell(0, 1).merge(table.cell(0, 2))
    table.cell(0, 0).merge(table.cell(1, 0))
    assert "Place | Rain | Rain\nPlace | Jan | Feb\nOslo |  | 7\n" in read(saved(made)).text


def test_charts_are_tables() -> None:
    made = deck()
    data = CategoryChartData(number_format="0.0")
    data.categories = ["spring", "late, wet autumn"]
    data.add_series("Herring", (311, 4.4000000000000004))
    data.add_series("Cod", (9, None))
    chart = made.slides[0].shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, *_BOX, data).chart
    chart.has_title = True
    chart.chart_title.text_frame.text = "Catch"
    document = read(saved(made))
    assert "Chart: Catch\n | Herring | Cod\nspring | 311.0 | 9.0\nlate, wet autumn | 4.4\n" in document.text
    assert document.notes == ()  # the workbook behind the chart holds nothing else
    made = deck()
    data = XyChartData()
    for name, points in (("north", ((1, 2), (3, 4))), ("south", ((5, 6),))):
        series = data.add_series(name)
        for x, y in points:
            series.add_data_point(x, y)
    made.slides[0].shapes.add_chart(XL_CHART_TYPE.XY_SCATTER, *_BOX, data)
    assert " | north\n1 | 2\n3 | 4\n | south\n5 | 6\n" in read(saved(made)).text


def test_diagrams_are_read_where_they_stand() -> None:
    relation = '<x:relIds xmlns:x="http://x/diagram" x:dm="dg"/>'
    frame = f"<p:graphicFrame><a:graphic><a:graphicData>{relation}</a:graphicData></a:graphic></p:graphicFrame>"
    made = deck()
    made.slides[0].shapes.add_textbox(*_BOX).text_frame.text = "before"
    data = edited(saved(made), "ppt/slides/slide1.xml", lambda text: text.replace("</p:spTree>", f"{frame}</p:spTree>"))
    row = '<Relationship Id="dg" Type="x/diagramData" Target="../diagrams/data1.xml"/></Relationships>'
    data = edited(data, "ppt/slides/_rels/slide1.xml.rels", lambda text: text.replace("</Relationships>", row))
    points = "".join(map(diagram_point, ("Harbour master", "Pilot")))
    data = edited(data, "ppt/diagrams/data1.xml", lambda text: f"<dataModel>{points}</dataModel>")
    assert read(data).text == "# Berth 1\n\nbefore\nHarbour master\nPilot\n"


def test_what_stands_for_newer_shapes_in_older_programs_is_not_read_twice() -> None:
    choice = "<mc:Choice><p:sp><p:txBody><a:p><a:r><a:t>new</a:t></a:r></a:p></p:txBody></p:sp></mc:Choice>"
    fallback = choice.replace("Choice", "Fallback").replace("new", "old")
    for first, shown in ((choice, "new"), ("<mc:Choice/>", "old")):
        shape = f"<mc:AlternateContent xmlns:mc='mc'>{first}{fallback}</mc:AlternateContent></p:spTree>"
        data = edited(saved(deck()), "ppt/slides/slide1.xml", lambda text, end=shape: text.replace("</p:spTree>", end))
        assert read(data).text == f"# Berth 1\n\n{shown}\n"


def test_notes_and_comments_follow_their_slide() -> None:
    made = deck(2)
    made.slides[0].notes_slide.notes_text_frame.text = "Say it slowly."
    data = saved(made)
    row = '<Relationship Id="cm" Type="x/{}" Target="{}"/></Relationships>'
    comments = row.format("comments", "../comments/comment1.xml")
    data = edited(data, "ppt/slides/_rels/slide1.xml.rels", lambda text: text.replace("</Relationships>", comments))
    authors = row.format("authors", "authors.xml")
    data = edited(data, "ppt/_rels/presentation.xml.rels", lambda text: text.replace("</Relationships>", authors))
    data = edited(
        data, "ppt/authors.xml", lambda text: "<authorLst xmlns='a'><author id='7' name='Ines Moe'/></authorLst>"
    )
    said = f"<txBody><a:p xmlns:a='{MAIN}'><a:r><a:t>{{}}</a:t></a:r></a:p></txBody>"
    reply = f"<replyLst><reply authorId='8'>{said.format('In May.')}</reply></replyLst>"
    cm = f"<cmLst xmlns='c'><cm authorId='7'>{reply}{said.format('When?')}</cm></cmLst>"
    data = edited(data, "ppt/comments/comment1.xml", lambda text: cm)
    expected = "# Berth 1\n\nSay it slowly.\n[comment by Ines Moe: When?]\n[comment by unknown: In May.]\n\n# Berth 2\n"
    document = read(data)
    assert document.text == expected
    assert [mark.place for mark in document.marks] == ["slide 1", "slide 2"]


@pytest.mark.parametrize("ending", [".ppsx", ".potx", ".pptm", ".ppsm", ".potm"])
def test_shows_and_templates_are_read(ending: str) -> None:
    kind = {"s": "slideshow", "t": "template"}.get(ending[3], "presentation")
    data = edited(saved(deck()), "[Content_Types].xml", lambda text: text.replace("presentation.main", f"{kind}.main"))
    assert read(data, ending).text == "# Berth 1\n"


def test_hidden_slides_and_embedded_files_are_noted() -> None:
    made = deck(3)
    made.slides[1].element.set("show", "0")
    document = read(saved(made))
    assert "# Berth 2\n" in document.text
    assert document.notes == ("hidden slide 2: read like those that are shown",)
    made = deck()
    made.slides[0].shapes.add_ole_object(io.BytesIO(b"PK"), "Package", 0, 0)
    assert read(saved(made)).notes == ("embedded files: 1 not read",)


def test_damaged_slides() -> None:
    data = edited(saved(deck(3)), "ppt/slides/slide2.xml", lambda text: text[: len(text) // 2])
    document = read(data)
    assert document.text == "# Berth 1\n\n# Berth 3\n"
    assert [mark.place for mark in document.marks] == ["slide 1", "slide 3"]
    assert document.notes == ("damaged slide 2: not all of it is read",)
    with refused(UnreadableFile):
        read(edited(saved(deck()), "ppt/slides/slide1.xml", lambda text: "<p:sld"))
    with pytest.raises(UnreadableFile):
        read(b"\xd0\xcf\x11\xe0" + bytes(600), ".ppt")


def test_a_damaged_chart_leaves_the_rest_of_its_slide() -> None:
    made = deck(2)
    data = CategoryChartData()
    data.categories = ["spring"]
    data.add_series("Herring", (311,))
    made.slides[0].shapes.add_chart(XL_CHART_TYPE.PIE, *_BOX, data)
    part = next(name for name in zipfile.ZipFile(io.BytesIO(saved(made))).namelist() if "charts/chart" in name)
    document = read(edited(saved(made), part, lambda text: text.replace('pt idx="0"', 'pt idx="?"')))
    assert document.text == "# Berth 1\n\n# Berth 2\n"
    assert document.notes == ("damaged slide 1: not all of it is read",)
