"""Parts of a report for people: text, quotes, tables and bars of text, and the HTML page that holds them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_BARS = "▁▂▃▄▅▆▇█"
_NUMBER = re.compile(r"(?:(\d[\d,]*(?:\.\d+)?)[%x]?(?: \[.*)?|-[\d.,%]*)?")  # or none, or one below 0
_STYLE = """
:root { color-scheme: light dark }
body { font: 14px/1.5 ui-monospace, monospace; max-width: 70rem; margin: 1rem auto; padding: 0 1rem }
p, blockquote { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 }
div { overflow-x: auto; margin: 1rem 0 }
caption { text-align: left; font-weight: bold }
th, td { padding: 0 1rem 0 0; text-align: left; white-space: nowrap }
td { background: linear-gradient(#48f6 0 0) no-repeat 0 / calc(var(--share, 0) * (100% - 1rem)) 85% }
td[style] { min-width: 6rem }
"""


@dataclass(frozen=True, slots=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Quote:
    """A document's text, with every line marked so that none looks like the report's own."""

    text: str


Shown = str | Quote | Table


def sparkline(values: Sequence[float | None]) -> str:
    """Draw a bar for each number, from 0 to the largest; a blank for None."""
    most = max([0.0, *(value for value in values if value is not None)]) or 1.0
    bars = [" " if value is None else _BARS[min(7, max(0, int(value / most * 7.999)))] for value in values]
    return "".join(bars)


def page(title: str, value: Mapping[str, Any], parts: Sequence[Shown]) -> str:
    """Make one self-contained HTML file of a report's parts, after what its JSON `value` says was used."""
    facts = [f"{name}: {fact}" for name, fact in value.get("resolved", {}).items()]
    body = [_part(part) for part in (*facts, *parts)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _part(part: Shown) -> str:
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>"
    if isinstance(part, Quote):
        return f"<blockquote>{escape(part.text)}</blockquote>"
    names, *columns = zip(*part.rows, strict=True) if part.rows else [()]
    rows = zip(_cells(names), *map(_bars, columns), strict=True)
    head = "".join(f"<th>{escape(name)}</th>" for name in part.head)
    lines = "\n".join(f"<tr>{row}</tr>" for row in (head, *map("".join, rows)))
    return f"<div><table><caption>{escape(part.title)}</caption>\n{lines}\n</table></div>"


def _cells(column: Sequence[object]) -> list[str]:
    return [f"<td>{escape(str(cell))}</td>" for cell in column]


def _bars(column: Sequence[object]) -> list[str]:
    """Plot a column of numbers as bars behind them, from 0 to the largest; other columns stay as they are."""
    matches = [_NUMBER.fullmatch(str(cell)) for cell in column]
    numbers = [float(match[1].replace(",", "")) if match and match[1] else 0.0 for match in matches]
    if None in matches or not (most := max(numbers, default=0.0)):
        return _cells(column)
    cells = zip(numbers, _cells(column), strict=True)
    return [f'<td style="--share:{number / most:.3f}"{cell[3:]}' for number, cell in cells]
