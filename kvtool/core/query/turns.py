"""What a conversation keeps of its turns: what was said, and what stands in the prompt cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from kvtool.core.common.types import Ids
from kvtool.core.fusion.engine import copied
from kvtool.core.fusion.plan import Candidate, as_resident
from kvtool.core.model.prompt import turn_header
from kvtool.core.model.states import Marked, StateCache
from kvtool.core.query.answer import Begun
from kvtool.core.query.layout import OTHER_TEXT, Standing

if TYPE_CHECKING:
    from kvtool.core.session.session import Session


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and what came of it.

    Attributes
    ----------
    places : where the passages stand that it was answered from, the best first.
    tokens : as in its reply.
    """

    question: str
    answer: str
    places: tuple[str, ...]
    tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class Stands:
    """What a conversation holds between two questions.

    Attributes
    ----------
    states : of a model that keeps some, as they are behind the rows of `standing`.
    pending : tokens behind those of `standing` that no row was computed for yet: the answer's last one, and what the
        template has between two turns.
    is_whole : nothing was written behind the rows that stand; else a question may have been begun there, and came to
        nothing.
    """

    session: Session
    system: str | None
    standing: Standing
    states: Marked | None
    pending: Ids
    is_whole: bool = True

    @classmethod
    def after(cls, begun: Begun, said: Sequence[int], answer: Ids) -> Stands:
        """What a turn leaves. Of its answer those rows stand that were computed of the same tokens.

        Parameters
        ----------
        said : the tokens whose rows the cache holds behind the prompt, and maybe more. `answer`: those that stand.
        """
        fused, before = begun.outcome.fused, begun.asked.behind
        computed = fused.cache.buffers[0].length - fused.plan.length
        pairs = zip(said[:computed], answer, strict=False)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if alike < computed and isinstance(fused.cache, StateCache):
            alike = 0  # where its states are marked
        if alike < computed:
            fused.cache.set_length(fused.plan.length + alike)
        named = [one for one in fused.plan.chunks if one.source.chunk_id and one.source.reason != OTHER_TEXT]
        chunks = {one.source.chunk_id: len(one.source.ids) for one in named}
        tokens = as_resident(fused.plan.segments, answer[:alike])
        if before is not None:
            chunks = {**before.chunks, **chunks}
        pending = (*answer[alike:], *turn_header(begun.session.tokenizer))
        stands = Standing(tokens, fused.cache, chunks)
        return cls(begun.session, begun.options.system, stands, marked(fused.cache), pending)

    def whole(self) -> Stands:
        """The same without what is behind the rows that stand."""
        if self.is_whole:
            return self
        cache, rows = self.standing.cache, len(self.standing.tokens.rows)
        if isinstance(cache, StateCache):
            assert self.states is not None
            cache.go_back(self.states)
            return replace(self, is_whole=True)
        # A thread that reads a slow record may still write into the old one.
        return replace(
            self, standing=replace(self.standing, cache=copied(self.session.decoder, cache, rows)), is_whole=True
        )

    def settled(self) -> Stands:
        """The same with its cache brought to where the next question begins; it has to be whole."""
        if not self.pending:
            return self
        tokens, cache = self.standing.tokens, self.standing.cache
        self.session.decoder.append(self.pending, cache)
        grown = range(len(tokens.ids), len(tokens.ids) + len(self.pending))
        kept = None if tokens.kept is None else (*tokens.kept, *grown)
        stands = replace(self.standing, tokens=Candidate((*tokens.ids, *self.pending), kept=kept))
        return replace(self, standing=stands, states=marked(cache), pending=())


def marked(cache: object) -> Marked | None:
    """Mark where states can be set back to."""
    return cache.mark() if isinstance(cache, StateCache) else None
