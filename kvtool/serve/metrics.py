"""Metrics of a server in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from kvtool.serve.facts import Facts

if TYPE_CHECKING:
    from kvtool.serve.engine import Engine

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """Counts requests and answers; what stands in the store is looked up when it is asked for."""

    def __init__(self, engine: Engine) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("kvtool_requests", "Requests.", ("path", "status"), registry=registry)
        self._ttft = _seconds("ttft", "From a question's turn to the first token of its answer.", registry)
        self._generation = _seconds("generation", "From an answer's first token to its end.", registry)
        self._queue = _seconds("queue", "That a question waited for its turn.", registry)
        self._turns = Counter("kvtool_turns", "Turns after others.", ("found",), registry=registry)
        self._tokens = Counter("kvtool_tokens", "Tokens of prompts and answers.", ("kind",), registry=registry)
        self._chunks = Counter("kvtool_chunks", "Chunks of prompts.", ("status",), registry=registry)
        self._read = Counter("kvtool_read_bytes", "Bytes of records that were read.", ("tier",), registry=registry)
        registry.register(_Now(engine))

    def count(self, path: str, facts: Facts) -> None:
        """Count a request that has ended; `path` is that of its endpoint, of which there are few."""
        self._requests.labels(path, str(facts.status)).inc()
        answer = facts.answer
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
        """All of them."""
        return generate_latest(self._registry)


def _seconds(name: str, about: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(f"kvtool_{name}_seconds", f"Seconds. {about}", buckets=_SECONDS, registry=registry)


class _Now:
    """Gauges of the current state."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Gauges of the queue and of the store."""
        scheduler, stats = self._engine.scheduler, self._engine.store_stats()
        yield GaugeMetricFamily("kvtool_queued", "Questions that wait.", value=scheduler.waiting)
        yield GaugeMetricFamily("kvtool_running", "Answers that are written.", value=scheduler.running)
        talks = self._engine.talks
        yield GaugeMetricFamily("kvtool_conversations", "Conversations that are held.", value=len(talks))
        yield GaugeMetricFamily("kvtool_conversation_bytes", "Bytes that they take.", value=talks.nbytes)
        levels = GaugeMetricFamily("kvtool_store_bytes", "Bytes of records in the store.", labels=["level"])
        for level, row in stats.get("levels", {}).items():
            levels.add_metric([level], row["bytes"])
        yield levels
        for name in ("documents", "chunks", "revision"):
            yield GaugeMetricFamily(f"kvtool_store_{name}", f"The store's {name}.", value=stats.get(name, 0))
