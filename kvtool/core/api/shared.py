"""State of a cache of the Python API: a store and its model, one thread at a time, and audits of its answers."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from kvtool.core.common.types import Events, Warn
from kvtool.core.errors import KvtoolError, KvtoolWarning, StoreFormatError, UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import Options, options_of
from kvtool.core.query.options import QueryOptions

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.query.reply import Reply
    from kvtool.core.retrieval.finder import Finder
    from kvtool.core.session.session import Session

Method = TypeVar("Method", bound=Callable[..., Any])
O = TypeVar("O", bound=Options)  # noqa: E741


def warn_user(text: str, hint: str) -> None:
    """Issue a `KvtoolWarning` at the line outside of kvtool that called it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "kvtool":
        level, frame = level + 1, frame.f_back
    warnings.warn(KvtoolWarning(text, hint), stacklevel=level)


def synchronized(source: type[Options] = Options) -> Callable[[Method], Method]:
    """Run a method in one thread at a time, on an open cache: passes of a model take turns, and another thread must not
    close the store meanwhile. The signature shows the options of `source` as keywords."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: SharedSession, *args: Any, **options: Any) -> Any:
            with self._lock:
                self._check_open()
                return method(self, *args, **options)

        call.__signature__ = _with_keywords(inspect.signature(method), source)  # type: ignore[attr-defined]
        return cast(Method, call)

    return decorate


def _with_keywords(plain: inspect.Signature, source: type[Options]) -> inspect.Signature:
    parameters = [each for each in plain.parameters.values() if each.kind is not each.VAR_KEYWORD]
    names = {each.name for each in parameters}
    keywords = [
        inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default)
        for option in options_of(source).values()
        if option.is_keyword and option.name not in names and option.name not in options_of(ModelOptions)
    ]
    return plain.replace(parameters=[*parameters, *keywords])


class StoreReader:
    """A store that is opened at the first use, and stays open with its index until `close`. Threads may share it."""

    def __init__(self, path: Path | str, warn: Warn) -> None:
        self._path, self._warn = path, warn
        self._lock = threading.RLock()
        self._open: tuple[Store, Finder] | None = None

    @contextmanager
    def reading(self) -> Iterator[tuple[Store, Finder]]:
        """Lend the newest revision of the store."""
        from kvtool.core.remote.mirror import open_store
        from kvtool.core.retrieval.finder import Finder

        with self._lock:
            if self._open is not None:
                try:
                    self._open[0].follow()
                except StoreFormatError:  # replaced by another store
                    self.close()
            if self._open is None:
                store = open_store(self._path, warn=self._warn)
                self._open = store, Finder(store, self._warn)
            with self._open[0].view():
                yield self._open

    def close(self) -> None:
        with self._lock:
            if self._open is not None:
                self._open[0].close()
                self._open = None


class SharedSession:
    def __init__(self, path: Path | str, model: ModelOptions, warn: Warn | None = None) -> None:
        self.path = path
        self._model = model
        self._warn = warn if warn is not None else warn_user
        self._lock = threading.RLock()
        self._session: Session | None = None
        self._reader = StoreReader(path, self._warn)
        self._to_audit: list[Callable[[], object]] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"kvtool.open({str(self.path)!r}){' (closed)' if self._closed else ''}"

    def close(self) -> None:
        """Release the model and the store. The cache cannot be used after that."""
        with self._lock:
            self._finish_audits()
            self._release()
            self._reader.close()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this cache was closed", f"open the store again: kvtool.open({str(self.path)!r})")

    def _options(self, source: type[O], given: Mapping[str, Any], **more: Any) -> O:
        """Return the options of a call, with those of the cache's model. Raises UsageError."""
        for name, value in given.items():
            if name in options_of(ModelOptions) and value != getattr(self._model, name):
                raise UsageError(f"{name} is the same for all that a cache does", "give it to kvtool.open")
        model = {name: getattr(self._model, name) for name in options_of(ModelOptions) if name in options_of(source)}
        return source.of({**model, **given, **more})

    def _events(self, events: Events | None) -> Events:
        return events or Events(warn=self._warn)

    @contextmanager
    def _exclusive_folder(self) -> Iterator[Path]:
        """Lend the store's folder to a function that opens the store itself. The model stays loaded, and the session is
        refreshed afterwards."""
        if isinstance(self.path, str):
            raise UsageError("a shared store can only be searched and queried", "work on a local one, and push it")
        if self._session is not None:
            self._session.store.flush()
        try:
            yield self.path
        finally:
            if self._session is not None:
                try:
                    self._session.refresh()
                except KvtoolError:  # another store, or another model's: the next question opens it again
                    self._release()

    # ---- audits ----

    def _audit_later(self, reply: Reply, options: QueryOptions) -> None:
        """Audit an answer in another thread, if it is drawn: the caller has the answer meanwhile."""
        from kvtool.core.query.audit import audit_answer, is_audit_due

        session = self._open_session()
        if is_audit_due(session, reply, options.audit):
            self._to_audit.append(functools.partial(audit_answer, session, reply, options))
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
        return self._session.decoder if self._session is not None else None

    def _release(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            session.store.close()

    @contextmanager
    def _shared_session(self) -> Iterator[Session]:
        with self._lock:
            self._check_open()
            self._finish_audits()
            yield self._open_session()

    def _open_session(self) -> Session:
        from kvtool.core.remote.mirror import open_store
        from kvtool.core.session.session import Session

        if self._session is None:
            store = open_store(self.path, warn=self._warn)
            try:
                session = Session.open(store, self._model, warn=self._warn)
                _ = session.decoder
                self._session = session
            except BaseException:
                store.close()
                raise
        return self._session
