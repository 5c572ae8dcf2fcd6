"""Summary of many replies in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtool.core.evaluate.measures import MEASURES, Row, means, medians
from kvtool.core.query.reply import Reply

_TIMES = ("ttft", "retrieve", "read", "recompute", "generate")
_COUNTS = ("prompt", "reused", "recomputed", "fresh")


def numbers(reply: Reply) -> Row:
    """Pick what is summed up of one reply; what it has not is left out."""
    row = reply.to_json()
    return {
        **{name: row[name] for name in MEASURES if name in row},
        **{f"tokens_{name}": row["tokens"][name] for name in _COUNTS},
        "bytes_read": row["bytes_read"],
        **({"rounds": len(reply.rounds), "chunks_loaded": len(reply.chunks)} if reply.rounds else {}),
        **{f"{name}_ms": row["timing_ms"][name] for name in _TIMES},
    }


def summarise(fusion: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Sum up the numbers of one mode's replies: means of scores and counts, medians of times."""
    names = dict.fromkeys(name for row in rows for name in row)
    times = medians(rows, [name for name in names if name.endswith("_ms")])
    return {
        "fusion": fusion,
        "count": len(rows),
        **means(rows, [name for name in names if name not in times]),
        **{f"{name}_median": value for name, value in times.items()},
    }
