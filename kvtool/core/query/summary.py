"""One line over many replies."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvtool.core.query.reply import Reply

_MEANS = ("f1", "exact_match", "contains", "kl_first", "kl_answer", "top1_agrees", "answer_equal")
_TIMES = ("retrieve", "read", "recompute", "generate")
_COUNTS = ("prompt", "reused", "recomputed", "fresh")


@dataclass(slots=True)
class Summary:
    """Collects the numbers of one mode's replies; what is not given for any reply is left out."""

    fusion: str
    count: int = 0
    _values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, reply: Reply) -> None:
        """Take one reply's numbers."""
        self.count += 1
        row = reply.to_json()
        for name in _MEANS:
            if name in row:
                self._add(name, row[name])
        for name in _COUNTS:
            self._add("tokens_" + name, row["tokens"][name])
        self._add("bytes_read", row["bytes_read"])
        if reply.rounds:
            self._add("rounds", len(reply.rounds))
            self._add("chunks_loaded", len(reply.chunks))
        self._add("ttft_ms", row["timing_ms"]["ttft"])
        for name in _TIMES:
            self._add(name + "_ms", row["timing_ms"][name])

    def _add(self, name: str, value: float) -> None:
        self._values.setdefault(name, []).append(float(value))

    def to_json(self) -> dict[str, Any]:
        """Means of scores and counts, medians of times."""
        row: dict[str, Any] = {"fusion": self.fusion, "count": self.count}
        for name, values in self._values.items():
            if name.endswith("_ms"):
                row[name + "_median"] = statistics.median(values)
            else:
                row[name] = statistics.fmean(values)
        return row


def summarise(replies: Iterable[Reply]) -> list[Summary]:
    """One summary a mode, in order of first appearance."""
    found: dict[str, Summary] = {}
    for reply in replies:
        found.setdefault(reply.asked_mode, Summary(reply.asked_mode)).add(reply)
    return list(found.values())
