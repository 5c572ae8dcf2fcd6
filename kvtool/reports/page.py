"""HTML page in one self-contained file: text, tables and inline SVG; opens offline, in light and dark, on a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WORD = re.compile(r"[^\W\d_]{3,}|[/~]")  # no number, interval or number with a unit has such; a path does
_SHADED = 0.98  # of the tokens have a shade of their own; those above it share the full one
_STYLE = """
:root { color-scheme: light dark; --text: #24292f; --faint: #6a737d; --page: #ffffff; --line: #d9dee3 }
@media (prefers-color-scheme: dark) {
  :root { --text: #e3e7ec; --faint: #98a1ab; --page: #14181d; --line: #333a42 }
}
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif }
main { max-width: 68rem; margin: 0 auto; padding: 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; color: var(--faint); margin: 0 }
dd { margin: 0; overflow-wrap: anywhere }
figure, .wide { margin: 1rem 0; overflow-x: auto; background:
  linear-gradient(to right, var(--page) 40%, transparent) left / 3rem 100% no-repeat local,
  linear-gradient(to left, var(--page) 40%, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to right, var(--faint), transparent) left / .6rem 100% no-repeat,
  linear-gradient(to left, var(--faint), transparent) right / .6rem 100% no-repeat }
figure::-webkit-scrollbar, .wide::-webkit-scrollbar { height: 10px }
figure::-webkit-scrollbar-track, .wide::-webkit-scrollbar-track { background: var(--line) }
figure::-webkit-scrollbar-thumb, .wide::-webkit-scrollbar-thumb { background: var(--faint); border-radius: 5px }
figure svg .page { fill: none }
figure svg { display: block; width: 100%; height: auto; min-width: 55rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th:first-child, td:first-child, .words { text-align: left }
.scale { display: grid; grid-template-columns: 1fr 1fr 1fr; max-width: 24rem; font-size: .85rem; color: var(--faint) }
.scale i { grid-column: 1 / 4; height: .8rem; border: 1px solid var(--line);
  background: linear-gradient(to right, transparent, rgb(224 134 0)) }
.scale span:nth-of-type(2) { text-align: center } .scale span:nth-of-type(3) { text-align: right }
.chunk { border: 1px solid var(--line); border-radius: 6px; margin: .8rem 0; padding: .4rem .8rem }
.chunk > h3 { font-size: .85rem; font-weight: 600; color: var(--faint); margin: 0; overflow-wrap: anywhere }
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.9; margin: .4rem 0 }
.tokens span { border-radius: 3px; padding: .1em 0 }
@media print {
  main { max-width: none } figure, .wide { overflow: visible } figure svg { min-width: 0 }
  section { break-inside: avoid } .tokens span, .scale i { print-color-adjust: exact }
}
"""


@dataclass(frozen=True, slots=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Passage:
    label: str
    pieces: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class HeatMap:
    measure: str
    passages: tuple[Passage, ...]

    @property
    def most(self) -> float:
        """The number with the full shade: few are above it, so that one outlier does not leave all others white."""
        numbers = sorted(number for passage in self.passages for _, number in passage.pieces)
        return (numbers[round(_SHADED * (len(numbers) - 1))] if numbers else 0.0) or 1.0


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    text: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    heat: HeatMap | None = None


def page(title: str, facts: Mapping[str, object], sections: Sequence[Section]) -> str:
    body = [f"<h1>{escape(title)}</h1>", "<dl>"]
    body += [f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items()]
    body.append("</dl>")
    for section in sections:
        body += _section(section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def figure_files(title: str, sections: Sequence[Section]) -> Iterator[tuple[str, str]]:
    for section in sections:
        for number, figure in enumerate(section.figures, 1):
            words = f"{title} {section.title}" + (f" {number}" if len(section.figures) > 1 else "")
            yield re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") + ".svg", figure


def _section(section: Section) -> Iterator[str]:
    yield f"<section><h2>{escape(section.title)}</h2>"
    for paragraph in section.text:
        yield f"<p>{escape(paragraph)}</p>"
    for figure in section.figures:
        yield f'<figure tabindex="0">{figure}</figure>'
    for table in section.tables:
        yield from _table(table)
    if section.heat is not None:
        yield from _heat(section.heat)
    yield "</section>"


def _table(table: Table) -> Iterator[str]:
    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.head)
    kinds = [' class="words"' if any(_WORD.search(str(cell)) for cell in column) else "" for column in columns]
    yield '<div class="wide" tabindex="0"><table><thead><tr>'
    yield from (f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, table.head, strict=True))
    yield "</tr></thead><tbody>"
    for row in table.rows:
        cells = (f"<td{kind}>{escape(str(cell))}</td>" for kind, cell in zip(kinds, row, strict=True))
        yield "<tr>" + "".join(cells) + "</tr>"
    yield "</tbody></table></div>"


def _heat(heat: HeatMap) -> Iterator[str]:
    most = heat.most
    ticks = "".join(f"<span>{number:.3g}</span>" for number in (0.0, most / 2))
    yield f'<p>{escape(heat.measure)}:</p><div class="scale"><i></i>{ticks}<span>{most:.3g} and more</span></div>'
    for passage in heat.passages:
        pieces = "".join(_piece(text, number, most) for text, number in passage.pieces)
        yield f'<div class="chunk"><h3>{escape(passage.label)}</h3><p class="tokens">{pieces}</p></div>'


def _piece(text: str, number: float, most: float) -> str:
    shade = round(100 * min(1.0, max(0.0, number / most)))
    if not shade:
        return escape(text)
    return f'<span style="background:rgb(224 134 0 / {shade}%)" title="{number:.3g}">{escape(text)}</span>'
