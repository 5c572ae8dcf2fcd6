"""Presentations by python-pptx: what stands on each slide, and its notes."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any

from kvtool.core.corpus.readers.document import Document, hidden_note, numbered, opened
from kvtool.core.corpus.readers.zipped import checked

ENDINGS = (".pptx", ".pptm", ".ppsx", ".potx")
LIBRARY = "python-pptx"


def read(source: str, data: bytes) -> list[Document]:
    """Return one document, its slides marked. A note names hidden slides.

    Raises
    ------
    UnreadableFile
        If it is damaged, protected by a password, or unpacks to too much.
    """
    checked(data).close()
    with opened("presentation", LIBRARY):
        from pptx import Presentation

        slides = [*Presentation(io.BytesIO(data)).slides]
        texts = ["\n".join(_lines(slide)) for slide in slides]
        hidden = [number for number, slide in enumerate(slides, 1) if slide.element.get("show") in ("0", "false")]
    notes = hidden_note("slide", [number for number in hidden if texts[number - 1].strip()])
    return [numbered(source, "markdown", "slide", texts, notes)]


def _lines(slide: Any) -> Iterator[str]:
    title = slide.shapes.title
    if title is not None and title.has_text_frame and title.text_frame.text.strip():
        yield f"# {' '.join(title.text_frame.text.split())}\n"
    title_id = None if title is None else title.shape_id
    yield from _of_shapes(shape for shape in slide.shapes if shape.shape_id != title_id)
    if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
        yield slide.notes_slide.notes_text_frame.text


def _of_shapes(shapes: Iterable[Any]) -> Iterator[str]:
    for shape in shapes:
        if hasattr(shape, "shapes"):  # a group
            yield from _of_shapes(shape.shapes)
        elif shape.has_text_frame:
            yield shape.text_frame.text.replace("\v", "\n")
        elif getattr(shape, "has_table", False):
            for row in shape.table.rows:
                yield " | ".join(" ".join(cell.text.split()) for cell in row.cells)
