"""Interface of a report: its flags and inputs, its result as JSON and as parts for people, and their HTML page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.common.types import Events
from kvtool.core.errors import UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import Options, Part, option
from kvtool.core.options.resolve import O, Resolved
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.core.query.reply import Request, read_batch

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.session.identity import StoreIdentity
    from kvtool.core.session.session import Session


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


RETRIEVAL = ("top_k", "retriever", "embedder", "set")  # options of a query by which chunks are found
QUESTIONS = "Questions"  # heading in a report's help


@dataclass(frozen=True)
class ReportContext:
    store: Store
    options: Resolved
    events: Events
    about: str | None = None

    def get(self, source: type[O]) -> O:
        return self.options.get(source)

    def query_options(self, *names: str, **others: Any) -> QueryOptions:
        return self.options.get(QueryOptions, *names, "offline", **others)

    @cached_property
    def identity(self) -> StoreIdentity:
        """Raises StoreNotFoundError if nothing was ever ingested."""
        from kvtool.core.session.identity import store_identity

        return store_identity(self.store)

    @cached_property
    def session(self) -> Session:
        from kvtool.core.session.session import Session

        self.events.status(f"loading the model {self.identity.model}")
        return Session.open(self.store, self.get(ModelOptions), warn=self.events.warn)

    def question(self, report: str) -> Request:
        if self.about is None:
            raise UsageError(f"inspect {report} needs a question", f'kvtool inspect {report} "Who founded it?"')
        choice = self.get(ChunkChoice)
        return Request(self.about, choice.chunks, choice.documents)


@dataclass(frozen=True, slots=True)
class ReportResult:
    title: str  # of the page
    value: Mapping[str, Any]  # the JSON
    summary: Sequence[Shown]
    details: Iterable[Shown] = ()  # what only the page shows, after the summary; made on demand
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    find: Callable[[ReportContext], ReportResult]  # makes the result; its docstring is the report's help
    takes: tuple[type[Options] | Part, ...] = ()  # options that are flags, in addition to those of every report
    about: str = ""  # the argument after its name, such as QUESTION; `about_help` explains it
    about_help: str = ""
    examples: tuple[str, ...] = ()  # command lines for the help, without the word `kvtool`


# ---- options of several reports ----


@dataclass(frozen=True, kw_only=True)
class PageOptions(Options, settings=False, group="Page"):
    html: Path | None = option(None, "Also write an HTML page with all tables and plots.", metavar="FILE", unit="path")

    def check(self) -> None:
        if self.html is not None and (self.html.is_dir() or not self.html.absolute().parent.is_dir()):
            raise UsageError(f"the page cannot be written to {str(self.html)!r}", "name a file in a folder that exists")


@dataclass(frozen=True, kw_only=True)
class BatchOptions(Options, settings=False, group=QUESTIONS):
    batch: Path | None = option(None, "A file of questions.", metavar="FILE.jsonl", unit="path")
    limit: int | None = option(None, "Use only the first N questions.", metavar="N", lowest=1)

    def requests(self, report: str) -> list[Request]:
        if self.batch is None:
            raise UsageError(f"inspect {report} needs questions", "--batch FILE.jsonl, as for `kvtool query`")
        return read_batch(self.batch)


@dataclass(frozen=True, kw_only=True)
class ResumeOptions(Options, settings=False, group=QUESTIONS):
    resume: Path | None = option(
        None, "Save results to this file, and resume from it.", metavar="FILE.jsonl", unit="path"
    )
