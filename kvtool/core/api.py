"""The Python API: the commands' operations, names and results."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kvtool.core.cache.store import Store
from kvtool.core.common.places import data_dir
from kvtool.core.common.progress import Events
from kvtool.core.common.types import Warn
from kvtool.core.common.urls import is_url
from kvtool.core.compress.compress_report import CompressReport
from kvtool.core.compress.job import compress
from kvtool.core.compress.options import CompressOptions
from kvtool.core.errors import KvtoolError, KvtoolWarning, UsageError
from kvtool.core.ingest.ingest_report import IngestReport
from kvtool.core.ingest.job import ingest
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Reply, Request
from kvtool.core.remote.opening import open_store
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from kvtool.core.remote.transfer_report import TransferReport
from kvtool.core.remote.urls import open_blobs

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.pack.give import ExportReport
    from kvtool.core.session.session import Session
    from kvtool.core.upkeep.budget import Budget
    from kvtool.core.upkeep.compact import Compacted
    from kvtool.core.upkeep.job import PruneReport
    from kvtool.core.upkeep.plan import Plan

Method = TypeVar("Method", bound=Callable[..., Any])


def open(store: str | Path | None = None, model: str | None = None, **options: Any) -> Cache:
    """Open a store for ingesting and asking; it is made at the first ingest.

    Parameters
    ----------
    store : its folder, the user's own by default; or the URL of a shared store, which can only be asked.
    model : a hub name, a local folder, a GGUF file or `smollm2`; by default what the store was built with.
    options : `device`, `dtype`, `offline`, as in the command line; `warn(text, hint)`, told what should be known
        although all went on. By default that is a `KvtoolWarning`.
    """
    if isinstance(store, str) and is_url(store):
        return Cache(store, model, **options)
    return Cache(Path(store) if store is not None else default_store(), model, **options)


def default_store() -> Path:
    """The store that is used when none is named."""
    return data_dir() / "store"


def warn_user(text: str, hint: str) -> None:
    """Issue a `KvtoolWarning` at the line outside of kvtool that called it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "kvtool":
        level, frame = level + 1, frame.f_back
    warnings.warn(KvtoolWarning(text, hint), stacklevel=level)


def _alone(method: Method) -> Method:
    """One thread at a time: what hooks into the model is shared, and a store must not be closed under another."""

    @functools.wraps(method)
    def call(self: Cache, *args: Any, **options: Any) -> Any:
        with self._lock:
            return method(self, *args, **options)

    return cast(Method, call)


class Cache:
    """A store of chunk KV caches. Use `kvtool.open`.

    Threads may share it: what they ask for is done one after the other.
    """

    def __init__(
        self,
        path: Path | str,
        model: str | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        offline: bool = False,
        warn: Warn | None = None,
    ) -> None:
        self.path = path
        self._warn = warn if warn is not None else warn_user
        self._lock = threading.RLock()
        self._model: dict[str, Any] = {"model": model, "device": device, "dtype": dtype, "offline": offline}
        self._session: Session | None = None

    @_alone
    def ingest(self, paths: Iterable[str | Path], *, events: Events | None = None, **options: Any) -> IngestReport:
        """Bring the store up to date with files; `options` are the fields of `IngestOptions`."""
        wanted = IngestOptions(paths=tuple(Path(path) for path in paths), **self._model, **options)
        with self._beside() as folder:
            return ingest(folder, wanted, events or Events(warn=self._warn), self._decoder)

    @_alone
    def compress(self, *levels: str, events: Events | None = None, **options: Any) -> CompressReport:
        """Encode what is stored at these levels; `options` are the fields of `CompressOptions`."""
        wanted = CompressOptions(levels=levels, **self._model, **options)
        with self._beside() as folder:
            return compress(folder, wanted, events or Events(warn=self._warn), self._decoder)

    @_alone
    def query(
        self,
        question: str,
        *,
        chunks: Iterable[str] = (),
        documents: Iterable[str] = (),
        **options: Any,
    ) -> Reply:
        """Answer a question; `options` are the fields of `QueryOptions`. The model stays loaded until `close`."""
        from kvtool.core.query.answer import answer

        request = Request(question, tuple(chunks), tuple(documents))
        return answer(self._opened(), request, replace(QueryOptions(), **options))

    @_alone
    def push(self, url: str, *, events: Events | None = None, **options: Any) -> TransferReport:
        """Bring a shared store up to date with this one; `options` are those of `core.remote.push.push`."""
        with self._beside() as folder, closing(open_blobs(url)) as blobs, Store.open(folder) as store:
            return push(store, blobs, events=events or Events(warn=self._warn), **options)

    @_alone
    def pull(self, url: str, *, events: Events | None = None, **options: Any) -> TransferReport:
        """Bring this store up to date with a shared one; `options` are those of `core.remote.pull.pull`."""
        with self._beside() as folder, closing(open_blobs(url)) as blobs:
            return pull(folder, blobs, events=events or Events(warn=self._warn), **options)

    @_alone
    def export(self, pack: str | Path, *, events: Events | None = None, **options: Any) -> ExportReport:
        """Write the store, or a part of it, into one file; `options` are those of `core.pack.give.export`."""
        from kvtool.core.pack.give import export

        with self._beside() as folder:
            return export(folder, Path(pack), events=events or Events(warn=self._warn), **options)

    @_alone
    def take(self, pack: str | Path, *, events: Events | None = None, **options: Any) -> TransferReport:
        """Take a pack into the store, as `store import` does; `options` are those of `core.pack.take.take`."""
        from kvtool.core.pack.take import take

        with self._beside() as folder:
            return take(folder, Path(pack), events=events or Events(warn=self._warn), **options)

    @_alone
    def forget(self, *targets: str, **options: Any) -> Plan:
        """Forget documents, by path, folder, glob or chunk's id; `options` are those of `core.upkeep.forget.forget`."""
        from kvtool.core.upkeep.forget import forget

        with self._beside() as folder:
            return forget(folder, targets, **options)

    @_alone
    def prune(self, **options: Any) -> PruneReport:
        """Make the store smaller; `options` are the fields of `PruneOptions`."""
        from kvtool.core.upkeep.job import prune
        from kvtool.core.upkeep.options import PruneOptions

        with self._beside() as folder:
            return prune(folder, PruneOptions(**options))

    @_alone
    def compact(self, **options: Any) -> Compacted:
        """Give free pages, and what nothing refers to, back to the disk."""
        from kvtool.core.upkeep.compact import compact

        with self._beside() as folder:
            return compact(folder, **options)

    @_alone
    def budget(self, *size: int | None) -> Budget:
        """The size budget that the store keeps to, in bytes; with a size it becomes that, with None it is lifted."""
        from kvtool.core.upkeep.budget import keep_budget, read_budget

        with self._beside() as folder:
            if size:
                return keep_budget(folder, size[0])
            with Store.open(folder) as store:
                return read_budget(store)

    @_alone
    def close(self) -> None:
        """Let go of the model and the store."""
        if self._session is not None:
            session, self._session = self._session, None
            session.store.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def _beside(self) -> Iterator[Path]:
        """The store's folder, for what opens it by itself: the model stays loaded, and learns of what was changed."""
        folder = self._folder()
        if self._session is not None:
            self._session.store.flush()
        try:
            yield folder
        finally:
            if self._session is not None:
                try:
                    self._session.refresh()
                except KvtoolError:  # another store, or another model's: the next question opens it anew
                    self.close()

    @property
    def _decoder(self) -> Decoder | None:
        """The model, if it is loaded."""
        return self._session.decoder if self._session is not None else None

    def _folder(self) -> Path:
        if isinstance(self.path, str):
            raise UsageError("a shared store can only be asked", "work on a local one, and push it")
        return self.path

    def _opened(self) -> Session:
        from kvtool.core.session.session import Session

        if self._session is None:
            store = open_store(self.path, warn=self._warn)
            try:
                self._session = Session.open(store, ModelOptions(**self._model), warn=self._warn)
            except BaseException:
                store.close()
                raise
        return self._session
