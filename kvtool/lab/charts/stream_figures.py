"""Figures of the stream bench: policies by class of trace, and one transfer over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from kvtool.lab.bench.stream import ALL, StreamBench
from kvtool.lab.charts.svg import COLOURS, closing, opening
from kvtool.lab.simulator.simulate import Outcome

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
