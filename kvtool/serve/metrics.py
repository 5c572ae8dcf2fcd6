"""The access log, a row for each request without any text of a question or an answer; and metrics of its rows."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from kvtool.core.errors import KvtoolError
from kvtool.serve.engine import Engine
from kvtool.serve.job import Answer, EndedError
from kvtool.serve.wire import failed

_STATS = "kvtool.stats"  # key of a request's scope
_MAX_SHOWN = 200  # characters of a path or a message
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
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


class Metrics:
    """Metrics in Prometheus' text format. Requests to unknown paths are counted together."""

    def __init__(self, engine: Engine) -> None:
        self.paths: set[str] = set()
        self._engine = engine
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("kvtool_requests", "Requests.", ("path", "status"), registry=registry)
        self._seconds = {
            name: Histogram(f"kvtool_{name}_seconds", f"Seconds. {about}", buckets=_SECONDS, registry=registry)
            for name, about in (
                ("ttft", "From a question's turn to the first token of its answer."),
                ("generate", "From an answer's first token to its end."),
                ("queue", "That a question waited for its turn."),
            )
        }
        self._tokens = Counter("kvtool_tokens", "Tokens of prompts and answers.", ("kind",), registry=registry)
        self._chunks = Counter("kvtool_chunks", "Chunks of prompts.", ("status",), registry=registry)
        registry.register(self)

    def count(self, row: Mapping[str, Any]) -> None:
        """Count a row of the access log."""
        path = row["path"] if row["path"] in self.paths else "other"
        self._requests.labels(path, str(row["status"])).inc()
        if "tokens" not in row:  # not an answer
            return
        for name, seconds in self._seconds.items():
            seconds.observe(row[f"{name}_ms"] / 1e3)
        for kind in ("reused", "recomputed", "fresh", "generated"):
            self._tokens.labels(kind).inc(row["tokens"][kind])
        for status, chunks in (("hit", row["hits"]), ("miss", row["misses"])):
            self._chunks.labels(status).inc(chunks)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        scheduler, conversations = self._engine.scheduler, self._engine.conversations
        yield GaugeMetricFamily("kvtool_queued", "Questions that wait.", value=scheduler.waiting)
        yield GaugeMetricFamily("kvtool_running", "Answers that are written.", value=scheduler.running)
        yield GaugeMetricFamily("kvtool_conversations", "Conversations in memory.", value=len(conversations))
        yield GaugeMetricFamily("kvtool_conversation_bytes", "Their bytes.", value=conversations.nbytes)


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
