"""Lay out a prompt that holds stored passages itself: a client's own messages, of which what is stored is reused.

A program that retrieves by itself pastes passages into its prompt. They are found by their token ids
(retrieval/spotting.py), take their stored KV with them to where they are, and all other tokens are computed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtool.core.common.timeline import add_span
from kvtool.core.common.types import Ids
from kvtool.core.fusion.plan import Candidate, build_plan
from kvtool.core.model.prompt import message_tokens
from kvtool.core.query.prompt import PromptLayout, lay_out, part_of_chunk
from kvtool.core.query.reply import OWN_TEXT
from kvtool.core.retrieval.passages import Hit

if TYPE_CHECKING:
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.query.reply import Request
    from kvtool.core.retrieval.spotting import Span
    from kvtool.core.session.session import Session

FEWEST = 48  # tokens of stored passages, at least, that show that a client retrieves by itself


def lay_out_request(session: Session, request: Request, options: QueryOptions) -> PromptLayout:
    """Lay out a request by the passages that its messages hold; without any, chunks are found. Raises as `lay_out`."""
    spotted = lay_out_messages(session, request, options)
    return spotted or lay_out(session, replace(request, messages=()), options)


def lay_out_messages(session: Session, request: Request, options: QueryOptions) -> PromptLayout | None:
    """Lay out the messages of a request with what is stored of them.

    Returns
    -------
    None : they hold no stored passage, or the model's template cannot be followed; chunks are to be found then.

    Raises
    ------
    UsageError : the prompt is longer than a loaded model's context.
    """
    if not request.messages or session.identity.keeps_states:
        return None
    started = time.perf_counter()
    with session.lock, session.store.view():
        session.refresh()
        ids = message_tokens(session.tokenizer, request.messages)
        spans = session.finder.spot(ids) if ids else []
        if ids is None or sum(map(len, spans)) < FEWEST:
            return None
        if session.is_loaded:
            session.decoder.check_length(len(ids) + options.max_tokens, "shorten the messages, or lower max_tokens")
        parts = list(_parts(session, options, ids, spans))
        passages = session.finder.index.passages([span.chunk_id for span in spans])
        hits = [Hit(passages[span.chunk_id], math.nan) for span in spans]
        plan = build_plan(parts[0], parts[1:], ids[spans[-1].stop :])
        revision = session.store.revision()
    return PromptLayout(request, hits, plan, add_span(session.timeline, "spot", started) * 1e3, revision)


def _parts(session: Session, options: QueryOptions, ids: Ids, spans: Sequence[Span]) -> Iterator[Candidate]:
    """Yield the prompt's parts before the question: passages, and the client's own text between them."""
    before = 0
    for number, span in enumerate(spans):
        if number == 0 or span.start > before:
            yield Candidate(ids[before : span.start], reason=OWN_TEXT)
        yield part_of_chunk(session, span.chunk_id, ids[span.start : span.stop], span.skipped, options)
        before = span.stop
