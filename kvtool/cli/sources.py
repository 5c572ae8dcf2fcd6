"""How the sources of an answer look in a terminal."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.cli.out import Out

if TYPE_CHECKING:
    from kvtool.core.query.reply import Reply, ReplyChunk

_SINCE = {"changed": " (changed since ingest)", "gone": " (gone since ingest)"}


def show_sources(out: Out, reply: Reply, passages: bool = False) -> None:
    """Where the answer comes from, the best first; with the passages themselves, if they are wanted."""
    best_first = sorted(reply.chunks, key=lambda chunk: -(chunk.score or 0))
    if not passages:
        out.status("sources: " + ", ".join(dict.fromkeys(map(cited, best_first))))
        return
    for chunk in best_first:
        out.status(f"source: {cited(chunk)}")
        out.passage([(chunk.text.strip() + "\n", 0)])


def cited(chunk: ReplyChunk) -> str:
    """Where a chunk stands, below the working folder where it is, and whether its file is another by now."""
    path = Path(chunk.source)
    with suppress(ValueError, OSError):
        path = path.relative_to(Path.cwd())
    return chunk.behind(str(path)) + _SINCE.get(chunk.since_ingest, "")
