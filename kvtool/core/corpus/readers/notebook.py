"""Jupyter notebooks: the text and the code of each cell, what it printed, and how it failed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from kvtool.core.corpus.readers.document import Document, UnreadableFile, numbered, unread_note, without_data_uris
from kvtool.core.corpus.readers.encoding import of_text
from kvtool.core.corpus.readers.html import visible

_LONGEST_OUTPUT = 2000  # characters of what one cell printed
_COLOURS = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")  # of a terminal
_REPR = re.compile(r"\s*<[^<>]*>\s*")  # stands for what a plain text cannot show


@of_text()
def read(source: str, text: str) -> list[Document]:
    try:
        notebook = json.loads(text)
        sheets = [notebook] if "cells" in notebook else notebook["worksheets"]  # before format 4
        cells = [cell for sheet in sheets for cell in sheet["cells"]]
        printed = [_printed(cell) for cell in cells]
        texts = ["\n\n".join(_texts(cell, output)) for cell, output in zip(cells, printed, strict=True)]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise UnreadableFile("damaged: no notebook in JSON") from error
    long = sum(len(output) > _LONGEST_OUTPUT for output in printed)
    return [numbered(source, "markdown", "cell", texts, unread_note({"ends of long outputs": long}))]


def _texts(cell: Any, printed: str) -> Iterator[str]:
    body = without_data_uris(_whole(cell.get("source", cell.get("input", ""))))
    if cell.get("cell_type") != "code":
        yield f"{'#' * min(6, int(cell.get('level', 1)))} {body}" if cell.get("cell_type") == "heading" else body
        return
    if body.strip():
        yield f"```\n{body}\n```"
    if printed.strip():
        yield printed[:_LONGEST_OUTPUT]


def _printed(cell: Any) -> str:
    """Join a cell's outputs, errors first: they are short, and outputs may be long."""
    parts: list[str] = []
    for out in sorted(cell.get("outputs", ()), key=lambda out: "ename" not in out):
        text = _COLOURS.sub("", _output(out))
        follows = parts and not parts[-1].endswith("\n") and out.get("output_type") != "stream"
        parts += ["\n" + text if follows else text] if text else []
    return without_data_uris("".join(parts))


def _output(out: Any) -> str:
    if "ename" in out:
        error = f"{out['ename']}: {out.get('evalue', '')}\n"
        trace = "\n".join(map(str, out.get("traceback", ())))
        return error + (f"{trace}\n" if "\n" in trace else "")
    data = out.get("data", out)
    forms = {key.rpartition("/")[2]: _whole(value) for key, value in data.items() if isinstance(value, (str, list))}
    plain = forms.get("plain") or forms.get("text", "")
    if plain and not _REPR.fullmatch(plain):
        return plain
    return forms.get("markdown") or visible(forms.get("html", "")) or forms.get("latex") or plain


def _whole(lines: Any) -> str:
    return lines if isinstance(lines, str) else "".join(map(str, lines))
