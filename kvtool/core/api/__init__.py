"""The Python API: the commands' operations, names and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.api.held import Held, alone
from kvtool.core.cache.options import LockOptions, default_store
from kvtool.core.cache.store import Store
from kvtool.core.common.types import Events, Warn
from kvtool.core.common.urls import is_url
from kvtool.core.compress.options import CompressOptions
from kvtool.core.errors import UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import options_of
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.core.remote.options import ExportOptions, ImportOptions, PullOptions, PushOptions
from kvtool.core.upkeep.options import ForgetOptions, PruneOptions

if TYPE_CHECKING:
    from kvtool.core.compress.report import CompressReport
    from kvtool.core.ingest.report import IngestReport
    from kvtool.core.query.conversation import Conversation
    from kvtool.core.query.reply import Reply
    from kvtool.core.remote.export import ExportReport
    from kvtool.core.remote.report import TransferReport
    from kvtool.core.upkeep.budget import Budget
    from kvtool.core.upkeep.forget import Removal
    from kvtool.core.upkeep.prune import Compacted, PruneReport


__all__ = ["Cache", "open"]


def open(
    store: str | Path | None = None, model: str | None = None, *, warn: Warn | None = None, **options: Any
) -> Cache:
    """Open a store for ingesting and asking; it is made at the first ingest.

    Parameters
    ----------
    store : its folder, the user's own by default; or the URL of a shared store, which can only be asked.
    model : a hub name, a local folder, a GGUF file or `smollm2`; by default what the store was built with.
    warn : called with (text, hint) of a problem that stopped nothing. By default it issues a `KvtoolWarning`.
    options : the fields of `ModelOptions`, as in the command line.

    Raises
    ------
    UsageError : an option that there is not, or a wrong value.
    """
    if not (isinstance(store, str) and is_url(store)):
        store = default_store() if store is None else Path(store)
    return Cache(store, ModelOptions.of({"model": model, **options}), warn)


class Cache(Held):
    """A store of chunk KV caches. Use `kvtool.open`.

    Threads may share it: what they ask for is done one after the other. The model is loaded when it is needed, and
    stays until the cache is closed.
    """

    @alone(IngestOptions)
    def ingest(
        self, paths: str | Path | Iterable[str | Path], *, events: Events | None = None, **options: Any
    ) -> IngestReport:
        """Bring the store up to date with a file or folder, or several; `options` are the fields of `IngestOptions`."""
        from kvtool.core.ingest.job import KeptModel, ingest

        wanted = self._wanted(IngestOptions, options, paths=paths)
        with self._beside() as folder:
            return ingest(folder, wanted, self._events(events), KeptModel(self._decoder))

    @alone(QueryOptions)
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

        `stream` is called with each piece of the answer's text as it comes.

        An answer that is drawn for an audit (`audit=0.01`) is returned first; another thread then audits it. What is
        asked next, and `close`, wait for that.
        """
        from kvtool.core.query.answer import answer
        from kvtool.core.query.reply import Request

        if not isinstance(question, str):
            raise UsageError(f"question: {question!r} is not text", "ask in words")
        if stream is not None and not callable(stream):
            raise UsageError(
                f"stream: {stream!r} is no function", "give one that takes a text, such as print or sys.stdout.write"
            )
        wanted, which = self._wanted(QueryOptions, options), ChunkChoice.of({"chunks": chunks, "documents": documents})
        self._finish_audits()
        reply = answer(self._opened(), Request(question, which.chunks, which.documents), wanted, stream)
        if wanted.audit:
            self._audit_later(reply, wanted)
        return reply

    @alone(QueryOptions)
    def conversation(self, **options: Any) -> Conversation:
        """Begin a conversation, in which each question sees the turns before it and continues from their cache;
        `options` are the fields of `QueryOptions`. Several conversations may be open at once, each with a cache of its
        own. They are not audited."""
        from kvtool.core.query.conversation import Conversation

        return Conversation(self._lent, self._wanted(QueryOptions, options))

    @alone(CompressOptions)
    def compress(self, *levels: str, events: Events | None = None, **options: Any) -> CompressReport:
        """Encode what is stored at these levels; `options` are the fields of `CompressOptions`."""
        from kvtool.core.compress.job import compress

        wanted = self._wanted(CompressOptions, options, levels=levels)
        with self._beside() as folder:
            return compress(folder, wanted, self._events(events), self._decoder)

    @alone(PushOptions)
    def push(self, url: str, *, events: Events | None = None, **options: Any) -> TransferReport:
        """Bring a shared store up to date with this one; `options` are the fields of `PushOptions`."""
        from kvtool.core.remote.push import push_to

        wanted = self._wanted(PushOptions, options)
        with self._beside() as folder:
            return push_to(url, folder, wanted, self._events(events))

    @alone(PullOptions)
    def pull(self, url: str, *, events: Events | None = None, **options: Any) -> TransferReport:
        """Bring this store up to date with a shared one; `options` are the fields of `PullOptions`."""
        from kvtool.core.remote.pull import pull_from

        wanted = self._wanted(PullOptions, options)
        with self._beside() as folder:
            return pull_from(url, folder, wanted, self._events(events))

    @alone(ExportOptions)
    def export(self, pack: str | Path, *, events: Events | None = None, **options: Any) -> ExportReport:
        """Write the store, or a part of it, into one file; `options` are the fields of `ExportOptions`."""
        from kvtool.core.remote.export import export

        wanted = self._wanted(ExportOptions, options)
        with self._beside() as folder:
            return export(folder, Path(pack), wanted, self._events(events))

    @alone(ImportOptions)
    def take(self, pack: str | Path, *, events: Events | None = None, **options: Any) -> TransferReport:
        """Import a pack, or a store's folder, as `store import` does; `options` are the fields of `ImportOptions`."""
        from kvtool.core.remote.import_ import take

        wanted = self._wanted(ImportOptions, options)
        with self._beside() as folder:
            return take(folder, Path(pack), wanted, events=self._events(events))

    @alone(ForgetOptions)
    def rm(self, *targets: str | Path, **options: Any) -> Removal:
        """Remove documents, by path, folder, glob or chunk's id; `options` are the fields of `ForgetOptions`."""
        from kvtool.core.upkeep.forget import forget

        wanted = self._wanted(ForgetOptions, options)
        names = tuple(map(str, targets))
        with self._beside() as folder:
            return forget(folder, names, dry_run=wanted.dry_run, yes=wanted.yes, lock_wait=wanted.lock_wait)

    @alone(PruneOptions)
    def prune(self, **options: Any) -> PruneReport:
        """Make the store smaller; `options` are the fields of `PruneOptions`."""
        from kvtool.core.upkeep.prune import prune

        wanted = self._wanted(PruneOptions, options)
        with self._beside() as folder:
            return prune(folder, wanted)

    @alone(LockOptions)
    def compact(self, **options: Any) -> Compacted:
        """Give free pages, and what nothing refers to, back to the disk."""
        from kvtool.core.upkeep.prune import compact

        wanted = self._wanted(LockOptions, options)
        with self._beside() as folder:
            return compact(folder, lock_wait=wanted.lock_wait)

    @alone(LockOptions)
    def budget(self, *size: int | str | None) -> Budget:
        """Return the size budget that the store keeps to; a size (bytes, or `20GB`) sets it, None or "none" lifts
        it."""
        from kvtool.core.upkeep.budget import keep_budget, read_budget

        with self._beside() as folder:
            if size:
                wanted = None if size[0] == "none" else size[0]
                most = options_of(IngestOptions)["max_size"].accept(wanted, "size")
                return keep_budget(folder, most, lock_wait=self._wanted(LockOptions, {}).lock_wait)
            with Store.open(folder) as store:
                return read_budget(store)
