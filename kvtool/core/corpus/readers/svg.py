"""Drawings in SVG: their titles, descriptions and labels."""

from __future__ import annotations

from xml.etree import ElementTree

from kvtool.core.corpus.readers.document import Document, UnreadableFile, joined

_SAID = ("title", "desc", "text")


def read(source: str, data: bytes) -> list[Document]:
    """Read one document of what a drawing says, a label a line; expat itself bounds what entities expand to.

    Raises
    ------
    UnreadableFile : it is no sound XML, or says nothing.
    """
    try:
        drawing = ElementTree.fromstring(data)
    except ElementTree.ParseError as error:
        raise UnreadableFile(f"damaged: {error}") from error
    said = (element for element in drawing.iter() if str(element.tag).rpartition("}")[2] in _SAID)
    labels = (" ".join("".join(element.itertext()).split()) for element in said)
    return [joined(source, "text", ((f"label {number}", label) for number, label in enumerate(labels, 1)), gap="\n")]
