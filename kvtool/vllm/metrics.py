"""Metrics of the connector, which vLLM collects from both of its halves, logs, and shows at `/metrics`."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

GATE, SECONDS = "gate", "load_seconds"
_COUNTED = {
    "prompts": "Prompts with stored passages.",
    "claimed_tokens": "Tokens of prompts that vLLM did not have to compute.",
    "recomputed_tokens": "Tokens of stored passages that were recomputed.",
    "failed_loads": "Prompts that vLLM computed although their tokens were claimed.",
}
_ABOUT_GATE = "Verdict of the gate: 1 passed and a prompt was fed, -1 failed, 0 neither yet."
_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Stats(KVConnectorStats):
    """Numbers by the name of their metric, noted by one half of the connector since vLLM last asked."""

    data: dict[str, list[float]]

    def note(self, name: str, number: float = 1) -> None:
        self.data.setdefault(name, []).append(number)

    def taken(self) -> Stats | None:
        taken, self.data = self.data, {}
        return Stats(taken) if taken else None

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> Stats:
        for name, numbers in other.data.items():
            self.data.setdefault(name, []).extend(numbers)
        return self

    def reduce(self) -> dict[str, int | float]:
        sums = {name: sum(numbers) for name, numbers in self.data.items() if name != GATE}
        return {name: round(number, 3) for name, number in sums.items()} | _verdict(self.data)


def _verdict(data: dict[str, Any]) -> dict[str, Any]:
    return {GATE: min(data[GATE])} if GATE in data else {}  # one worker that fails is enough


class PromMetrics(KVConnectorPromMetrics):
    """The metrics at `/metrics`. Their names begin as vLLM's own do: vLLM takes those off when an engine ends."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._counters = {name: self._per_engine(self._counter_cls, name, about) for name, about in _COUNTED.items()}
        about = "Seconds that a prompt was loaded, those that failed included."
        self._seconds = self._per_engine(self._histogram_cls, SECONDS, about, buckets=_BUCKETS)
        self._gate = self._per_engine(self._gauge_cls, GATE, _ABOUT_GATE, multiprocess_mode="mostrecent")

    def _per_engine(self, kind: Any, name: str, about: str, **more: Any) -> Any:
        metric = kind(name=f"vllm:kvtool_{name}", documentation=about, labelnames=self._labelnames, **more)
        return create_metric_per_engine(metric, self.per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, counter in self._counters.items():
            counter[engine_idx].inc(sum(transfer_stats_data.get(name, ())))
        for number in transfer_stats_data.get(SECONDS, ()):
            self._seconds[engine_idx].observe(number)
        for number in _verdict(transfer_stats_data).values():
            self._gate[engine_idx].set(number)
