"""The life of a job, from its prompt to the storage of the chunks that were computed for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvtool.core.errors import ModelError, StoreFormatError
from kvtool.serve.conversations import ConversationCache
from kvtool.serve.job import Answer, CachedConversation, Job, Step, TokenCounts
from kvtool.serve.loaded_model import LoadedModel, describe_tools

if TYPE_CHECKING:
    from kvtool.core.query.answer import PreparedAnswer
    from kvtool.core.session.session import Session


_Prompt = tuple["PreparedAnswer", CachedConversation | None]


def steps_of(
    job: Job,
    model: LoadedModel,
    conversations: ConversationCache,
    pause: Callable[[Job | None], None],
) -> Generator[Step]:
    """Answer a question. It may be closed after each step; its conversation is cached all the same.

    `pause` is called between two layers, with the job as long as it can be abandoned.
    """
    from kvtool.core.model.generate import AnswerSequence

    prepared, cached = yield from _prefill(job, model, conversations, pause)
    fused, decoder = prepared.outcome.fused, prepared.session.decoder
    cached_rows = 0 if cached is None else min(cached.rows, fused.tokens.resident)
    job.tokens = TokenCounts(fused.tokens.prompt, fused.tokens.reused + cached_rows)
    sampling, checked = replace(prepared.sampling, stop=job.ask.stop), None
    try:
        sequence = job.sequence = AnswerSequence(decoder, fused.cache, prepared.known, sampling, job.tell)
        yield Step.DECODE
        generated = sequence.end()
        if prepared.is_draft:
            drafted = time.perf_counter()
            yield Step.VERIFY
            with decoder.pausing(partial(pause, job)):
                checked = prepared.check(generated, sampling, drafted)
            sequence = job.sequence = AnswerSequence(decoder, checked.exact.cache, checked.known, sampling)
            yield Step.DECODE
            generated = sequence.end()
        job.answer = Answer.of((cached or prepared).reply(generated, checked), job, prepared)
    finally:
        if cached is not None:
            conversations.hold(cached.conversation, job.ask.request)
    yield Step.DONE
    with decoder.pausing(partial(pause, None)):
        (cached or prepared).store_chunks()


def _prefill(
    job: Job, model: LoadedModel, conversations: ConversationCache, pause: Callable[[Job | None], None]
) -> Generator[Step, None, _Prompt]:
    """Bring the prompt to its first token; from its beginning where the store is replaced meanwhile."""
    session = model.session()
    while True:
        with closing(_turns(job, session, conversations)) as turns:
            while (current := model.session()) is session:
                try:
                    with session.decoder.pausing(partial(pause, job)):
                        prompt = next(turns)
                except (ModelError, StoreFormatError):
                    if model.session() is session:
                        raise
                    continue
                if prompt is not None:
                    return prompt
                yield Step.PREFILL
        session = current


def _turns(job: Job, session: Session, conversations: ConversationCache) -> Generator[_Prompt | None]:
    """Yield None after each turn of the prompt, at last the prompt."""
    from kvtool.core.query.answer import load_and_fuse
    from kvtool.core.query.prompt import lay_out, lay_out_messages

    ask = describe_tools(job.ask, session)
    with session.lock, session.store.view():
        layout = lay_out_messages(session, ask.request, ask.options)
        if layout is None:
            ask = job.ask = replace(ask, request=replace(ask.request, messages=()))
            if ask.turns is None:
                layout = lay_out(session, ask.request, ask.options, must_find=ask.must_find)
        prepared = None if layout is None else load_and_fuse(session, layout, ask.options)
    if prepared is not None:
        yield prepared, None
        return
    for cached in conversations.begin(session, ask):
        yield None if cached is None else (cached.prepared, cached)
