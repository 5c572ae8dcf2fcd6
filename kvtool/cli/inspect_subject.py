"""What `kvtool inspect` is asked about: a question or a file of them, and the page to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.cli.sessions import open_session
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.query.options import QueryOptions

if TYPE_CHECKING:
    from kvtool.cli.options import Run
    from kvtool.core.cache.store import Store
    from kvtool.core.fusion.source import KVSource
    from kvtool.core.query.layout import Asked
    from kvtool.core.query.reply import Request
    from kvtool.core.session.session import Session
    from kvtool.lab.charts.page import Section

EXACTLY = "exact"  # raw or lossless records; computed where only lossy ones are stored


@dataclass(frozen=True, slots=True)
class Subject:
    """Flags that several reports share.

    Attributes
    ----------
    text : the argument after WHAT: a question, or a chunk's id.
    defer : of a plan: as `query --defer` would load it.
    """

    text: str | None = None
    chunks: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    batch: Path | None = None
    limit: int | None = None
    html: Path | None = None
    figures: Path | None = None
    defer: bool = False

    @property
    def wanted(self) -> bool:
        """Whether a page or figures are to be written."""
        return self.html is not None or self.figures is not None

    def requests(self, what: str) -> list[Request]:
        """The questions: the argument's, or those of `--batch`, `--limit` of them.

        Raises
        ------
        UsageError : none, or both; chunks beside a file of questions, which brings its own; chunks and documents.
        """
        from kvtool.core.query.reply import Request, read_batch

        if (self.text is None) == (self.batch is None):
            raise UsageError(
                f"inspect {what} needs a question, or a file of them",
                f'kvtool inspect {what} "Who founded the observatory?", or --batch FILE.jsonl',
            )
        if self.batch is not None and (self.chunks or self.documents):
            raise UsageError("--batch brings its own questions and chunks", "leave --chunks and --documents out")
        if self.chunks and self.documents:
            raise UsageError("--chunks and --documents exclude each other", "give one of them")
        if self.batch is not None:
            return read_batch(self.batch)[: self.limit]
        return [Request(str(self.text), self.chunks, self.documents)]

    def check(self) -> None:
        """Refuse a page, or figures, that cannot be written, before anything is computed.

        Raises
        ------
        UsageError : the page is a folder, or its folder is not there; the figures' folder is not there.
        """
        if self.figures is not None and not self.figures.is_dir():
            raise UsageError(f"there is no folder {str(self.figures)!r} for the figures", "name a folder that exists")
        if self.html is not None and (self.html.is_dir() or not self.html.absolute().parent.is_dir()):
            raise UsageError(f"the page cannot be written to {str(self.html)!r}", "name a file in a folder that exists")

    def write_page(
        self, run: Run, title: str, facts: Mapping[str, object], sections: Sequence[Section], about: str = ""
    ) -> None:
        """Write the page and the figures by themselves, where they are wanted.

        Parameters
        ----------
        about : stands behind the page's title; the figures' files are named after the title alone.

        Raises
        ------
        KvtoolError : they cannot be written.
        """
        from kvtool.lab.charts.page import figure_files, page

        files = (
            [] if self.html is None else [(self.html, page(f"{title}, {about}" if about else title, facts, sections))]
        )
        if self.figures is not None:
            files += [(self.figures / name, figure) for name, figure in figure_files(title, sections)]
        for path, text in files:
            try:
                path.write_text(text, encoding="utf-8")
            except OSError as error:
                raise KvtoolError(f"{str(path)!r} cannot be written: {error.strerror}") from error
            run.out.status(f"written: {path}")


def retrieval_of(run: Run) -> dict[str, Any]:
    """How chunks are found, as the settings say: fields of `QueryOptions`."""
    given = run.get(QueryOptions)
    return {name: getattr(given, name) for name in ("top_k", "retriever", "embedder", "order", "offline")}


def options_of(run: Run) -> QueryOptions:
    """How a question's prompt is laid out, as the flags say."""
    names, given = ("ratio", "link_tokens", "level", "max_loss", "defer_first"), run.get(QueryOptions)
    return QueryOptions(**retrieval_of(run), **{name: getattr(given, name) for name in names})


@dataclass(frozen=True, slots=True)
class Prompts:
    """The model loaded, and the questions' prompts.

    Attributes
    ----------
    level : at which their chunks are read: `exact` if nothing else was asked for.
    facts : what every report says of them first.
    """

    session: Session
    asked: list[Asked]
    source: KVSource
    level: str
    facts: dict[str, object]

    def told(self) -> dict[str, object]:
        """The same for a page: flat, with the prompt's length."""
        nested: Any = self.facts["resolved"]
        flat = {name: fact for name, fact in self.facts.items() if name != "resolved"}
        return {**nested, **flat, "prompt tokens": self.asked[0].plan.length}

    @property
    def read_at(self) -> str:
        """What a report's title says of it."""
        return "from exact records" if self.level == EXACTLY else f"chunks read at level {self.level}"


def laid_out(run: Run, store: Store, requests: Sequence[Request]) -> Prompts:
    """The questions' prompts, for a report on fusion: chunks are read exactly, so that no codec's loss is counted as
    reuse's; or at the level that is asked for."""
    from kvtool.core.query.layout import lay_out
    from kvtool.lab.measure.exact import exactly

    options = options_of(run)
    level = EXACTLY if options.level == "auto" else options.level
    session = open_session(run, store)
    prompts = [lay_out(session, one, options, exactly=level == EXACTLY, answered=False) for one in requests]
    source = session.source
    if level == EXACTLY:
        prompts, source = exactly(session, prompts)
    identity = session.identity
    facts: dict[str, object] = {
        "question": requests[0].question,
        "resolved": {"model": identity.model, "dtype": identity.dtype, "lead_in": identity.lead_in.mode},
        "level": level,
    }
    return Prompts(session, prompts, source, level, facts)
