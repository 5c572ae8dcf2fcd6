"""`kvtool query`: find, load, fuse, answer."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli.answered import show_decision, show_numbers, show_runs
from kvtool.cli.chat_lines import is_on_terminal
from kvtool.cli.commands import new_app
from kvtool.cli.explaining import show_explained
from kvtool.cli.options import Question, Run, new_session, open_any_store, open_session, takes
from kvtool.cli.query_batch import Batch
from kvtool.cli.sources import show_sources
from kvtool.core.cache.options import LockOptions, StoreOptions
from kvtool.core.common.collecting import paused_collection
from kvtool.core.errors import KvtoolError, UsageError, did_you_mean
from kvtool.core.fusion.selectors import FUSIONS
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import Options, option
from kvtool.core.query.options import ANSWER, INSIDE, ChunkChoice, QueryOptions
from kvtool.core.remote.options import RemoteOptions

if TYPE_CHECKING:
    from kvtool.core.common.timeline import Timeline
    from kvtool.core.evaluate.audits import Audit
    from kvtool.core.query.reply import Reply, Request
    from kvtool.core.retrieval.finder import Finder
    from kvtool.core.session.session import Session

app = new_app()


@dataclass(frozen=True, kw_only=True)
class QueryFlags(Options, settings=False):
    """What only the command line has."""

    batch: Path | None = option(
        None, "Answer every question of a file.", group=ANSWER, metavar="FILE.jsonl", unit="path"
    )
    show_sources: bool = option(False, "Show the passages that the answer was given from.", group=ANSWER)
    hot_memory: int = option(
        10**9,
        "What --batch may hold of loaded chunks.",
        group=ANSWER,
        unit="size",
        lowest=0,
        instead="1GB",
    )
    server: bool = option(
        True,
        "Ask a running `kvtool serve` of this store, whose model is loaded already.",
        group=ANSWER,
        flag="--server/--no-server",
    )
    compare: str | None = option(None, "Answer in several modes, beside full recompute.", group=INSIDE, metavar="a,b,c")
    timeline: Path | None = option(
        None,
        "Write a timeline (Chrome's trace format).",
        group=INSIDE,
        synonyms=("--profile",),
        metavar="FILE",
        unit="path",
    )


@app.command(cls=Question)
@takes(
    QueryOptions,
    ChunkChoice,
    QueryFlags,
    StoreOptions,
    RemoteOptions,
    ModelOptions,
    LockOptions,
    examples=('query "Who founded the observatory?"', 'query "Who founded it?" --fusion epic --top-k 8 --explain'),
)
def query(
    run: Run,
    question: Annotated[
        str | None, typer.Argument(help="What to ask; `-`, or a pipe alone, gives it on stdin.", show_default=False)
    ] = None,
) -> int | None:
    """Answer a question from the store's documents; in a terminal without one, hold a conversation."""
    flags, options = run.get(QueryFlags), run.get(QueryOptions)
    if question is None and flags == QueryFlags() and run.get(ChunkChoice) == ChunkChoice() and is_on_terminal(run.out):
        from kvtool.cli.chat import hold

        return hold(run)
    modes = _modes(flags.compare)
    if question is None and flags.batch is None and _is_piped():
        question = _piped(run)
    requests = _requests(question, flags.batch, run.get(ChunkChoice))
    if flags.timeline is not None:
        _check_writable(flags.timeline)
    if options.defer and modes is not None:
        raise UsageError("--compare answers from whole prompts", "leave --defer out, or give --no-defer")
    if flags.server and flags.batch is None and modes is None and flags.timeline is None:
        from kvtool.cli.resident import answered_beside

        if answered_beside(run, requests[0], passages=flags.show_sources):
            return None
    if flags.batch is None and modes is None:
        # One answer leaves too little to be worth a look at all that is imported and loaded for it, 0.1 s each time.
        gc.disable()  # until the end of the process, which comes then; see cli/app.py
    with open_any_store(run) as store, _timed(flags.timeline) as timeline:
        from kvtool.core.retrieval.finder import Finder
        from kvtool.core.session.identity import store_identity

        finder = Finder(store, functools.cache(run.out.warning))  # each warning once, though chunks are found twice
        is_found = _is_any_found(finder, requests, options, alone=flags.batch is None)
        if is_found:
            options.check_of(store_identity(store), modes or ())  # before the model is loaded
        session = _session(run, store, timeline) if is_found else new_session(run, store)
        session.finder = finder
        if flags.batch is not None:
            if modes is None and is_found:  # modes that are compared each load for themselves
                session.cache_chunks(flags.hot_memory)
            return Batch(run, session, options, modes).run(requests)
        if modes is not None:
            _compare(run, session, requests[0], options, modes)
        else:
            _answer(run, session, requests[0], options)
    return None


def _check_writable(profile: Path) -> None:
    if profile.is_dir() or not profile.absolute().parent.is_dir():
        raise UsageError(f"the timeline cannot be written to {str(profile)!r}", "name a file in a folder that exists")


@contextmanager
def _timed(profile: Path | None) -> Iterator[Timeline | None]:
    """What runs inside is timed into a file, also where it fails."""
    if profile is None:
        yield None
        return
    from kvtool.core.common.timeline import Timeline, add_span, process_started

    timeline = Timeline()
    if (began := process_started()) is not None:
        add_span(timeline, "start of the process", began)
    try:
        yield timeline
    finally:
        try:
            timeline.write(profile)
        except OSError as error:
            raise KvtoolError(f"the timeline {str(profile)!r} cannot be written: {error.strerror}") from error


# ---- what was asked ----


def _modes(compare: str | None) -> list[str] | None:
    """The modes of `--compare`; checked before anything is loaded."""
    if compare is None:
        return None
    modes = [mode.strip() for mode in compare.split(",") if mode.strip()]
    unknown = [mode for mode in modes if mode not in FUSIONS]
    if unknown or not modes:
        raise UsageError(
            f"--compare: there is no fusion mode {', '.join(unknown) or compare!r}",
            (did_you_mean(unknown[0], FUSIONS) if len(unknown) == 1 else "") or f"known: {', '.join(FUSIONS)}",
        )
    return modes


def _requests(question: str | None, batch: Path | None, choice: ChunkChoice) -> list[Request]:
    from kvtool.core.query.reply import Request, read_batch

    if batch is not None:
        if question is not None or choice.chunks or choice.documents:
            raise UsageError("--batch brings its own questions and chunks", "leave the question out")
        return read_batch(batch)
    if question is None:
        raise UsageError("no question was given", 'kvtool query "Who founded the observatory?"')
    if question == "-":
        question = _from_stdin()
    if not question.strip():
        raise UsageError("the question is empty", 'kvtool query "Who founded the observatory?"')
    return [Request(question, choice.chunks, choice.documents)]


def _is_piped() -> bool:
    """Return True if stdin is a pipe or a file, which may hold the question."""
    return sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty()


def _piped(run: Run) -> str | None:
    run.out.doing("reading the question from stdin")
    question = _from_stdin()
    if lines := question.count("\n"):
        run.out.status(f"{lines + 1} lines are one question; `kvtool chat` and --batch answer one after another")
    return question or None


def _from_stdin() -> str:
    if sys.stdin is None:  # started with it closed
        raise UsageError("there is no stdin to read the question from", "give the question as an argument")
    try:
        return sys.stdin.buffer.read().decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise UsageError("the question on stdin is not UTF-8", "convert it, such as with iconv") from error


def _is_any_found(finder: Finder, requests: list[Request], options: QueryOptions, *, alone: bool) -> bool:
    """Whether anything is to be answered: told before the model is loaded, which takes seconds.

    Raises
    ------
    KvtoolError : nothing is found for the question, which is asked `alone`.
    """

    for request in requests:
        try:
            options.find(finder, request)
        except KvtoolError:
            if alone:
                raise
        else:
            return True
    return False


def _session(run: Run, store: Any, timeline: Timeline | None) -> Session:
    from kvtool.core.common.timeline import add_span

    started = time.perf_counter()
    with paused_collection():
        importlib.import_module("kvtool.core.query.answer")  # torch and transformers come with it
    add_span(timeline, "import", started)
    started = time.perf_counter()
    session = open_session(run, store)
    session.say = run.out.status
    add_span(timeline, "load model", started)
    session.timeline = timeline
    loaded = session.decoder.loaded
    run.out.detail(
        f"{loaded.files.ref} on {loaded.device} in {loaded.arithmetic.dtype}, loaded in {loaded.load_ms:.0f} ms"
    )
    return session


# ---- one question ----


def _answer(run: Run, session: Session, request: Request, options: QueryOptions) -> None:
    from kvtool.core.query.answer import answer

    run.out.doing("answering")
    reply = answer(session, request, options, on_text=lambda piece: run.out.print(piece, end=""))
    facts = reply.to_json()
    run.out.result(facts, human=run.out.end_line if reply.answer else run.out.print)
    show_numbers(run.out, facts, reply.generated.steps, reply.generated.stepper)
    if reply.explained:
        show_explained(run.out, reply)
    show_sources(run.out, reply.chunks, passages=run.get(QueryFlags).show_sources)
    if options.audit:
        _audit(run, session, reply, options)


def _audit(run: Run, session: Session, reply: Reply, options: QueryOptions) -> None:
    """Answer in full, too, where this question is drawn: the answer is printed, and stands."""
    from kvtool.core.query.audit import Auditor

    auditor = Auditor(session)
    if not auditor.is_due(reply, options.audit):
        return
    run.out.doing("auditing")
    if (done := auditor.audit(reply, options)) is not None:
        run.out.status(audited(done))


def audited(audit: Audit) -> str:
    """One line about an audit."""
    first, answer = (
        f"{'same' if same else 'another'} {what}"
        for same, what in ((audit.top1_agrees, "first token"), (audit.answer_equal, "answer"))
    )
    of_what = ", as it would be without a temperature" if audit.sampled else ""
    return (
        f"audit: {first}, {answer} in full prefill{of_what}; KL {audit.kl_first:.4f} of the first token, "
        f"{audit.kl_answer:.4f} a token of the answer ({audit.milliseconds:.0f} ms)"
    )


def _compare(run: Run, session: Session, request: Request, options: QueryOptions, modes: list[str]) -> None:
    from kvtool.core.fusion.selectors import REFERENCE
    from kvtool.core.query.audit import compare

    replies = compare(session, request, options, modes)
    for reply in replies:
        show_decision(run.out, reply.to_json())
    value = {"reference": REFERENCE, "runs": [reply.to_json() for reply in replies]}
    run.out.result(value, human=lambda: show_runs(run.out, replies, request.question))
