"""The Python API: the commands' operations, names and results."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvtool.core.cache.store import Store
from kvtool.core.compress.job import compress
from kvtool.core.compress.report import CompressEvents, CompressOptions, CompressReport
from kvtool.core.errors import UsageError
from kvtool.core.ingest.job import ingest
from kvtool.core.ingest.report import Events, IngestOptions, IngestReport
from kvtool.core.places import data_dir
from kvtool.core.query.reply import QueryOptions, Reply, Request
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from kvtool.core.remote.report import TransferReport
from kvtool.core.remote.tier import open_store
from kvtool.core.remote.urls import is_url, open_blobs

if TYPE_CHECKING:
    from kvtool.core.query.session import Session


def open(store: str | Path | None = None, model: str | None = None, **options: Any) -> Cache:
    """Open a store for ingesting and asking; it is made at the first ingest.

    Parameters
    ----------
    store : its folder, the user's own by default; or the URL of a shared store, which can only be asked.
    model : a hub name, a local folder, a GGUF file or `smollm2`; by default what the store was built with.
    options : `device`, `dtype`, `offline`, as in the command line.
    """
    if isinstance(store, str) and is_url(store):
        return Cache(store, model, **options)
    return Cache(Path(store) if store is not None else default_store(), model, **options)


def default_store() -> Path:
    """The store that is used when none is named."""
    return data_dir() / "store"


class Cache:
    """A store of chunk KV caches. Use `kvtool.open`."""

    def __init__(
        self,
        path: Path | str,
        model: str | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        offline: bool = False,
    ) -> None:
        self.path = path
        self._model: dict[str, Any] = {"model": model, "device": device, "dtype": dtype, "offline": offline}
        self._session: Session | None = None

    def ingest(self, paths: Iterable[str | Path], *, events: Events | None = None, **options: Any) -> IngestReport:
        """Bring the store up to date with files; `options` are the fields of `IngestOptions`."""
        self.close()
        wanted = IngestOptions(paths=tuple(Path(path) for path in paths), **self._model, **options)
        return ingest(self._folder(), wanted, events)

    def compress(self, *levels: str, events: CompressEvents | None = None, **options: Any) -> CompressReport:
        """Encode what is stored at these levels; `options` are the fields of `CompressOptions`."""
        self.close()
        wanted = CompressOptions(levels=levels, **self._model, **options)
        return compress(self._folder(), wanted, events)

    def query(
        self,
        question: str,
        *,
        chunks: Iterable[str] = (),
        documents: Iterable[str] = (),
        **options: Any,
    ) -> Reply:
        """Answer a question; `options` are the fields of `QueryOptions`. The model stays loaded until `close`."""
        request = Request(question, tuple(chunks), tuple(documents))
        return self._opened().ask(request, replace(QueryOptions(), **options))

    def push(self, url: str, **options: Any) -> TransferReport:
        """Bring a shared store up to date with this one; `options` are those of `core.remote.push.push`."""
        self.close()
        with closing(open_blobs(url)) as blobs, Store.open(self._folder()) as store:
            return push(store, blobs, **options)

    def pull(self, url: str, **options: Any) -> TransferReport:
        """Bring this store up to date with a shared one; `options` are those of `core.remote.pull.pull`."""
        self.close()
        with closing(open_blobs(url)) as blobs:
            return pull(self._folder(), blobs, **options)

    def close(self) -> None:
        """Let go of the model and the store."""
        if self._session is not None:
            session, self._session = self._session, None
            session.store.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _folder(self) -> Path:
        if isinstance(self.path, str):
            raise UsageError("a shared store can only be asked", "work on a local one, and push it")
        return self.path

    def _opened(self) -> Session:
        from kvtool.core.query.session import Session

        if self._session is None:
            store = open_store(self.path)
            try:
                self._session = Session.open(store, **self._model)
            except BaseException:
                store.close()
                raise
        return self._session
