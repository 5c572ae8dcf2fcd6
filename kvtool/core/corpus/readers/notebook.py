"""Jupyter notebooks: the text and the code of each cell, and what it printed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvtool.core.corpus.readers.document import Document, UnreadableFile, numbered
from kvtool.core.corpus.readers.encoding import of_text

_LONGEST_OUTPUT = 2000  # characters of what one cell printed


@of_text()
def read(source: str, text: str) -> list[Document]:
    """Return one document, its cells marked.

    Raises
    ------
    UnreadableFile
        If it is no notebook.
    """
    try:
        notebook = json.loads(text)
        cells = notebook["cells"] if "cells" in notebook else notebook["worksheets"][0]["cells"]  # before format 4
        texts = ["\n\n".join(_texts(cell)) for cell in cells]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise UnreadableFile("damaged: no notebook in JSON") from error
    return [numbered(source, "markdown", "cell", texts)]


def _texts(cell: Any) -> Iterator[str]:
    body = _whole(cell.get("source", cell.get("input", "")))
    if cell.get("cell_type") != "code":
        yield body
        return
    if body.strip():
        yield f"```\n{body}\n```"
    printed = "".join(_whole(out.get("text") or out.get("data", {}).get("text/plain", "")) for out in cell["outputs"])
    if printed.strip():
        yield printed[:_LONGEST_OUTPUT]


def _whole(lines: Any) -> str:
    return lines if isinstance(lines, str) else "".join(map(str, lines))
