"""Layout of a turn's prompt, kept so that its KV is used only while the store would give the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtool.core.errors import DamagedError, KvtoolError
from kvtool.core.fusion.plan import Candidate, Plan
from kvtool.core.model.prompt import question_tokens
from kvtool.core.model.states import StateCache
from kvtool.core.query.answer import Begun
from kvtool.core.query.layout import Marks, Standing, lay_out, parts_for, plan_marks, record_marks
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request

if TYPE_CHECKING:
    from kvtool.core.model.prompt_cache import PromptCache
    from kvtool.core.session.session import Session


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of one segment's KV: its ids, its chunk, the level, and the very records that were read.

    Attributes
    ----------
    wanted : the segment as it was looked up, without its rank among the passages.
    marks : of the records of each layer; empty where none was read.
    """

    wanted: Candidate
    marks: Marks

    def is_stored(self, session: Session) -> bool:
        """Return whether the store still has these records, or, where none was read, a chunk of these ids."""
        chunk_id, level = self.wanted.chunk_id, self.wanted.level
        if not chunk_id:
            return True
        if self.marks and level is not None:
            return self.marks == record_marks(session, chunk_id, level)
        try:
            info = session.store.chunk_info(chunk_id)
        except DamagedError:
            return False
        return info is not None and info.token_ids == self.wanted.ids


@dataclass(frozen=True, slots=True)
class TurnLayout:
    """The segments that a turn added to its conversation's prompt, and how they were found.

    Attributes
    ----------
    known : chunks that stood before the turn; None: it was the first.
    origins : of its segments, the question last.
    is_as_laid : all of them were read as they were laid out, and none was computed in its place.
    revision : of the store, at which all of it was looked up.
    """

    request: Request
    known: Mapping[bytes, int] | None
    origins: tuple[Origin, ...]
    is_as_laid: bool
    revision: int

    @classmethod
    def of(cls, begun: Begun) -> TurnLayout:
        """Note the layout of an answer's prompt."""
        asked, fused = begun.asked, begun.outcome.fused
        # Else a record was damaged, or slow.
        is_as_laid = isinstance(fused.cache, StateCache) or _levels(fused.plan) == _levels(asked.plan)
        marks = begun.marks if is_as_laid else [()] * len(asked.plan.segments)
        known = None if asked.behind is None else asked.behind.chunks
        return cls(asked.request, known, _origins(asked.plan, marks), is_as_laid, asked.revision)

    def is_so(self, session: Session, options: QueryOptions, cache: PromptCache) -> bool:
        """Return whether the store as it is now would give the same layout, of the same records."""
        if not self.is_as_laid or self.revision == session.store.revision():
            return self.is_as_laid
        behind = None if self.known is None else Standing(Candidate(()), cache, self.known)
        try:
            asked = lay_out(session, self.request, options, behind=behind, must_find=False)
        except KvtoolError:  # what it names is gone
            return False
        return _origins(asked.plan, plan_marks(session, asked.plan)) == self.origins

    def still_stands(self, session: Session, options: QueryOptions) -> bool:
        """Return whether the store still has all that the turn was made of, whatever its question would find now."""
        if self.revision == session.store.revision():
            return True
        parts, (*first, question) = parts_for(session, options), self.origins
        if question.wanted.ids != question_tokens(session.tokenizer, self.request.question, parts):
            return False
        if self.known is None and first[0].wanted.ids != parts.prefix:
            return False
        return all(origin.is_stored(session) for origin in first)


def _origins(plan: Plan, marks: Sequence[Marks]) -> tuple[Origin, ...]:
    return tuple(
        Origin(replace(segment.source, relevance=0.0), mark)
        for segment, mark in zip(plan.segments, marks, strict=True)
        if segment.status != "resident"
    )


def _levels(plan: Plan) -> list[tuple[object, ...]]:
    return [(one.source.ids, one.source.level if one.cached else None) for one in plan.segments]
