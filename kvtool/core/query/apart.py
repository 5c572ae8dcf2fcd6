"""A question to a model that keeps states, over chunks that were computed apart: found, refused or put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtool.core.errors import KvtoolError
from kvtool.core.fusion.apart import Stored, fuse_apart
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.stretch import Found
from kvtool.core.session.alone import alone_id, found_in, put, stretch_id

if TYPE_CHECKING:
    from kvtool.core.fusion.engine import Fused
    from kvtool.core.fusion.plan import Plan, Segment
    from kvtool.core.fusion.selectors.base import Selector
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.session.session import Session


def check_loss(session: Session, mode: str, options: QueryOptions) -> dict[str, Any]:
    """What a mode loses, as the gate has measured it; refused where that is too much, or where a law is broken.

    Returns
    -------
    `states` of the reply's JSON.

    Raises
    ------
    GateError : unless it is to be answered all the same.
    """
    verdict, measured = session.check_apart(), _measured_as(mode, options)
    if verdict is not None and not options.force:
        verdict.enforce()
        verdict.enforce_loss(measured, options.max_state_loss)
    loss = None if verdict is None else verdict.losses.get(measured)
    return {"loss": loss, "max_loss": options.max_state_loss}


def _measured_as(mode: str, options: QueryOptions) -> str:
    """The mode whose measured loss holds: with fewer link tokens than the gate takes `epic` may lose all that `reuse`
    does."""
    return Reuse.name if mode == Epic.name and options.link_tokens < Epic().link_tokens else mode


def answer_apart(session: Session, plan: Plan, selector: Selector, options: QueryOptions) -> Fused:
    """Put a prompt together from what is stored of its chunks."""
    identity, decoder, store = session.identity, session.decoder, session.store
    first, *chunks = plan.segments[:-1]
    ids = (
        stretch_id(identity, (), first.ids),
        *(alone_id(identity, segment.ids) for segment in chunks),
    )
    found = Found(ids, tuple(found_in(store, one) for one in ids))
    if not options.force:
        session.check_alone([first.ids, *(segment.ids for segment in chunks)], found)
    stored = Stored(found, identity.lead_in.ids)
    return fuse_apart(decoder, plan, selector, stored, store.read_part, options.max_tokens, session.timeline)


def fill_alone(session: Session, holes: Sequence[Segment]) -> int:
    """Compute holes alone and store them; returns how many.

    A query is no writer: where the store is locked, full or read-only the holes stay, with a warning.
    """
    store, maker, identity = session.store, session.alone, session.identity
    first = [identity.prefix] if any(one.source.chunk_id == identity.prefix_id for one in holes) else []
    chunks = [one.ids for one in holes if one.source.chunk_id == identity.chunk_id(one.ids)]
    if store.read_only or not first + chunks:
        return 0
    try:
        with store.writer(session.lock_wait) as writer:
            for made in (*(maker.beginning() for _ in first), *map(maker.chunk, chunks)):
                put(writer, made, session.decoder.kv_dtype)
    except KvtoolError as error:
        session.warn(f"{len(holes)} computed chunk(s) could not be stored: {error.message}", error.hint)
        return 0
    return len(first + chunks)
