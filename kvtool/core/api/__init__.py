"""The Python API: the commands' operations, names and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from kvtool.core.api.held import alone
from kvtool.core.api.sharing import Sharing
from kvtool.core.api.upkeep import Upkeep
from kvtool.core.cache.options import default_store
from kvtool.core.common.types import Events, Warn
from kvtool.core.common.urls import is_url
from kvtool.core.compress.options import CompressOptions
from kvtool.core.errors import UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import ChunkChoice, QueryOptions

if TYPE_CHECKING:
    from kvtool.core.compress.report import CompressReport
    from kvtool.core.ingest.report import IngestReport
    from kvtool.core.options import arguments
    from kvtool.core.query.conversation import Conversation
    from kvtool.core.query.reply import Reply

__all__ = ["Cache", "open"]


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


class Cache(Sharing, Upkeep):
    """A store of chunk KV caches. Use `kvtool.open`.

    Threads may share it: what they ask for is done one after the other. The model is loaded when it is needed, and
    stays until the cache is closed.
    """

    @alone(IngestOptions)
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

    @alone(QueryOptions)
    def query(
        self,
        question: str,
        *,
        chunks: str | Iterable[str] = (),
        documents: str | Path | Iterable[str | Path] = (),
        stream: Callable[[str], None] | None = None,
        **options: Unpack[arguments.QueryArguments],
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
    def conversation(self, **options: Unpack[arguments.QueryArguments]) -> Conversation:
        """Begin a conversation, in which each question sees the turns before it and goes on from the cache that they
        left; `options` are the fields of `QueryOptions`. Several may go on beside each other, each with a cache of its
        own. It is not audited."""
        from kvtool.core.query.conversation import Conversation

        return Conversation(self._lent, self._wanted(QueryOptions, options))

    @alone(CompressOptions)
    def compress(
        self, *levels: str, events: Events | None = None, **options: Unpack[arguments.CompressArguments]
    ) -> CompressReport:
        """Encode what is stored at these levels; `options` are the fields of `CompressOptions`."""
        from kvtool.core.compress.job import compress

        wanted = self._wanted(CompressOptions, options, levels=levels)
        with self._beside() as folder:
            return compress(folder, wanted, self._events(events), self._decoder)
