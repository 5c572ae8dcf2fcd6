"""A question's prompt, laid out from a store: which chunks, which tokens, what of it is cached. Runs no model."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvtool.core.cache.identity import ids_digest
from kvtool.core.cache.layout import REPAIR
from kvtool.core.codec.levels import enough_loss, known, whole
from kvtool.core.common.types import Ids, add_span
from kvtool.core.errors import ContextFullError, DamagedError, NothingFoundError, UsageError
from kvtool.core.fusion.plan import Candidate, Part, Plan, Segment, build_plan, extend_plan, with_stored_rows
from kvtool.core.model.options import ORDINARY
from kvtool.core.model.prompt import (
    PromptParts,
    chunk_tokens,
    message_tokens,
    prompt_parts,
    question_tokens,
    said_tokens,
)
from kvtool.core.model.tokens import encode
from kvtool.core.query.options import LoadOptions, QueryOptions
from kvtool.core.query.reply import NO_KV, OWN_TEXT, Request
from kvtool.core.query.retrieve import Retrieved, find_chunks
from kvtool.core.retrieval.passages import Found, Hit, Passage
from kvtool.core.retrieval.spotting import Span, without_overlap
from kvtool.core.session.identity import smallest_allowed

if TYPE_CHECKING:
    from kvtool.core.cache.entries import ChunkInfo
    from kvtool.core.fusion.source import KVSource
    from kvtool.core.model.prompt_cache import PromptCache
    from kvtool.core.session.session import Session


_NOTHING = ids_digest([])  # the lead-in of what comes first
Marks = tuple[bytes | None, ...]
"""Marks of a chunk's records at a level, one a layer: other records have other marks."""
_MOST_CHARACTERS = 64  # for each token that a passage may have; longer ones are not tokenised
OTHER_TEXT = "what is stored of it is of another text"
_FEWEST_SPOTTED = 48  # tokens of stored passages, at least, that show that a client retrieves without kvtool
_LONG_MESSAGE = 500  # characters; where passages are learned, a longer message is one that has its own


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """A request's chunks and prompt. `prefix`: the prompt cache with the plan's first segment. `resident_hits`: found
    chunks that are in it already. `cut`: chunks below `search.min_score`. `learned`: ids of learned passages."""

    request: Request
    hits: Sequence[Hit]
    plan: Plan
    retrieve_ms: float
    revision: int = 0
    prefix: CachedPrefix | None = None
    resident_hits: Sequence[Hit] = ()
    cut: int = 0
    corrections: Sequence[dict[str, str]] = ()
    learned: Collection[bytes] = ()


@dataclass(slots=True)
class PromptSource:
    """A prompt's plan and what its cached KV is read from. Of a prompt fetched from a shared store: chunks that reached
    no level and were not computed are holes of `plan`; some of `kv` is decoded already, `bytes_read` of records;
    `holes`: computed segments that are worth storing; `rows`: the decisions (`kvtool help json`)."""

    plan: Plan
    kv: KVSource
    holes: list[Segment] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    bytes_read: int = 0
    fetch_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Contents of a conversation's prompt cache: rows of `tokens`, and the tokens of each chunk among them. `is_exact`:
    all rows are those of full prefill."""

    tokens: Candidate
    cache: PromptCache
    chunks: Mapping[bytes, int]
    is_exact: bool = False


def lay_out(
    session: Session,
    request: Request,
    options: QueryOptions,
    *,
    exactly: bool = False,
    answered: bool = True,
    prefix: CachedPrefix | None = None,
    must_find: bool = True,
    retrieved: Retrieved | None = None,
) -> PromptLayout:
    """Find the chunks and plan the prompt; no KV is loaded yet. `exactly`: take no lossy level where there is an exact
    one. `answered`: the answer must fit, too. `must_find`: without `prefix`, something has to be found.
    `retrieved`: used unless the documents have changed since. Raises UsageError (ContextFullError after a cached
    prefix): the prompt is too long; KvtoolError: nothing was found; DamagedError: nothing of it is left."""
    started = time.perf_counter()
    with session.lock, session.store.view():
        session.refresh()
        parts = parts_for(session, options.system)
        _check_characters(session, len(request.question))
        question = question_tokens(session.tokenizer, request.question, parts, request.prefill)
        check_length, more = partial(_check_length, session, len(question), prefix), 0
        if answered:
            more = _least_answer(options, prefix is None)
        least = len(question) + len(parts.prefix if prefix is None else prefix.tokens.ids) + more
        check_length(least)  # before anything is looked for
        if retrieved is not None and retrieved.revision != session.store.documents_revision():
            retrieved = None
        found = retrieved.result if retrieved else _find(session, request, options, must_find and prefix is None)
        in_prompt = {} if prefix is None else prefix.chunks
        resident_hits = [hit for hit in found.hits if hit.passage.chunk_id in in_prompt]
        hits = [hit for hit in found.hits if hit.passage.chunk_id not in in_prompt]
        check_length(least + len(hits))  # before their tokens are read: each has some
        candidates = [_candidate(session, hit, options.level, -1.0 if exactly else options.max_loss) for hit in hits]
        left = [(hit, chunk) for hit, chunk in zip(hits, candidates, strict=True) if chunk is not None]
        if hits and not left and prefix is None:
            raise DamagedError("nothing is left of the chunks to answer from", REPAIR)
        chunks = with_stored_rows(session.store, [chunk for _, chunk in left])
        if prefix is None:
            plan = build_plan(_prefix(session, parts.prefix), chunks, question)
        else:
            plan = extend_plan(prefix.tokens, chunks, question)
        revision = session.store.revision()
    retrieve_ms = add_span(session.timeline, "lay out", started) * 1e3 + (retrieved.milliseconds if retrieved else 0.0)
    check_length(plan.length + more)
    hits = [hit for hit, _ in left]
    cut, corrections = found.cut, found.corrections
    return PromptLayout(request, hits, plan, retrieve_ms, revision, prefix, resident_hits, cut, corrections)


def _least_answer(options: QueryOptions, is_first: bool) -> int:
    """Return how many tokens of the context an answer needs. With `clamp`, a conversation with too few left for an
    ordinary answer starts over, rather than have its answers cut off."""
    return options.max_tokens if not options.clamp else 1 if is_first else min(options.max_tokens, ORDINARY)


def _check_length(session: Session, question: int, prefix: CachedPrefix | None, tokens: int) -> None:
    """Refuse a prompt of at least so many tokens that is too long for a loaded model. `question`: tokens of its own."""
    if not session.model.is_loaded:
        return
    decoder, hint = session.decoder, "lower --top-k or --max-tokens, or name fewer --documents"
    if question > decoder.context // 2:
        hint = f"{question} of them are the question's own: ask a shorter one, and ingest what it is about"
    if prefix is None:
        decoder.check_length(tokens, hint)
    elif tokens > decoder.context:
        raise ContextFullError(
            f"the conversation would have {tokens} tokens with this question, the model takes {decoder.context}",
            f"start a new one, or {hint}",
        )


def _check_characters(session: Session, length: int) -> None:
    if session.model.is_loaded and length > (most := _MOST_CHARACTERS * session.decoder.context):
        what = f"the question has {length:,} characters, and what the model takes has at most {most:,}"
        raise UsageError(what, "ask a shorter one, and ingest what it is about")


def _find(session: Session, request: Request, options: QueryOptions, must_find: bool) -> Found:
    try:
        return find_chunks(session.finder, request, options, session.recent_chunks)
    except NothingFoundError:
        if must_find:
            raise
        return Found([])


def lay_out_at(session: Session, layout: PromptLayout, options: LoadOptions, level: str) -> PromptLayout:
    prefix, *_, question = layout.plan.segments
    chunks = [found for hit in layout.hits if (found := _candidate(session, hit, level, options.max_loss)) is not None]
    return replace(layout, plan=build_plan(prefix.source, with_stored_rows(session.store, chunks), question.ids))


def parts_for(session: Session, system: str | None) -> PromptParts:
    if system is not None and system != session.identity.system:
        return prompt_parts(session.tokenizer, system)
    return session.parts


def record_marks(session: Session, chunk_id: bytes, level: str) -> Marks:
    return tuple(session.store.record_mark(chunk_id, level, layer) for layer in range(session.layers))


def plan_marks(session: Session, plan: Plan) -> tuple[Marks, ...]:
    sources = [(one.source.chunk_id, one.source.level if one.cached else None) for one in plan.segments]
    return tuple(record_marks(session, chunk_id, level) if level else () for chunk_id, level in sources)


def _prefix(session: Session, ids: Ids) -> Candidate:
    if not ids:
        return Candidate((), lead_in=_NOTHING, reason="empty")
    identity = session.identity
    if ids != identity.prefix:
        return Candidate(ids, reason="another instruction than the store's")
    wanted = Candidate(ids, identity.prefix_id, _NOTHING, relevance=math.inf)
    return _stored(session, wanted, _info(session, identity.prefix_id), "auto", 0.0)


def _candidate(session: Session, hit: Hit, level: str, max_loss: float) -> Candidate | None:
    """Return a chunk as a segment of the prompt. Its ids are those of its text, which the answer cites: a stored chunk
    of other ids is damaged, or another user's, and nothing of it is used. None: neither its document nor the store
    holds it any longer."""
    place = hit.passage
    info, text = _info(session, place.chunk_id), session.finder.own_text(place)
    if text is None:
        if info is None:
            what = f"chunk {place.chunk_id.hex()[:12]} of {place.source}"
            session.warn(f"{what} is left out: its description is lost, and so is its place", REPAIR)
            return None
        ids = info.token_ids
    elif _is_foreign_and_long(session, place, text):
        session.warn(f"a passage of {place.source} is left out: it is longer than a chunk of this store", "")
        return None
    else:
        (ids,) = chunk_tokens(session.tokenizer, [text])
    if info is None:
        return Candidate(ids, place.chunk_id, reason="its description is lost or damaged")
    if info.token_ids != ids:
        return Candidate(ids, place.chunk_id, reason=OTHER_TEXT)
    relevance = 0.0 if math.isnan(hit.score) else hit.score
    wanted = Candidate(ids, place.chunk_id, info.lead_in, relevance=relevance)
    return _stored(session, wanted, info, level, max_loss)


def part_of_chunk(session: Session, chunk_id: bytes, ids: Ids, skipped: int, options: LoadOptions) -> Candidate:
    """Return tokens of a chunk from number `skipped` on, with the level their rows are read at: none that drops
    rows."""
    info = _info(session, chunk_id)
    if info is None or info.token_ids[skipped : skipped + len(ids)] != ids:
        return Candidate(ids, chunk_id, reason="its description is lost or damaged")
    wanted = Candidate(info.token_ids, chunk_id, info.lead_in)
    found = _stored(session, wanted, info, options.level, options.max_loss, every_row=True)
    if len(ids) == len(info.token_ids):
        return found
    part = Part(skipped, skipped + len(ids), len(info.token_ids))
    some = found.sensitivity[2 * part.first : 2 * part.stop]  # a number of two bytes for each token
    return replace(found, ids=ids, sensitivity=some, part=part)


def _is_foreign_and_long(session: Session, place: Passage, text: str) -> bool:
    """Return True for a foreign passage that no split of this store gives: one that is longer than the model's
    context, and found by every question, would end all of them."""
    most = session.identity.most_tokens
    if len(text) <= most or not any(entry.origin.is_foreign for entry in session.store.files_with([place.source])):
        return False
    return len(text) > _MOST_CHARACTERS * most or len(chunk_tokens(session.tokenizer, [text])[0]) > most


def _stored(
    session: Session,
    wanted: Candidate,
    info: ChunkInfo | None,
    level: str,
    max_loss: float,
    *,
    every_row: bool = False,
) -> Candidate:
    if info is None:
        return replace(wanted, reason=NO_KV)
    if info.token_ids != wanted.ids:
        return replace(wanted, reason="the stored token ids differ")
    if info.layers not in (0, session.layers):  # 0: nothing is stored of it by design
        return replace(wanted, reason="stored with another number of layers")
    stored = session.store.levels(wanted.chunk_id)
    levels = whole(stored) if every_row else stored
    best: str | None = level
    if level == "auto":
        losses = session.losses.of(wanted.chunk_id, levels)
        best = smallest_allowed(levels, losses, max_loss)
        if 0 <= max_loss < losses.get(best or "", 0.0):
            _tell_of_loss(session, str(best), losses[str(best)], max_loss)
    if best is None or best not in levels:
        _tell_of_unknown(session, stored)
        why = _why_not(level, bool(levels), max_loss)  # it may be computed as it was stored, and counts as such then
        why = "no stored level has all of its rows" if stored and not levels else why
        if why == NO_KV and session.store.has_level_row(wanted.chunk_id):
            why = "the row of its level is damaged"
        return replace(wanted, reason=why, stored=bool(stored), sensitivity=info.sensitivity)
    return replace(wanted, level=best, sensitivity=info.sensitivity)


def _tell_of_loss(session: Session, level: str, loss: float, max_loss: float) -> None:
    session.warn_once(
        f"some chunks are read at level {level}, which loses {loss:.2g} nats a token: nothing that is stored of them "
        f"loses as little as {max_loss:g}",
        f"`--set load.max_loss={enough_loss(loss)}` accepts it; ingest into a new store makes exact records",
    )


def _tell_of_unknown(session: Session, levels: Sequence[str]) -> None:
    if strange := sorted({*levels} - {*known(levels)}):
        session.warn_once(
            f"records at level {', '.join(map(repr, strange))} are not read: there is no codec for it here",
            "install the kvtool that made them; they stay in the store until then",
        )


def _info(session: Session, chunk_id: bytes) -> ChunkInfo | None:
    with suppress(DamagedError):
        return session.store.chunk_info(chunk_id)
    return None


def _why_not(level: str, stored: bool, max_loss: float) -> str:
    if level != "auto":
        return f"not stored at level {level}"
    return f"no stored level is known to lose at most {max_loss:g} nats a token" if stored else NO_KV


# ---- a client's own messages: passages are found by their token ids and reused where they are -----------------------


def lay_out_messages(session: Session, request: Request, options: QueryOptions) -> PromptLayout | None:
    """Plan the prompt of a request's messages, with what is stored of them. Raises UsageError: it is too long. None:
    chunks have to be retrieved, since the messages hold no stored or learnable passage, the model's template cannot be
    followed, or the context is full."""
    if not request.messages or session.identity.keeps_states:
        return None
    started = time.perf_counter()
    with session.lock, session.store.view():
        session.refresh()
        is_own = _is_own(session, request)
        if not is_own and not spotted(spot_all(session, _beginning(session, request), request.owner)):
            return None  # before the template is rendered, which starts a process
        _check_characters(session, sum(len(content) for _, content in request.messages))
        ids = message_tokens(session.tokenizer, request.messages)
        if ids is None:
            return None
        ids += tuple(said_tokens(session.tokenizer, request.prefill))
        if session.model.is_loaded:
            is_first = all(role != "assistant" for role, _ in request.messages)
            try:
                least = _least_answer(options, is_first)
                session.decoder.check_length(len(ids) + least, "shorten the messages, or lower max_tokens")
            except UsageError:
                if not is_first:
                    return None  # a conversation starts over at the context's end
                raise
        # The last token is always computed: the answer follows it.
        spans = spotted(spot_all(session, ids[:-1], request.owner))
        if not spans and not is_own:
            return None
        passages = session.finder.index.passages([span.chunk_id for span in spans])
        learned = {span.chunk_id for span in spans} - passages.keys()
        if session.learned is not None:
            passages |= {chunk_id: session.learned.passage(chunk_id) for chunk_id in learned}
        hits = [Hit(passages[span.chunk_id], math.nan) for span in spans]
        plan = plan_spotted(session, ids, spans, options)
        revision = session.store.revision()
    ms = add_span(session.timeline, "spot", started) * 1e3
    return PromptLayout(request, hits, plan, ms, revision, learned=learned)


def _is_own(session: Session, request: Request) -> bool:
    """Return True where passages are learned, if a message is so long that it has some, or there is no other text."""
    if session.learned is None or request.owner is None:
        return False
    session.finder.follow()
    said = [content for role, content in request.messages if role != "assistant"]
    return max(map(len, said), default=0) >= _LONG_MESSAGE or not len(session.finder.index)


def _beginning(session: Session, request: Request) -> Sequence[int]:
    """Return the tokens of a request's messages, up to a loaded model's context. Answers are left out: one that quotes
    a passage does not show that the client retrieves."""
    text = "\n\n".join(content for role, content in request.messages if role != "assistant")
    if not session.model.is_loaded:
        return encode(session.tokenizer, text)
    most = session.decoder.context
    return encode(session.tokenizer, text[: _MOST_CHARACTERS * most])[:most]


def plan_spotted(session: Session, ids: Ids, spans: Sequence[Span], options: LoadOptions) -> Plan:
    """Plan a prompt of these token ids, `spans` of which are stored passages; the question is what follows the last."""
    parts = list(_parts(session, options, ids, spans))
    return build_plan(parts[0], parts[1:], ids[spans[-1].stop if spans else -1 :])


def spotted(spans: list[Span]) -> list[Span]:
    return spans if sum(map(len, spans)) >= _FEWEST_SPOTTED else []


def spot_all(session: Session, ids: Sequence[int], owner: str | None) -> list[Span]:
    spans = session.finder.spot(ids)
    if session.learned is None or owner is None:
        return spans
    return without_overlap([*spans, *session.learned.spot(ids, owner)])


def _parts(session: Session, options: LoadOptions, ids: Ids, spans: Sequence[Span]) -> Iterator[Candidate]:
    before = 0
    if not spans:
        yield Candidate(ids[:-1], reason=OWN_TEXT)
    for number, span in enumerate(spans):
        if number == 0 or span.start > before:
            yield Candidate(ids[before : span.start], reason=OWN_TEXT)
        yield part_of_chunk(session, span.chunk_id, ids[span.start : span.stop], span.skipped, options)
        before = span.stop
