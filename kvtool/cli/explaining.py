"""How `query --explain` looks in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.cli.out import Out
from kvtool.cli.sources import cited
from kvtool.core.common.sizes import counted

if TYPE_CHECKING:
    from kvtool.core.query.explain import ChunkSpans
    from kvtool.core.query.reply import Reply

_COLOURS = {"deviation": 33, "link token": 36, "question attention": 35, "hole": 31, "dropped": 90}
_OTHER = 34


def show_explained(out: Out, reply: Reply) -> None:
    """Each chunk's text with what was recomputed of it in a colour, or in brackets, under a line that says why; then
    the attention backends."""
    for chunk, runs in zip(reply.chunks, reply.explained, strict=True):
        out.status(f"{cited(chunk)}: {_counts(runs, chunk.tokens)}")
        out.passage((span.text, _COLOURS.get(span.reason, _OTHER) if span.reason else 0) for span in runs.spans)
    shifted = reply.fused.shifted
    if count := int(shifted.rows.sum()):
        out.status(
            f"{count} reused tokens shifted by {shifted.size:.0%} of what the recomputed ones changed by, "
            f"of which their chunks have {shifted.common:.0%} in common"
        )
    if forward := reply.resolved.get("forward"):
        out.status(f"layers: {forward}")
    for one in reply.backends:
        window = "" if one.window is None else f" with a window of {one.window}"
        out.status(f"attention of {counted(one.layers, 'layer')}{window}: {one.chosen}")


def _counts(runs: ChunkSpans, tokens: int) -> str:
    why = ", ".join(f"{count} for {reason}" for reason, count in runs.recomputed.items())
    gone = f", {runs.dropped} not there" if runs.dropped else ""
    return f"{sum(runs.recomputed.values())} of {tokens} tokens recomputed" + (f" ({why})" if why else "") + gone
