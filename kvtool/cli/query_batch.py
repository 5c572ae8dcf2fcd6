"""`kvtool query --batch`: a file of questions, answered one JSON object a line, or for reading on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtool.cli.answered import show_end, show_runs
from kvtool.cli.json_out import error_json
from kvtool.cli.sources import source_line
from kvtool.core.common.sizes import counted
from kvtool.core.errors import EXIT_FAILED, EXIT_PARTIAL, GateError, KvtoolError
from kvtool.core.evaluate.measures import MEASURES
from kvtool.core.fusion.selectors import REFERENCE
from kvtool.core.query.summary import numbers, summarise

if TYPE_CHECKING:
    from kvtool.cli.options import Run
    from kvtool.core.evaluate.measures import Row
    from kvtool.core.query.audit import Auditor
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.query.reply import Reply, Request
    from kvtool.core.session.session import Session


class Batch:
    """Answers a file of questions and sums up at the end: one JSON object a line, or on a terminal to be read.

    Parameters
    ----------
    modes : those to compare with full recompute; None: answer in the mode of `options`.
    """

    def __init__(self, run: Run, session: Session, options: QueryOptions, modes: list[str] | None) -> None:
        self._run, self._session, self._options, self._modes = run, session, options, modes
        self._numbers: dict[str, list[Row]] = {}  # by mode, one row a question
        self._failed = 0
        self._auditor: Auditor | None = None
        self._audited = 0

    def run(self, requests: list[Request]) -> int | None:
        with self._run.out.progress("questions", total=len(requests), unit="questions") as bar:
            for number, request in enumerate(requests, 1):
                if self._reads:
                    self._run.out.prose(f"{request.id or number}. {request.question}")
                self._one(request)
                bar.advance()
        rows = [summarise(mode, of) for mode, of in self._numbers.items()]
        head: dict[str, Any] = {"type": "summary", "count": len(requests) - self._failed, "failed": self._failed}
        if self._audits:
            head["audited"] = self._audited
        if self._reads:
            self._sum_up(len(requests), rows)
        elif self._modes is not None:
            self._run.out.json(head | {"reference": REFERENCE, "runs": rows})
        else:
            self._run.out.json((rows[0] if rows else {}) | head)
        if self._failed == len(requests):
            return EXIT_FAILED
        return EXIT_PARTIAL if self._failed else None

    def _one(self, request: Request) -> None:
        known = {"id": request.id} if request.id is not None else {}
        try:
            replies = self._ask(request)
        except GateError:  # the next question would meet it, too
            raise
        except KvtoolError as error:
            self._failed += 1
            if self._reads:
                self._run.out.prose(f"no answer: {error_json(error)['message']}\n")
            else:
                self._run.out.json({"type": "error", **known, "question": request.question, "error": error_json(error)})
            return
        for reply in replies:
            self._numbers.setdefault(reply.asked_mode, []).append(numbers(reply))
        if self._reads:
            self._tell(replies)
        elif self._modes is not None:
            runs = [reply.to_json() for reply in replies]
            self._run.out.json({**known, "question": request.question, "reference": REFERENCE, "runs": runs})
        else:
            self._run.out.json(known | replies[0].to_json())
        if self._modes is None:
            self._audit(replies[0])

    # ---- on a terminal ----

    @property
    def _reads(self) -> bool:
        """Whether a person reads the answers as they come."""
        return self._run.out.on_terminal

    def _tell(self, replies: list[Reply]) -> None:
        if self._modes is not None:
            show_runs(self._run.out, replies, title="")
        else:
            self._run.out.prose(replies[0].answer)
            show_end(self._run.out, replies[0].to_json())
        self._run.out.prose(f"{source_line(replies[0].chunks)}\n")

    def _sum_up(self, count: int, rows: list[dict[str, Any]]) -> None:
        """Say how many questions were answered, and in each mode how well and how fast."""
        failed = f", {self._failed} without an answer" if self._failed else ""
        audited = f", {self._audited} audited" if self._audits else ""
        self._run.out.print(f"{counted(count, 'question')}{failed}{audited}")
        names = [name for name in MEASURES if any(name in row for row in rows)]
        head = ("mode", *(name.replace("_", " ") for name in names), "TTFT ms", "answer ms")
        if rows:
            self._run.out.table(
                head, [(row["fusion"], *(row.get(name) for name in names), *_times(row)) for row in rows]
            )

    # ---- audits ----

    @property
    def _audits(self) -> bool:
        """Whether a share of the answers is audited; modes that are compared are held against full prefill anyway."""
        return self._modes is None and self._options.audit > 0

    def _audit(self, reply: Reply) -> None:
        """Answer in full, too, where this question is drawn: its line is printed, and stands."""
        if not self._audits:
            return
        from kvtool.core.query.audit import Auditor

        self._auditor = self._auditor or Auditor(self._session)
        if self._auditor.is_due(reply, self._options.audit):
            self._audited += self._auditor.audit(reply, self._options) is not None

    def _ask(self, request: Request) -> list[Reply]:
        if self._modes is None:
            from kvtool.core.query.answer import answer

            return [answer(self._session, request, self._options)]
        from kvtool.core.query.audit import compare

        return compare(self._session, request, self._options, self._modes)


def _times(row: dict[str, Any]) -> tuple[int, int]:
    """Medians of the milliseconds to the first token and of those after it."""
    return round(row["ttft_ms_median"]), round(row["generate_ms_median"])
