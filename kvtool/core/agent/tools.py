"""Tools of an agent, as plain functions of a store.

The library makes the schema that clients see from the result classes, and the descriptions from the docstrings.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import nsmallest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.api import Cache
from kvtool.core.common.types import Warn
from kvtool.core.corpus.ignoring import Roots
from kvtool.core.errors import StoreFormatError, UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import options_of
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.staleness import changes
from kvtool.core.remote.mirror import open_store
from kvtool.core.retrieval.finder import Finder
from kvtool.core.retrieval.passages import Hit, Passage, passages_in, place_and_text
from kvtool.core.session.identity import known_result, store_identity
from kvtool.core.upkeep.inventory import sizes_of

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store

MOST_CHUNKS = 50  # that one call may ask for
# The result classes have no slots, which would look like defaults in the schema.


@dataclass(frozen=True)
class Excerpt:
    """A chunk of a document.

    Attributes
    ----------
    id : of the chunk, in hex; `read` and `answer` take it.
    place : `file:line` where the chunk begins.
    score : relevance; 1 for the best match by words only; None without a search.
    staleness : `changed` or `deleted` if the file has changed since its ingest, so the text may be out of date.
    origin : the pack, store or signer that the document came from; empty for one that was ingested here.
    """

    id: str
    place: str
    source: str
    text: str
    score: float | None = None
    staleness: str = ""
    origin: str = ""


@dataclass(frozen=True)
class Found:
    """The chunks that match a question, best first."""

    chunks: list[Excerpt]


@dataclass(frozen=True)
class Neighbourhood:
    """A chunk with its neighbours, in the order of their document; `first` and `total` count its chunks from 1."""

    source: str
    first: int
    total: int
    chunks: list[Excerpt]


@dataclass(frozen=True)
class Answer:
    """An answer of the store's own model, and the chunks that it is based on.

    Attributes
    ----------
    finish : how the answer ended: stop, length (cut off at the longest allowed) or repeat (it began to repeat itself).
    sources : the chunks of the prompt, best first.
    fusion : the mode by which stored keys and values were fused.
    tokens : of the prompt `prompt = reused + recomputed + fresh`, and `generated`.
    ttft_ms : milliseconds from the question to the first token.
    """

    answer: str
    finish: str
    sources: list[Excerpt]
    fusion: str
    tokens: dict[str, int]
    ttft_ms: float


@dataclass(frozen=True)
class Status:
    """Contents of the store, and its model; `gate`: whether its fused answers may be trusted, None: not tested."""

    store: str
    documents: int
    chunks: int
    tokens: int
    bytes: int
    levels: list[str]
    model: str
    lead_in: str
    gate: bool | None
    roots: list[str]


@dataclass(frozen=True)
class Ingested:
    """Counts what an ingest did with documents; `failed` files are named in `problems`."""

    added: int
    changed: int
    unchanged: int
    failed: int
    chunks_computed: int
    problems: list[str]


class Tools:
    """Tools that read, ask and fill a store. Threads may share them; answers are computed one after another."""

    def __init__(
        self, place: Path | str, model: ModelOptions, options: QueryOptions, roots: Sequence[Path], warn: Warn
    ) -> None:
        self.roots = tuple(Path(os.path.realpath(root)) for root in roots)
        self._place, self._options, self._warn = place, options, warn
        self._cache = Cache(place, model, warn)
        self._lock = threading.RLock()
        self._open: tuple[Store, Finder] | None = None

    def close(self) -> None:
        self._close_store()
        self._cache.close()

    def search(self, question: str, top_k: int | None = None, source: list[str] | None = None) -> Found:
        """Find chunks of the documents that match a question, best first, with their text. Needs no model.

        Parameters
        ----------
        question : what to look for, in the words of the documents where they are known.
        top_k : number of chunks; by default the server's.
        source : globs; only documents whose path, or the end of it, matches one of them.
        """
        count = self._count("top_k", top_k, self._options.top_k, 1)
        options = replace(self._options, source=tuple(source or self._options.source))
        with self._reading() as (store, finder):
            hits = finder.find(question, count, options.retrieval).hits
            since = changes(store, [hit.passage.source for hit in hits])
            return Found([_excerpt(store, hit.passage, since, hit) for hit in hits])

    def read(self, chunk: str, before: int = 1, after: int = 1) -> Neighbourhood:
        """Read a chunk with its neighbours in the document.

        Parameters
        ----------
        chunk : its id, as search and answer give it, or the beginning of it.
        before : number of chunks before it.
        after : number of chunks after it.
        """
        before, after = self._count("before", before, 1), self._count("after", after, 1)
        with self._reading() as (store, finder):
            passage, *_ = finder.places.of_chunks(chunk)
            document = store.document(passage.source)
            passages = passages_in(document) if document is not None else [passage]
            first = max(0, passage.index - before)
            chosen = passages[first : passage.index + after + 1]
            since = changes(store, [passage.source])
            excerpts = [_excerpt(store, each, since) for each in chosen]
            return Neighbourhood(passage.source, first + 1, len(passages), excerpts)

    def answer(
        self,
        question: str,
        top_k: int | None = None,
        source: list[str] | None = None,
        chunks: list[str] | None = None,
        documents: list[str] | None = None,
        stream: Callable[[str], None] | None = None,
    ) -> Answer:
        """Let the store's own local model answer a question from the documents; takes seconds, the first one longer.

        Parameters
        ----------
        question : what to ask, in a whole sentence.
        top_k : number of chunks to answer from; by default the server's.
        source : globs; only documents whose path, or the end of it, matches one of them.
        chunks : ids of chunks to answer from, instead of a search.
        documents : paths of documents to answer from, instead of a search.
        """
        names = [name for name in options_of(QueryOptions) if name not in options_of(ModelOptions)]
        options: dict[str, Any] = {name: getattr(self._options, name) for name in names}
        options["top_k"] = self._count("top_k", top_k, self._options.top_k, 1)
        options["source"] = tuple(source or self._options.source)
        if stream is not None:
            stream("")  # raises where the call was cancelled while it waited
        reply = self._cache.query(question, chunks=chunks or (), documents=documents or (), stream=stream, **options)
        return Answer(
            answer=reply.answer,
            finish=reply.finish,
            sources=[
                Excerpt(each.id, each.place, each.source, each.text, each.score, each.staleness, each.origin)
                for each in reply.sources
            ],
            fusion=reply.fusion,
            tokens=reply.tokens,
            ttft_ms=round(reply.timing_ms["ttft"], 1),
        )

    def status(self) -> Status:
        """Report what the store contains, its model, and the folders that may be ingested."""
        with self._reading() as (store, _):
            stats, identity = sizes_of(store), store_identity(store)
            verdict = known_result(store, identity.fingerprint)
            return Status(
                store=str(self._place),
                **{name: stats[name] for name in ("documents", "chunks", "tokens", "bytes")},
                levels=sorted(stats["levels"]),
                model=identity.model,
                lead_in=identity.lead_in.mode,
                gate=None if verdict is None else verdict.passed,
                roots=[str(root) for root in self.roots],
            )

    def ingest(self, paths: list[str]) -> Ingested:
        """Read files and folders into the store, so that they are found from then on; only what changed is computed.

        Parameters
        ----------
        paths : absolute paths below one of the roots that status lists.
        """
        roots = Roots(self.roots)
        report = self._cache.ingest([self._below_a_root(path, roots) for path in paths], roots=self.roots)
        counts = report.documents
        return Ingested(
            added=counts.added,
            changed=counts.changed,
            unchanged=counts.unchanged,
            failed=counts.failed,
            chunks_computed=report.chunks.computed,
            problems=[f"{each['path']}: {each['error']}" for each in (*report.failures, *report.known_failures)]
            + report.warnings,
        )

    # ---- resources ----

    def sources(self, after: str, count: int) -> list[str]:
        """List at most `count` names of documents in order, from the first one after a name."""
        with self._reading() as (store, _):
            return nsmallest(count, (source for source in store.sources() if source > after))

    def text(self, source: str) -> str:
        with self._reading() as (store, _):
            document = store.document(source)
            if document is None:
                raise UsageError(f"document {source!r} is not in the store", "the resources list the documents")
            return document.text

    # ---- the store ----

    @contextmanager
    def _reading(self) -> Iterator[tuple[Store, Finder]]:
        with self._lock:
            if self._open is not None:
                try:
                    self._open[0].follow()
                except StoreFormatError:  # replaced by another store
                    self._close_store()
            if self._open is None:
                store = open_store(self._place, warn=self._warn)
                self._open = store, Finder(store, self._warn)
            with self._open[0].view():
                yield self._open

    def _close_store(self) -> None:
        with self._lock:
            if self._open is not None:
                self._open[0].close()
                self._open = None

    def _below_a_root(self, path: str, roots: Roots) -> Path:
        try:
            real = Path(os.path.realpath(path))
        except ValueError as error:
            raise UsageError(f"not a path: {path!r}", "a path cannot contain NUL") from error
        if not os.path.isabs(path) or not roots.show(real):
            raise UsageError(
                f"{path} may not be ingested",
                f"allowed is what is below {', '.join(map(str, self.roots))}, but nothing hidden, no secret and "
                "nothing that an ignore file names",
            )
        return real

    @staticmethod
    def _count(name: str, given: int | None, default: int, lowest: int = 0) -> int:
        number = default if given is None else given
        if not lowest <= number <= MOST_CHUNKS:
            raise UsageError(f"{name}: {number} is not between {lowest} and {MOST_CHUNKS}")
        return number


def _excerpt(store: Store, passage: Passage, since: Mapping[str, str], hit: Hit | None = None) -> Excerpt:
    place, text = place_and_text(store, passage)
    score = None if hit is None else round(hit.score, 4)
    source = passage.source
    origin = store.origin_of(source)
    return Excerpt(passage.chunk_id.hex(), place.cite(source), source, text, score, since[source], origin)
