"""The stream bench for people: tables, and what their numbers mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvtool.core.common.text import counted
from samples.benchmarks.streaming.bench import ALL, StreamBench, StreamRow

READY_HEAD = ("context ready over 3 Gbit/s", "ms", "loss", "sooner than text", "sooner than int8")
CASE_HEAD = ("3 Gbit/s, 1 from 0.1 s on", "TTFT ms", "in time", "loss", "MB", "chunks by level")
_MEANING = (
    "cells: share of requests within the objective, and the mean loss of all of them in nats a token of the answer "
    "(text loses nothing); a request is one trace at one objective"
)


def stream_table(result: StreamBench) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
    """Head and rows: a policy a row, all traces, then each class, then each objective over all traces."""
    slos = result.options.slo_ms
    head = ("policy", ALL, *result.kinds, *(f"{slo:g} ms" for slo in slos), "MB", "median ms")
    return head, (
        (
            policy,
            *(_cell(result.row(policy, kind)) for kind in (ALL, *result.kinds)),
            *(_cell(result.row(policy, ALL, slo)) for slo in slos),
            f"{result.row(policy).bytes_read / 1e6:.0f}",
            f"{result.row(policy).ttft_ms_median:.0f}",
        )
        for policy in result.policies
    )


def _cell(row: StreamRow) -> str:
    return f"{row.met_share:.0%} {row.kl_answer:.4f}"


def ready_table(result: StreamBench) -> Iterator[tuple[Any, ...]]:
    """Rows under `READY_HEAD`."""
    for ready in result.ready:
        eight = "-" if ready.sooner_than_int8 is None else f"{ready.sooner_than_int8:.2f}x"
        yield ready.policy, f"{ready.ready_ms:.0f}", f"{ready.kl_answer:.4f}", f"{ready.sooner_than_text:.2f}x", eight


def case_table(result: StreamBench) -> Iterator[tuple[Any, ...]]:
    """Rows under `CASE_HEAD`."""
    for policy, outcome in result.case.items():
        levels = Counter(level or "text" for level in outcome.levels.values())
        told = ", ".join(f"{count} {level}" for level, count in sorted(levels.items()))
        ttft, loss, megabytes = f"{outcome.ttft_s * 1e3:.0f}", f"{outcome.loss:.4f}", f"{outcome.bytes / 1e6:.0f}"
        yield policy, ttft, "yes" if outcome.met else "no", loss, megabytes, told


def stream_notes(result: StreamBench) -> Iterator[str]:
    """Yield what was simulated, and what the numbers mean."""
    options = result.options
    yield (
        f"{result.context}: {result.tokens} tokens in {counted(result.chunks, 'chunk')}, "
        f"{result.raw_bytes / 1e6:.0f} MB of KV; computing them from text {result.text_ms:.0f} ms; "
        f"{len(result.traces)} traces; predictor {options.predictor}, "
        f"{options.depth} requests outstanding; the drop's objective {options.case_slo_ms:g} ms"
    )
    yield "; ".join(result.sources)
    yield _MEANING
    yield result.includes
