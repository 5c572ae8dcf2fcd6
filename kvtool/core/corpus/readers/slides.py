"""PowerPoint files: presentations, slide shows and templates, of today's formats and of the one before 2007; the shapes
of texts, slides and sheets: their text, tables, diagrams and charts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby, zip_longest
from xml.etree.ElementTree import Element

from kvtool.core.corpus.readers.containers import Link, Package, checked, embedded, is_old, parsed
from kvtool.core.corpus.readers.document import (
    Document,
    UnreadableFile,
    hidden_note,
    numbered,
    opened,
    table_row,
    unread_note,
)
from kvtool.core.corpus.readers.office import (
    GENERAL,
    Cell,
    Piece,
    blocks,
    comment,
    counter,
    image,
    integer,
    line,
    linear,
    rows,
    shown,
)

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


def read(source: str, data: bytes) -> list[Document]:
    if is_old(data):
        return [numbered(source, "markdown", "slide", _old_slides(data))]
    texts: list[str] = []
    hidden, damaged = [], []
    with opened("presentation", "xlfmt"), checked(data) as archive:
        package = Package(archive)
        main = package.main("ppt/presentation.xml")
        deck, links = parsed(archive, main), package.links(main)
        parts = [package.part(link.name) for link in links.values() if link.kind in ("commentAuthors", "authors")]
        authors = {each.get("id", ""): each.get("name", "") for part in parts if part is not None for each in part}
        for number, each in enumerate(deck.iterfind("{*}sldIdLst/{*}sldId"), 1):  # which has an id of its own, too
            keys = (value for key, value in each.items() if key.endswith("}id"))
            part = next((links[key].name for key in keys if key in links), "")
            slide = package.part(part)
            texts.append("" if slide is None else "\n".join(_lines(package, part, slide, authors)))
            if slide is None or package.damaged:
                damaged.append(f"damaged slide {number}: not all of it is read")
                package.damaged.clear()
            if slide is not None and slide.get("show") in ("0", "false") and texts[-1].strip():
                hidden.append(number)
        notes = unread_note({"embedded files": embedded(archive)})
    if damaged and not any(map(str.strip, texts)):
        raise UnreadableFile("damaged: none of its slides can be read")
    return [numbered(source, "markdown", "slide", texts, (*hidden_note("slide", hidden), *damaged, *notes))]


def _lines(package: Package, part: str, slide: Element, authors: Mapping[str, str]) -> Iterator[str]:
    links, shapes = package.links(part), [*slide.iterfind("cSld/spTree/*")]
    title = next((each for each in shapes if _placeholder(each, "idx", "0") == "0"), None)
    if title is not None and (words := " ".join(" ".join(shape_texts(package, links, [title])).split())):
        yield f"# {words}\n"
    yield from shape_texts(package, links, (each for each in shapes if each is not title))
    for link in sorted(links.values(), reverse=True):
        other = package.part(link.name) if link.kind in ("notesSlide", "comments") else None
        for each in () if other is None else other.iter():
            if each.tag == "sp" and _placeholder(each, "type", "obj") == "body":
                yield from shape_texts(package, {}, [each])
            elif each.tag in ("cm", "reply"):
                body = each.find("txBody")
                text = (each.findtext("text") or "") if body is None else paragraphs(body)
                yield comment(text, authors.get(each.get("authorId", ""), "unknown"))


def _placeholder(shape: Element, name: str, default: str) -> str | None:
    found = shape.find("nvSpPr/nvPr/ph")
    return None if found is None else found.get(name, default)


def _old_slides(data: bytes) -> Iterator[str]:
    with opened("presentation", "office-oxide"):
        from office_oxide import Document as Office

        for slide in Office.from_bytes(data, "ppt").to_ir()["sections"]:
            if slide.get("title") == "Slide Master" and all(each["type"] != "heading" for each in slide["elements"]):
                continue  # no slide has such a title without its heading
            lines = [*filter(str.strip, blocks(slide["elements"])), *blocks(slide.get("speaker_notes") or ())]
            yield "\n".join(f"{text}\n" if text.startswith("# ") else text for text in lines)
