"""Operations of a server, independent of HTTP: answer, ingest, list, forget, embed."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvtool.core.cache import tables
from kvtool.core.cache.store import Store
from kvtool.core.common.types import Events, Warn
from kvtool.core.errors import ModelError, NothingFoundError, UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.model.options import ModelOptions
from kvtool.serve.conversations import ConversationCache
from kvtool.serve.job import Ask, EndedError, Job, Tell
from kvtool.serve.loaded_model import LoadedModel
from kvtool.serve.options import ServeOptions
from kvtool.serve.scheduler import Scheduler

if TYPE_CHECKING:
    from kvtool.core.ingest.report import IngestReport
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.retrieval.embed import Embeds
    from kvtool.core.retrieval.passages import RetrievalOptions
    from kvtool.core.retrieval.segment import Array
    from kvtool.core.session.session import Session


T = TypeVar("T")


class IngestState:
    """State of the running ingest.

    Attributes
    ----------
    progress : None while nothing is ingested.
    ending : whether it shall stop. What is stored stays, and the next ingest goes on.
    """

    def __init__(self) -> None:
        self.progress: dict[str, Any] | None = None
        self.ending = False

    @contextmanager
    def noted(self) -> Iterator[Events]:
        kept = 0

        def check() -> None:
            if self.ending:
                went = f"{kept} {'file was' if kept == 1 else 'files were'} kept"
                raise EndedError(f"the server ends: the ingest has stopped, {went}", "send it again to continue")

        def step(label: str, total: int, unit: str) -> None:
            self.progress = {"step": label, "done": 0, "total": total, "unit": unit}

        def advance(count: float) -> None:
            check()
            progress = self.progress or {}
            self.progress = {**progress, "done": progress.get("done", 0) + count}

        def left(path: str, why: str) -> None:
            check()

        def took(path: str, what: str, chunks: int) -> None:
            nonlocal kept
            kept += what != "removed"
            check()

        try:
            yield Events(step=step, advance=advance, failed=left, skipped=left, took=took)
        finally:
            self.progress = None


class Engine:
    """A store and a model that many clients, and threads, share. `owners`: whose learned passages stay; None: all."""

    def __init__(
        self,
        place: Path | str,
        model: ModelOptions,
        warn: Warn,
        options: ServeOptions | None = None,
        owners: Collection[str] | None = None,
    ) -> None:
        options = options or ServeOptions()
        self.place, self.model = place, model
        self._warn = warn

        def learn(session: Session) -> Session:
            return session.with_learning(options.learn_budget, owners) if options.learn else session

        self._loaded = LoadedModel(place, model, options.memory_cache, self._warned, learn)
        self.conversations = ConversationCache(options.keep_conversations)
        self.scheduler = Scheduler(self._loaded, warn, options, self.conversations)
        self.ingesting = IngestState()
        self._embedding = threading.RLock()  # held while texts are embedded
        self._embedder: Embeds | None = None

    def _warned(self, text: str, hint: str) -> None:
        if not self.scheduler.warned(text, hint):
            self._warn(text, hint)

    # ---- start and shutdown ----

    def start(self) -> None:
        from kvtool.core.model.decode.native import prepare_compiled_model

        if self._loaded.exists():
            session = self._loaded.session()
            with self._loaded.turn():
                if session.store.ids_here():  # else no answer can depend on it
                    session.check_gate()
            prepare_compiled_model(session.decoder)
        self.scheduler.start()

    def refuse(self) -> None:
        self.ingesting.ending = True
        self.scheduler.refuse()

    def halt(self) -> None:
        self.ingesting.ending = True

    def close(self) -> None:
        self.halt()
        self.scheduler.close()
        self._loaded.close()

    # ---- questions ----

    def submit(self, ask: Ask, tell: Tell) -> Job:
        return self.scheduler.submit(ask, tell)

    def count(self, ask: Ask) -> int:
        return self._loaded.count(ask)

    # ---- documents ----

    @property
    def folder(self) -> Path:
        if isinstance(self.place, str):
            raise UsageError("a shared store can only be asked", "serve a local one, and push it")
        return self.place

    def ingest(self, options: IngestOptions) -> IngestReport:
        from kvtool.core.ingest.job import KeptModel, ingest

        with self.ingesting.noted() as events:
            kept = KeptModel(self._loaded.decoder)
            report = ingest(self.folder, options, events, kept)
            if self._loaded.decoder is None:
                self._loaded.spare = kept.decoder
            return report

    def forget(
        self, source: str, much: bool = False, before: Callable[[Store, Sequence[str]], None] | None = None
    ) -> tuple[str, ...]:
        """Forget the documents that a path, a glob or a chunk id selects. `much`: also more than half of several."""
        from kvtool.core.upkeep.forget import forget

        return forget(self.folder, [source], yes=much, lock_wait=10.0, before=before).sources

    def _read(self, work: Callable[[Store], T], otherwise: T) -> T:
        """Read the store; `otherwise` for one that is shared, or does not exist."""
        if isinstance(self.place, str) or not self._loaded.exists():
            return otherwise
        with Store.open(self.place) as store:
            return work(store)

    def has_file(self, path: Path, data: bytes | None = None) -> bool:
        entry = self._read(lambda store: store.file(str(path)), None)
        return entry is not None and (data is None or entry.digest == hashlib.sha256(data).hexdigest())

    def has_documents(self, count: int) -> bool:
        """Return True if the store has at least so many documents; it reads no more of their names."""

        def has(store: Store) -> bool:
            with store.snapshot() as snapshot:
                return sum(1 for _ in islice(snapshot.keys(tables.DOCUMENTS), count)) == count

        return self._read(has, False)

    def documents(self, source: str | None = None) -> list[dict[str, Any]]:
        """List documents as `kvtool store ls --json` does."""
        from kvtool.core.upkeep.documents import list_documents, listed

        with Store.open(self.folder) as store:
            documents: list[dict[str, Any]] = listed(list_documents(store, [source] if source else ()))["documents"]
            return documents

    def search(self, question: str, options: RetrievalOptions) -> dict[str, Any]:
        """Return what `kvtool search --json` does."""
        from kvtool.core.query.retrieve import SearchReport, search
        from kvtool.core.retrieval.finder import Finder

        with self._embedding, Store.open(self.folder) as store:
            try:
                return search(store, Finder(store, self._warn, self._embedder_for), question, options).to_json()
            except NothingFoundError:
                return SearchReport(question, []).to_json()

    # ---- state ----

    @property
    def model_name(self) -> str:
        """Return the model's name for clients; "" if the store does not exist."""
        from kvtool.core.checkpoint.files import looks_local
        from kvtool.core.session.identity import store_identity

        if isinstance(self.place, str):
            return self.model.model or "kvtool"
        ref = self._read(lambda store: store_identity(store).model, "")
        return Path(ref).name if looks_local(ref) else ref

    @property
    def decoder(self) -> Decoder | None:
        return self._loaded.decoder or self._loaded.spare

    def status(self) -> dict[str, Any]:
        return {
            "status": "ok" if self._loaded.exists() else "empty",
            "model": self.model_name,
            "queue": self.scheduler.waiting,
            "running": self.scheduler.running,
            "conversations": len(self.conversations),
        }

    # ---- embeddings ----

    @property
    def embedder_name(self) -> str | None:
        """Return the embedding model of the store's vectors."""
        from kvtool.core.retrieval.embed import remembered

        return self._read(lambda store: remembered(store, self._warn), None)

    def embed(self, texts: Sequence[str]) -> tuple[Array, int]:
        """Return unit vectors of texts, float32 `[texts, dimensions]`, and their token count. Raises ModelError."""
        ref = self.embedder_name
        if ref is None:
            raise ModelError("the store has no embedding model", "an ingest that names one (`embedder`) makes it")
        with self._embedding:
            embedder = self._embedder_for(ref, self.model.offline)
            return embedder.encode(texts), embedder.count(texts)

    def _embedder_for(self, ref: str, offline: bool) -> Embeds:
        from kvtool.core.retrieval.embed import embedder_of

        if self._embedder is None or self._embedder.ref != ref:
            self._embedder = embedder_of(ref, offline)
        return self._embedder
