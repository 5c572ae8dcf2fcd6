"""Charts: lines as one self-contained SVG, in colours that read on light and on dark, and sparklines."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from xml.sax.saxutils import escape

Axis = Literal["even", "linear", "logarithmic"]  # of x: values evenly spaced, or to one of two scales

WIDTH = 1056  # of a whole chart: fits a page of 1,200 pixels
_HEIGHT = 280  # of a panel's plot
_LEFT, _TOP, _GAP, _RIGHT, _BOTTOM = 64, 64, 72, 24, 56
_LABEL = 30  # pixels that a number below a panel takes at least; on a logarithmic axis they are longer
_ASIDE = 6  # pixels between the points of two series with intervals
_LEGEND = 150  # pixels of a name in the legend
COLOURS = ("#8a8f98", "#3f8cf0", "#e08600", "#16a36f", "#dd5335", "#b267d6", "#1fa7bd", "#b3941a")
_MODES = ("reuse", "epic", "blend", "infoflow", "union", "prefix", "full")  # each looks alike in every figure
_MARKS = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", "M-4 -4h8v8h-8z", "M0 -5l5 5l-5 5l-5 -5z", "M0 -5l5 9h-10z")
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-size: 15px; font-weight: 600 } .note { font-size: 11px; fill: #6a737d }
.page { fill: #ffffff } .grid { stroke: #d9dee3; stroke-width: 1 }
.level { stroke: #6a737d; stroke-width: 1; stroke-dasharray: 2 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e3e7ec } .note { fill: #98a1ab } .page { fill: #14181d } .grid { stroke: #333a42 }
  .level { stroke: #98a1ab }
}
"""


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: tuple[tuple[float, float], ...]  # (x, y), ascending in x
    bounds: tuple[tuple[float, float], ...] = ()  # of each point, its interval in y; empty: no intervals
    variant_of: str = ""  # a series in whose colour and mark this one is drawn, hollow and dashed


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot; `levels`: name and y of reference lines across the whole plot."""

    title: str
    lines: tuple[Line, ...]
    logarithmic: bool = False
    levels: tuple[tuple[str, float], ...] = ()


def series(name: str, rows: Iterable[Mapping[str, Any]], x: str, y: str) -> Line:
    return Line(name, tuple((row[x], row[y]) for row in rows))


def line_charts(title: str, panels: Sequence[Panel], x_label: str, note: str = "", axis: Axis = "even") -> str:
    """Draw panels side by side over the same values of x, as SVG; a name has one colour in all of them."""
    values = sorted({x for panel in panels for line in panel.lines for x, _ in line.points})
    wide = (WIDTH - _LEFT - _RIGHT - _GAP * (len(panels) - 1)) / len(panels)
    across = _AXES[axis](values, wide)
    looks = _looks(line for panel in panels for line in panel.lines)
    height = _TOP + _HEIGHT + _BOTTOM + 20 * -(-len(looks) // _per_row()) + (20 if note else 0)
    parts = [*opening(title, WIDTH, height)]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({_LEFT + number * (wide + _GAP):.1f} {_TOP})">')
        parts += _panel(panel, looks, across, x_label)
        parts.append("</g>")
    parts += _legend(looks, _TOP + _HEIGHT + _BOTTOM)
    return closing(parts, note, height)


def opening(title: str, width: int, height: int) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">'
    )
    yield f"<style>{STYLE}</style>"
    yield f'<rect class="page" width="{width}" height="{height}"/>'
    yield f'<text class="title" x="16" y="26">{escape(title)}</text>'


def closing(parts: Sequence[str], note: str, height: int) -> str:
    bottom = [f'<text class="note" x="16" y="{height - 10}">{escape(note)}</text>'] if note else []
    return "\n".join([*parts, *bottom, "</svg>"]) + "\n"


def _panel(panel: Panel, looks: Mapping[str, _Look], across: _Across, x_label: str) -> Iterator[str]:
    values = [y for line in panel.lines for _, y in line.points] + [y for _, y in panel.levels]
    values += [y for line in panel.lines for bounds in line.bounds for y in bounds]
    scale = _Scale.over(values, panel.logarithmic)
    yield f'<text x="0" y="-12">{escape(panel.title)}</text>'
    for tick in scale.ticks:
        y = scale.place(tick)
        yield f'<path class="grid" d="M0 {y:.1f}H{across.wide:.1f}"/>'
        yield f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
    for x in across.ticks:
        yield f'<text x="{across.place(x):.1f}" y="{_HEIGHT + 18}" text-anchor="middle">{x:g}</text>'
    middle = across.wide / 2
    yield f'<text class="note" x="{middle:.1f}" y="{_HEIGHT + 36}" text-anchor="middle">{escape(x_label)}</text>'
    for name, level in panel.levels:
        y = scale.place(level)
        yield f'<path class="level" d="M0 {y:.1f}H{across.wide:.1f}"/>'
        yield f'<text class="note" x="2" y="{y - 4:.1f}">{escape(name)}</text>'
    aside = _asides(panel.lines)
    for line in panel.lines:
        look = looks[line.name]
        spots = [(across.place(x) + aside.get((line.name, x), 0.0), scale.place(y), y) for x, y in line.points]
        for (x, _, _), (low, high) in zip(spots, line.bounds, strict=False):
            yield _whisker(look, x, scale.place(low), scale.place(high))
        yield from _series(line.name, look, spots)


def _asides(lines: Sequence[Line]) -> dict[tuple[str, float], float]:
    """Return horizontal offsets of points, in pixels, by series and x: intervals at one x would hide one another."""
    at: dict[float, list[str]] = {}
    for line in lines:
        for x, _ in line.points if line.bounds else ():
            at.setdefault(x, []).append(line.name)
    middles = {x: (len(names) - 1) / 2 for x, names in at.items()}
    return {(name, x): _ASIDE * (place - middles[x]) for x, names in at.items() for place, name in enumerate(names)}


def _series(name: str, look: _Look, spots: Sequence[tuple[float, float, float]]) -> Iterator[str]:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in spots)
    yield f'<path d="M{path}" fill="none" {look.stroke} stroke-width="2"/>'
    for x, y, value in spots:
        hover = f"<title>{escape(name)}: {value:.4g}</title>"
        yield f'<path transform="translate({x:.1f} {y:.1f})" d="{look.mark}" {look.fill}>{hover}</path>'


def _whisker(look: _Look, x: float, low: float, high: float) -> str:
    ends = "".join(f"M{x - 3:.1f} {y:.1f}h6" for y in (low, high))
    return f'<path class="interval" d="M{x:.1f} {low:.1f}V{high:.1f}{ends}" fill="none" stroke="{look.colour}"/>'


def _per_row() -> int:
    return (WIDTH - _LEFT) // _LEGEND


def _legend(looks: Mapping[str, _Look], top: int) -> Iterator[str]:
    for number, (name, look) in enumerate(looks.items()):
        row, column = divmod(number, _per_row())
        x, y = _LEFT + _LEGEND * column, top + 20 * row
        yield f'<path transform="translate({x + 5} {y})" d="{look.mark}" {look.fill}/>'
        yield f'<text x="{x + 16}" y="{y + 4}">{escape(name)}</text>'


# ---- looks ----


@dataclass(frozen=True, slots=True)
class _Look:
    number: int
    hollow: bool

    @property
    def colour(self) -> str:
        return COLOURS[self.number % len(COLOURS)]

    @property
    def mark(self) -> str:
        return _MARKS[self.number % len(_MARKS)]

    @property
    def stroke(self) -> str:
        return f'stroke="{self.colour}"' + (' stroke-dasharray="5 4"' if self.hollow else "")

    @property
    def fill(self) -> str:
        return f'class="page" stroke="{self.colour}" stroke-width="1.5"' if self.hollow else f'fill="{self.colour}"'


def _looks(lines: Iterable[Line]) -> dict[str, _Look]:
    """No two looks are alike: a second variant has a colour of its own, and a mode the same in every figure."""
    series = {line.name: line.variant_of or line.name for line in lines}
    numbers = _of_modes([*series.values()])
    others = (number for number in itertools.count() if number not in {*numbers.values()})
    looks: dict[str, _Look] = {}
    for name, base in series.items():
        look = _Look(numbers[base] if base in numbers else numbers.setdefault(base, next(others)), base != name)
        if look in looks.values():
            look = _Look(numbers.setdefault(name, next(others)), True)
        looks[name] = look
    return looks


def _of_modes(names: Sequence[str]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for name in names:
        words = re.split(r"[ :,+]", name.removeprefix("kvtool "))
        if words[0] in _MODES and _MODES.index(words[0]) not in numbers.values():
            numbers.setdefault(name, _MODES.index(words[0]))
    return numbers


# ---- axes ----


@dataclass(frozen=True, slots=True)
class _Across:
    wide: float
    places: Mapping[float, float]
    ticks: tuple[float, ...]

    @classmethod
    def evenly(cls, values: Sequence[float], wide: float) -> _Across:
        places = {x: wide * (number + 0.5) / len(values) for number, x in enumerate(values)}
        return cls(wide, places, tuple(values[:: math.ceil(len(values) * _LABEL / wide)]))

    @classmethod
    def linear(cls, values: Sequence[float], wide: float) -> _Across:
        last = max([*values, 0.0]) or 1.0
        step = _round_step(last / 10)
        ticks = tuple(step * number for number in range(int(last / step) + 1))
        return cls(wide, {x: wide * (0.05 + 0.9 * x / last) for x in (*values, *ticks)}, ticks)

    @classmethod
    def logarithmic(cls, values: Sequence[float], wide: float) -> _Across:
        first, last = math.log(values[0]), math.log(values[-1])
        places = {x: wide * (0.05 + 0.9 * (math.log(x) - first) / (last - first or 1.0)) for x in values}
        ticks = [values[0]]
        for x in values:
            if places[x] - places[ticks[-1]] >= 1.4 * _LABEL:
                ticks.append(x)
        return cls(wide, places, tuple(ticks))

    def place(self, value: float) -> float:
        return self.places[value]


_AXES: dict[Axis, Callable[[Sequence[float], float], _Across]] = {
    "even": _Across.evenly,
    "linear": _Across.linear,
    "logarithmic": _Across.logarithmic,
}


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    logarithmic: bool
    ticks: tuple[float, ...]

    @classmethod
    def over(cls, values: Sequence[float], logarithmic: bool) -> _Scale:
        if logarithmic:
            low, high = min(values) / 1.2, max(values) * 1.2
            ticks = [tick for tick in _decades(low, high) if low <= tick <= high]
            if len(ticks) < 2:  # values too near to one another for two round numbers between them
                low, high = _round_below(low), _round_step(high)
                ticks = [tick for tick in _decades(low, high) if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
            return cls(low, high, True, tuple(ticks))
        high = max([*values, 0.0]) * 1.08 or 1.0
        step = _round_step(high / 5)
        return cls(0.0, high, False, tuple(step * number for number in range(int(high / step) + 1)))

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return _HEIGHT * (1 - (value - low) / (high - low))


def _decades(low: float, high: float) -> Iterator[float]:
    few = math.log10(high / low) > 3  # then whole powers of ten are enough
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for digit in (1,) if few else (1, 2, 5):
            yield digit * 10.0**power


def _round_below(most: float) -> float:
    power = 10.0 ** math.floor(math.log10(most))
    return next(digit * power for digit in (5, 2, 1) if digit * power <= most * (1 + 1e-9))


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least * (1 - 1e-9))


# ---- on a terminal ----

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None]) -> str:
    """Draw a bar for each number, from 0 to the largest; a blank for None."""
    most = max([0.0, *(value for value in values if value is not None)]) or 1.0
    bars = [" " if value is None else _BARS[min(7, max(0, int(value / most * 7.999)))] for value in values]
    return "".join(bars)
