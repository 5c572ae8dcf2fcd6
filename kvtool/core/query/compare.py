"""The same question in several modes, each measured against full recompute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvtool.core.errors import UsageError
from kvtool.core.evaluate.reference import SAME, Reference
from kvtool.core.fusion.selectors import REFERENCE
from kvtool.core.query.answer import answer
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Reply, Request
from kvtool.core.session.session import Session


def compare(session: Session, request: Request, options: QueryOptions, modes: Sequence[str]) -> list[Reply]:
    """Answer in full and in each of `modes`, and measure how far each reply is from the full one.

    `kl_first`: KL in nats of the first token's distribution. `kl_answer`: mean over the reference's own greedy answer,
    teacher-forced, end token included. Every run starts at the question's text: retrieval counts in each TTFT.

    Raises
    ------
    UsageError : `options` ask for deferred loading, with which every mode might stop at another prompt.
    """
    if options.defer:
        raise UsageError("--compare answers from whole prompts", "leave --defer out, or give --no-defer")
    with session.lock:  # each answer as the model gives it, to its end
        return _compare(session, request, replace(options, stop_repeats=False), modes)


def _compare(session: Session, request: Request, options: QueryOptions, modes: Sequence[str]) -> list[Reply]:
    full = answer(session, request, replace(options, fusion=REFERENCE))
    reference = Reference.of(session.decoder, full.fused, full.generated)
    full.comparison = SAME.to_json() | {"answer_equal": True}
    replies = [full]
    for mode in (mode for mode in dict.fromkeys(modes) if mode != REFERENCE):
        reply = answer(session, request, replace(options, fusion=mode), again=len(replies) > 1)
        distance = reference.force(reply.fused).distance
        reply.comparison = distance.to_json() | {"answer_equal": reply.generated.ids == full.generated.ids}
        replies.append(reply)
    return replies
