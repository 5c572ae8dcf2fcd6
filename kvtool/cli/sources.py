"""How the sources of an answer look in a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtool.cli.out import Out
from kvtool.cli.text import clean
from kvtool.core.common.marks import as_named_here

if TYPE_CHECKING:
    from kvtool.core.query.reply import ReplyChunk

_MISLEADING = re.compile(r'"|,\s|\s\((?:from|changed|gone)\b')  # what stands between places, or behind one
_SINCE = {"changed": " (changed since ingest)", "gone": " (gone since ingest)"}


def show_sources(out: Out, chunks: Sequence[ReplyChunk], passages: bool = False) -> None:
    """Where an answer comes from, the best first; with the passages themselves, if they are wanted. With -v in the
    order of the prompt, too."""
    if not passages:
        out.status(source_line(chunks))
    for chunk in _best_first(chunks) if passages else ():
        out.status(f"source: {cited(chunk)}")
        out.passage([(chunk.text.strip() + "\n", 0)])
    for chunk in chunks:
        out.detail(f"  {chunk.status:5} {chunk.tokens:5} tokens  {cited(chunk)}")


def source_line(chunks: Sequence[ReplyChunk]) -> str:
    """Where an answer comes from, on one line."""
    return "sources: " + (", ".join(dict.fromkeys(map(cited, _best_first(chunks)))) or "what was said before")


def _best_first(chunks: Sequence[ReplyChunk]) -> list[ReplyChunk]:
    return sorted(chunks, key=lambda chunk: -(chunk.score or 0))


def cited(chunk: ReplyChunk) -> str:
    """Where a chunk stands, below the working folder where it is, and whether its file is another by now; one line, and
    one place, whatever the file and its origin are called."""
    made_by = f" (from {_unmistakable(chunk.origin)})" if chunk.origin else ""
    return _unmistakable(chunk.behind(as_named_here(chunk.source))) + made_by + _SINCE.get(chunk.since_ingest, "")


def _unmistakable(name: str) -> str:
    """A name, in quotation marks where it could be read as several places, or as what is said of one."""
    name = name.replace("\n", "\\n")
    return json.dumps(name, ensure_ascii=False) if _MISLEADING.search(clean(name)) else name
