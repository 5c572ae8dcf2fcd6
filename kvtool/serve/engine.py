"""Operations of a server, independent of the protocol: answers, ingests, lists, forgets, embeds. It knows no HTTP."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.cache.store import Store
from kvtool.core.common.types import Warn
from kvtool.core.errors import KvtoolError, ModelError, UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.serve.ending import Ending
from kvtool.serve.job import Answer, Ask, Event, Job, Tell
from kvtool.serve.resident import Resident
from kvtool.serve.scheduler import Scheduler
from kvtool.serve.talks import Talks

if TYPE_CHECKING:
    from kvtool.core.ingest.ingest_report import IngestReport
    from kvtool.core.retrieval.embed import Embeds
    from kvtool.core.retrieval.tables import Array


class Engine:
    """A store and a model that many clients share. Threads may share it.

    Parameters
    ----------
    place : the store's folder, or the URL of a shared one, which can only be asked.
    model : the model as the user names it; needed if the store is still to be made.
    warn : called with warnings for the server's owner that belong to no single question.
    parallel, queue, patience : see `Scheduler`. `memory_cache`: bytes of chunks kept in memory; `keep_conversations`:
        of conversations.
    """

    def __init__(
        self,
        place: Path | str,
        model: ModelOptions,
        warn: Warn,
        *,
        parallel: int = 8,
        queue: int = 64,
        patience: float = 300.0,
        memory_cache: int = 10**9,
        keep_conversations: int = 5 * 10**8,
    ) -> None:
        self.place, self.model = place, model
        self._warn = warn
        self._resident = Resident(place, model, memory_cache, self._warned)
        self.talks = Talks(keep_conversations)
        self.scheduler = Scheduler(self._resident, warn, parallel, queue, patience, self.talks)
        self.ending = Ending()
        self._writing = threading.Lock()
        self._embedding = threading.Lock()
        self._embedder: Embeds | None = None

    def _warned(self, text: str, hint: str) -> None:
        if not self.scheduler.warned(text, hint):
            self._warn(text, hint)

    # ---- beginning and end ----

    def start(self) -> None:
        """Load the model where there is a store, and begin to answer.

        Raises
        ------
        KvtoolError : the store or its model cannot be used.
        """
        from kvtool.core.model.decode.native import prepare_compiled_model

        if self._resident.exists():
            session = self._resident.session()
            with self._resident.turn():
                session.check_gate()
            prepare_compiled_model(session.decoder)
        self.scheduler.start()

    def refuse(self) -> None:
        """Take no more questions; those that were taken are answered, an ingest stops behind its document."""
        self.ending.behind_a_document = True
        self.scheduler.refuse()

    def halt(self) -> None:
        """An ingest stops behind the chunks that are computed just now."""
        self.ending.at_once = True

    def close(self) -> None:
        """End; what was not answered is told so."""
        self.halt()
        self.scheduler.close()
        self._resident.close()

    # ---- questions ----

    def submit(self, ask: Ask, tell: Tell) -> Job:
        """Take a question in, and tell what comes of it, in another thread. Raises BusyError."""
        return self.scheduler.submit(ask, tell)

    def stream(self, ask: Ask) -> Iterator[str | Answer]:
        """Give the pieces of an answer as they come, and at last the whole. Who stops listening stops it.

        Raises
        ------
        KvtoolError : whatever keeps it from being answered; BusyError where too many ask.
        """
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        job = self.submit(ask, events.put)
        try:
            while True:
                event = events.get()
                if isinstance(event, KvtoolError):
                    raise event
                yield event
                if isinstance(event, Answer):
                    return
        finally:
            self.scheduler.leave(job)

    def ask(self, ask: Ask) -> Answer:
        """Answer one question. Raises as `stream` does."""
        *_, answer = self.stream(ask)
        assert isinstance(answer, Answer)
        return answer

    # ---- documents ----

    @property
    def folder(self) -> Path:
        """The store's own folder. Raises UsageError where a URL is served."""
        if isinstance(self.place, str):
            raise UsageError("a shared store can only be asked", "serve a local one, and push it")
        return self.place

    def ingest(self, options: IngestOptions) -> IngestReport:
        """Bring the store up to date with files and folders; questions are answered between two batches of chunks.

        Raises
        ------
        EndedError : the server ends; what was kept so far stands.
        """
        from kvtool.core.ingest.job import KeptModel, ingest

        with self._writing:
            kept = KeptModel(self._resident.decoder)
            report = ingest(self.folder, options, self.ending.events(), kept)
            if self._resident.decoder is None:
                self._resident.spare = kept.decoder
            return report

    def forget(
        self, source: str, much: bool = False, before: Callable[[Store, Sequence[str]], None] | None = None
    ) -> tuple[str, ...]:
        """Forget a document, or all that a path, a glob or a chunk's id means; returns what went.

        Parameters
        ----------
        much : also where that is more than half of several documents.
        before : see `upkeep.forget`.

        Raises
        ------
        UsageError : it means nothing in the store, or is pinned; MuchError: it means more than that.
        """
        from kvtool.core.upkeep.forget import forget

        with self._writing:
            return forget(self.folder, [source], yes=much, lock_wait=10.0, before=before).sources

    def has_file(self, path: Path, data: bytes | None = None) -> bool:
        """Return True if the store has an entry of a file; with `data`, of these bytes of it."""
        if not self._resident.exists():
            return False
        with Store.open(self.folder) as store:
            entry = store.file(str(path))
        return entry is not None and (data is None or entry.digest == hashlib.sha256(data).hexdigest())

    def documents(self, source: str | None = None) -> list[dict[str, Any]]:
        """List the documents with their chunks, as `kvtool store ls --json` does.

        Parameters
        ----------
        source : list only the documents that this selects, as in `forget`.

        Raises
        ------
        UsageError : it selects nothing in the store.
        """
        from kvtool.core.upkeep.listing import documents_of, listed, rows_of
        from kvtool.core.upkeep.selectors import named_documents

        with Store.open(self.folder) as store, store.view():
            meant = None if source is None else set(named_documents(store, [source]))
            rows = list(rows_of(store))
        documents = listed(documents_of(rows), rows)["documents"]
        return [row for row in documents if meant is None or row["source"] in meant]

    # ---- what it is ----

    @property
    def model_name(self) -> str:
        """Return the model's name for clients; "" before there is a store."""
        from kvtool.core.checkpoint.files import looks_local
        from kvtool.core.session.identity import store_identity

        if not self._resident.exists():
            return ""
        if isinstance(self.place, str):
            return self.model.model or "kvtool"
        with Store.open(self.place) as store:
            ref = store_identity(store).model
        return Path(ref).name if looks_local(ref) else ref

    def status(self) -> dict[str, Any]:
        """Return the state: whether it can answer, how many questions wait and are answered."""
        return {
            "status": "ok" if self._resident.exists() else "empty",
            "model": self.model_name,
            "queue": self.scheduler.waiting,
            "running": self.scheduler.running,
            "conversations": len(self.talks),
        }

    def store_stats(self) -> dict[str, Any]:
        """Counts and sizes of the store; nothing where there is none, or it stands elsewhere."""
        if isinstance(self.place, str) or not self._resident.exists():
            return {}
        from kvtool.core.upkeep.inventory import sizes_of

        with Store.open(self.place) as store:
            return sizes_of(store)

    # ---- meaning ----

    @property
    def embedder_name(self) -> str | None:
        """The embedding model that the store's vectors are of; None: there is none."""
        from kvtool.core.retrieval.vectors import remembered

        if isinstance(self.place, str) or not self._resident.exists():
            return None
        with Store.open(self.place) as store:
            return remembered(store, self._warn)

    def embed(self, texts: Sequence[str]) -> tuple[Array, int]:
        """Turn texts into unit vectors, float32 `[texts, dimensions]`; and how many tokens they have.

        Raises
        ------
        ModelError : the store has no embedding model, or it cannot be loaded.
        """
        from kvtool.core.retrieval.embed import embedder_of

        ref = self.embedder_name
        if ref is None:
            raise ModelError("the store has no embedding model", "name one at ingest, with --embedder")
        with self._embedding:
            if self._embedder is None or self._embedder.ref != ref:
                self._embedder = embedder_of(ref, self.model.offline)
            return self._embedder.encode(texts), self._embedder.count(texts)
