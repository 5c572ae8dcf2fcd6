"""The online audit (`--audit`): a share of the answers is compared with full prefill, after they have been given.

The measure is that of `eval` and `--compare`: KL from full prefill's distributions to the fused prompt's,
teacher-forced over full prefill's own greedy answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Any, cast

from kvtool.core.common.types import add_span
from kvtool.core.errors import KvtoolError
from kvtool.core.evaluate.measures import Audit, is_drawn, keep_audit, shortened
from kvtool.core.evaluate.reference import SAME, Reference
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.plan import Candidate, Plan, build_plan
from kvtool.core.fusion.selectors import REFERENCE
from kvtool.core.fusion.selectors.full import Full
from kvtool.core.model.decoder import out_of_memory_hint
from kvtool.core.query.answer import answer
from kvtool.core.query.fuse_prompt import fuse_after_checkpoints, store_empty
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import lay_out
from kvtool.core.query.reply import Reply, Request
from kvtool.core.query.retrieve import Retrieved
from kvtool.core.session.session import Session

if TYPE_CHECKING:
    from kvtool.core.fusion.selectors.base import Selector
    from kvtool.core.model.generate import Generated


_READ_ONLY = "audits are stored next to the store, which cannot be written: none is made"


def is_audit_due(session: Session, reply: Reply, share: float) -> bool:
    """Return True if an answer is among the audited share, and an audit of it says something."""
    if not is_drawn(reply.question, reply.revision, share):
        return False
    if session.store.read_only:
        session.warn_once(_READ_ONLY, "make the store writable, or leave --audit out")
        return False
    if reply.selector.lossless:
        session.say_once(f"no audit: {reply.fusion} gives full prefill's answer by construction")
        return False
    if reply.verified is not None:
        session.say_once("no audit: a verified answer has been held against full prefill")
        return False
    return True


def audit_answer(session: Session, reply: Reply, options: QueryOptions) -> Audit | None:
    """Audit an answer and keep the result; None, with a warning, where that failed: the answer is valid without."""
    try:
        with out_of_memory_hint(reply.tokens["prompt"]):  # a second prompt cache may be one too many
            done = audit(session, reply, options)
    except KvtoolError as error:
        session.warn(f"an answer could not be audited: {error.message}", error.hint)
        return None
    if not math.isfinite(done.kl_answer):
        session.warn("an answer could not be audited: its distributions are no numbers", "try --dtype float32")
        return None
    if not keep_audit(session.store, session.identity.fingerprint, done):
        hint = "free space on the store's disk, or make its folder writable"
        session.warn_once("an audit could not be kept", hint)
    return done


def audit(session: Session, reply: Reply, options: QueryOptions) -> Audit:
    """Answer a reply's prompt once more, in full, and measure the distance. Two prompt caches are in memory
    meanwhile."""
    with session.lock:
        started = time.perf_counter()
        whole = _in_full(session, uncached(reply.fused.plan), options)
        reference = Reference.answered(session.decoder, whole, options.max_tokens)
        del whole  # its rows are as many as the reply's
        forced = reference.force(reply.fused)
        milliseconds = add_span(session.timeline, "audit", started) * 1e3
    selector, plan, sampled = reply.selector, reply.fused.plan, not options.is_greedy
    greedily = forced.distance.agreement == 1.0
    tokens = {name: reply.tokens[name] for name in ("prompt", "reused", "recomputed", "fresh", "dropped")}
    return Audit(
        at=int(time.time()),
        question=shortened(reply.question),
        revision=reply.revision,
        fusion=selector.name,
        amount=selector.amount if selector.knob else None,
        changes=changes_of(selector),
        levels=plan.levels,
        lead_in=session.identity.lead_in.mode,
        tokens=tokens | {"script": len(forced.best)},
        holes=sum(chunk.status == "miss" for chunk in plan.chunks),
        sampled=sampled,
        kl_first=forced.distance.kl_first,
        kl_answer=forced.distance.kl_answer,
        top1_agrees=forced.distance.first_agrees,
        answer_equal=greedily if sampled else _is_same(reply.generated, forced.reference.answer),
        milliseconds=round(milliseconds, 3),
    )


def _in_full(session: Session, plan: Plan, options: QueryOptions) -> Fused:
    if session.identity.keeps_states:
        return fuse_after_checkpoints(session, plan, Full(), options).fused
    return fuse(session.decoder, plan, Full(), session.source, options.max_tokens)


def uncached(plan: Plan) -> Plan:
    """Return the same prompt, rows that were not there among it, as one segment of which nothing is stored."""
    return build_plan(Candidate(()), [], plan.text_ids)


def _is_same(said: Generated, full: Generated) -> bool:
    return said.ids == (full.ids[: len(said.ids)] if said.finish == "repeat" else full.ids)


def changes_of(selector: Selector) -> dict[str, Any]:
    """Return the parameters of a mode that are not its own, but for the amount."""
    return {
        each.name: value
        for each in fields(cast(Any, selector))
        if each.name != selector.knob
        and each.default is not MISSING
        and (value := getattr(selector, each.name)) != each.default
    }


def compare(
    session: Session, request: Request, options: QueryOptions, modes: Sequence[str], retrieved: Retrieved | None = None
) -> list[Reply]:
    """Answer in full and in each of `modes`, and measure each reply's KL in nats from the full one: `kl_first` of the
    first token, `kl_answer` the mean over the reference's own greedy answer, end token included. Retrieval counts in
    each TTFT. Raises UsageError: see `QueryOptions.check_comparable`."""
    options.check_comparable()
    options = replace(options, stop_repeats=False)  # each answer as the model gives it, to its end
    with session.lock:
        if not session.identity.keeps_states:  # else the first mode would be full prefill
            store_empty(session, lay_out(session, request, options, retrieved=retrieved).plan)
        full = answer(session, request, replace(options, fusion=REFERENCE), retrieved=retrieved)
        reference = Reference.of(session.decoder, full.fused, full.generated)
        full.comparison = SAME.to_json() | {"answer_equal": True}
        replies = [full]
        for mode in (mode for mode in dict.fromkeys(modes) if mode != REFERENCE):
            reply = answer(session, request, replace(options, fusion=mode), None, len(replies) > 1, retrieved)
            distance = reference.force(reply.fused).distance
            reply.comparison = distance.to_json() | {"answer_equal": reply.generated.ids == full.generated.ids}
            replies.append(reply)
    return replies
