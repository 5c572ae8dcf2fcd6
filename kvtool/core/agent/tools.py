"""The tools of an agent, as plain functions of a store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtool.core.agent.results import Answer, Excerpt, Found, Ingested, Status, Stretch
from kvtool.core.agent.shelf import Shelf
from kvtool.core.api import Cache
from kvtool.core.common.types import Warn
from kvtool.core.corpus.ignoring import Roots
from kvtool.core.errors import UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import options_of
from kvtool.core.query.options import QueryOptions

MOST_CHUNKS = 50  # that one call may ask for


class Tools:
    """Reads, asks and fills a store. Threads may share it; answers are given one after another, reading goes on beside.

    Parameters
    ----------
    place : the store's folder, or the URL of a shared one.
    options : how questions are answered where a call does not say otherwise.
    roots : what may be ingested lies below one of these folders; none: nothing may.
    """

    def __init__(
        self, place: Path | str, model: ModelOptions, options: QueryOptions, roots: Sequence[Path], warn: Warn
    ) -> None:
        self.roots = tuple(Path(os.path.realpath(root)) for root in roots)
        self.shelf = Shelf(place, options, warn)
        self._options = options
        self._cache = Cache(place, model, warn)

    def close(self) -> None:
        """Let go of the model and the store."""
        self.shelf.close()
        self._cache.close()

    def search(self, question: str, top_k: int | None = None, source: list[str] | None = None) -> Found:
        """Find chunks of the documents that match a question, best first, with their text. Needs no model.

        Parameters
        ----------
        question : what to look for, in the words of the documents where they are known.
        top_k : how many chunks; the server's default where it is left out.
        source : globs; only documents whose path, or the end of it, matches one of them.
        """
        return self.shelf.search(question, self._count("top_k", top_k, self._options.top_k, 1), source or [])

    def read(self, chunk: str, before: int = 1, after: int = 1) -> Stretch:
        """Read a chunk with its neighbours in the document.

        Parameters
        ----------
        chunk : its id, as search and answer give it, or the beginning of it.
        before : how many chunks before it.
        after : how many chunks behind it.
        """
        return self.shelf.read(chunk, self._count("before", before, 1), self._count("after", after, 1))

    def answer(
        self,
        question: str,
        top_k: int | None = None,
        source: list[str] | None = None,
        chunks: list[str] | None = None,
        documents: list[str] | None = None,
    ) -> Answer:
        """Let the store's own local model answer a question from the documents; takes seconds, the first one longer.

        Parameters
        ----------
        question : what to ask, in a whole sentence.
        top_k : from how many chunks; the server's default where it is left out.
        source : globs; only documents whose path, or the end of it, matches one of them.
        chunks : ids of chunks to answer from, instead of a search.
        documents : paths of documents to answer from, instead of a search.
        """
        own = options_of(ModelOptions)
        options: dict[str, Any] = {name: getattr(self._options, name) for name in options_of(QueryOptions)}
        options = {name: value for name, value in options.items() if name not in own}
        options["top_k"] = self._count("top_k", top_k, self._options.top_k, 1)
        options["source"] = tuple(source or self._options.source)
        reply = self._cache.query(question, chunks=chunks or (), documents=documents or (), **options)
        return Answer(
            answer=reply.answer,
            finish=reply.finish,
            sources=[
                Excerpt(each.id, each.place, each.source, each.text, each.score, each.since_ingest, each.origin)
                for each in reply.sources
            ],
            fusion=reply.fusion,
            tokens=reply.tokens,
            ttft_ms=round(reply.timing_ms["ttft"], 1),
        )

    def status(self) -> Status:
        """Tell what the store holds, for which model, and what may be ingested into it."""
        return self.shelf.status(self.roots)

    def ingest(self, paths: list[str]) -> Ingested:
        """Read files and folders into the store, so that they are found from then on; only what changed is computed.

        Parameters
        ----------
        paths : absolute paths below one of the roots that status tells.
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
            problems=[f"{each['path']}: {each['error']}" for each in (*report.failures, *report.still_failing)]
            + report.warnings,
        )

    def _below_a_root(self, path: str, roots: Roots) -> Path:
        """The real path of what is to be read. Raises UsageError where it is not below a root."""
        try:
            real = Path(os.path.realpath(path))
        except ValueError as error:
            raise UsageError(f"not a path: {path!r}", "a path cannot contain NUL") from error
        if not os.path.isabs(path) or not roots.show(real):
            raise UsageError(
                f"{path} may not be ingested",
                f"allowed is what lies below {', '.join(map(str, self.roots))}, but nothing hidden, no secret and "
                "nothing that an ignore file names",
            )
        return real

    @staticmethod
    def _count(name: str, given: int | None, default: int, lowest: int = 0) -> int:
        number = default if given is None else given
        if not lowest <= number <= MOST_CHUNKS:
            raise UsageError(f"{name}: {number} is not between {lowest} and {MOST_CHUNKS}", "ask for fewer")
        return number
