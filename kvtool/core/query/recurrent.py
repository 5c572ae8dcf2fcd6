"""Fusing of a laid-out prompt, and storage of what the store lacks of it.

All chunks are fused at once; with `--defer` in rounds, the best ones first, and more while the answer is unsure. Of a
recurrent model, whose states cannot be moved, the prompt's beginning is looked up among stored checkpoints.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from kvtool.core.cache.identity import chunk_id, ids_digest
from kvtool.core.cache.stretches import StretchInfo, least_used
from kvtool.core.errors import DamagedError, KvtoolError
from kvtool.core.fusion.prefix_cache import DAMAGED, PrefixFused, StoredPrefix, encoded, fuse_prefix

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.fusion.plan import Plan
    from kvtool.core.fusion.selectors.base import Selector
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.session.session import Session


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
