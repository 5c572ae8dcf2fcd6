"""The Python API: the commands' operations, names and results."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

from kvtool.core.cache.options import LockOptions, default_store
from kvtool.core.cache.store import Store
from kvtool.core.common.progress import Events
from kvtool.core.common.types import Warn
from kvtool.core.common.urls import is_url
from kvtool.core.compress.options import CompressOptions
from kvtool.core.errors import KvtoolError, KvtoolWarning, UsageError
from kvtool.core.fit.options import FitOptions
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import Options, options_of
from kvtool.core.pack.options import ExportOptions, ImportOptions
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.core.remote.options import PullOptions, PushOptions
from kvtool.core.upkeep.options import ForgetOptions, PruneOptions

if TYPE_CHECKING:
    from kvtool.core.compress.compress_report import CompressReport
    from kvtool.core.fit.fit_report import FitReport
    from kvtool.core.ingest.ingest_report import IngestReport
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.options import arguments
    from kvtool.core.pack.give import ExportReport
    from kvtool.core.query.audit import Auditor
    from kvtool.core.query.conversation import Conversation
    from kvtool.core.query.reply import Reply
    from kvtool.core.remote.transfer_report import TransferReport
    from kvtool.core.session.session import Session
    from kvtool.core.upkeep.budget import Budget
    from kvtool.core.upkeep.compact import Compacted
    from kvtool.core.upkeep.job import PruneReport
    from kvtool.core.upkeep.plan import Plan

Method = TypeVar("Method", bound=Callable[..., Any])
O = TypeVar("O", bound=Options)  # noqa: E741


def open(
    store: str | Path | None = None,
    model: str | None = None,
    *,
    warn: Warn | None = None,
    **options: Unpack[arguments.OpenArguments],
) -> Cache:
    """Open a store for ingesting and asking; it is made at the first ingest.

    Parameters
    ----------
    store : its folder, the user's own by default; or the URL of a shared store, which can only be asked.
    model : a hub name, a local folder, a GGUF file or `smollm2`; by default what the store was built with.
    warn : told (text, hint) what should be known although all went on. By default that is a `KvtoolWarning`.
    options : the fields of `ModelOptions`, as in the command line.

    Raises
    ------
    UsageError : an option that there is not, or a wrong value.
    """
    if not (isinstance(store, str) and is_url(store)):
        store = default_store() if store is None else Path(store)
    return Cache(store, ModelOptions.of({"model": model, **options}), warn)


def warn_user(text: str, hint: str) -> None:
    """Issue a `KvtoolWarning` at the line outside of kvtool that called it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "kvtool":
        level, frame = level + 1, frame.f_back
    warnings.warn(KvtoolWarning(text, hint), stacklevel=level)


def _alone(source: type[Options] = Options) -> Callable[[Method], Method]:
    """One thread at a time, and on an open cache: what hooks into the model is shared, and a store must not be closed
    under another thread. Notebooks are shown the options of `source` as keywords."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Cache, *args: Any, **options: Any) -> Any:
            with self._lock:
                self._check_open()
                return method(self, *args, **options)

        call.__signature__ = _with_keywords(inspect.signature(method), source)  # type: ignore[attr-defined]
        return cast(Method, call)

    return decorate


def _with_keywords(plain: inspect.Signature, source: type[Options]) -> inspect.Signature:
    """A signature whose `**options` are written out."""
    keep = [each for each in plain.parameters.values() if each.kind is not each.VAR_KEYWORD]
    names = {each.name for each in keep}
    written_out = [
        inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default)
        for option in options_of(source).values()
        if option.name not in names and not _is_of_model(option.name)
    ]
    return plain.replace(parameters=[*keep, *written_out])


def _is_of_model(name: str) -> bool:
    return name in options_of(ModelOptions)


class Cache:
    """A store of chunk KV caches. Use `kvtool.open`.

    Threads may share it: what they ask for is done one after the other. The model is loaded when it is needed, and
    stays until the cache is closed.
    """

    def __init__(self, path: Path | str, model: ModelOptions, warn: Warn | None = None) -> None:
        self.path = path
        self._model = model
        self._warn = warn if warn is not None else warn_user
        self._lock = threading.RLock()
        self._session: Session | None = None
        self._auditor: Auditor | None = None
        self._to_audit: list[Callable[[], object]] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"kvtool.open({str(self.path)!r}){' (closed)' if self._closed else ''}"

    # ---- what it is for ----

    @_alone(IngestOptions)
    def ingest(
        self,
        paths: str | Path | Iterable[str | Path],
        *,
        events: Events | None = None,
        **options: Unpack[arguments.IngestArguments],
    ) -> IngestReport:
        """Bring the store up to date with a file or folder, or several; `options` are the fields of `IngestOptions`."""
        from kvtool.core.ingest.job import KeptModel, ingest

        wanted = self._wanted(IngestOptions, options, paths=paths)
        with self._beside() as folder:
            return ingest(folder, wanted, self._events(events), KeptModel(self._decoder))

    @_alone(QueryOptions)
    def query(
        self,
        question: str,
        *,
        chunks: str | Iterable[str] = (),
        documents: str | Path | Iterable[str | Path] = (),
        **options: Unpack[arguments.QueryArguments],
    ) -> Reply:
        """Answer a question; `options` are the fields of `QueryOptions`.

        An answer that is drawn for an audit (`audit=0.01`) is returned first; another thread then audits it. What is
        asked next, and `close`, wait for that.
        """
        from kvtool.core.query.answer import answer
        from kvtool.core.query.reply import Request

        if not isinstance(question, str):
            raise UsageError(f"question: {question!r} is not text", "ask in words")
        wanted, which = self._wanted(QueryOptions, options), ChunkChoice.of({"chunks": chunks, "documents": documents})
        self._finish_audits()
        reply = answer(self._opened(), Request(question, which.chunks, which.documents), wanted)
        if wanted.audit:
            self._audit_later(reply, wanted)
        return reply

    @_alone(QueryOptions)
    def conversation(self, **options: Unpack[arguments.QueryArguments]) -> Conversation:
        """Begin a conversation, in which each question sees the turns before it and goes on from the cache that they
        left; `options` are the fields of `QueryOptions`. Several may go on beside each other, each with a cache of its
        own. It is not audited."""
        from kvtool.core.query.conversation import Conversation

        return Conversation(self._lent, self._wanted(QueryOptions, options))

    @_alone(CompressOptions)
    def compress(
        self, *levels: str, events: Events | None = None, **options: Unpack[arguments.CompressArguments]
    ) -> CompressReport:
        """Encode what is stored at these levels; `options` are the fields of `CompressOptions`."""
        from kvtool.core.compress.job import compress

        wanted = self._wanted(CompressOptions, options, levels=levels)
        with self._beside() as folder:
            return compress(folder, wanted, self._events(events), self._decoder)

    @_alone(FitOptions)
    def fit_lead_in(self, *, events: Events | None = None, **options: Unpack[arguments.FitArguments]) -> FitReport:
        """Learn the lead-in from the store's own chunks; `options` are the fields of `FitOptions`."""
        from kvtool.core.fit.job import fit_lead_in

        wanted = self._wanted(FitOptions, options)
        with self._beside() as folder:
            return fit_lead_in(folder, wanted, self._events(events))

    # ---- sharing ----

    @_alone(PushOptions)
    def push(
        self, url: str, *, events: Events | None = None, **options: Unpack[arguments.PushArguments]
    ) -> TransferReport:
        """Bring a shared store up to date with this one; `options` are the fields of `PushOptions`."""
        from kvtool.core.remote.push import push
        from kvtool.core.remote.urls import open_blobs

        wanted = self._wanted(PushOptions, options)
        with (
            self._beside() as folder,
            closing(open_blobs(url, wanted.remote_timeout)) as blobs,
            Store.open(folder) as store,
        ):
            return push(
                store,
                blobs,
                delete=wanted.delete,
                verify=wanted.verify,
                dry_run=wanted.dry_run,
                yes=wanted.yes,
                events=self._events(events),
            )

    @_alone(PullOptions)
    def pull(
        self, url: str, *, events: Events | None = None, **options: Unpack[arguments.PullArguments]
    ) -> TransferReport:
        """Bring this store up to date with a shared one; `options` are the fields of `PullOptions`."""
        from kvtool.core.remote.pull import preview, pull
        from kvtool.core.remote.urls import open_blobs

        wanted = self._wanted(PullOptions, options)
        levels = wanted.levels or None
        with self._beside() as folder, closing(open_blobs(url, wanted.remote_timeout)) as blobs:
            if wanted.dry_run:
                return preview(folder, blobs, levels=levels, delete=wanted.delete)
            return pull(
                folder,
                blobs,
                levels=levels,
                delete=wanted.delete,
                lock_wait=wanted.lock_wait,
                max_size=wanted.max_size,
                timeout=wanted.remote_timeout,
                yes=wanted.yes,
                events=self._events(events),
            )

    @_alone(ExportOptions)
    def export(
        self, pack: str | Path, *, events: Events | None = None, **options: Unpack[arguments.ExportArguments]
    ) -> ExportReport:
        """Write the store, or a part of it, into one file; `options` are the fields of `ExportOptions`."""
        from kvtool.core.pack.give import export

        wanted = self._wanted(ExportOptions, options)
        levels, told = wanted.levels or None, self._events(events)
        with self._beside() as folder:
            return export(folder, Path(pack), only=wanted.only, levels=levels, force=wanted.force, events=told)

    @_alone(ImportOptions)
    def take(
        self, pack: str | Path, *, events: Events | None = None, **options: Unpack[arguments.ImportArguments]
    ) -> TransferReport:
        """Take a pack into the store, as `store import` does; `options` are the fields of `ImportOptions`."""
        from kvtool.core.pack.take import take

        wanted = self._wanted(ImportOptions, options)
        told = self._events(events)
        with self._beside() as folder:
            return take(folder, Path(pack), lock_wait=wanted.lock_wait, max_size=wanted.max_size, events=told)

    # ---- upkeep ----

    @_alone(ForgetOptions)
    def forget(self, *targets: str | Path, **options: Unpack[arguments.ForgetArguments]) -> Plan:
        """Forget documents, by path, folder, glob or chunk's id; `options` are the fields of `ForgetOptions`."""
        from kvtool.core.upkeep.forget import forget

        wanted = self._wanted(ForgetOptions, options)
        with self._beside() as folder:
            return forget(folder, _texts(targets), dry_run=wanted.dry_run, yes=wanted.yes, lock_wait=wanted.lock_wait)

    @_alone(PruneOptions)
    def prune(self, **options: Unpack[arguments.PruneArguments]) -> PruneReport:
        """Make the store smaller; `options` are the fields of `PruneOptions`."""
        from kvtool.core.upkeep.job import prune

        wanted = self._wanted(PruneOptions, options)
        with self._beside() as folder:
            return prune(folder, wanted)

    @_alone(LockOptions)
    def compact(self, **options: Unpack[arguments.LockArguments]) -> Compacted:
        """Give free pages, and what nothing refers to, back to the disk."""
        from kvtool.core.upkeep.compact import compact

        wanted = self._wanted(LockOptions, options)
        with self._beside() as folder:
            return compact(folder, lock_wait=wanted.lock_wait)

    @_alone()
    def budget(self, *size: int | str | None) -> Budget:
        """The size budget that the store keeps to; a size (bytes, or `20GB`) sets it, None or "none" lifts it."""
        from kvtool.core.upkeep.budget import keep_budget, read_budget

        with self._beside() as folder:
            if size:
                wanted = None if size[0] == "none" else size[0]
                return keep_budget(folder, options_of(IngestOptions)["max_size"].accept(wanted, "size"))
            with Store.open(folder) as store:
                return read_budget(store)

    # ---- opening and closing ----

    def close(self) -> None:
        """Let go of the model and the store. Nothing can be asked of the cache after that."""
        with self._lock:
            self._finish_audits()
            self._release()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this cache was closed", f"open the store again: kvtool.open({str(self.path)!r})")

    def _wanted(self, source: type[O], given: Mapping[str, Any], **own: Any) -> O:
        """The options of a call, with the model's as the cache was opened with.

        Raises
        ------
        UsageError : an option that there is not, or a wrong value.
        """
        for name, value in given.items():
            if _is_of_model(name) and value != getattr(self._model, name):
                raise UsageError(f"{name} is the same for all that a cache does", "give it to kvtool.open")
        model = {name: getattr(self._model, name) for name in options_of(ModelOptions) if name in options_of(source)}
        return source.of({**model, **given, **own})

    def _events(self, events: Events | None) -> Events:
        return events or Events(warn=self._warn)

    @contextmanager
    def _beside(self) -> Iterator[Path]:
        """The store's folder, for what opens it by itself: the model stays loaded, and learns of what was changed."""
        if isinstance(self.path, str):
            raise UsageError("a shared store can only be asked", "work on a local one, and push it")
        if self._session is not None:
            self._session.store.flush()
        try:
            yield self.path
        finally:
            if self._session is not None:
                try:
                    self._session.refresh()
                except KvtoolError:  # another store, or another model's: the next question opens it anew
                    self._release()

    # ---- audits ----

    def _audit_later(self, reply: Reply, options: QueryOptions) -> None:
        """Audit an answer in a thread of its own, if it is drawn: the caller has the answer meanwhile."""
        from kvtool.core.query.audit import Auditor

        if self._auditor is None:
            self._auditor = Auditor(self._opened())
        if self._auditor.is_due(reply, options.audit):
            self._to_audit.append(functools.partial(self._auditor.audit, reply, options))
            threading.Thread(target=self._audit_now, name="kvtool-audit").start()

    def _audit_now(self) -> None:
        with self._lock:
            self._finish_audits()

    def _finish_audits(self) -> None:
        """Do what is to be audited yet, under the lock: each holds a prompt cache, so no second one is made first."""
        while self._to_audit:
            self._to_audit.pop(0)()

    @property
    def _decoder(self) -> Decoder | None:
        """The model, if it is loaded."""
        return self._session.decoder if self._session is not None else None

    def _release(self) -> None:
        if self._session is not None:
            session, self._session, self._auditor = self._session, None, None
            session.store.close()

    @contextmanager
    def _lent(self) -> Iterator[Session]:
        """The session for one question of a conversation."""
        with self._lock:
            self._check_open()
            self._finish_audits()
            yield self._opened()

    def _opened(self) -> Session:
        from kvtool.core.remote.opening import open_store
        from kvtool.core.session.session import Session

        if self._session is None:
            store = open_store(self.path, warn=self._warn)
            try:
                self._session = Session.open(store, self._model, warn=self._warn)
            except BaseException:
                store.close()
                raise
        return self._session


def _texts(given: str | Path | Iterable[str | Path]) -> tuple[str, ...]:
    """One text as one, several as several."""
    return (str(given),) if isinstance(given, str | Path) else tuple(map(str, given))
