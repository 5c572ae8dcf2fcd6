"""The same question in several modes, each measured against full recompute."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtool.core.errors import UsageError
from kvtool.core.evaluate.scoring import kl
from kvtool.core.fusion.engine import forced_logits
from kvtool.core.query.reply import QueryOptions, Reply, Request
from kvtool.core.session.session import Session

REFERENCE = "full"


def compare(session: Session, request: Request, options: QueryOptions, modes: Sequence[str]) -> list[Reply]:
    """One reply for the reference and one for each of `modes`, with their distance to the reference.

    `kl_first`: KL in nats of the first token's distribution. `kl_answer`: mean over the reference's own greedy answer,
    teacher-forced, end token included. Every run starts at the question's text: retrieval counts in each TTFT.

    Raises
    ------
    UsageError : `options` ask for deferred loading, with which every mode might stop at another prompt.
    """
    if options.defer:
        raise UsageError("--compare answers from whole prompts", "leave --defer out, or give --no-defer")
    with session.lock:
        return _compare(session, request, options, modes)


def _compare(session: Session, request: Request, options: QueryOptions, modes: Sequence[str]) -> list[Reply]:
    reference = session.answer(session.lay_out(request, options), options, REFERENCE)
    script = [*reference.generated.ids, *([] if reference.generated.end is None else [reference.generated.end])]
    expected = forced_logits(session.decoder, reference.fused, script)
    replies = [reference]
    for mode in (mode for mode in dict.fromkeys(modes) if mode != REFERENCE):
        reply = session.answer(session.lay_out(request, options), options, mode)
        reply.comparison = _distance(expected, forced_logits(session.decoder, reply.fused, script), reference, reply)
        replies.append(reply)
    reference.comparison = _distance(expected, expected, reference, reference)
    return replies


def _distance(expected: torch.Tensor, logits: torch.Tensor, reference: Reply, reply: Reply) -> dict[str, object]:
    return {
        "kl_first": kl(expected[:1], logits[:1]),
        "kl_answer": kl(expected, logits),
        "top1_agrees": bool(expected[0].argmax() == logits[0].argmax()),
        "answer_equal": reference.generated.ids == reply.generated.ids,
    }
