"""Policies of streaming over bandwidth traces: how often each meets an objective, and what it loses."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvtool.core.streaming.book import Policy, Task
from kvtool.core.streaming.estimate import DEFAULT_MARGIN, DEFAULT_PREDICTOR, make_estimator
from kvtool.core.streaming.policy import DEPTH, Adaptive
from kvtool.lab.bench.stream_subject import Subject
from kvtool.lab.simulator.generate import drop_in_mid_transfer
from kvtool.lab.simulator.rules import CacheGenRule, Fixed, TextOnly
from kvtool.lab.simulator.simulate import Run, simulate
from kvtool.lab.simulator.traces import Trace

ADAPTIVE, CACHEGEN, TEXT = "adaptive", "cachegen", "text"
ALL = "all"
_READY_MBPS = 3000.0  # of the link that the context's time is stated for, CacheGen's own (section 7)
INCLUDES = (
    "TTFT: waiting for the link, fetching, decoding beside it where counted, then one pass over the question and the "
    "chunks that are computed from text"
)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What is varied.

    Attributes
    ----------
    slo_ms : objectives; every trace is run once for each.
    depth : fetches outstanding at once.
    """

    slo_ms: tuple[float, ...]
    predictor: str = DEFAULT_PREDICTOR
    margin: float = DEFAULT_MARGIN
    depth: int = DEPTH


@dataclass(frozen=True, slots=True)
class StreamRow:
    """One policy over the requests of one class of traces (`all`: of every one) at one objective (None: at all).

    Attributes
    ----------
    met : share within the objective.
    loss : mean over requests, in or out of the objective, of nats a token of the answer.
    text : share of the tokens computed from text.
    """

    policy: str
    kind: str
    slo_ms: float | None
    requests: int
    met: float
    loss: float
    text: float
    megabytes: float
    median_ttft_ms: float


@dataclass(frozen=True, slots=True)
class Ready:
    """How soon the context is there over 3 Gbit/s: fetched and decoded, or computed from text."""

    policy: str
    ready_ms: float
    loss: float
    sooner_than_text: float
    sooner_than_int8: float | None


@dataclass(frozen=True, slots=True)
class CaseRun:
    """One policy in the case of the drop in mid-transfer."""

    policy: str
    run: Run


@dataclass(frozen=True, slots=True)
class StreamBench:
    """All results, and what they are of."""

    subject: str
    tokens: int
    chunks: int
    raw_bytes: int
    text_ms: float
    options: StreamOptions
    traces: tuple[Trace, ...]
    rows: tuple[StreamRow, ...]
    ready: tuple[Ready, ...]
    case_trace: Trace
    case_slo_ms: float
    case: tuple[CaseRun, ...]
    sources: tuple[str, ...]
    includes: str = INCLUDES

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.policy for row in self.rows))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Classes of traces in order, without `all`."""
        return tuple(dict.fromkeys(trace.kind for trace in self.traces))

    def row(self, policy: str, kind: str = ALL, slo_ms: float | None = None) -> StreamRow:
        return next(one for one in self.rows if (one.policy, one.kind, one.slo_ms) == (policy, kind, slo_ms))

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        value["options"]["slo_ms"] = list(self.options.slo_ms)
        for trace in value["traces"]:
            trace["class"] = trace.pop("kind")
        for row in value["rows"]:
            row["class"] = row.pop("kind")
        return value


@dataclass(frozen=True, slots=True)
class _Result:
    policy: str
    kind: str
    slo_ms: float
    text: float
    run: Run


def bench_stream(
    subject: Subject, traces: Sequence[Trace], options: StreamOptions, advance: Callable[[], None] = lambda: None
) -> StreamBench:
    """Run every policy over every trace at every objective; `advance` is told after each trace and objective.

    Raises
    ------
    UsageError : no such predictor.
    """
    results: list[_Result] = []
    for slo_ms in options.slo_ms:
        for trace in traces:
            for policy, run in _runs(subject, trace, slo_ms, options):
                text = run.text_tokens / subject.tokens
                results.append(_Result(policy, trace.kind, slo_ms, text, run))
            advance()
    drop, slo_ms = drop_in_mid_transfer(), sorted(options.slo_ms)[(len(options.slo_ms) - 1) // 2]
    return StreamBench(
        subject=subject.name,
        tokens=subject.tokens,
        chunks=len(subject.ladders),
        raw_bytes=subject.raw_bytes,
        text_ms=subject.text_seconds() * 1e3,
        options=options,
        traces=tuple(traces),
        rows=tuple(_rows(results)),
        ready=tuple(_ready(subject, options)),
        case_trace=drop,
        case_slo_ms=slo_ms,
        case=tuple(CaseRun(policy, run) for policy, run in _runs(subject, drop, slo_ms, options)),
        sources=subject.sources,
    )


def _runs(subject: Subject, trace: Trace, slo_ms: float, options: StreamOptions) -> Iterator[tuple[str, Run]]:
    """Every policy at one objective, its name first."""
    for name in (ADAPTIVE, CACHEGEN, *subject.fixed, TEXT):
        task = subject.task(slo_ms / 1e3, name if name in subject.fixed else None)
        yield name, simulate(_policy(name, task, options), task, trace, options.depth)


def _policy(name: str, task: Task, options: StreamOptions) -> Policy:
    estimator = make_estimator(options.predictor)
    if name == ADAPTIVE:
        return Adaptive(task, estimator, options.margin)
    if name == CACHEGEN:
        return CacheGenRule(task, make_estimator("last"), options.margin)
    return TextOnly(task, estimator) if name == TEXT else Fixed(task, estimator, name)


def _rows(results: Sequence[_Result]) -> Iterator[StreamRow]:
    policies, kinds, slos = (
        list(dict.fromkeys(getattr(one, key) for one in results)) for key in ("policy", "kind", "slo_ms")
    )
    for policy in policies:
        own = [one for one in results if one.policy == policy]
        for kind in (ALL, *kinds):
            of_kind = [one for one in own if kind in (ALL, one.kind)]
            yield _row(policy, kind, None, of_kind)
            for slo_ms in slos:
                yield _row(policy, kind, slo_ms, [one for one in of_kind if one.slo_ms == slo_ms])


def _row(policy: str, kind: str, slo_ms: float | None, results: Sequence[_Result]) -> StreamRow:
    def mean(values: Iterable[float]) -> float:
        return statistics.fmean(values)

    return StreamRow(
        policy=policy,
        kind=kind,
        slo_ms=slo_ms,
        requests=len(results),
        met=mean(float(bool(one.run.met)) for one in results),
        loss=mean(one.run.loss for one in results),
        text=mean(one.text for one in results),
        megabytes=mean(one.run.bytes / 1e6 for one in results),
        median_ttft_ms=statistics.median(one.run.ttft_s * 1e3 for one in results),
    )


def _ready(subject: Subject, options: StreamOptions) -> Iterator[Ready]:
    """Every fixed level over a steady link, and the adaptive policy at each objective."""
    link, text = Trace("steady", "steady", ((0.0, _READY_MBPS),)), subject.text_seconds()
    found: dict[str, tuple[float, float]] = {}
    for level in subject.fixed:
        task = subject.task(None, level)
        run = simulate(_policy(level, task, options), task, link, options.depth)
        found[level] = run.ready_s, run.loss
    for slo_ms in options.slo_ms:
        task = subject.task(slo_ms / 1e3)
        run = simulate(_policy(ADAPTIVE, task, options), task, link, options.depth)
        rest = run.ttft_s - subject.compute(frozenset())  # text included
        found[f"{ADAPTIVE}, {slo_ms:g} ms"] = rest, run.loss
    eight = found.get("int8")
    for name, (seconds, loss) in {**found, TEXT: (text, 0.0)}.items():
        yield Ready(name, seconds * 1e3, loss, text / seconds, None if eight is None else eight[0] / seconds)
