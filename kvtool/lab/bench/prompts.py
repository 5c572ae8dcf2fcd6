"""Prompts of a wanted length over stored chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool.core.cache.identity import ids_digest
from kvtool.core.cache.layout import REPAIR
from kvtool.core.cache.store import Store
from kvtool.core.common.types import Ids
from kvtool.core.errors import DamagedError, KvtoolError, UsageError
from kvtool.core.fusion.plan import Candidate, Plan, build_plan, with_stored_rows
from kvtool.core.records.read import exact_level
from kvtool.core.session.identity import StoreIdentity

if TYPE_CHECKING:
    from kvtool.core.cache.entries import ChunkInfo


@dataclass(frozen=True, slots=True)
class Stored:
    """A piece of a prompt and where its records are."""

    chunk_id: bytes
    ids: Ids
    level: str


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """Prefix, chunks and question.

    Attributes
    ----------
    wanted : the context that was asked for.
    prefix : None: the model has none.
    holds_all : there are no more chunks than these.
    """

    wanted: int
    prefix: Stored | None
    chunks: tuple[Stored, ...]
    question: Ids
    holds_all: bool = False

    @property
    def length(self) -> int:
        """The number of its tokens."""
        return sum(len(piece.ids) for piece in self.pieces) + len(self.question)

    @property
    def pieces(self) -> tuple[Stored, ...]:
        """What is stored of it."""
        return self.chunks if self.prefix is None else (self.prefix, *self.chunks)

    def shortest(self) -> BenchPrompt:
        """Its first chunk alone."""
        return BenchPrompt(self.wanted, self.prefix, self.chunks[:1], self.question)

    def plan(self, store: Store) -> Plan:
        """Look the pieces up and lay the prompt out, as a query does. Raises DamagedError where one is not whole."""
        empty = Candidate((), lead_in=ids_digest([]), reason="empty")
        prefix = empty if self.prefix is None else _candidate(store, self.prefix)
        return build_plan(
            prefix, with_stored_rows(store, [_candidate(store, chunk) for chunk in self.chunks]), self.question
        )


def _candidate(store: Store, piece: Stored) -> Candidate:
    info = store.chunk_info(piece.chunk_id)
    if info is None or info.token_ids != piece.ids or piece.level not in store.levels(piece.chunk_id):
        raise DamagedError(f"chunk {piece.chunk_id.hex()[:12]} is not whole at level {piece.level}", REPAIR)
    return Candidate(piece.ids, piece.chunk_id, info.lead_in, piece.level, sensitivity=info.sensitivity)


def stored_prompts(
    store: Store, identity: StoreIdentity, level: str, contexts: Sequence[int], question_tokens: int
) -> list[BenchPrompt]:
    """Prompts of a store's own chunks, document by document, each once, as many as fit.

    The question is made of words of the first chunk and the store's own answer header.

    Raises
    ------
    KvtoolError : no chunk is stored at this level.
    UsageError : a context that not even one chunk fits in.
    """
    chunks = _chunks(store, level)
    if not chunks:
        held = sorted(store.stats()["levels"])
        hint = f"its levels: {', '.join(held)}" if held else "run `kvtool ingest PATH` first"
        raise KvtoolError(f"the store holds no chunk at level {level}", hint)
    header = identity.answer_header[-question_tokens:]
    question = chunks[0].ids[: max(0, question_tokens - len(header))] + header
    own = exact_level(store, identity.prefix_id) if identity.prefix else None
    if identity.prefix and own is None:
        raise DamagedError("the store has lost the record of its prompts' beginning", REPAIR)
    prefix = Stored(identity.prefix_id, identity.prefix, own) if own else None
    return [_fitting(BenchPrompt(context, prefix, tuple(chunks), question)) for context in contexts]


def _chunks(store: Store, level: str) -> list[Stored]:
    wanted = dict.fromkeys(ref.chunk_id for document in store.documents() for ref in document.chunks)
    found: list[tuple[bytes, ChunkInfo | None]] = [(chunk, store.chunk_info(chunk)) for chunk in wanted]
    return [Stored(chunk, info.token_ids, level) for chunk, info in found if info and level in store.levels(chunk)]


def _fitting(prompt: BenchPrompt) -> BenchPrompt:
    """Cut a prompt to as many of its first chunks as its context holds."""
    room = prompt.wanted - len(prompt.question) - (len(prompt.prefix.ids) if prompt.prefix else 0)
    count = 0
    for chunk in prompt.chunks:
        room -= len(chunk.ids)
        if room < 0:
            break
        count += 1
    if not count:
        raise UsageError(f"a context of {prompt.wanted} tokens has no room for a chunk", "take a longer --context")
    chunks = prompt.chunks[:count]
    return BenchPrompt(prompt.wanted, prompt.prefix, chunks, prompt.question, count == len(prompt.chunks))
