"""`kvtool query --batch`: a file of questions, answered one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from kvtool.cli.answers import show_end, show_runs, source_line
from kvtool.cli.options import Run, load_session
from kvtool.cli.out import error_json
from kvtool.core.common.sizes import counted
from kvtool.core.errors import EXIT_FAILED, EXIT_PARTIAL, GateError, KvtoolError
from kvtool.core.evaluate.measures import MEASURES
from kvtool.core.fusion.selectors import REFERENCE
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request, marked, numbers, summarise
from kvtool.serve.options import ServeOptions

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.common.timeline import Timeline
    from kvtool.core.evaluate.measures import Row
    from kvtool.core.query.reply import Reply
    from kvtool.core.query.retrieve import Retrieved
    from kvtool.core.retrieval.finder import Finder
    from kvtool.core.session.session import Session

    Search = Retrieved | KvtoolError


def answer_batch(
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
        return Batch(run, Session.open(store), options, modes).run(requests, searches)
    options.check_of(store_identity(store), modes or ())  # before the model is loaded
    # Modes that are compared each load for themselves.
    memory_cache = run.get(ServeOptions).memory_cache if modes is None else None
    session = load_session(run, store, finder, timeline, memory_cache)
    return Batch(run, session, options, modes).run(requests, searches)


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


class Batch:
    def __init__(self, run: Run, session: Session, options: QueryOptions, modes: list[str] | None) -> None:
        self._run, self._session, self._options, self._modes = run, session, options, modes
        self._numbers: dict[str, list[Row]] = {}  # by mode, one row a question
        self._reads = run.out.on_terminal  # else a program does
        self._audits = modes is None and options.audit > 0
        self._failed = self._audited = 0

    def run(self, requests: Sequence[Request], searches: Sequence[Search]) -> int | None:
        """Answer the questions. `searches`: of the first ones, from before the model was loaded."""
        with self._run.out.progress("questions", total=len(requests), unit="questions") as bar:
            for number, (request, search) in enumerate(zip_longest(requests, searches), 1):
                if self._reads:
                    self._run.out.prose(f"{request.id or number}. {request.question}")
                self._answer_one(request, search)
                bar.advance()
        rows = [summarise(mode, of) for mode, of in self._numbers.items()]
        head: dict[str, Any] = {"type": "summary", "count": len(requests) - self._failed, "failed": self._failed}
        if self._audits:
            head["audited"] = self._audited
        if self._reads:
            self._show_summary(len(requests), rows)
        elif self._modes is not None:
            self._run.out.json(head | {"reference": REFERENCE, "runs": rows})
        else:
            self._run.out.json((rows[0] if rows else {}) | head)
        if self._failed == len(requests):
            return EXIT_FAILED
        return EXIT_PARTIAL if self._failed else None

    def _answer_one(self, request: Request, search: Search | None) -> None:
        labels = {"id": request.id} if request.id is not None else {}
        try:
            replies = self._replies_to(request, search)
        except GateError:  # the next question would meet it, too
            raise
        except KvtoolError as error:
            self._failed += 1
            if self._reads:
                self._run.out.prose(f"no answer: {error_json(error)['message']}\n")
            else:
                self._run.out.json(
                    {"type": "error", **labels, "question": request.question, "error": error_json(error)}
                )
            return
        for reply in replies:
            self._numbers.setdefault(reply.asked_mode, []).append(numbers(reply))
        if self._reads:
            self._show(replies)
        elif self._modes is not None:
            runs = [reply.to_json() for reply in replies]
            self._run.out.json({**labels, "question": request.question, "reference": REFERENCE, "runs": runs})
        else:
            self._run.out.json(labels | replies[0].to_json())
        if self._audits:
            self._audit(replies[0])

    def _show(self, replies: list[Reply]) -> None:
        if self._modes is not None:
            show_runs(self._run.out, replies, title="")
        else:
            self._run.out.prose(marked(replies[0].answer, list(map(asdict, replies[0].citations or ()))))
            show_end(self._run.out, replies[0].to_json())
        self._run.out.prose(f"{source_line(replies[0].chunks)}\n")

    def _show_summary(self, count: int, rows: list[dict[str, Any]]) -> None:
        failed = f", {self._failed} without an answer" if self._failed else ""
        audited = f", {self._audited} audited" if self._audits else ""
        self._run.out.print(f"{counted(count, 'question')}{failed}{audited}")
        names = [name for name in MEASURES if any(name in row for row in rows)]
        head = ("mode", *(name.replace("_", " ") for name in names), "TTFT ms", "answer ms")
        times = ("ttft_ms_median", "generate_ms_median")
        cells = [(row["fusion"], *map(row.get, names), *(round(row[name]) for name in times)) for row in rows]
        if rows:
            self._run.out.table(head, cells)

    def _audit(self, reply: Reply) -> None:
        """Answer in full, too, where this question is drawn: the printed line is final."""
        from kvtool.core.query.audit import audit_answer, is_audit_due

        if is_audit_due(self._session, reply, self._options.audit):
            self._audited += audit_answer(self._session, reply, self._options) is not None

    def _replies_to(self, request: Request, search: Search | None) -> list[Reply]:
        if isinstance(search, KvtoolError):
            raise search
        if self._modes is None:
            from kvtool.core.query.answer import answer

            return [answer(self._session, request, self._options, retrieved=search)]
        from kvtool.core.query.audit import compare

        return compare(self._session, request, self._options, self._modes, search)
