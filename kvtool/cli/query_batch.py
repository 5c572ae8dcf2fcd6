"""`kvtool query --batch`: a file of questions, one JSON object a line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtool.cli.json_out import error_json
from kvtool.core.errors import EXIT_FAILED, EXIT_PARTIAL, GateError, KvtoolError
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
    """Answers a file of questions, one JSON object a line, and sums up at the end.

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
            for request in requests:
                self._one(request)
                bar.advance()
        rows = [summarise(mode, of) for mode, of in self._numbers.items()]
        head: dict[str, Any] = {"type": "summary", "count": len(requests) - self._failed, "failed": self._failed}
        if self._audits:
            head["audited"] = self._audited
        if self._modes is not None:
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
            self._run.out.json({"type": "error", **known, "question": request.question, "error": error_json(error)})
            return
        for reply in replies:
            self._numbers.setdefault(reply.asked_mode, []).append(numbers(reply))
        if self._modes is not None:
            runs = [reply.to_json() for reply in replies]
            self._run.out.json({**known, "question": request.question, "reference": REFERENCE, "runs": runs})
        else:
            self._run.out.json(known | replies[0].to_json())
            self._audit(replies[0])

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
        from kvtool.core.query.compare import compare

        return compare(self._session, request, self._options, self._modes)
