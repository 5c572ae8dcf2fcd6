"""One question's caches, and how far its answer is from full prefill's over any mixture of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvtool.core.evaluate.reference import Reference, kl_of_logits
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.full import Full
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.query.layout import Asked
from kvtool.core.session.session import Session

BOTH = (0, 1)  # sides of a cache: keys, values


@dataclass(frozen=True, slots=True)
class Case:
    """A laid out prompt, its full prefill, and the answer that full prefill gives.

    Attributes
    ----------
    script : tokens of the answer, the end token among them.
    logits : before each of them, over the full cache, float32 `[script, vocabulary]`.
    rooms : one cache of the prompt and the script, in which mixtures are made.
    """

    session: Session
    asked: Asked
    full: PromptCache
    script: tuple[int, ...]
    logits: torch.Tensor
    room: PromptCache

    @classmethod
    def of(cls, session: Session, asked: Asked, max_tokens: int) -> Case:
        """Answer in full."""
        decoder, plan = session.decoder, asked.plan
        full = fuse(decoder, plan, Full(), session.source, reserve=max_tokens + 1)
        script = tuple(Reference.answered(decoder, full, max_tokens).answer.script)
        room = decoder.new_cache(plan.length + len(script))
        bare = cls(session, asked, full.cache, script, torch.empty(0), room)
        return cls(session, asked, full.cache, script, bare.forced(bare.mixed(full.cache)), room)

    @property
    def decoder(self) -> Decoder:
        return self.session.decoder

    @property
    def plan(self) -> Plan:
        return self.asked.plan

    @property
    def context(self) -> int:
        """How many rows stand before the question."""
        return self.plan.segments[-1].start

    def fused(self, selector: Selector) -> Fused:
        """Fuse the prompt in a mode."""
        return fuse(self.decoder, self.plan, selector, self.session.source, reserve=len(self.script))

    def mixed(
        self,
        base: PromptCache,
        rows: torch.Tensor | None = None,
        layers: Iterable[int] | None = None,
        sides: Iterable[int] = BOTH,
    ) -> PromptCache:
        """Copy a cache's rows up to the answer, and put full prefill's in place of some before the question.

        Parameters
        ----------
        rows : bool `[length]`; None: no row, or every one where `layers` are named.
        layers : None: all.
        """
        for target, source in zip(self.room.buffers, base.buffers, strict=True):
            target.keys[:, :, : self.plan.length] = source.keys[:, :, : self.plan.length]
            target.values[:, :, : self.plan.length] = source.values[:, :, : self.plan.length]
        if rows is None and layers is None and tuple(sides) == BOTH:
            return self.room
        places = torch.arange(self.context) if rows is None else rows[: self.context].nonzero()[:, 0]
        for layer in range(len(self.decoder.layers)) if layers is None else layers:
            for side in sides:
                exact = sides_of(self.full, layer)[side][:, :, places]
                sides_of(self.room, layer)[side].index_copy_(2, places, exact)
        return self.room

    def forced(self, cache: PromptCache, again: torch.Tensor | None = None, asks: bool = True) -> torch.Tensor:
        """Lead a cache through the script: logits before each of its tokens, float32 `[script, vocabulary]`.

        Parameters
        ----------
        again : rows of the context that are computed anew in the same pass, bool `[length]`.
        asks : whether the question's rows are computed over the cache; else those in it are taken, and the logits of
            the first token are left out.
        """
        ids, length = [*self.plan.ids, *self.script[:-1]], self.plan.length + len(self.script) - 1
        first = self.context if asks else self.plan.length
        rows = torch.arange(first, length)
        if again is not None:
            rows = torch.cat([again[: self.context].nonzero()[:, 0], rows])
        if not len(rows):
            return self.logits[:0]
        cache.set_length(length)
        places = QueryRows.of(rows, self.decoder.device)
        return self.decoder.compute([ids[row] for row in places.order], places, cache, keep=length - self._before(asks))

    def _before(self, asks: bool) -> int:
        return self.plan.length - 1 if asks else self.plan.length

    def kl(self, cache: PromptCache, again: torch.Tensor | None = None) -> list[float]:
        """KL divergence in nats from full prefill before each token of the script; the question is asked anew."""
        return kl_of_logits(self.logits, self.forced(cache, again)).tolist()

    def kl_without_asking(self, cache: PromptCache) -> list[float]:
        """The same from the second token on, over the question's rows as they stand."""
        return kl_of_logits(self.logits[1:], self.forced(cache, asks=False)).tolist()


def sides_of(cache: PromptCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and values, `[1, kv_heads, capacity, head_dim]`."""
    return cache.buffers[layer].keys, cache.buffers[layer].values
