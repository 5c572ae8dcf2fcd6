"""Facts about a request, for its line in the log and for the metrics."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import HTTPConnection

from kvtool.core.errors import KvtoolError
from kvtool.serve.job import Answer

_NAME = "kvtool.facts"
_MOST = 200  # characters of a path or a message


@dataclass(slots=True)
class Facts:
    """Facts about a request; no word of a question or an answer.

    Attributes
    ----------
    status : of the response; 0 before it has one.
    """

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    started: float = field(default_factory=time.monotonic)
    at: float = field(default_factory=time.time)
    status: int = 0
    answer: Answer | None = None
    error: KvtoolError | None = None

    def answered(self, answer: Answer) -> None:
        """An answer was given."""
        self.answer = answer

    def failed(self, error: KvtoolError, status: int) -> None:
        """Note that the request ended in an error, maybe after its response had begun."""
        self.error, self.status = error, status

    def row(self, method: str, path: str, client: str) -> dict[str, Any]:
        """Its line in the log."""
        row: dict[str, Any] = {
            "type": "request",
            "time": round(self.at, 3),
            "id": self.id,
            "client": client,
            "method": method,
            "path": path[:_MOST],
            "status": self.status,
            "milliseconds": round((time.monotonic() - self.started) * 1e3, 1),
        }
        if self.answer is not None:
            row |= _of_answer(self.answer)
        if self.error is not None:
            row["error"] = self.error.message[:_MOST]
        return row


def _of_answer(answer: Answer) -> dict[str, Any]:
    timing, statuses = answer.facts["timing_ms"], [chunk.status for chunk in answer.chunks]
    return {
        "fusion": answer.facts["fusion"],
        "revision": answer.facts["revision"],
        "tokens": answer.facts["tokens"],
        "queue_ms": round(answer.queue_ms, 1),
        "others_ms": round(answer.others_ms, 1),
        "ttft_ms": timing["ttft"],
        "generate_ms": timing["generate"],
        "hits": sum(status != "miss" for status in statuses),
        "misses": statuses.count("miss"),
        "chunks": [chunk.id for chunk in answer.chunks],
        "finish": answer.finish,
    }


def facts_of(connection: HTTPConnection) -> Facts:
    """The facts of a request."""
    facts = connection.scope.setdefault(_NAME, Facts())
    assert isinstance(facts, Facts)
    return facts
