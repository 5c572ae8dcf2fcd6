"""Fusing of a laid-out prompt, and storage of what the store lacks of it.

All chunks are fused at once; with `--defer` in rounds, the best ones first, and more while the answer is unsure. Of a
recurrent model, whose states cannot be moved, the prompt's beginning is looked up among stored checkpoints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.cache.identity import chunk_id, ids_digest
from kvtool.core.cache.tables import StretchInfo, least_used
from kvtool.core.common.types import Timeline, add_span
from kvtool.core.errors import DamagedError, KvtoolError, StoreLockedError
from kvtool.core.fusion.engine import Fused, FuseTiming, TokenCounts, fuse
from kvtool.core.fusion.plan import Candidate, Plan, Segment, as_resident, build_plan, extend_plan
from kvtool.core.fusion.prefix_cache import DAMAGED, PrefixFused, StoredPrefix, encoded, extend_prefix, fuse_prefix
from kvtool.core.fusion.source import KVSource
from kvtool.core.model.decoder import is_recurrent
from kvtool.core.model.generate import GreedyPrefix, greedy_prefix
from kvtool.core.query.reply import NO_KV, OWN_TEXT, Round
from kvtool.core.records.encode import LeadIns
from kvtool.core.records.read import repair_chunks

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.fusion.selectors.base import Selector
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.query.prompt import CachedPrefix, PromptSource
    from kvtool.core.session.session import Session


_RESERVED = 1024  # tokens of an answer whose limit is the context's: caches grow, and few answers are as long
_PROBED = 8  # answer tokens whose probability says how sure a round is

# What models say in place of an answer; in lower case. An answer that begins with one of them is no answer.
_NOT_THERE = (
    *("not mentioned", "not specified", "not provided", "not stated", "not found", "not given", "no information"),
    *("does not mention", "do not mention", "does not say", "doesn't say", "does not provide", "do not provide"),
    *("cannot be determined", "i don't know", "i do not know", "i'm sorry", "i am sorry", "unknown", "unanswerable"),
    *("알 수 없", "찾을 수 없", "언급되지 않", "나와 있지 않", "정보가 없", "모르겠"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The prompt that the answer is given from. `beginning`: of the answer, which the cache holds already.
    `chained`: what of the prompt will be stored."""

    fused: Fused
    beginning: GreedyPrefix | None = None
    rounds: list[Round] = field(default_factory=list)
    chained: PrefixFused | None = None


def fuse_prompt(
    session: Session, prefix: CachedPrefix | None, source: PromptSource, selector: Selector, options: QueryOptions
) -> Outcome:
    """Make the prompt cache, and the logits of the prompt's last token. With `prefix` a conversation's cache is
    extended."""
    decoder, plan, timeline = session.decoder, source.plan, session.timeline
    reserve = min(options.max_tokens, _RESERVED) if options.clamp else options.max_tokens
    cache = None if prefix is None else prefix.cache
    if is_recurrent(cache):
        chained = extend_prefix(decoder, cache, plan, selector, reserve, timeline)
        return Outcome(chained.fused, chained=chained)
    if cache is None and session.identity.keeps_states:
        chained = fuse_after_checkpoints(session, plan, selector, options)
        return Outcome(chained.fused, chained=chained)
    if cache is None and options.defer:
        return fuse_in_rounds(session, plan, selector, source.kv, options)
    return Outcome(fuse(decoder, plan, selector, source.kv, reserve, timeline, options.load_timeout, cache))


def fuse_in_rounds(
    session: Session, plan: Plan, selector: Selector, source: KVSource, options: QueryOptions
) -> Outcome:
    """Load until the answer's greedy beginning is sure, or nothing is left to load."""
    decoder, timeline, chunks = session.decoder, session.timeline, plan.chunks
    fused: Fused | None = None
    rounds: list[Round] = []
    for start, stop in options.rounds(len(chunks)):
        began, wanted = time.perf_counter(), [segment.source for segment in chunks[start:stop]]
        if fused is None:
            first = build_plan(plan.segments[0].source, wanted, plan.segments[-1].ids)
            room = plan.length - first.length + options.max_tokens  # for all chunks and the answer from the start
            now = fused = fuse(decoder, first, selector, source, room, timeline, options.load_timeout)
        else:
            now = extend_fused(decoder, fused, wanted, selector, source, timeline, options.load_timeout)
            fused = joined(fused, now)
        took = add_span(timeline, f"fuse: {selector.name}, chunks {start + 1} to {stop}", began)
        began, beginning, sure, enough, reason = time.perf_counter(), None, None, True, "all chunks are loaded"
        if stop < len(chunks):
            beginning = greedy_prefix(decoder, fused.cache, fused.logits, min(_PROBED, options.max_tokens))
            sure = math.exp(math.fsum(beginning.log_p) / len(beginning.log_p))
            text = session.tokenizer.decode(list(beginning.ids), skip_special_tokens=True)
            enough, reason = judge(sure, text, options.defer_threshold)
        took += add_span(timeline, "is it sure?", began)
        counts = {kind: count for kind, count in now.tokens.to_json().items() if kind != "dropped"}
        ids = tuple(segment.source.chunk_id.hex() for segment in now.plan.chunks)
        rounds.append(Round(ids, enough, reason, sure, now.bytes_read, {"round": took * 1e3}, counts))
        if enough:
            return Outcome(fused, beginning, rounds)
    raise AssertionError("a last round is always enough")


def extend_fused(
    decoder: Decoder,
    before: Fused,
    chunks: Sequence[Candidate],
    selector: Selector,
    source: KVSource,
    timeline: Timeline | None = None,
    patience: float | None = None,
) -> Fused:
    """Fuse `chunks` into the prompt cache of `before`, one round or several that `joined` has added up, after its own,
    and compute the question again after them. A row sees only earlier rows, so resident rows never change. The result
    counts and times the new rows, and a ratio is a share of the new chunks."""
    *fused, question = before.plan.segments
    plan = extend_plan(as_resident(fused), chunks, question.ids)
    return fuse(decoder, plan, selector, source, timeline=timeline, patience=patience, cache=before.cache)


def joined(before: Fused, now: Fused) -> Fused:
    """Add a round to those before it, as if they were one pass: the whole prompt's plan, with counts and times summed.
    `tokens.rows` counts every computed question, `tokens.fresh` the last one only."""
    start = before.plan.segments[-1].start
    plan = Plan((*before.plan.segments[:-1], *now.plan.segments[1:]))
    fresh = before.tokens.fresh - len(before.plan.segments[-1].ids) + now.tokens.fresh
    names = {**before.reasons, **now.reasons}
    none = plan.mask()
    return replace(
        now,
        plan=plan,
        tokens=TokenCounts(
            prompt=plan.length,
            reused=before.tokens.reused + now.tokens.reused,
            recomputed=before.tokens.recomputed + now.tokens.recomputed,
            fresh=fresh,
            rows=tuple(a + b for a, b in zip(before.tokens.rows, now.tokens.rows, strict=True)),
            dropped=plan.dropped,
        ),
        timing=FuseTiming(*map(sum, zip(astuple(before.timing), astuple(now.timing), strict=True))),
        bytes_read=before.bytes_read + now.bytes_read,
        recomputed=_spliced(before.recomputed, now.recomputed, start),
        shifted=before.shifted + now.shifted,
        reasons={name: _spliced(before.reasons.get(name, none), now.reasons.get(name, none), start) for name in names},
    )


def _spliced(before: torch.Tensor, now: torch.Tensor, start: int) -> torch.Tensor:
    return torch.cat([before[:start], now[start:]])


def judge(sure: float, beginning: str, threshold: float) -> tuple[bool, str]:
    """Decide whether an answer is given, and why: from its beginning, and from how sure the model is of it."""
    text = beginning.lower()
    if (phrase := next((phrase for phrase in _NOT_THERE if phrase in text), None)) is not None:
        return False, f"it says that the answer is not there: {phrase!r}"
    if sure < threshold:
        return False, f"unsure: {sure:.3f} is below {threshold:.3f}"
    return True, f"sure: {sure:.3f} is at least {threshold:.3f}"


def store_chunks(
    session: Session, fused: Fused, computed: Sequence[Segment], again: bool, learned: Collection[bytes]
) -> None:
    """Note what was used, and store what was missing. `learned`: ids of learned passages, which others must not get."""
    cached = fused.plan.cached_chunks
    if session.recent_chunks is not None:
        for segment in cached:
            session.recent_chunks.use(segment.source.chunk_id, session.decoder.kv_bytes(len(segment.ids)))
    missed = len(fused.plan.passages) - len(cached)
    used = [segment.source.chunk_id for segment in cached]
    session.store.note_access([chunk_id for chunk_id in used if chunk_id not in learned], missed, again)
    holes = [
        segment
        for segment in fused.plan.segments[:-1]
        if segment.status == "miss" and segment.ids and segment.reason != OWN_TEXT
    ]
    positions = {segment.position for segment in holes}
    holes += [segment for segment in computed if segment.position not in positions]
    _repair_holes(session, [segment for segment in holes if segment.source.chunk_id not in learned])
    if session.learned is not None and learned:
        session.learned.store.note_access([chunk_id for chunk_id in used if chunk_id in learned])
        lost = [hole for hole in holes if hole.source.chunk_id in learned and not hole.source.stored]
        for segment in lost:
            session.warn(f"a learned passage was computed in place: {segment.reason}", "it is learned again")
        if lost:  # not those that are stored at another level than is asked for
            session.learned.forget({segment.source.chunk_id for segment in lost})


def _repair_holes(session: Session, holes: Sequence[Segment]) -> None:
    """Store what the store lacks of some segments; when it is locked, full or read-only, only warn. Chunks without KV
    are left to idle time where the session has some (`Session.missed`), and noted for the next ingest. One of a
    `neighbour` store is left to that, which knows the chunk before it."""
    store, identity = session.store, session.identity
    specs = [identity.spec_of(hole.source.chunk_id, hole.ids) for hole in holes if not hole.source.stored]
    chunks = {spec.chunk_id: spec for spec in specs if spec is not None}  # a prompt may hold a chunk twice
    if store.read_only:
        chunks = {}
    empty = [hole.source.chunk_id for hole in holes if hole.reason == NO_KV]
    store.use_log.note_uses(empty)
    if session.missed is not None:
        session.missed.update({chunk_id: chunks.pop(chunk_id) for chunk_id in empty if chunk_id in chunks})
    if chunks:
        try:
            store_missed(session, [*chunks.values()])
        except KvtoolError as error:
            if not isinstance(error, StoreLockedError) or chunks.keys() - {*empty}:  # an ingest computes those itself
                session.warn(f"{len(chunks)} computed chunk(s) could not be stored: {error.message}", error.hint)
            chunks = {}
        else:
            store.use_log.note_uses([*chunks.keys() - {*empty}])
    for segment in holes:
        if segment.reason == NO_KV:
            continue
        chunk_id = segment.source.chunk_id  # another instruction than the store's has none
        name = f"chunk {chunk_id.hex()[:12]}" if chunk_id else "the prompt's beginning"
        hint = "it is stored now, for the next question" if chunk_id in chunks else ""
        if not hint and chunk_id and not segment.source.stored:
            hint = "an ingest of its document stores it"
        session.warn(f"{name} was computed in place: {segment.reason}", hint)


def store_empty(session: Session, plan: Plan) -> None:
    """Compute and store the chunks of a plan that have no KV; when the store is locked or full, only warn."""
    _repair_holes(session, [segment for segment in plan.segments if segment.reason == NO_KV])


def store_missed(session: Session, chunks: Sequence[ChunkSpec], later: bool = False) -> None:
    """Compute and store chunks of documents that were not removed since their question, alone behind the lead-in;
    `later` than their question only those that the store still describes. Raises KvtoolError: the store is locked or
    full."""
    store, decoder, prefix_id = session.store, session.decoder, session.identity.prefix_id
    session.model.check_forward()

    def lead_ins_for(chunk: ChunkSpec) -> LeadIns:
        return LeadIns.nothing(decoder) if chunk.chunk_id == prefix_id else session.lead_ins

    def is_wanted(chunk: ChunkSpec) -> bool:
        if later or chunk.chunk_id == prefix_id:
            return chunk.chunk_id == prefix_id or store.describes_own(chunk.chunk_id)
        session.finder.follow()
        return bool(session.finder.index.holders([chunk.chunk_id]))

    repair_chunks(store, decoder, session.profiles, lead_ins_for, chunks, is_wanted)


def fuse_after_checkpoints(session: Session, plan: Plan, selector: Selector, options: QueryOptions) -> PrefixFused:
    """Fuse a prompt of a model that keeps states, from what is stored of its beginning where the mode uses that."""
    found = find_checkpoints(session, plan) if selector.uses_cache else StoredPrefix((), ())
    if not options.force:
        session.check_prefix([segment.ids for segment in plan.segments[:-1]], found)
    return fuse_prefix(
        session.decoder, plan, selector, found, session.store.read_part, options.max_tokens, session.timeline
    )


def find_checkpoints(session: Session, plan: Plan) -> StoredPrefix:
    """Look up the stored stretches of a prompt's segments. A name covers the model, the format of states, and all ids
    so far."""
    identity, before = session.identity, list[int]()
    named = partial(
        chunk_id, namespace=identity.namespace, model_fingerprint=f"{identity.fingerprint} states in {identity.dtype}"
    )
    ids: list[bytes] = []
    for segment in plan.segments[:-1]:
        ids.append(named(lead_in=ids_digest(before), token_ids=segment.ids))
        before.extend(segment.ids)
    return StoredPrefix(tuple(ids), tuple(_checkpoint(session.store, stretch) for stretch in ids))


def _checkpoint(store: Store, stretch: bytes) -> StretchInfo | None:
    with suppress(DamagedError):
        return store.stretch(stretch)
    return None


def store_checkpoints(session: Session, chained: PrefixFused, limit: int, again: bool = False) -> None:
    """Note what was used, and store the stretches that were computed; when the store is locked, full or read-only, only
    warn. `limit`: bytes of all stretches; the least recently used are evicted."""
    store, plan = session.store, chained.fused.plan
    for segment in plan.segments:
        if segment.reason == DAMAGED:
            what = f"chunk {segment.source.chunk_id.hex()[:12]}" if segment.position else "the prompt's beginning"
            session.warn(f"what was stored of the prompt up to {what} is damaged, and was computed again", "")
    reused = [segment.source.chunk_id for segment in plan.cached_chunks]
    store.note_access(reused, len(plan.chunks) - len(reused), again)
    store.use_log.note_uses([segment.source.chunk_id for segment in plan.chunks if not segment.cached])
    new = [*chained.new]
    if new and limit and not store.read_only:
        try:
            _write(session, chained, limit)
        except KvtoolError as error:
            session.warn(f"what was computed of the prompt could not be stored: {error.message}", error.hint)
            new = []
    store.use_log.note_uses([*chained.used, *(one.id for one in new)])


def _write(session: Session, chained: PrefixFused, limit: int) -> None:
    stretches, store = session.store.stretches(), session.store
    own = {*chained.used, *(one.id for one in chained.new)}
    infos = [*(one.info for one in chained.new), *(stretches[one] for one in chained.used if one in stretches)]
    needed = sum(info.size for info in infos)
    if needed > limit:
        raise KvtoolError(
            f"it takes {needed / 1e6:,.1f} MB", f"--set load.state_cache_size={needed // 10**6 + 1}MB keeps it"
        )
    others = {stretch: info for stretch, info in stretches.items() if stretch not in own}
    with store.writer() as writer:
        going = least_used(others, store.last_used(), sum(info.size for info in others.values()) + needed - limit)
        if going:
            writer.drop_stretches(going)
        for one in chained.new:
            writer.put_stretch(one.id, one.info, encoded(one.parts, session.decoder.kv_dtype))
