"""Tools of an agent, as plain functions of a store.

The library makes the schema that clients see from the result classes, and the descriptions from the docstrings.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from kvtool.core.api import Cache
from kvtool.core.api.shared import StoreReader
from kvtool.core.common.types import Warn
from kvtool.core.corpus.ignoring import Roots
from kvtool.core.errors import UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import ReplyChunk
from kvtool.core.query.retrieve import search, with_changes
from kvtool.core.retrieval.passages import Hit, passages_in
from kvtool.core.session.identity import known_result, store_identity
from kvtool.core.upkeep.plan import sizes_of

MOST_CHUNKS = 50  # that one call may ask for
TopK = Annotated[int, Field(ge=1, le=MOST_CHUNKS)]
Neighbours = Annotated[int, Field(ge=0, le=MOST_CHUNKS)]
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
        self._place, self._options = place, options
        self._cache, self._reader = Cache(place, model, warn), StoreReader(place, warn)

    def close(self) -> None:
        self._reader.close()
        self._cache.close()

    def search(self, question: str, top_k: TopK | None = None, source: list[str] | None = None) -> Found:
        """Find chunks of the documents that match a question, best first, with their text. Needs no model.

        Parameters
        ----------
        question : what to look for, in the words of the documents where they are known.
        top_k : number of chunks; by default the server's.
        source : globs; only documents whose path, or the end of it, matches one of them.
        """
        options = replace(self._options, **self._retrieval(top_k, source))
        with self._reader.reading() as (store, finder):
            return Found([_excerpt(chunk) for chunk in search(store, finder, question, options).chunks])

    def read(self, chunk: str, before: Neighbours = 1, after: Neighbours = 1) -> Neighbourhood:
        """Read a chunk with its neighbours in the document.

        Parameters
        ----------
        chunk : its id, as search and answer give it, or the beginning of it.
        before : number of chunks before it.
        after : number of chunks after it.
        """
        with self._reader.reading() as (store, finder):
            passage, *_ = finder.places.of_chunks(chunk)
            document = store.document(passage.source)
            passages = passages_in(document) if document is not None else [passage]
            first = max(0, passage.index - before)
            chosen = passages[first : passage.index + after + 1]
            chunks = with_changes(store, [ReplyChunk.of(store, Hit(each, math.nan)) for each in chosen])
            return Neighbourhood(passage.source, first + 1, len(passages), [_excerpt(chunk) for chunk in chunks])

    def answer(
        self,
        question: str,
        top_k: TopK | None = None,
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
        options = vars(self._options) | self._retrieval(top_k, source)
        if stream is not None:
            stream("")  # raises where the call was cancelled while it waited
        reply = self._cache.query(question, chunks=chunks or (), documents=documents or (), stream=stream, **options)
        return Answer(
            answer=reply.answer,
            finish=reply.finish,
            sources=[_excerpt(chunk) for chunk in reply.sources],
            fusion=reply.fusion,
            tokens=reply.tokens,
            ttft_ms=round(reply.timing_ms["ttft"], 1),
        )

    def status(self) -> Status:
        """Report what the store contains, its model, and the folders that may be ingested."""
        with self._reader.reading() as (store, _):
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
        with self._reader.reading() as (store, _):
            return nsmallest(count, (source for source in store.sources() if source > after))

    def text(self, source: str) -> str:
        with self._reader.reading() as (store, _):
            document = store.document(source)
            if document is None:
                raise UsageError(f"document {source!r} is not in the store", "the resources list the documents")
            return document.text

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

    def _retrieval(self, top_k: int | None, source: list[str] | None) -> dict[str, Any]:
        return {"top_k": top_k or self._options.top_k, "source": tuple(source or self._options.source)}


def _excerpt(chunk: ReplyChunk) -> Excerpt:
    score = None if chunk.score is None else round(chunk.score, 4)
    return Excerpt(chunk.id, chunk.place, chunk.source, chunk.text, score, chunk.staleness, chunk.origin)
