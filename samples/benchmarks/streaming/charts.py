"""The stream bench for people: tables, what their numbers mean, a chart by objective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

from kvtool.core.codec.levels import exact
from kvtool.core.common.sizes import counted
from kvtool.reports.charts import COLOURS, Line, Panel, closing, line_charts, opening
from samples.benchmarks.streaming.bench import ALL, StreamBench, StreamRow
from samples.benchmarks.streaming.simulate import Outcome

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
        f"{len(result.traces)} traces; predictor {options.predictor}, margin {options.margin:.0%}, "
        f"{options.depth} requests outstanding; the drop's objective {options.case_slo_ms:g} ms"
    )
    yield "; ".join(result.sources)
    yield _MEANING
    yield result.includes


def stream_chart(result: StreamBench) -> str:
    """Share within the objective and mean loss by objective, as an SVG document; `raw` and `lossless`, which are hardly
    ever in time, are left to the tables."""
    policies = [policy for policy in result.policies if policy not in exact()]
    slos = sorted(result.options.slo_ms)

    def lines(name: str) -> tuple[Line, ...]:
        rows = {policy: [result.row(policy, ALL, slo) for slo in slos] for policy in policies}
        return tuple(
            Line(policy, tuple((slo, getattr(row, name)) for slo, row in zip(slos, own, strict=True)))
            for policy, own in rows.items()
        )

    panels = [
        Panel("share of requests within the objective", lines("met_share")),
        Panel("mean loss, nats a token", lines("kl_answer")),
    ]
    note = f"{result.tokens} tokens, {len(result.traces)} traces, over all of them; text loses nothing"
    return line_charts(f"streaming policies: {result.context}", panels, "objective, ms", note, "logarithmic")


_CELL, _ROW, _NAMES, _TOP = 104, 34, 84, 66
_WIDTH, _LINK, _LANE = 760, 90, 30  # of the plot over time, of the bandwidth above it, of a policy's lane
_FILL = "#3f8cf0"


def classes_figure(result: StreamBench) -> str:
    """A cell for each policy and class: as full as requests were within the objective, with the mean loss below."""
    columns = (ALL, *result.kinds)
    width, height = _NAMES + _CELL * len(columns) + 16, _TOP + _ROW * len(result.policies) + 34
    parts = [*opening(f"Within the objective, by class of trace: {result.context}", width, height)]
    for number, kind in enumerate(columns):
        parts.append(f'<text x="{_NAMES + number * _CELL + 4}" y="{_TOP - 10}">{escape(kind)}</text>')
    for line, policy in enumerate(result.policies):
        y = _TOP + line * _ROW
        parts.append(f'<text x="{_NAMES - 10}" y="{y + 20}" text-anchor="end">{escape(policy)}</text>')
        for number, kind in enumerate(columns):
            row, x = result.row(policy, kind), _NAMES + number * _CELL
            parts.append(
                f'<rect x="{x}" y="{y}" width="{(_CELL - 6) * row.met_share:.1f}" height="{_ROW - 6}" fill="{_FILL}" '
                f'fill-opacity="0.45"/><rect x="{x}" y="{y}" width="{_CELL - 6}" height="{_ROW - 6}" fill="none" '
                f'class="grid"/><text x="{x + 5}" y="{y + 18}">{row.met_share:.0%}</text>'
                f'<text class="note" x="{x + _CELL - 12}" y="{y + 18}" text-anchor="end">{row.kl_answer:.4f}</text>'
            )
    slos = ", ".join(f"{slo:g}" for slo in result.options.slo_ms)
    note = f"share of requests within the objective, mean loss in nats a token; {len(result.traces)} traces, {slos} ms"
    return closing(parts, note, height)


def drop_figure(result: StreamBench) -> str:
    """The case of the drop in mid-transfer: bandwidth, each chunk as it reaches a level, and the first token."""
    outcomes, levels = result.case, _levels(result)
    slo_ms = result.options.case_slo_ms
    until = 1.06 * min(max(outcome.ttft_s for outcome in outcomes.values()), 4 * slo_ms / 1e3)
    lanes = _TOP + _LINK + 26
    width, height = _NAMES + _WIDTH + 130, lanes + _LANE * len(outcomes) + 86
    title = f"3 Gbit/s, 1 Gbit/s from 0.1 s on, objective {slo_ms:g} ms: {result.context}"
    parts = [*opening(title, width, height), *_link(result, until)]
    bottom = lanes + _LANE * len(outcomes)
    slo = _NAMES + _WIDTH * min(slo_ms / 1e3 / until, 1)
    parts.append(f'<path d="M{slo:.1f} {_TOP}V{bottom}" stroke="#dd5335" stroke-width="2" stroke-dasharray="5 4"/>')
    for number, (policy, outcome) in enumerate(outcomes.items()):
        parts += _lane(policy, outcome, lanes + number * _LANE, until, levels)
    for tick in range(6):
        x = _NAMES + _WIDTH * tick / 5 / 1.06
        told = f"{until / 1.06 * tick / 5 * 1e3:.0f} ms"
        parts.append(f'<text class="note" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{told}</text>')
    for number, level in enumerate(levels):
        x, y = _NAMES + number * 88, bottom + 40
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{_colour(level, levels)}"/>')
        parts.append(f'<text x="{x + 17}" y="{y}">{escape(level)}</text>')
    note = (
        "a bar ends where a chunk has arrived at that level, the line at the first token (green: in time); the "
        "numbers are the time to it and the loss"
    )
    return closing(parts, note, height)


def _levels(result: StreamBench) -> list[str]:
    return list(dict.fromkeys(arrival.level for outcome in result.case.values() for arrival in outcome.arrivals))


def _colour(level: str, levels: Sequence[str]) -> str:
    return COLOURS[::-1][levels.index(level) % len(COLOURS)]


def _link(result: StreamBench, until: float) -> Iterator[str]:
    trace = result.options.scenario.case
    most = max(mbps for _, mbps in trace.steps)
    path = ""
    for second, mbps in trace.steps:
        x, y = _NAMES + _WIDTH * second / until, _TOP + _LINK * (1 - mbps / most)
        path += f"{'H' + format(x, '.1f') if path else 'M' + format(x, '.1f') + ' ' + format(y, '.1f')}V{y:.1f}"
    yield f'<path d="{path}H{_NAMES + _WIDTH}" fill="none" stroke="{_FILL}" stroke-width="2"/>'
    yield f'<path class="grid" d="M{_NAMES} {_TOP + _LINK}H{_NAMES + _WIDTH}"/>'
    for share in (0.0, 1 / 3, 1.0):
        y = _TOP + _LINK * (1 - share) + 4
        told = f"{most * share / 1e3:g} Gbit/s"
        yield f'<text class="note" x="{_NAMES - 8}" y="{y:.1f}" text-anchor="end">{told}</text>'


def _lane(policy: str, outcome: Outcome, y: int, until: float, levels: Sequence[str]) -> Iterator[str]:
    yield f'<text x="{_NAMES - 10}" y="{y + 18}" text-anchor="end">{escape(policy)}</text>'
    end = min(outcome.ttft_s, until)
    stroke = "#16a36f" if outcome.met else "#8a8f98"
    yield f'<path d="M{_NAMES} {y + 13}H{_NAMES + _WIDTH * end / until:.1f}" stroke="{stroke}" stroke-width="3"/>'
    before = 0.0
    for arrival in outcome.arrivals:
        if arrival.second > until:
            break
        x, wide = _NAMES + _WIDTH * before / until, _WIDTH * (arrival.second - before) / until
        told = f"chunk {arrival.chunk} at {arrival.level}, {arrival.second * 1e3:.0f} ms"
        yield (
            f'<rect x="{x:.1f}" y="{y + 4}" width="{max(wide - 1, 1):.1f}" height="18" '
            f'fill="{_colour(arrival.level, levels)}"><title>{escape(told)}</title></rect>'
        )
        before = arrival.second
    told = f"{outcome.ttft_s * 1e3:.0f} ms, {outcome.loss:.4f}"
    yield f'<text class="note" x="{_NAMES + _WIDTH + 10}" y="{y + 17}">{told}</text>'
