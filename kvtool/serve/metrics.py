"""Statistics of requests: the access log, and metrics in Prometheus' text format."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Iterator, MutableMapping
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


@dataclass(slots=True)
class RequestStats:
    """Statistics of a request, without any text of a question or an answer. `status`: 0 before the response."""

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
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("kvtool_requests", "Requests.", ("path", "status"), registry=registry)
        self._ttft = _seconds("ttft", "From a question's turn to the first token of its answer.", registry)
        self._generation = _seconds("generation", "From an answer's first token to its end.", registry)
        self._queue = _seconds("queue", "That a question waited for its turn.", registry)
        self._turns = Counter("kvtool_turns", "Turns after the first of a conversation.", ("found",), registry=registry)
        self._tokens = Counter("kvtool_tokens", "Tokens of prompts and answers.", ("kind",), registry=registry)
        self._chunks = Counter("kvtool_chunks", "Chunks of prompts.", ("status",), registry=registry)
        self._read = Counter("kvtool_read_bytes", "Bytes of records that were read.", ("tier",), registry=registry)
        registry.register(self)

    def count(self, path: str, stats: RequestStats) -> None:
        self._requests.labels(path, str(stats.status)).inc()
        answer = stats.answer
        if answer is None:
            return
        timing = answer.facts["timing_ms"]
        self._ttft.observe(timing["ttft"] / 1e3)
        self._generation.observe(timing["generate"] / 1e3)
        self._queue.observe(answer.queue_ms / 1e3)
        if (turn := answer.facts.get("turn", {})).get("number", 1) > 1:
            self._turns.labels("anew" if "reason" in turn else "kept").inc()
        for kind in ("reused", "recomputed", "fresh", "generated"):
            self._tokens.labels(kind).inc(answer.facts["tokens"][kind])
        for chunk in answer.chunks:
            self._chunks.labels(chunk.status).inc()
        shared = sum(row.get("bytes", 0) or 0 for row in answer.facts.get("stream", ()))
        self._read.labels("shared").inc(shared)
        self._read.labels("store").inc(max(0, answer.facts["bytes_read"] - shared))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        scheduler, stats = self._engine.scheduler, self._engine.store_stats()
        yield GaugeMetricFamily("kvtool_queued", "Questions that wait.", value=scheduler.waiting)
        yield GaugeMetricFamily("kvtool_running", "Answers that are written.", value=scheduler.running)
        held = self._engine.conversations
        yield GaugeMetricFamily("kvtool_conversations", "Conversations that are held.", value=len(held))
        yield GaugeMetricFamily("kvtool_conversation_bytes", "Bytes that they take.", value=held.nbytes)
        levels = GaugeMetricFamily("kvtool_store_bytes", "Bytes of records in the store.", labels=["level"])
        for level, row in stats.get("levels", {}).items():
            levels.add_metric([level], row["bytes"])
        yield levels
        for name in ("documents", "chunks", "revision"):
            yield GaugeMetricFamily(f"kvtool_store_{name}", f"The store's {name}.", value=stats.get(name, 0))


def _seconds(name: str, about: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(f"kvtool_{name}_seconds", f"Seconds. {about}", buckets=_SECONDS, registry=registry)


class AccessLog:
    def __init__(self, engine: Engine, log: Callable[[dict[str, Any]], None]) -> None:
        self.metrics, self._log = Metrics(engine), log

    def of(self, app: ASGIApp, known: Collection[str], client: str | None = None) -> ASGIApp:
        """Wrap an application; other paths than the `known` are counted together. `client`: instead of addresses."""

        def note(scope: Scope) -> None:
            stats, address = stats_of(HTTPConnection(scope)), scope.get("client")
            self.metrics.count(scope["path"] if scope["path"] in known else "other", stats)
            name = client or (address[0] if address else "")
            self._log(stats.row(scope["method"], scope["path"], name))

        return LoggingMiddleware(app, note)


class LoggingMiddleware:
    """Middleware that notes the result of each request. `note`: called with its scope at its end."""

    def __init__(self, app: ASGIApp, note: Callable[[Scope], None]) -> None:
        self._app, self._note = app, note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stats = stats_of(HTTPConnection(scope))

        async def sending(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                stats.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", stats.id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except OSError:  # the client has left
            stats.status = 499
        except asyncio.CancelledError:  # after the drain timeout
            begun, error = stats.status != 0, EndedError("the server ends before this was done", "ask again")
            stats.failed(error, 503)
            if begun:
                raise
            await failed(error, scope)(scope, receive, sending)
        finally:
            self._note(scope)
