"""Parts of Open XML files, Strict or not: what refers to what, and the text of shapes, tables, diagrams and charts."""

from __future__ import annotations

import posixpath
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby, zip_longest
from xml.etree.ElementTree import Element

from kvtool.core.corpus.readers.containers import parsed
from kvtool.core.corpus.readers.document import UnreadableFile, table_row
from kvtool.core.corpus.readers.ir import counter, line
from kvtool.core.corpus.readers.numberformats import GENERAL, shown

_NUMBERS = {"alphaLc": "alpha", "alphaUc": "upper_alpha", "romanLc": "roman", "romanUc": "upper_roman"}
Links = Mapping[str, tuple[str, str]]
"""Id of a reference → kind of the part, and its name in the archive."""


def links_of(archive: zipfile.ZipFile, part: str) -> Links:
    """Return the parts that a part refers to; "" is the file itself."""
    folder, name = posixpath.split(part)
    links = {}
    with suppress(UnreadableFile):
        for each in parsed(archive, posixpath.join(folder, "_rels", f"{name}.rels")):
            if each.get("TargetMode") != "External":
                target = posixpath.normpath(posixpath.join("/", folder, each.get("Target", ""))).lstrip("/")
                links[each.get("Id", "")] = each.get("Type", "").rpartition("/")[2], _member(archive, target)
    return links


def _member(archive: zipfile.ZipFile, name: str) -> str:
    """Return what a part is called in the archive, where upper and lower case may differ."""
    try:
        return archive.getinfo(name).filename
    except KeyError:
        return next((each for each in archive.namelist() if each.lower() == name.lower()), name)


def link(element: Element, links: Links, name: str = "id") -> str:
    """Return the part that an element refers to by an attribute of its own name space; "" for none."""
    ids = (value for key, value in element.attrib.items() if key.endswith(f"}}{name}"))
    return links.get(next(ids, ""), ("", ""))[1]


def kind_of(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def shape_texts(archive: zipfile.ZipFile, links: Links, shapes: Iterable[Element]) -> Iterator[str]:
    """Yield the text of each shape below an element, in the order of the file; groups are opened."""
    for shape in shapes:
        kind = kind_of(shape)
        if kind in ("sp", "cxnSp"):
            body = shape.find("{*}txBody")
            if body is not None:
                yield paragraphs(body)
        elif kind == "graphicFrame":
            with suppress(UnreadableFile):
                yield from _graphic_texts(archive, links, shape)
        elif kind == "AlternateContent":
            yield from shape_texts(archive, links, shape[0] if len(shape) else ())
        elif kind in ("grpSp", "absoluteAnchor", "oneCellAnchor", "twoCellAnchor"):
            yield from shape_texts(archive, links, shape)


def _graphic_texts(archive: zipfile.ZipFile, links: Links, frame: Element) -> Iterator[str]:
    for graphic in frame.iterfind("{*}graphic/{*}graphicData/*"):
        kind = kind_of(graphic)
        if kind == "tbl":
            yield from table_rows(graphic)
        elif kind == "chart":
            yield from chart_rows(parsed(archive, link(graphic, links)))
        elif kind == "relIds":
            for point in parsed(archive, link(graphic, links, "dm")).iterfind(".//{*}t"):
                if text := paragraphs(point):  # of a body; texts of runs have none
                    yield text


def table_rows(table: Element) -> Iterator[str]:
    """Yield a table's rows; merged cells repeat their text."""
    above: list[str] = []
    for row in table.iterfind("{*}tr"):
        cells: list[str] = []
        for cell in row.iterfind("{*}tc"):
            column, body = len(cells), cell.find("{*}txBody")
            if cell.get("hMerge") in ("1", "true") and cells:
                cells.append(cells[-1])
            elif cell.get("vMerge") in ("1", "true") and column < len(above):
                cells.append(above[column])
            else:
                cells.append("" if body is None else paragraphs(body))
        yield table_row(cells)
        above = cells


def paragraphs(body: Element) -> str:
    """Join the paragraphs of a shape or cell, lower levels indented, with their automatic numbers."""
    lines, counts = [], dict[int, int]()
    for each in body.iterfind("{*}p"):
        properties = each.find("{*}pPr")
        level = 0 if properties is None else int(properties.get("lvl", 0))
        number = None if properties is None else properties.find("{*}buAutoNum")
        text, mark = line(_pieces(each)), ""
        counts = {key: count for key, count in counts.items() if key < level + (number is not None)}
        if number is not None and text.strip():
            counts[level] = counts.get(level, int(number.get("startAt", 1)) - 1) + 1
            mark = (
                f"{counter(counts[level], number.get('type', '').replace('Lc', '').replace('alphaUc', 'upperalpha'))}. "
            )
        lines.append(f"{'  ' * level if text.strip() else ''}{mark}{text}")
    return "\n".join(lines)


def _pieces(element: Element) -> Iterator[tuple[str, str]]:
    """Yield the texts of a paragraph with their positions."""
    for child in element:
        kind = kind_of(child)
        if kind in ("r", "fld"):
            properties = child.find("{*}rPr")
            raised = "0" if properties is None else properties.get("baseline", "0")
            position = "subscript" if raised.startswith("-") else "superscript" if raised.strip("0%") else ""
            yield "".join(each.text or "" for each in child.iterfind("{*}t")), position
        elif kind == "br":
            yield "\n", ""
        elif kind in ("den", "sup", "sub") and len(child):  # of an equation
            yield {"den": "/", "sup": "^", "sub": "_"}[kind], ""
            yield from _pieces(child)
        elif kind != "Fallback":
            yield from _pieces(child)


def chart_rows(chart: Element) -> Iterator[str]:
    """Yield a chart's titles, and its values as tables: a row for each category, a column for each series."""
    titles = (_words(title) for title in chart.iterfind(".//{*}title"))
    if title := " — ".join(filter(None, titles)):
        yield f"Chart: {title}"
    series = []
    for each in chart.iterfind(".//{*}ser"):
        name, *data = (each.find(f"{{*}}{tag}") for tag in ("tx", "cat", "xVal", "val", "yVal"))
        category, value = (data[0] if data[0] is not None else data[1]), (data[2] if data[2] is not None else data[3])
        series.append(("" if name is None else _words(name), _points(category), _points(value)))
    for categories, group in groupby(series, key=lambda each: each[1]):
        columns = [*group]
        yield table_row(("", *(name for name, _, _ in columns)))
        for index in sorted({*categories, *(index for _, _, points in columns for index in points)}):
            yield table_row((categories.get(index, ""), *(points.get(index, "") for _, _, points in columns)))
    for modern in chart.iterfind("{*}chartData/{*}data"):  # of the kinds of charts since 2016
        levels = ([point.text or "" for point in level.iterfind("{*}pt")] for level in modern.iterfind("*/{*}lvl"))
        yield from map(table_row, zip_longest(*levels, fillvalue=""))


def _words(element: Element) -> str:
    """Return the text of a title or of a series' name, written or taken from cells."""
    return " ".join("".join(each.text or "" for each in element.iter() if kind_of(each) in ("t", "v")).split())


def _points(data: Element | None) -> dict[int, str]:
    """Return the values that are saved with a series, by their index; of categories in levels, all levels."""
    points: dict[int, str] = {}
    levels = [] if data is None else [*data.iterfind(".//{*}lvl")] or [data]
    for level in levels:
        code, before = level.findtext(".//{*}formatCode") or GENERAL, ""
        texts = {int(point.get("idx", 0)): point.findtext("{*}v") or "" for point in level.iterfind(".//{*}pt")}
        for index in points or texts:
            before = texts.get(index, before)
            points[index] = f"{before} {points[index]}" if index in points else _number(before, code)
    return points


def _number(value: str, code: str) -> str:
    try:
        return shown(float(value), code)
    except ValueError:
        return value
