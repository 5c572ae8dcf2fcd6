"""The Python API: the commands' operations, names and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.api.shared import SharedSession, synchronized
from kvtool.core.cache.options import LockOptions, default_store
from kvtool.core.cache.store import Store
from kvtool.core.common.types import Events, Warn
from kvtool.core.common.urls import is_url
from kvtool.core.compress.options import CompressOptions
from kvtool.core.errors import UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.core.remote.options import ExportOptions, ImportOptions, PullOptions, PushOptions
from kvtool.core.retrieval.passages import RetrievalOptions
from kvtool.core.upkeep.options import ForgetOptions, PruneOptions

if TYPE_CHECKING:
    from kvtool.core.compress.options import CompressReport
    from kvtool.core.ingest.report import IngestReport
    from kvtool.core.query.conversation import Conversation
    from kvtool.core.query.reply import Reply
    from kvtool.core.query.retrieve import SearchReport
    from kvtool.core.remote.options import TransferReport
    from kvtool.core.remote.packs import ExportReport
    from kvtool.core.upkeep.forget import Removal
    from kvtool.core.upkeep.prune import Compacted, PruneReport


__all__ = ["Cache", "open"]


def open(
    store: str | Path | None = None, model: str | None = None, *, warn: Warn | None = None, **options: Any
) -> Cache:
    """Open a store to ingest documents and to query them; the first ingest creates it.

    Parameters
    ----------
    store : its folder, by default the user's; or the URL of a shared store, which can only be searched and queried.
    model : a hub name, a local folder, a GGUF file or `smollm2`; by default what the store was built with.
    warn : called with (text, hint) of a problem that stopped nothing. By default it issues a `KvtoolWarning`.
    options : the fields of `ModelOptions`, as in the command line.

    Raises
    ------
    UsageError : an option is unknown, or its value is wrong.
    """
    if not (isinstance(store, str) and is_url(store)):
        store = default_store() if store is None else Path(store)
    return Cache(store, ModelOptions.of({"model": model, **options}), warn)


class Cache(SharedSession):
    """A store of chunk KV caches. Use `kvtool.open`.

    Threads may share it: calls run one after another. The model is loaded at the first call that needs it, and stays
    loaded until the cache is closed.
    """

    @synchronized(IngestOptions)
    def ingest(
        self, paths: str | Path | Iterable[str | Path], *, events: Events | None = None, **options: Any
    ) -> IngestReport:
        """Bring the store up to date with a file or folder, or several; `options` are the fields of `IngestOptions`."""
        from kvtool.core.ingest.job import KeptModel, ingest

        ingesting = self._options(IngestOptions, options, paths=paths)
        with self._exclusive_folder() as folder:
            return ingest(folder, ingesting, self._events(events), KeptModel(self._decoder))

    @synchronized(QueryOptions)
    def query(
        self,
        question: str,
        *,
        chunks: str | Iterable[str] = (),
        documents: str | Path | Iterable[str | Path] = (),
        stream: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Reply:
        """Answer a question; `options` are the fields of `QueryOptions`.

        `stream` is called with each piece of the answer's text as it is generated.

        An answer that is drawn for an audit (`audit=0.01`) is returned first; another thread then audits it. The next
        call, and `close`, wait for the audit.
        """
        from kvtool.core.query.answer import answer
        from kvtool.core.query.reply import Request

        if not isinstance(question, str):
            raise UsageError(f"question: {question!r} is not text", "ask in words")
        if stream is not None and not callable(stream):
            raise UsageError(
                f"stream: {stream!r} is not a function", "give one that takes a text, such as print or sys.stdout.write"
            )
        querying = self._options(QueryOptions, options)
        choice = ChunkChoice.of({"chunks": chunks, "documents": documents})
        self._finish_audits()
        reply = answer(self._open_session(), Request(question, choice.chunks, choice.documents), querying, stream)
        if querying.audit:
            self._audit_later(reply, querying)
        return reply

    @synchronized(QueryOptions)
    def conversation(self, **options: Any) -> Conversation:
        """Begin a conversation: each question sees the earlier turns and continues from their prompt cache. `options`
        are the fields of `QueryOptions`. Several conversations may be open at once, each with a separate prompt cache.
        They are not audited."""
        from kvtool.core.query.conversation import Conversation

        return Conversation(self._shared_session, self._options(QueryOptions, options))

    @synchronized(RetrievalOptions)
    def search(self, question: str, **options: Any) -> SearchReport:
        """Find the passages that match a question, best first; `options` are the fields of `RetrievalOptions`. Needs no
        model."""
        from kvtool.core.query.retrieve import search

        retrieval = self._options(RetrievalOptions, options)
        with self._reader.reading() as (store, finder):
            return search(store, finder, question, retrieval)

    @synchronized()
    def documents(self, *targets: str | Path) -> list[dict[str, Any]]:
        """List documents as `store ls --json` does: all, or those that a path, folder, glob or chunk id selects."""
        from kvtool.core.upkeep.documents import list_documents, listed

        with self._exclusive_folder() as folder, Store.open(folder) as store:
            documents: list[dict[str, Any]] = listed(list_documents(store, [*map(str, targets)]))["documents"]
            return documents

    @synchronized()
    def stats(self) -> dict[str, Any]:
        """Count documents, chunks, tokens and bytes, by level too, as `store stats` does; sizes are in bytes."""
        from kvtool.core.upkeep.plan import sizes_of

        with self._exclusive_folder() as folder, Store.open(folder) as store:
            return sizes_of(store)

    @synchronized(CompressOptions)
    def compress(self, *levels: str, events: Events | None = None, **options: Any) -> CompressReport:
        """Encode the stored KV at these levels; `options` are the fields of `CompressOptions`."""
        from kvtool.core.compress.job import compress

        compressing = self._options(CompressOptions, options, levels=levels)
        with self._exclusive_folder() as folder:
            return compress(folder, compressing, self._events(events), self._decoder)

    @synchronized(PushOptions)
    def push(self, url: str, *, events: Events | None = None, **options: Any) -> TransferReport:
        """Bring a shared store up to date with this one; `options` are the fields of `PushOptions`."""
        from kvtool.core.remote.push import push_to

        with self._exclusive_folder() as folder:
            return push_to(url, folder, self._options(PushOptions, options), self._events(events))

    @synchronized(PullOptions)
    def pull(self, url: str, *, events: Events | None = None, **options: Any) -> TransferReport:
        """Bring this store up to date with a shared one; `options` are the fields of `PullOptions`."""
        from kvtool.core.remote.pull import pull_from

        with self._exclusive_folder() as folder:
            return pull_from(url, folder, self._options(PullOptions, options), self._events(events))

    @synchronized(ExportOptions)
    def export(self, pack: str | Path, *, events: Events | None = None, **options: Any) -> ExportReport:
        """Write the store, or a part of it, into one file; `options` are the fields of `ExportOptions`."""
        from kvtool.core.remote.packs import export

        with self._exclusive_folder() as folder:
            return export(folder, Path(pack), self._options(ExportOptions, options), self._events(events))

    @synchronized(ImportOptions)
    def import_(self, pack: str | Path, *, events: Events | None = None, **options: Any) -> TransferReport:
        """Import a pack, or a store's folder, as `store import` does; `options` are the fields of `ImportOptions`."""
        from kvtool.core.remote.packs import take

        with self._exclusive_folder() as folder:
            return take(folder, Path(pack), self._options(ImportOptions, options), events=self._events(events))

    @synchronized(ForgetOptions)
    def remove(self, *targets: str | Path, **options: Any) -> Removal:
        """Remove documents, by path, folder, glob or chunk id; `options` are the fields of `ForgetOptions`."""
        from kvtool.core.upkeep.forget import forget

        with self._exclusive_folder() as folder:
            return forget(folder, [*map(str, targets)], **vars(self._options(ForgetOptions, options)))

    @synchronized(PruneOptions)
    def prune(self, **options: Any) -> PruneReport:
        """Make the store smaller; `options` are the fields of `PruneOptions`."""
        from kvtool.core.upkeep.prune import prune

        with self._exclusive_folder() as folder:
            return prune(folder, self._options(PruneOptions, options))

    @synchronized(LockOptions)
    def compact(self, **options: Any) -> Compacted:
        """Give free pages, and data that nothing refers to, back to the disk."""
        from kvtool.core.upkeep.prune import compact

        with self._exclusive_folder() as folder:
            return compact(folder, **vars(self._options(LockOptions, options)))

    @synchronized(LockOptions)
    def set_budget(self, size: int | str | None, **options: Any) -> None:
        """Limit the store to a size (bytes, or text such as `20GB`) from now on; None or "none" lifts the limit."""
        from kvtool.core.upkeep.prune import keep_budget

        with self._exclusive_folder() as folder:
            keep_budget(folder, size, **vars(self._options(LockOptions, options)))
