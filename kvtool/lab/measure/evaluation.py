"""Questions, each answered by several runs: what is finished stands in a journal, what is open is worked off."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvtool.core.errors import GateError, KvtoolError
from kvtool.core.evaluate.measures import Row
from kvtool.core.retrieval.embed import remembered
from kvtool.core.retrieval.index import INDEX_FORMAT
from kvtool.lab.measure.journal import Journal

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.common.types import Events
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.query.reply import Request
    from kvtool.core.session.identity import StoreIdentity

RowsOf = Callable[["Request", Sequence[str]], Mapping[str, Row]]  # of a question and the runs that it still needs


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Questions and the runs that answer them.

    Attributes
    ----------
    names : of the runs.
    strict : whether the first question that fails ends it; else it is warned of, and open still.
    """

    requests: Sequence[Request]
    names: Sequence[str]
    journal: Journal
    events: Events
    strict: bool = False

    def open_work(self) -> list[tuple[int, list[str]]]:
        """List the questions that are not finished, by place, and the runs that each still needs."""
        rows, places = self.journal.rows, range(len(self.requests))
        missing = [(at, [name for name in self.names if name not in rows.get(at, {})]) for at in places]
        return [(at, names) for at, names in missing if names or at not in rows]

    def work_off(self, begin: Callable[[], RowsOf]) -> int:
        """Add what is open to the journal, a question at a time, and return how many questions failed.

        Parameters
        ----------
        begin : gets ready for the first question, such as by loading the model; not called where nothing is open.

        Raises
        ------
        GateError : the gate refuses the model.
        """
        if not self.open_work():
            return 0
        with self.journal.writing():
            work, rows_of = self.open_work(), begin()  # another process may have gone on meanwhile
            self.events.step("questions", len(work), "questions")
            return sum(not self._finish(at, names, rows_of) for at, names in work)

    def _finish(self, at: int, names: Sequence[str], rows_of: RowsOf) -> bool:
        request = self.requests[at]
        try:
            self.journal.add(at, request.id, rows_of(request, names))
        except KvtoolError as error:
            if self.strict or isinstance(error, GateError):  # the next question would meet it, too
                raise
            self.events.warn(f"{name_of(request)}: {error.message}", error.hint)
            return False
        finally:
            self.events.advance(1)
        return True


def name_of(request: Request) -> str:
    """Name a question in a warning: by its id, else by its words."""
    return f"question {request.id or repr(request.question)}"


def evaluation_facts(
    store: Store, identity: StoreIdentity, requests: Sequence[Request], options: QueryOptions
) -> dict[str, Any]:
    """Tell what results depend on besides the runs: where it is equal, they can be compared."""
    batch = json.dumps([_asked(request) for request in requests], ensure_ascii=False)
    return {
        "store": store.uuid,
        "model": identity.fingerprint,
        "lead_in": identity.lead_in.digest().hex(),
        "level": options.level,
        "max_loss": options.max_loss if options.level == "auto" else None,
        "batch": hashlib.sha256(batch.encode()).hexdigest(),
        "top_k": options.top_k,
        "min_score": options.min_score,
        "retriever": [options.retriever, options.embedder or remembered(store), options.order, INDEX_FORMAT],
        "max_tokens": options.max_tokens,
    }


def _asked(request: Request) -> dict[str, Any]:
    """A request as results depend on it; what it does not have is left out of what was added to it since."""
    return {name: value for name, value in asdict(request).items() if value or name not in ("sources", "made_by")}


def by_run(rows: Mapping[int, Mapping[str, Row]]) -> dict[str, list[Mapping[str, Row]]]:
    """List the questions that each run has answered, in the order of the file; a question is its rows by run."""
    questions: dict[str, list[Mapping[str, Row]]] = {}
    for _, question in sorted(rows.items()):
        for name in question:
            questions.setdefault(name, []).append(question)
    return questions
