"""Policies of streaming over bandwidth traces: how often each meets an objective, and what it loses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from kvtool.core.streaming import Task
from kvtool.core.streaming.policy import DEPTH, Policy
from samples.benchmarks.streaming.context import Context
from samples.benchmarks.streaming.predictors import DEFAULT_PREDICTOR, PREDICTORS
from samples.benchmarks.streaming.rules import CacheGenRule, Fixed, TextOnly
from samples.benchmarks.streaming.simulate import Outcome, simulate
from samples.benchmarks.streaming.traces import LinkTrace, drop_in_mid_transfer

ADAPTIVE, LINK, CACHEGEN, TEXT = "adaptive", "link", "cachegen", "text"
ALL = "all"
INCLUDES = (
    "TTFT: waiting for the link, fetching, decoding beside it where counted and computing chunks beside it (`link`: as "
    "`adaptive`, without that), then one pass over the question and the others that are computed from text"
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """The simulated cases besides the given traces.

    Attributes
    ----------
    ready_mbps : the steady link for which the time until the context is there is reported: CacheGen's own (section 7).
    case : the trace whose transfers are listed one by one.
    """

    ready_mbps: float = 3000.0
    case: LinkTrace = field(default_factory=drop_in_mid_transfer)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Parameters of the simulation.

    Attributes
    ----------
    slo_ms : objectives; every trace is run once for each.
    depth : fetches outstanding at once.
    scenario : the link and the trace that are reported separately.
    """

    slo_ms: tuple[float, ...]
    predictor: str = DEFAULT_PREDICTOR
    depth: int = DEPTH
    scenario: Scenario = field(default_factory=Scenario)

    @property
    def case_slo_ms(self) -> float:
        """The objective of the scenario's case: the middle one."""
        return sorted(self.slo_ms)[(len(self.slo_ms) - 1) // 2]


@dataclass(frozen=True, slots=True)
class StreamRow:
    """One policy over the requests of one class of traces (`all`: of every one) at one objective (None: at all).

    Attributes
    ----------
    met_share : within the objective.
    kl_answer : mean over requests, in or out of the objective, of nats a token of the answer.
    text_share : of the tokens, those computed from text. `vain_share` : those of chunks whose computation was stopped.
    bytes_read : mean over requests.
    """

    policy: str
    kind: str
    slo_ms: float | None
    requests: int
    met_share: float
    kl_answer: float
    text_share: float
    vain_share: float
    bytes_read: float
    ttft_ms_median: float


@dataclass(frozen=True, slots=True)
class Ready:
    """Time until the context is there over a steady link: fetched and decoded, or computed from text."""

    policy: str
    ready_ms: float
    kl_answer: float
    sooner_than_text: float
    sooner_than_int8: float | None


@dataclass(frozen=True, slots=True)
class StreamBench:
    """All results, and what they are of; `case`: what every policy made of the scenario's trace."""

    context: str
    tokens: int
    chunks: int
    raw_bytes: int
    text_ms: float
    options: StreamOptions
    traces: tuple[LinkTrace, ...]
    rows: tuple[StreamRow, ...]
    ready: tuple[Ready, ...]
    case: Mapping[str, Outcome]
    sources: tuple[str, ...]
    includes: str = INCLUDES

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies in order."""
        return tuple(dict.fromkeys(row.policy for row in self.rows))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Classes of traces in order, without `all`."""
        return tuple(dict.fromkeys(trace.kind for trace in self.traces))

    def row(self, policy: str, kind: str = ALL, slo_ms: float | None = None) -> StreamRow:
        """Return the row of one policy over a class of traces at an objective."""
        return next(row for row in self.rows if (row.policy, row.kind, row.slo_ms) == (policy, kind, slo_ms))

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `stream.py`."""
        value = {own.name: getattr(self, own.name) for own in fields(self)}
        names = ("slo_ms", "predictor", "depth")
        case = self.options.scenario.case
        return value | {
            "options": {name: getattr(self.options, name) for name in names},
            "traces": [_with_class(trace) for trace in self.traces],
            "rows": [_with_class(row) for row in self.rows],
            "case": {
                "trace": _with_class(case),
                "slo_ms": self.options.case_slo_ms,
                "runs": [{"policy": policy, **outcome.to_json()} for policy, outcome in self.case.items()],
            },
        }


def _with_class(row: LinkTrace | StreamRow) -> dict[str, Any]:
    return {"class" if name == "kind" else name: fact for name, fact in asdict(row).items()}


@dataclass(frozen=True, slots=True)
class _Result:
    policy: str
    kind: str
    slo_ms: float
    outcome: Outcome


def bench_stream(
    context: Context, traces: Sequence[LinkTrace], options: StreamOptions, advance: Callable[[], None] = lambda: None
) -> StreamBench:
    """Run every policy over every trace at every objective; `advance` is called after each trace and objective.

    Raises
    ------
    UsageError : no such predictor.
    """
    results: list[_Result] = []
    for slo_ms in options.slo_ms:
        for trace in traces:
            for policy, outcome in _outcomes(context, trace, slo_ms, options):
                results.append(_Result(policy, trace.kind, slo_ms, outcome))
            advance()
    return StreamBench(
        context=context.name,
        tokens=context.tokens,
        chunks=len(context.ladders),
        raw_bytes=context.raw_bytes,
        text_ms=context.text_seconds() * 1e3,
        options=options,
        traces=tuple(traces),
        rows=tuple(_rows(results, context.tokens)),
        ready=tuple(_ready(context, options)),
        case=dict(_outcomes(context, options.scenario.case, options.case_slo_ms, options)),
        sources=context.sources,
    )


def _outcomes(
    context: Context, trace: LinkTrace, slo_ms: float, options: StreamOptions
) -> Iterator[tuple[str, Outcome]]:
    """Yield every policy's name and outcome of a trace at one objective."""
    for name in (ADAPTIVE, LINK, CACHEGEN, *context.fixed, TEXT):
        task = context.task(slo_ms / 1e3, name if name in context.fixed else None)
        yield name, simulate(_policy(name, task, options), task, trace, options.depth)


def _policy(name: str, task: Task, options: StreamOptions) -> Policy:
    estimator = PREDICTORS[options.predictor]()
    if name == ADAPTIVE:
        return Policy(task, estimator)
    if name == LINK:
        return Policy(replace(task, alone=lambda chunk: math.inf), estimator)
    if name == CACHEGEN:
        return CacheGenRule(task, PREDICTORS["last"]())
    return TextOnly(task, estimator) if name == TEXT else Fixed(task, estimator, name)


def _rows(results: Sequence[_Result], tokens: int) -> Iterator[StreamRow]:
    """Sum up by policy, class of traces and objective; `all` classes and all objectives (None) before each one."""
    groups: dict[tuple[str, str, float | None], list[_Result]] = {}
    for policy in dict.fromkeys(result.policy for result in results):
        of_policy = [result for result in results if result.policy == policy]
        for kind in (ALL, *dict.fromkeys(result.kind for result in of_policy)):
            of_kind = [result for result in of_policy if kind in (ALL, result.kind)]
            groups[policy, kind, None] = of_kind
            for slo_ms in dict.fromkeys(result.slo_ms for result in of_kind):
                groups[policy, kind, slo_ms] = [result for result in of_kind if result.slo_ms == slo_ms]
    return (_row(*key, group, tokens) for key, group in groups.items())


def _row(policy: str, kind: str, slo_ms: float | None, results: Sequence[_Result], tokens: int) -> StreamRow:
    outcomes = [result.outcome for result in results]
    return StreamRow(
        policy=policy,
        kind=kind,
        slo_ms=slo_ms,
        requests=len(results),
        met_share=statistics.fmean(float(bool(outcome.met)) for outcome in outcomes),
        kl_answer=statistics.fmean(outcome.loss for outcome in outcomes),
        text_share=statistics.fmean(outcome.text_tokens for outcome in outcomes) / tokens,
        vain_share=statistics.fmean(outcome.vain_tokens for outcome in outcomes) / tokens,
        bytes_read=statistics.fmean(outcome.bytes for outcome in outcomes),
        ttft_ms_median=statistics.median(outcome.ttft_s * 1e3 for outcome in outcomes),
    )


def _ready(context: Context, options: StreamOptions) -> Iterator[Ready]:
    """Every fixed level over the scenario's steady link, and the adaptive policy at each objective."""
    link = LinkTrace("steady", "steady", ((0.0, options.scenario.ready_mbps),))
    reached: dict[str, tuple[float, float]] = {}  # seconds, loss
    for level in context.fixed:
        task = context.task(math.inf, level)
        outcome = simulate(_policy(level, task, options), task, link, options.depth)
        reached[level] = outcome.ready_s, outcome.loss
    for slo_ms in options.slo_ms:
        task = context.task(slo_ms / 1e3)
        outcome = simulate(_policy(ADAPTIVE, task, options), task, link, options.depth)
        with_text = outcome.ttft_s - context.compute(frozenset())
        reached[f"{ADAPTIVE}, {slo_ms:g} ms"] = with_text, outcome.loss
    text, eight = context.text_seconds(), reached.get("int8")
    for name, (seconds, loss) in {**reached, TEXT: (text, 0.0)}.items():
        yield Ready(name, seconds * 1e3, loss, text / seconds, None if eight is None else eight[0] / seconds)
