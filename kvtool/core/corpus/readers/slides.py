"""PowerPoint files: presentations, slide shows and templates, of today's formats and of the one before 2007."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvtool.core.corpus.readers.containers import checked, embedded, is_old
from kvtool.core.corpus.readers.document import Document, hidden_note, joined, opened, table_row, unread_note
from kvtool.core.corpus.readers.ir import blocks

_BROKEN = re.compile(r"\[unreadable slide .*\]")


def read(source: str, data: bytes) -> list[Document]:
    """Return one document, its slides marked, each with its comments and notes. A note names hidden slides.

    Raises
    ------
    UnreadableFile
        If it is damaged, protected by a password, or unpacks to too much.
    """
    notes: tuple[str, ...] = ()
    if not (old := is_old(data)):
        with checked(data) as archive:
            notes = unread_note({"embedded files": embedded(archive)})
    with opened("presentation", "office_oxide"):
        from office_oxide import Document as Office

        slides = Office.from_bytes(data, "ppt" if old else "pptx").to_ir()["sections"]
    texts = ["\n".join(_lines(slide)) for slide in slides]
    broken = [number for number, text in enumerate(texts, 1) if _BROKEN.fullmatch(text)]
    hidden = [number for number, slide in enumerate(slides, 1) if slide.get("hidden") and texts[number - 1].strip()]
    notes = hidden_note("slide", hidden) + notes + tuple(f"damaged slide {number}: not read" for number in broken)
    places = ["slide master" if _is_master(slide) else f"slide {number}" for number, slide in enumerate(slides, 1)]
    parts = ((place, _BROKEN.sub("", text)) for place, text in zip(places, texts, strict=True))
    return [joined(source, "markdown", parts, notes=notes)]


def _is_master(slide: Mapping[str, Any]) -> bool:
    """Return True for the texts that all slides show: their title is not one of a slide, which is a heading."""
    return slide.get("title") == "Slide Master" and all(each["type"] != "heading" for each in slide["elements"])


def _lines(slide: Mapping[str, Any]) -> Iterator[str]:
    """Yield a slide's title, shapes from top to bottom, comments and notes."""
    for element in slide["elements"]:
        if element["type"] == "heading":
            yield f"# {' '.join(' '.join(blocks([element])).lstrip('# ').split())}\n"
        else:
            lines = [line for line in blocks([element]) if line.strip()]
            yield from chart_rows(lines) if any(line.startswith("Categories: ") for line in lines) else lines
    yield from blocks(slide.get("speaker_notes") or ())


def chart_rows(lines: Sequence[str]) -> list[str]:
    """Write a chart as a table with a row for each category, if it has as many values in each series; else as it is."""
    titles = [line for line in lines if line.startswith("Title: ")]
    categories, *series = [line for line in lines if line not in titles] or [""]
    names, values = zip(*(line.rpartition(": ")[::2] for line in series), strict=True) if series else ((), ())
    columns = [text.split(", ") for text in (categories.removeprefix("Categories: "), *values)]
    if not categories.startswith("Categories: ") or len({len(column) for column in columns}) > 1:
        return [*lines]
    return [*titles, table_row(("", *names)), *map(table_row, zip(*columns, strict=True))]
