"""Report interface: it declares its flags and, from a store, makes findings: JSON, lines for a terminal, a page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.common.types import Events
from kvtool.core.errors import UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import Options, Part, option
from kvtool.core.options.resolve import O, Resolved
from kvtool.core.query.options import QueryOptions
from kvtool.lab.charts.page import Section, Table

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.session.identity import StoreIdentity
    from kvtool.core.session.session import Session

RETRIEVAL = ("top_k", "min_score", "retriever", "embedder", "order")  # options of a query by which chunks are found
_TIMES = ("since", "until", "last_used")  # facts that are seconds since 1970
_LONG = 500  # characters of a fact that would hide the others


@dataclass(frozen=True)
class Desk:
    """The inputs of a report.

    Attributes
    ----------
    events : callbacks for progress, and for warnings that do not stop the report.
    about : the argument after the report's name, such as a question.
    """

    store: Store
    options: Resolved
    events: Events
    about: str | None = None

    def get(self, source: type[O]) -> O:
        """Take a room's options with the values in force."""
        return self.options.get(source)

    def query_options(self, *names: str, **others: Any) -> QueryOptions:
        """Make options of a query: these as they are in force, those given, and of all others the defaults."""
        return self.options.get(QueryOptions, *names, "offline", **others)

    @cached_property
    def identity(self) -> StoreIdentity:
        """Return the store's identity. Raises StoreNotFoundError if nothing was ever ingested into it."""
        from kvtool.core.session.identity import store_identity

        return store_identity(self.store)

    @cached_property
    def session(self) -> Session:
        """The store with its model, which is loaded when it is first needed."""
        from kvtool.core.session.session import Session

        self.events.status(f"loading the model {self.identity.model}")
        return Session(self.store, self.get(ModelOptions), warn=self.events.warn)


@dataclass(frozen=True, slots=True)
class Quote:
    """A text of a document, which is shown so that none of its lines looks like the report's."""

    text: str


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of a report.

    Attributes
    ----------
    title : of the page; `subtitle` follows it, and is in no figure's file name.
    value : the JSON; what was measured, and on what, is in `resolved` and in values that are no lists.
    told : lines, quotes and tables for a terminal.
    sections : the page, made on demand; empty: the tables in `told`.
    told_elsewhere : names in `value` that a section of the page shows, too.
    """

    title: str
    value: Mapping[str, Any]
    told: Sequence[str | Quote | Table]
    sections: Iterable[Section] = ()
    subtitle: str = ""
    exit_code: int = 0
    told_elsewhere: frozenset[str] = frozenset()

    @property
    def page_sections(self) -> list[Section]:
        """The page's sections."""
        tables = tuple(part for part in self.told if isinstance(part, Table))
        return list(self.sections) or [Section(self.title, tables=tables)]

    @property
    def facts(self) -> dict[str, object]:
        """Return the facts under the page's title."""
        facts: dict[str, object] = dict(self.value.get("resolved", {}))
        for name, value in self.value.items():
            if name == "tokens" and isinstance(value, dict):
                facts |= {f"{what} tokens": count for what, count in value.items()}
            elif isinstance(value, list | dict | None) or name in self.told_elsewhere:
                continue
            elif len(str(value)) < _LONG:
                facts[name] = value
        return {_words(name): _for_people(name, fact) for name, fact in facts.items()}


def _words(name: str) -> str:
    return name.replace("lead_in", "lead-in").replace("_", " ")


def _for_people(name: str, fact: object) -> object:
    if type(fact) is not int:
        return fact
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(fact)) if name in _TIMES else f"{fact:,}"


@dataclass(frozen=True, slots=True)
class Report:
    """A report of `kvtool inspect`.

    Attributes
    ----------
    takes : the options that it has flags for, besides those of every report.
    about : the argument after its name, such as QUESTION; `about_help` explains it.
    examples : command lines for the help, without the word `kvtool`.
    """

    find: Callable[[Desk], Findings]
    takes: tuple[type[Options] | Part, ...] = ()
    about: str = ""
    about_help: str = ""
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PageOptions(Options, settings=False, group="Page"):
    """Options of where a report is written besides the terminal."""

    html: Path | None = option(None, "Also write an HTML page with plots.", metavar="FILE", unit="path")
    figures: Path | None = option(None, "Write the plots as SVG files.", metavar="FOLDER", unit="path")

    @property
    def wanted(self) -> bool:
        """Return True if a page or figures are to be written."""
        return self.html is not None or self.figures is not None

    def check(self) -> None:
        """Refuse a page, or figures, that cannot be written, before anything is computed."""
        if self.figures is not None and not self.figures.is_dir():
            raise UsageError(f"there is no folder {str(self.figures)!r} for the figures", "name a folder that exists")
        if self.html is not None and (self.html.is_dir() or not self.html.absolute().parent.is_dir()):
            raise UsageError(f"the page cannot be written to {str(self.html)!r}", "name a file in a folder that exists")
