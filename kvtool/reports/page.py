"""Parts of a report for people: text, quotes, tables and bars of text, and the HTML page that holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_BARS = "▁▂▃▄▅▆▇█"
_STYLE = """
:root { color-scheme: light dark }
body { font: 14px/1.5 ui-monospace, monospace; max-width: 70rem; margin: 1rem auto; padding: 0 1rem }
p, blockquote { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 }
div { overflow-x: auto; margin: 1rem 0 }
caption { text-align: left; font-weight: bold }
th, td { padding: 0 1rem 0 0; text-align: left; white-space: nowrap }
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
    rows = "\n".join([_row("th", part.head), *(_row("td", row) for row in part.rows)])
    return f"<div><table><caption>{escape(part.title)}</caption>\n{rows}\n</table></div>"


def _row(kind: str, cells: Sequence[object]) -> str:
    return "<tr>" + "".join(f"<{kind}>{escape(str(cell))}</{kind}>" for cell in cells) + "</tr>"
