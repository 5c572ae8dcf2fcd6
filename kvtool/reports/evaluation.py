"""Evaluation of questions by several runs, with a journal of results so that a killed evaluation resumes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.common.files import make_folder
from kvtool.core.common.text import escaped, parsed
from kvtool.core.errors import GateError, KvtoolError, UsageError
from kvtool.core.evaluate.measures import Row
from kvtool.core.retrieval.embed import remembered
from kvtool.core.retrieval.index import INDEX_FORMAT

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.common.types import Events
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.query.reply import Request
    from kvtool.core.session.identity import StoreIdentity

RowsOf = Callable[["Request", Sequence[str]], Mapping[str, Row]]  # of a question and the runs that it still needs


def answer_open(
    requests: Sequence[Request],
    names: Sequence[str],
    journal: Journal,
    events: Events,
    begin: Callable[[], RowsOf],
) -> int:
    """Add missing rows to the journal; return how many questions failed. Raises GateError."""
    if not _open_work(requests, names, journal):
        return 0
    failed = 0
    with journal.writing():
        work, rows_of = _open_work(requests, names, journal), begin()  # another process may have gone on meanwhile
        events.step("questions", len(work), "questions")
        for at, missing in work:
            request = requests[at]
            try:
                journal.add(at, request.id, rows_of(request, missing))
            except KvtoolError as error:
                if isinstance(error, GateError):  # the next question would meet it, too
                    raise
                events.warn(f"{name_of(request)}: {error.message}", error.hint)
                failed += 1
            finally:
                events.advance(1)
    return failed


def _open_work(requests: Sequence[Request], names: Sequence[str], journal: Journal) -> list[tuple[int, list[str]]]:
    rows = journal.rows
    missing = ((at, [name for name in names if name not in rows.get(at, {})]) for at in range(len(requests)))
    return [(at, some) for at, some in missing if some or at not in rows]


def name_of(request: Request) -> str:
    return f"question {request.id or repr(request.question)}"


def evaluation_facts(
    store: Store, identity: StoreIdentity, requests: Sequence[Request], options: QueryOptions
) -> dict[str, Any]:
    batch = json.dumps([asdict(request) for request in requests], ensure_ascii=False)
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
        **({"set": [*options.set]} if options.set else {}),
    }


def by_run(rows: Mapping[int, Mapping[str, Row]]) -> dict[str, list[Mapping[str, Row]]]:
    questions: dict[str, list[Mapping[str, Row]]] = {}
    for _, question in sorted(rows.items()):
        for name in question:
            questions.setdefault(name, []).append(question)
    return questions


# ---- journal ----


class Journal:
    """Rows of runs by question, in memory and (where a file is named) on disk.

    Line 1 holds the facts under which all others were measured. A question's runs may be in several lines; the first
    row of a run counts. A torn last line is ignored, and overwritten.

    A file of another `kind` (the command that writes it), or with other `facts`, raises UsageError.
    """

    def __init__(self, path: Path | None, facts: Mapping[str, Any], kind: str = "kvtool eval") -> None:
        self.rows: dict[int, dict[str, Row]] = {}
        self._path = path
        self._kind = kind
        self._facts = json.loads(json.dumps(facts))
        self._sound = 0  # bytes of whole lines
        self._read()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the file for `add`; what another process has written meanwhile is read first. Raises KvtoolError."""
        if self._path is None:
            yield
            return
        import filelock

        lock = filelock.FileLock(f"{self._path}.lock", mode=0o600, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout as error:
            raise KvtoolError(
                f"{self._path} is being written by another process", "wait for it, or give another --resume file"
            ) from error
        try:
            self._read()
            self._repair(self._path)
            yield
        finally:
            lock.release()

    def add(self, index: int, key: str | None, rows: Mapping[str, Row]) -> None:
        """Keep a finished question's rows by name of run; `index`, `key`: its place and its id in the batch."""
        self._merge(index, rows)
        if self._path is not None:
            self._append(self._path, {"index": index, "id": key, "runs": rows})

    # ---- the file ----

    def _append(self, path: Path, value: Mapping[str, Any]) -> None:
        line = escaped(json.dumps(value, ensure_ascii=False)).encode() + b"\n"
        with path.open("ab") as file:
            file.write(line)
        self._sound += len(line)

    def _repair(self, path: Path) -> None:
        make_folder(path.parent)
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
            file.truncate(self._sound)
        if not self._sound:
            self._append(path, {"type": self._kind, "facts": self._facts})

    def _read(self) -> None:
        self._sound = 0
        try:
            data = self._path.read_bytes() if self._path is not None else b""
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(f"{self._path} cannot be read: {error.strerror}", "give a file to --resume") from error
        beginning = json.dumps({"type": self._kind})[:-1].encode()
        if not (data.startswith(beginning) or beginning.startswith(data)):
            raise self._strange()
        *lines, _ = data.split(b"\n")
        for number, line in enumerate(lines):
            try:
                value = parsed(line)
                if number:
                    self._merge(int(value["index"]), dict(value["runs"]))
            except (ValueError, KeyError, TypeError) as error:
                if number and number == len(lines) - 1:  # torn, too: a machine that crashed leaves such lines
                    return
                raise self._strange(number + 1) from error
            if not number:
                self._check(value.get("facts"))
            self._sound += len(line) + 1

    def _merge(self, index: int, rows: Mapping[str, Row]) -> None:
        known = self.rows.setdefault(index, {})
        for name, row in rows.items():
            known.setdefault(name, row)

    def _check(self, facts: Any) -> None:
        if facts == self._facts:
            return
        known = facts if isinstance(facts, dict) else {}
        names = [name for name in {**self._facts, **known} if known.get(name) != self._facts.get(name)]
        short = [[str(facts.get(name))[:16] for facts in (known, self._facts)] for name in names]
        changes = (f"{name.replace('_', ' ')} {was}, now {now}" for name, (was, now) in zip(names, short, strict=True))
        raise UsageError(
            f"{self._path} was made under other settings: {', '.join(changes)}",
            "give another --resume file, or the settings it was made under",
        )

    def _strange(self, line: int = 1) -> UsageError:
        return UsageError(
            f"{self._path}, line {line}: not written by `{self._kind}`",
            "give a new file to --resume, or one of its own",
        )
