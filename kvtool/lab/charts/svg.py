"""Line charts as one self-contained SVG, in colours that read on light and on dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH = 1056  # of a whole chart: what a page at 1,200 pixels has room for
_HEIGHT = 280  # of a panel's plot
_LEFT, _TOP, _GAP, _RIGHT, _BOTTOM = 64, 64, 72, 24, 56
_LABEL = 30  # pixels that a number below a panel takes at least
_ASIDE = 4  # pixels between the points of two series with intervals
_LEGEND = 150  # pixels of a name in the legend
COLOURS = ("#8a8f98", "#3f8cf0", "#e08600", "#16a36f", "#dd5335", "#b267d6", "#1fa7bd", "#b3941a")
_MARKS = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", "M-4 -4h8v8h-8z", "M0 -5l5 5l-5 5l-5 -5z", "M0 -5l5 9h-10z")
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-size: 15px; font-weight: 600 } .note { font-size: 11px; fill: #6a737d }
.page { fill: #ffffff } .grid { stroke: #d9dee3; stroke-width: 1 }
@media (prefers-color-scheme: dark) {
  text { fill: #e3e7ec } .note { fill: #98a1ab } .page { fill: #14181d } .grid { stroke: #333a42 }
}
"""


@dataclass(frozen=True, slots=True)
class Line:
    """A named series of (x, y), ascending in x; `bounds`, where there are any: of each point, its interval in y."""

    name: str
    points: tuple[tuple[float, float], ...]
    bounds: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot. `logarithmic` is the vertical axis; it then needs numbers above 0."""

    title: str
    lines: tuple[Line, ...]
    logarithmic: bool = False


def line_charts(title: str, panels: Sequence[Panel], x_label: str, note: str = "") -> str:
    """Panels side by side over the same values of x, which stand evenly spaced; a name has one colour in all of them.

    Returns
    -------
    The SVG document's text.
    """
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    across = sorted({x for panel in panels for line in panel.lines for x, _ in line.points})
    wide = (WIDTH - _LEFT - _RIGHT - _GAP * (len(panels) - 1)) / len(panels)
    legend_rows = -(-len(names) // _per_row())
    height = _TOP + _HEIGHT + _BOTTOM + 20 * legend_rows + (20 if note else 0)
    parts = [*opening(title, WIDTH, height)]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({_LEFT + number * (wide + _GAP):.1f} {_TOP})">')
        parts += _panel(panel, names, across, x_label, wide)
        parts.append("</g>")
    parts += _legend(names, _TOP + _HEIGHT + _BOTTOM)
    return closing(parts, note, height)


def opening(title: str, width: int, height: int) -> Iterator[str]:
    """What every figure begins with: its size, its style, its background, its title."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">'
    )
    yield f"<style>{STYLE}</style>"
    yield f'<rect class="page" width="{width}" height="{height}"/>'
    yield f'<text class="title" x="16" y="26">{escape(title)}</text>'


def closing(parts: Sequence[str], note: str, height: int) -> str:
    """A figure's text: its parts, and a note at the bottom."""
    told = [f'<text class="note" x="16" y="{height - 10}">{escape(note)}</text>'] if note else []
    return "\n".join([*parts, *told, "</svg>"]) + "\n"


def _panel(panel: Panel, names: Sequence[str], across: Sequence[float], x_label: str, wide: float) -> Iterator[str]:
    values = [y for line in panel.lines for _, y in line.points]
    values += [y for line in panel.lines for bounds in line.bounds for y in bounds]
    scale = _Scale.over(values, panel.logarithmic)
    yield f'<text x="0" y="-12">{escape(panel.title)}</text>'
    for tick in scale.ticks:
        y = scale.place(tick)
        yield f'<path class="grid" d="M0 {y:.1f}H{wide:.1f}"/>'
        yield f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
    places = {x: wide * (number + 0.5) / len(across) for number, x in enumerate(across)}
    for x, place in list(places.items())[:: math.ceil(len(places) * _LABEL / wide)]:
        yield f'<text x="{place:.1f}" y="{_HEIGHT + 18}" text-anchor="middle">{x:g}</text>'
    yield f'<text class="note" x="{wide / 2:.1f}" y="{_HEIGHT + 36}" text-anchor="middle">{escape(x_label)}</text>'
    for line in panel.lines:
        number = names.index(line.name)
        aside = _ASIDE * (number - (len(names) - 1) / 2) if line.bounds else 0.0  # else intervals hide one another
        spots = [(places[x] + aside, scale.place(y), y) for x, y in line.points]
        yield from _series(line.name, number, spots)
        for (x, _, _), (low, high) in zip(spots, line.bounds, strict=False):
            yield _whisker(number, x, scale.place(low), scale.place(high))


def _series(name: str, number: int, spots: Sequence[tuple[float, float, float]]) -> Iterator[str]:
    colour = COLOURS[number % len(COLOURS)]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in spots)
    yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for x, y, value in spots:
        told = f"<title>{escape(name)}: {value:.4g}</title>"
        yield f'<path transform="translate({x:.1f} {y:.1f})" d="{_mark(number)}" fill="{colour}">{told}</path>'


def _whisker(number: int, x: float, low: float, high: float) -> str:
    """A point's interval: a line with short ends."""
    colour = COLOURS[number % len(COLOURS)]
    ends = "".join(f"M{x - 3:.1f} {y:.1f}h6" for y in (low, high))
    return f'<path class="interval" d="M{x:.1f} {low:.1f}V{high:.1f}{ends}" fill="none" stroke="{colour}"/>'


def _mark(number: int) -> str:
    return _MARKS[number % len(_MARKS)]


def _per_row() -> int:
    return (WIDTH - _LEFT) // _LEGEND


def _legend(names: Sequence[str], top: int) -> Iterator[str]:
    for number, name in enumerate(names):
        row, column = divmod(number, _per_row())
        x, y, colour = _LEFT + _LEGEND * column, top + 20 * row, COLOURS[number % len(COLOURS)]
        yield f'<path transform="translate({x + 5} {y})" d="{_mark(number)}" fill="{colour}"/>'
        yield f'<text x="{x + 16}" y="{y + 4}">{escape(name)}</text>'


@dataclass(frozen=True, slots=True)
class _Scale:
    """A vertical axis from `low` to `high`."""

    low: float
    high: float
    logarithmic: bool
    ticks: tuple[float, ...]

    @classmethod
    def over(cls, values: Sequence[float], logarithmic: bool) -> _Scale:
        """An axis that holds these values, with round numbers at its ticks."""
        if logarithmic:
            low, high = min(values) / 1.2, max(values) * 1.2
            return cls(low, high, True, tuple(tick for tick in _decades(low, high) if low <= tick <= high))
        high = max([*values, 0.0]) * 1.08 or 1.0
        step = _round_step(high / 5)
        return cls(0.0, high, False, tuple(step * number for number in range(int(high / step) + 1)))

    def place(self, value: float) -> float:
        """Distance from the top."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return _HEIGHT * (1 - (value - low) / (high - low))


def _decades(low: float, high: float) -> Iterator[float]:
    few = math.log10(high / low) > 3  # then whole powers of ten are enough
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for digit in (1,) if few else (1, 2, 5):
            yield digit * 10.0**power


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least * (1 - 1e-9))
