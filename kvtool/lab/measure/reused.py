"""Caches of one prompt for comparison: reused, fused, in full; and the question's queries on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvtool.core.errors import UsageError
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.source import KVSource
from kvtool.core.kernels.attention.eager import attention_weights
from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.kernels.linear.onednn import return_freed_memory
from kvtool.core.model.attention import QueryRows, Watch
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache


@dataclass(frozen=True, slots=True)
class Chosen(Selector):
    """Recomputes the rows that it was given, bool `[plan.length]`."""

    name: ClassVar[str] = "chosen"
    reads_all: ClassVar[bool] = True
    rows_chosen: torch.Tensor

    def rows(self, plan: Plan, attention: torch.Tensor | None = None) -> torch.Tensor:
        return self.rows_chosen


@dataclass(frozen=True, slots=True)
class ReusedPrompt:
    """A prompt whose records are all there, some of them not what full prefill gives.

    Attributes
    ----------
    hits : positions, ascending, of rows that are reused and not exact: int64 `[hits]`.
    """

    decoder: Decoder
    plan: Plan
    source: KVSource
    hits: torch.Tensor

    @classmethod
    def of(cls, decoder: Decoder, plan: Plan, source: KVSource) -> ReusedPrompt:
        """Look at a laid out prompt. Raises UsageError where nothing of it is reused, or rows of it are not stored."""
        if any(segment.source.kept is not None for segment in plan.segments):
            raise UsageError(
                "some rows of this prompt are not stored, so that they cannot be compared", "name a level of all rows"
            )
        hits = plan.hit_rows().nonzero()[:, 0]
        if not len(hits):
            raise UsageError(
                "nothing of this prompt is reused from another place", "take more chunks (--top-k, --documents)"
            )
        return_freed_memory()  # several caches of a whole prompt come and go
        return cls(decoder, plan, source, hits)

    def full(self) -> PromptCache:
        """Prefill the prompt in full."""
        return self.decoder.prefill(self.plan.ids)[1]

    def fused(self, selector: Selector) -> Fused:
        """Fuse the prompt in a mode."""
        return fuse(self.decoder, self.plan, selector, self.source)

    def recomputing(self, rows: torch.Tensor) -> PromptCache:
        """Fuse the prompt with these rows (bool `[length]`) recomputed."""
        return self.fused(Chosen(rows)).cache

    def watch_question(self, cache: PromptCache, watch: Watch) -> None:
        """Show every layer's queries and keys of the question's rows."""
        question = self.plan.segments[-1]
        watch_rows(self.decoder, question.ids, question.start, cache, watch)

    def queries(self, cache: PromptCache) -> Queries:
        """Compute what the question asks a cache with."""
        question = self.plan.segments[-1]
        return queries_of(self.decoder, question.ids, question.start, cache)


@dataclass(frozen=True, slots=True)
class Queries:
    """Rotated queries of some rows.

    Attributes
    ----------
    layers : `[heads, rows, head_dim]` and the scoring of each layer.
    sources : the layer whose keys each attends to.
    """

    rows: QueryRows
    layers: list[tuple[torch.Tensor, AttentionParams]]
    sources: list[int]

    def attention(self, cache: PromptCache) -> Iterator[torch.Tensor]:
        """Compute the weights of each layer over a cache: `[heads, rows, keys]`."""
        for (query, scoring), source in zip(self.layers, self.sources, strict=True):
            keys = cache.buffers[source].view()[0][0]
            yield attention_weights(query, keys, self.rows.seen(scoring.window), scoring)


def queries_of(decoder: Decoder, ids: Sequence[int], start: int, cache: PromptCache) -> Queries:
    """Compute what some rows ask a cache with."""
    layers: list[tuple[torch.Tensor, AttentionParams]] = []
    watch_rows(
        decoder, ids, start, cache, lambda layer, query, key, scoring: layers.append((query[0].clone(), scoring))
    )
    sources = [layer if kind.source is None else kind.source for layer, kind in enumerate(decoder.kinds)]
    return Queries(QueryRows.of(torch.arange(start, start + len(ids)), decoder.device), layers, sources)


def watch_rows(decoder: Decoder, ids: Sequence[int], start: int, cache: PromptCache, watch: Watch) -> None:
    """Compute the rows of a prompt from `start` on, into their places in the cache, and show each layer's queries and
    keys."""
    rows = QueryRows.of(torch.arange(start, start + len(ids)), decoder.device)
    decoder.fill_cache(ids, replace(rows, watch=watch), cache)


def cache_of(decoder: Decoder, length: int) -> PromptCache:
    """Make a cache for a prompt of this length, all of whose rows are still to be computed."""
    cache = decoder.new_cache(length)
    cache.set_length(length)
    return cache
