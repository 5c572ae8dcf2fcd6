"""Shared state of a cache of the Python API: a store and its model, one thread at a time, and audits of its answers."""

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
from kvtool.core.errors import KvtoolError, KvtoolWarning, UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import Options, options_of
from kvtool.core.query.options import QueryOptions

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.query.audit import Auditor
    from kvtool.core.query.reply import Reply
    from kvtool.core.session.session import Session

Method = TypeVar("Method", bound=Callable[..., Any])
O = TypeVar("O", bound=Options)  # noqa: E741


def warn_user(text: str, hint: str) -> None:
    """Issue a `KvtoolWarning` at the line outside of kvtool that called it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "kvtool":
        level, frame = level + 1, frame.f_back
    warnings.warn(KvtoolWarning(text, hint), stacklevel=level)


def alone(source: type[Options] = Options) -> Callable[[Method], Method]:
    """Run a method in one thread at a time, on an open cache: passes of a model take turns, and a store must not be
    closed under another thread. Notebooks are shown the options of `source` as keywords."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Held, *args: Any, **options: Any) -> Any:
            with self._lock:
                self._check_open()
                return method(self, *args, **options)

        call.__signature__ = _with_keywords(inspect.signature(method), source)  # type: ignore[attr-defined]
        return cast(Method, call)

    return decorate


def _with_keywords(plain: inspect.Signature, source: type[Options]) -> inspect.Signature:
    keep = [each for each in plain.parameters.values() if each.kind is not each.VAR_KEYWORD]
    names = {each.name for each in keep}
    written_out = [
        inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default)
        for option in options_of(source).values()
        if option.is_keyword and option.name not in names and not _is_of_model(option.name)
    ]
    return plain.replace(parameters=[*keep, *written_out])


def _is_of_model(name: str) -> bool:
    return name in options_of(ModelOptions)


class Held:
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

    def close(self) -> None:
        """Release the model and the store. Nothing can be asked of the cache after that."""
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
        """Return the options of a call, with the model's as the cache was opened with. Raises UsageError."""
        for name, value in given.items():
            if _is_of_model(name) and value != getattr(self._model, name):
                raise UsageError(f"{name} is the same for all that a cache does", "give it to kvtool.open")
        model = {name: getattr(self._model, name) for name in options_of(ModelOptions) if name in options_of(source)}
        return source.of({**model, **given, **own})

    def _events(self, events: Events | None) -> Events:
        return events or Events(warn=self._warn)

    @contextmanager
    def _beside(self) -> Iterator[Path]:
        """Lend the store's folder to a function that opens the store itself. The model stays loaded, and the session is
        refreshed afterwards."""
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
        return self._session.decoder if self._session is not None else None

    def _release(self) -> None:
        if self._session is not None:
            session, self._session, self._auditor = self._session, None, None
            session.store.close()

    @contextmanager
    def _lent(self) -> Iterator[Session]:
        with self._lock:
            self._check_open()
            self._finish_audits()
            yield self._opened()

    def _opened(self) -> Session:
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
