"""Shapes of slides and sheets: their text, tables, diagrams and charts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, zip_longest
from xml.etree.ElementTree import Element

from kvtool.core.corpus.readers.document import table_row
from kvtool.core.corpus.readers.equations import linear
from kvtool.core.corpus.readers.ir import counter, image, line
from kvtool.core.corpus.readers.numberformats import GENERAL, shown
from kvtool.core.corpus.readers.openxml import Link, Package

_NUMBERS = {"alphaLc": "alpha", "alphaUc": "upper_alpha", "romanLc": "roman", "romanUc": "upper_roman"}
_YES = ("1", "true")


def shape_texts(package: Package, links: Mapping[str, Link], shapes: Iterable[Element]) -> Iterator[str]:
    """Yield the text of each shape, in the order of the file; groups are opened.

    Parameters
    ----------
    links : those of the part that holds the shapes.
    """
    for shape in shapes:
        if shape.tag == "graphicFrame":
            yield from _graphic_texts(package, links, shape)
        elif shape.tag == "AlternateContent":  # the first choice is for the newest programs
            yield from shape_texts(package, links, shape[0] if len(shape) else ())
        elif shape.tag in ("grpSp", "absoluteAnchor", "oneCellAnchor", "twoCellAnchor"):
            yield from shape_texts(package, links, shape)
        elif shape.tag == "pic":
            described = shape.find("nvPicPr/cNvPr")
            yield from filter(None, [image("" if described is None else described.get("descr", ""))])
        elif (body := shape.find("txBody")) is not None:
            yield paragraphs(body)


def _graphic_texts(package: Package, links: Mapping[str, Link], frame: Element) -> Iterator[str]:
    for graphic in frame.iterfind("a-graphic/a-graphicData/*"):
        part = None
        if link := links.get(graphic.get("dm") or graphic.get("id") or ""):
            part = package.part(link.name) if graphic.tag in ("c-chart", "chart", "dgm-relIds") else None
        if graphic.tag == "a-tbl":
            yield from _table_rows(graphic)
        elif part is not None and graphic.tag == "dgm-relIds":
            yield from filter(None, map(paragraphs, part.iter("dgm-t")))
        elif part is not None:
            yield from chart_rows(part)


def _table_rows(table: Element) -> Iterator[str]:
    """Yield a table's rows; merged cells repeat their text."""
    above: list[str] = []
    for row in table.iterfind("a-tr"):
        cells: list[str] = []
        for cell in row.iterfind("a-tc"):
            body = cell.find("a-txBody")
            if cell.get("hMerge") in _YES and cells:
                cells.append(cells[-1])
            elif cell.get("vMerge") in _YES and len(cells) < len(above):
                cells.append(above[len(cells)])
            else:
                cells.append("" if body is None else paragraphs(body))
        yield table_row(cells)
        above = cells


def paragraphs(body: Element) -> str:
    """Join the paragraphs of a shape or cell, lower levels indented, with their automatic numbers."""
    lines: list[str] = []
    counts: dict[int, int] = {}
    for each in body.iterfind("a-p"):
        properties, number, level = each.find("a-pPr"), each.find("a-pPr/a-buAutoNum"), 0
        if properties is not None and properties.get("lvl", "").isdecimal():
            level = int(properties.get("lvl", 0))
        text, mark = line(_pieces(each)), ""
        if text.strip():
            counts = {
                key: count for key, count in counts.items() if key < level or (key == level and number is not None)
            }
            if number is not None:
                counts[level] = counts.get(level, int(number.get("startAt", 1)) - 1) + 1
                mark = counter(counts[level], _NUMBERS.get(number.get("type", "")[:7], "decimal")) + ". "
            mark = "  " * level + mark
        lines.append(mark + text)
    return "\n".join(lines)


def _pieces(element: Element) -> Iterator[tuple[str, str]]:
    """Yield the texts of a paragraph with their positions."""
    for child in element:
        if child.tag in ("a-r", "a-fld"):
            properties = child.find("a-rPr")
            raised = "" if properties is None else properties.get("baseline", "").strip("0%")
            position = "subscript" if raised.startswith("-") else "superscript" if raised else ""
            yield child.findtext("a-t") or "", position
        elif child.tag in ("a-br", "m-oMath", "m-oMathPara"):
            yield "\n" if child.tag == "a-br" else linear(child), ""
        elif child.tag != "Fallback":
            yield from _pieces(child)


def chart_rows(chart: Element) -> Iterator[str]:
    """Yield a chart's titles, and its values as tables: a row for each category, a column for each series."""
    if title := " — ".join(filter(None, map(_words, (*chart.iter("c-title"), *chart.iter("title"))))):
        yield f"Chart: {title}"
    series = []
    for each in chart.iter("c-ser"):
        category, value = _first(each, "c-cat", "c-xVal"), _first(each, "c-val", "c-yVal")
        name = each.find("c-tx")
        series.append((_words(name), _points(category), _points(value)))
    for categories, group in groupby(series, key=lambda each: each[1]):
        columns = [*group]
        yield table_row(("", *(name for name, _, _ in columns)))
        for index in sorted({*categories, *(index for _, _, points in columns for index in points)}):
            yield table_row((categories.get(index, ""), *(points.get(index, "") for _, _, points in columns)))
    for data in chart.iterfind("chartData/data"):  # of the kinds of charts since 2016
        levels = ([point.text or "" for point in level.iterfind("pt")] for level in data.iterfind("*/lvl"))
        yield from map(table_row, zip_longest(*levels, fillvalue=""))


def _first(element: Element, *names: str) -> Element | None:
    return next((found for name in names if (found := element.find(name)) is not None), None)


def _words(element: Element | None) -> str:
    """Return the text of a title or of a series' name, written or taken from cells."""
    texts = () if element is None else (each.text or "" for each in element.iter() if each.tag in ("a-t", "c-v"))
    return " ".join("".join(texts).split())


def _points(data: Element | None) -> dict[int, str]:
    """Return the values that are saved with a series, by their index; of categories in levels, all levels."""
    points: dict[int, str] = {}
    levels = [] if data is None else [*data.iter("c-lvl")] or [data]
    for level in levels:
        code = next((each.text or "" for each in level.iter("c-formatCode")), GENERAL)
        texts, before = {int(point.get("idx", 0)): point.findtext("c-v") or "" for point in level.iter("c-pt")}, ""
        for index in points or texts:
            before = texts.get(index, before)
            points[index] = f"{before} {points[index]}" if index in points else _number(before, code)
    return points


def _number(value: str, code: str) -> str:
    try:
        return shown(float(value), code)
    except ValueError:
        return value
