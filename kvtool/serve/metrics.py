"""The access log: a row of statistics for each request, without any text of a question or an answer."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from kvtool.core.errors import KvtoolError
from kvtool.serve.job import Answer, EndedError
from kvtool.serve.wire import failed

_STATS = "kvtool.stats"  # key of a request's scope
_MAX_SHOWN = 200  # characters of a path or a message
Log = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class RequestStats:
    """Statistics of a request. `status`: 0 before the response."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    started: float = field(default_factory=time.monotonic)
    at: float = field(default_factory=time.time)
    status: int = 0
    answer: Answer | None = None
    error: KvtoolError | None = None

    def failed(self, error: KvtoolError, status: int) -> None:
        self.error, self.status = error, status

    def row(self, method: str, path: str, client: str) -> dict[str, Any]:
        row: dict[str, Any] = {
            "type": "request",
            "time": round(self.at, 3),
            "id": self.id,
            "client": client,
            "method": method,
            "path": path[:_MAX_SHOWN],
            "status": self.status,
            "milliseconds": round((time.monotonic() - self.started) * 1e3, 1),
        }
        if self.answer is not None:
            row |= _of_answer(self.answer)
        if self.error is not None:
            row["error"] = self.error.message[:_MAX_SHOWN]
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


def stats_of(connection: HTTPConnection) -> RequestStats:
    stats = connection.scope.setdefault(_STATS, RequestStats())
    assert isinstance(stats, RequestStats)
    return stats


def logged(app: ASGIApp, write: Log, client: str = "") -> ASGIApp:
    """Wrap an application: each request gets an id, and its end a row. `client`: in the row instead of the address."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        stats = stats_of(HTTPConnection(scope))

        async def sending(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                stats.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", stats.id.encode())]
            await send(message)

        try:
            await app(scope, receive, sending)
        except OSError:  # the client has left
            stats.status = 499
        except asyncio.CancelledError:  # after the drain timeout
            begun, error = stats.status != 0, EndedError("the server ends before this was done", "ask again")
            stats.failed(error, 503)
            if begun:
                raise
            await failed(error, scope)(scope, receive, sending)
        finally:
            address, *_ = scope.get("client") or [""]
            write(stats.row(scope["method"], scope["path"], client or address))

    return answer
