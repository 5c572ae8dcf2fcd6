"""Interface of a report: its flags and inputs, its result as JSON and as parts for people, and their HTML page."""

from __future__ import annotations

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
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.core.query.reply import Request, read_batch
from kvtool.reports.page import Shown

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.session.identity import StoreIdentity
    from kvtool.core.session.session import Session

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
