"""Shapes of texts, slides and sheets: their text, tables, diagrams and charts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby, zip_longest
from xml.etree.ElementTree import Element

from kvtool.core.corpus.readers.document import table_row
from kvtool.core.corpus.readers.equations import linear
from kvtool.core.corpus.readers.ir import Cell, Piece, counter, image, integer, line, rows
from kvtool.core.corpus.readers.numberformats import GENERAL, shown
from kvtool.core.corpus.readers.openxml import Link, Package

_NUMBERS = {"alphaLc": "alpha", "alphaUc": "upper_alpha", "romanLc": "roman", "romanUc": "upper_roman"}
GRAPHICS = ("c-chart", "chart", "dgm-relIds")


def shape_texts(package: Package, links: Mapping[str, Link], shapes: Iterable[Element]) -> Iterator[str]:
    for shape in shapes:
        if shape.tag == "graphicFrame":
            for graphic in shape.iterfind("a-graphic/a-graphicData/*"):
                yield from graphic_texts(package, links, graphic)
        elif shape.tag == "AlternateContent":  # the first choice is for the newest programs
            yield from shape_texts(package, links, next((each for each in shape if len(each)), ()))
        elif shape.tag in ("grpSp", "absoluteAnchor", "oneCellAnchor", "twoCellAnchor"):
            yield from shape_texts(package, links, shape)
        elif shape.tag == "pic":
            described = shape.find("nvPicPr/cNvPr")
            yield from filter(None, [image("" if described is None else described.get("descr", ""))])
        elif (body := shape.find("txBody")) is not None:
            yield paragraphs(body)


def graphic_texts(package: Package, links: Mapping[str, Link], graphic: Element) -> Iterator[str]:
    link = links.get(graphic.get("dm") or graphic.get("id") or "") if graphic.tag in GRAPHICS else None
    part = package.part(link.name) if link else None
    if graphic.tag == "a-tbl":
        yield from rows(map(_cells, graphic.iterfind("a-tr")))
    elif link is not None and part is not None:
        try:
            yield from filter(None, map(paragraphs, part.iter("dgm-t")))
            yield from _chart_rows(part)
        except ValueError:  # a number that is none
            package.damaged.append(link.name)


def _cells(row: Element) -> Iterator[Cell]:
    for cell in row.iterfind("a-tc"):
        if not {cell.get("hMerge"), cell.get("vMerge")} & {"1", "true"}:
            body = cell.find("a-txBody")
            text = "" if body is None else paragraphs(body)
            yield text, integer(cell, "gridSpan", 1), integer(cell, "rowSpan", 1)


def paragraphs(body: Element) -> str:
    lines: list[str] = []
    counts: dict[int, int] = {}
    for each in body.iterfind("a-p"):
        level, number, text = integer(each.find("a-pPr"), "lvl"), each.find("a-pPr/a-buAutoNum"), line(_pieces(each))
        mark = "  " * level if text.strip() else ""
        if text.strip():
            counts = {key: count for key, count in counts.items() if key < level + (number is not None)}
        if number is not None and text.strip():
            counts[level] = counts.get(level, integer(number, "startAt", 1) - 1) + 1
            mark += counter(counts[level], _NUMBERS.get(number.get("type", "")[:7], "decimal")) + ". "
        lines.append(mark + text)
    return "\n".join(lines)


def _pieces(element: Element) -> Iterator[Piece]:
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


def _chart_rows(chart: Element) -> Iterator[str]:
    if title := " — ".join(filter(None, map(_words, (*chart.iter("c-title"), *chart.iter("title"))))):
        yield f"Chart: {title}"
    series = [
        (_words(each.find("c-tx")), _points(each, "c-cat", "c-xVal"), _points(each, "c-val", "c-yVal"))
        for each in chart.iter("c-ser")
    ]
    for categories, group in groupby(series, key=lambda each: each[1]):
        columns = [*group]
        yield table_row(("", *(name for name, _, _ in columns)))
        for index in sorted({*categories, *(index for _, _, points in columns for index in points)}):
            yield table_row((categories.get(index, ""), *(points.get(index, "") for _, _, points in columns)))
    for data in chart.iterfind("chartData/data"):  # of the kinds of charts since 2016
        levels = ([point.text or "" for point in level.iterfind("pt")] for level in data.iterfind("*/lvl"))
        yield from map(table_row, zip_longest(*levels, fillvalue=""))


def _words(element: Element | None) -> str:
    texts = () if element is None else (each.text or "" for each in element.iter() if each.tag in ("a-t", "c-v"))
    return " ".join("".join(texts).split())


def _points(series: Element, *names: str) -> dict[int, str]:
    points: dict[int, str] = {}
    for data in (found for name in names for found in series.iterfind(name)):
        code = next((each.text or "" for each in data.iter("c-formatCode")), GENERAL)
        for point in data.iter("c-pt"):
            index, text = int(point.get("idx", 0)), point.findtext("c-v") or ""
            with suppress(ValueError):
                text = shown(float(text), point.get("formatCode") or code)
            points[index] = f"{text} {points[index]}" if index in points else text
    return points
