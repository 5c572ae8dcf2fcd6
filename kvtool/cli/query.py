"""`kvtool query`: find, load, fuse, answer one question or a file of them; `kvtool search` only finds."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli.answers import (
    cited,
    end_answer,
    show_corrections,
    show_decision,
    show_explained,
    show_numbers,
    show_runs,
    show_sources,
)
from kvtool.cli.keep_alive import answer_by_server, check_keep_alive, is_keep_alive_given
from kvtool.cli.options import ManyValues, Question, Run, load_session, open_any_store, takes
from kvtool.cli.out import error_json
from kvtool.core.cache.options import LockOptions, StoreOptions
from kvtool.core.common.text import counted
from kvtool.core.common.types import Timeline, add_span, process_started
from kvtool.core.errors import (
    EXIT_FAILED,
    EXIT_PARTIAL,
    GateError,
    KvtoolError,
    StoreLockedError,
    UsageError,
    did_you_mean,
)
from kvtool.core.fusion.options import INSIDE, FusionOptions
from kvtool.core.fusion.selectors import FUSIONS, REFERENCE
from kvtool.core.model.options import ANSWER, ModelOptions, SamplingOptions
from kvtool.core.options.option import Options, option
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.core.query.reply import Request, numbers, summarise
from kvtool.core.remote.options import RemoteOptions
from kvtool.core.retrieval.passages import RetrievalOptions
from kvtool.serve.options import KeepOptions, ServeOptions

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.evaluate.measures import Audit, Row
    from kvtool.core.query.reply import Reply
    from kvtool.core.query.retrieve import Retrieved
    from kvtool.core.retrieval.finder import Finder
    from kvtool.core.session.session import Session

    Search = Retrieved | KvtoolError

TIMELINE = "KVTOOL_TIMELINE"


@dataclass(frozen=True, kw_only=True)
class QueryFlags(Options, settings=False):
    batch: Path | None = option(
        None, 'Answer a file of questions, one {"question": …} a line.', group=ANSWER, metavar="FILE.jsonl", unit="path"
    )
    compare: str | None = option(None, "Compare fusion modes with full recompute.", group=INSIDE, metavar="a,b,c")


@takes(
    *(SamplingOptions, RetrievalOptions.without("source", "embedder"), FusionOptions.without("set")),
    QueryOptions.without("source", "embedder"),
    ChunkChoice,
    QueryFlags,
    KeepOptions,
    StoreOptions,
    RemoteOptions,
    ModelOptions,
    LockOptions,
    examples=('query "Who founded the observatory?"', 'query "Who founded it?" --fusion epic --top-k 8 --explain'),
    common="fusion ratio top_k documents chunks max_tokens system batch compare explain set keep_alive store model",
    cls=Question,
)
def query(
    run: Run,
    question: Annotated[
        str | None,
        typer.Argument(help="The question. `-` or a pipe: from stdin. None: a conversation.", show_default=False),
    ] = None,
) -> int | None:
    """Answer a question from the stored documents, or hold a conversation."""
    flags, options = run.get(QueryFlags), run.get(QueryOptions)
    is_bare = question is None and flags == QueryFlags() and run.get(ChunkChoice) == ChunkChoice()
    if is_bare and run.out.is_interactive and not is_keep_alive_given(run):
        from kvtool.cli.chat import hold

        return hold(run)
    modes = _modes(flags.compare)
    is_piped = sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty()
    if question is None and flags.batch is None and is_piped:
        run.out.doing("reading the question from stdin")
        question = _from_stdin() or None
    requests = _requests(question, flags.batch, run.get(ChunkChoice))
    if modes is not None:
        options.check_comparable()
    is_plain = run.get(KeepOptions).server and flags.batch is None and modes is None
    is_plain = is_plain and not os.environ.get(TIMELINE)
    check_keep_alive(run, is_plain)
    if is_plain and answer_by_server(run, requests[0]):
        return None
    if flags.batch is None and modes is None:
        # One answer leaves too little garbage to look at all that is imported and loaded for it: 0.6 s of a processor.
        gc.disable()  # until the end of the process, which comes then; see cli/app.py
    with _timed() as timeline, open_any_store(run) as store:
        from kvtool.core.query.retrieve import retrieve
        from kvtool.core.retrieval.finder import Finder
        from kvtool.core.session.identity import store_identity

        finder = Finder(store, run.out.warning)
        if flags.batch is not None:
            return _answer_batch(run, store, finder, requests, options, modes, timeline)
        retrieved = retrieve(store, finder, requests[0], options, timeline=timeline)
        options.check_of(store_identity(store), modes or ())  # before the model is loaded
        at_once = modes is not None or store.is_front or run.out.mode == "jsonl"  # whose summary comes last
        session = load_session(run, store, finder, timeline, stores_missed=at_once, checks_later=True)
        if modes is None:
            _answer(run, session, requests[0], options, retrieved)
            if session.missed and not run.out.on_terminal:  # where a person would wait for it
                _store_missed(run, session)
        else:
            _compare(run, session, requests[0], options, modes, retrieved)
    return None


def _answer(run: Run, session: Session, request: Request, options: QueryOptions, retrieved: Retrieved) -> None:
    from kvtool.core.query.answer import answer

    run.out.doing("answering")
    show = functools.partial(run.out.print, end="") if options.is_streamed(run.out.on_terminal) else None
    reply = answer(session, request, options, show, retrieved=retrieved)
    facts = reply.to_json()
    if run.out.mode != "jsonl":
        run.out.result(facts, human=lambda: end_answer(run.out, facts))
    show_numbers(run.out, facts, reply.generated.steps, reply.generated.stepper)
    if reply.explanations:
        show_explained(run.out, reply)
    show_sources(run.out, reply.chunks)
    if (done := _audit(session, reply, options, run.out.doing)) is not None:
        run.out.status(_audited(done))
    if run.out.mode == "jsonl":  # the summary is the last event
        run.out.result(facts, human=lambda: None)


def _store_missed(run: Run, session: Session) -> None:
    from kvtool.core.query.fuse_prompt import store_missed

    missed = [*(session.missed or {}).values()]
    try:
        if not run.get(QueryOptions).force:
            session.check_gate()  # which the next question would wait for
        store_missed(session, missed, later=True)
    except (StoreLockedError, KeyboardInterrupt):  # an ingest computes them; the answer is complete
        pass
    except KvtoolError as error:
        run.out.warning(f"{counted(len(missed), 'computed chunk')} could not be stored: {error.message}", error.hint)


def _audit(
    session: Session, reply: Reply, options: QueryOptions, doing: Callable[[str], None] = lambda words: None
) -> Audit | None:
    """Answer in full, too, where this question is drawn: the printed answer is final."""
    if not options.audit:
        return None
    from kvtool.core.query.audit import audit_answer, is_audit_due

    if not is_audit_due(session, reply, options.audit):
        return None
    doing("auditing")
    return audit_answer(session, reply, options)


def _audited(audit: Audit) -> str:
    first, answer = (
        f"{'same' if same else 'another'} {what}"
        for same, what in ((audit.top1_agrees, "first token"), (audit.answer_equal, "answer"))
    )
    of_what = ", as it would be without a temperature" if audit.sampled else ""
    return (
        f"audit: {first}, {answer} in full prefill{of_what}; KL {audit.kl_first:.4f} of the first token, "
        f"{audit.kl_answer:.4f} a token of the answer ({audit.milliseconds:.0f} ms)"
    )


def _compare(
    run: Run, session: Session, request: Request, options: QueryOptions, modes: list[str], retrieved: Retrieved
) -> None:
    from kvtool.core.query.audit import compare

    replies = compare(session, request, options, modes, retrieved)
    for reply in replies:
        show_decision(run.out, reply.to_json())
    value = {"reference": REFERENCE, "runs": [reply.to_json() for reply in replies]}
    run.out.result(value, human=lambda: show_runs(run.out, replies, request.question))


def _modes(compare: str | None) -> list[str] | None:
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
    from kvtool.core.query.reply import read_batch

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


def _from_stdin() -> str:
    if sys.stdin is None:  # started with it closed
        raise UsageError("there is no stdin to read the question from", "give the question as an argument")
    try:
        return sys.stdin.buffer.read().decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise UsageError("the question on stdin is not UTF-8", "convert it, such as with iconv") from error


@contextmanager
def _timed() -> Iterator[Timeline | None]:
    """Write a timeline of the block to the file that `KVTOOL_TIMELINE` names, if any."""
    name = os.environ.get(TIMELINE)
    if not name:
        yield None
        return
    path = Path(name).expanduser()
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"the timeline cannot be written to {name!r}", "name a file in a folder that exists")
    timeline = Timeline()
    if (began := process_started()) is not None:
        add_span(timeline, "start of the process", began)
    try:
        yield timeline
    finally:
        try:
            timeline.write(path)
        except OSError as error:
            raise KvtoolError(f"the timeline {str(path)!r} cannot be written: {error.strerror}") from error


# ---- a file of questions ----


def _answer_batch(
    run: Run,
    store: Store,
    finder: Finder,
    requests: Sequence[Request],
    options: QueryOptions,
    modes: list[str] | None,
    timeline: Timeline | None,
) -> int | None:
    from kvtool.core.session.identity import store_identity
    from kvtool.core.session.session import Session

    searches = [*_search_until_found(store, finder, requests, options, timeline)]
    if isinstance(searches[-1], KvtoolError):
        session = Session.open(store)
    else:
        options.check_of(store_identity(store), modes or ())  # before the model is loaded
        # Modes that are compared each load for themselves.
        memory_cache = run.get(ServeOptions).memory_cache if modes is None else None
        session = load_session(run, store, finder, timeline, memory_cache)
    rows: dict[str, list[Row]] = {}  # by mode, one row a question
    failed = audited = 0
    with run.out.progress("questions", total=len(requests), unit="questions") as bar:
        for request, search in zip_longest(requests, searches):
            facts = {"id": request.id} if request.id is not None else {}
            try:
                replies = _replies_to(session, request, options, modes, search)
            except GateError:  # the next question would meet it, too
                raise
            except KvtoolError as error:
                failed += 1
                run.out.json({"type": "error", **facts, "question": request.question, "error": error_json(error)})
            else:
                for reply in replies:
                    rows.setdefault(reply.asked_mode, []).append(numbers(reply))
                answers = [reply.to_json() for reply in replies]
                compared = {"question": request.question, "reference": REFERENCE, "runs": answers}
                run.out.json(facts | (answers[0] if modes is None else compared))
                audited += modes is None and _audit(session, replies[0], options) is not None
            bar.advance()
    runs = [summarise(mode, of) for mode, of in rows.items()]
    head: dict[str, Any] = {"type": "summary", "count": len(requests) - failed, "failed": failed}
    if modes is not None:
        head |= {"reference": REFERENCE, "runs": runs}
    else:
        head = (runs[0] if runs else {}) | head | ({"audited": audited} if options.audit else {})
    run.out.json(head)
    if failed == len(requests):
        return EXIT_FAILED
    return EXIT_PARTIAL if failed else None


def _search_until_found(
    store: Store, finder: Finder, requests: Sequence[Request], options: QueryOptions, timeline: Timeline | None
) -> Iterator[Search]:
    """Search for each question before the model is loaded, up to the first that finds chunks."""
    from kvtool.core.query.retrieve import retrieve

    for request in requests:
        try:
            yield retrieve(store, finder, request, options, timeline=timeline)
            return
        except KvtoolError as error:
            yield error


def _replies_to(
    session: Session, request: Request, options: QueryOptions, modes: list[str] | None, search: Search | None
) -> list[Reply]:
    from kvtool.core.query.answer import answer
    from kvtool.core.query.audit import compare

    if isinstance(search, KvtoolError):
        raise search
    if modes is not None:
        return compare(session, request, options, modes, search)
    return [answer(session, request, options, retrieved=search)]


# ---- passages only ----

_SHOWN = 240  # characters of a passage in a terminal


@takes(
    QueryOptions.some("top_k", "source", "retriever", "embedder", "offline", "set"),
    StoreOptions,
    RemoteOptions,
    LockOptions,
    examples=("search founded observatory", "search opening hours --top-k 20 --set search.min_score=0"),
    cls=ManyValues,
)
def search(
    run: Run, words: Annotated[list[str], typer.Argument(help="What to find.", metavar="WORDS...", show_default=False)]
) -> None:
    """Show the passages that match a question, best first. No language model is needed."""
    from kvtool.core.query.retrieve import search
    from kvtool.core.retrieval.finder import Finder

    with open_any_store(run) as store:
        report = search(store, Finder(store, run.out.warning), " ".join(words), run.get(QueryOptions))

    def show() -> None:
        for chunk in report.chunks:
            text = " ".join(chunk.text.split())
            run.out.prose(f"{chunk.score:.2f}  {cited(chunk)}")
            run.out.prose(f"      {text[:_SHOWN]}{'…' if len(text) > _SHOWN else ''}\n")

    show_corrections(run.out, report.corrections)
    run.out.result(report.to_json(), human=show)
    if report.chunks_omitted:
        more = counted(report.chunks_omitted, "passage")
        run.out.status(f"{more} more would help a question no further; --set search.min_score=0 shows all")
