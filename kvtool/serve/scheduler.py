"""Scheduler of questions, and the steps of each: one thread computes a prompt at a time, and decodes all answers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvtool.core.cache.environment import Closed
from kvtool.core.common.types import Warn
from kvtool.core.errors import ModelError, StoreFormatError
from kvtool.serve.conversations import ConversationCache
from kvtool.serve.idle import IdleWork, Interrupted
from kvtool.serve.job import (
    Answer,
    Ask,
    BusyError,
    CachedConversation,
    Event,
    FairQueue,
    Job,
    Step,
    Tell,
    TokenCounts,
    as_error,
)
from kvtool.serve.learning import Learner
from kvtool.serve.loaded_model import LoadedModel, describe_tools
from kvtool.serve.options import ServeOptions

if TYPE_CHECKING:
    from kvtool.core.model.generate import ContinuousBatch
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


# Seconds of a prompt between two tokens of other answers; at least as long as the last decoding step took.
_SLICE = 0.05
_ENDED = "the server has ended"


class Scheduler:
    """Scheduler that chooses which job takes its next step (`steps_of`), in the order of a `FairQueue`.

    A turn brings one prompt to its first token, if an answer may begin, and then decodes one token of every answer.
    Between two layers of a prompt, tokens of the other answers are decoded, too, so that no answer waits for another
    one or for a long prompt. A prompt with earlier turns of a conversation is suspended between two turns while other
    questions wait, and continues after the first of them. A draft is checked, and chunks are stored, in the same way.
    A turn after which nothing runs or waits learns one passage, or computes some chunks without KV (`IdleWork`).
    """

    _batch: ContinuousBatch

    def __init__(self, model: LoadedModel, warn: Warn, options: ServeOptions, conversations: ConversationCache) -> None:
        self._model, self._warn, self._conversations = model, warn, conversations
        self._parallel, self._timeout = options.parallel, options.request_timeout
        self._changed = threading.Condition()
        self._waiting = FairQueue(options.queue)
        self._running: list[Job] = []
        self._suspended: deque[Job] = deque()  # of those, interrupted prompts
        self._current: Job | None = None  # that is being computed, so that warnings belong to it
        self._stepped = self._step_took = 0.0  # end of the last step by `time.monotonic()`, and its seconds
        self._drafts: deque[Job] = deque()  # of those, answers that full prefill is to check
        self._finished: deque[Generator[Step]] = deque()  # of jobs that are done
        self._learner = Learner() if options.learn else None
        self._idle = IdleWork(options)
        self._accepting, self._stopped = True, False
        self._thread = threading.Thread(target=self._run, name="kvtool-engine", daemon=True)

    # ---- from any thread ----

    def start(self) -> None:
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def learning(self) -> int:
        return len(self._learner) if self._learner is not None else 0

    def submit(self, ask: Ask, tell: Tell) -> Job:
        """Add a question. If the queue is full, the newest of the client with the most is refused."""
        job = Job(ask, tell, self._timeout)
        with self._changed:
            if not self._accepting:
                raise BusyError("the server is about to end")
            last = self._waiting.add(job)
            busy = BusyError(f"{len(self._waiting)} questions wait already")
            self._changed.notify_all()
        if last is job:
            raise busy
        if last is not None:
            last.tell(busy)
            last.ended = True
        return job

    def leave(self, job: Job) -> None:
        """Abandon a job: it ends before its next token, or leaves the queue."""
        with self._changed:
            job.left = True
            if job in self._waiting:
                self._waiting.remove(job)
                job.ended = True
            self._changed.notify_all()

    def warned(self, text: str, hint: str) -> bool:
        job = self._current
        if job is not None:
            job.warnings.append((text, hint))
        return job is not None

    def refuse(self) -> None:
        with self._changed:
            self._accepting = False

    def close(self) -> None:
        with self._changed:
            self._accepting, self._stopped = False, True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    # ---- in the engine's thread ----

    def _run(self) -> None:
        from kvtool.core.model.generate import ContinuousBatch

        self._batch = ContinuousBatch()
        while self._is_work():
            with self._model.turn():
                self._turn()
        for job in self._jobs():
            self._end(job, BusyError(_ENDED))

    def _is_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting or self._running or self._stopped or self._can_learn, self._idle_wait
            )
            return not self._stopped

    @property
    def _idle_wait(self) -> float | None:
        return self._idle.wait(self._model.missed) if self._accepting else None

    @property
    def _can_learn(self) -> bool:
        return self._accepting and self.learning > 0 and not self._running and not self._waiting

    def _turn(self) -> None:
        jobs = [self._next(), self._suspended.popleft() if self._suspended else None]
        self._drop_lost()  # before the next job begins: their conversations can be reused
        for job in jobs:
            if job is not None and not job.ended:
                self._begin(job)
        self._step()
        if self._drafts:  # one of them, so that a question that waits begins before the next
            self._advance(self._drafts.popleft())
        while self._finished:
            keep = partial(next, self._finished.popleft(), None)
            self._do_later(keep, "the computed chunks of a prompt could not be stored")
        if self._learner is not None and self._can_learn:  # one chunk at most: a question may come meanwhile
            self._learn(self._learner)
        elif self._accepting and not self._running and not self._waiting and self._idle_wait == 0:
            work = partial(self._idle.step, self._model.session, self._interrupt)
            self._do_later(work, "KV could not be stored in idle time")

    def _interrupt(self) -> None:
        if self._waiting or self._stopped:
            raise Interrupted

    def _next(self) -> Job | None:
        with self._changed:
            if not self._can_begin:
                return None
            job = self._waiting.take()
            self._running.append(job)
            return job

    @property
    def _can_begin(self) -> bool:
        return bool(self._waiting) and len(self._running) < self._parallel

    def _begin(self, job: Job) -> None:
        """Begin a job, or continue one that was suspended."""
        job.queue_ms += (time.monotonic() - job.since) * 1e3
        if job.steps is None:
            job.steps = steps_of(job, self._model, self._conversations, self._run_others)
        self._advance(job)

    def _advance(self, job: Job) -> None:
        """Continue a job until it is decoded, waits for others, or ends."""
        started, job.sequence, steps = time.monotonic(), None, job.steps
        if steps is None:  # it was abandoned
            return
        self._current = job
        try:
            while (step := next(steps)) is Step.PREFILL:
                self._run_others(job)
                if (self._suspended or self._can_begin) and time.monotonic() - started >= _SLICE:
                    job.since = time.monotonic()
                    self._suspended.append(job)
                    return
            if step is Step.DECODE and job.sequence is not None:
                self._batch.add(job.sequence)
            elif step is Step.VERIFY:
                self._drafts.append(job)
            elif job.answer is not None:
                job.steps = None
                self._finished.append(steps)
                if self._learner is not None and job.ask.request.messages:
                    self._learner.add(job.ask.request)
                self._end(job, job.answer)
        except Exception as error:
            self._end(job, as_error(error))
        finally:
            self._current = None

    def _step(self) -> None:
        """Decode one token of every answer."""
        started = time.monotonic()
        try:
            done = self._batch.step()
        except Exception as error:  # most likely out of memory: unknown which of them could go on
            for job in [job for job in self._running if job.sequence is not None]:
                self._end(job, as_error(error))
            self._batch.sequences.clear()
            done = []
        ended = {id(sequence) for sequence in done}
        for job in [job for job in self._running if id(job.sequence) in ended]:
            self._advance(job)
        self._stepped = time.monotonic()
        self._step_took = self._stepped - started

    def _run_others(self, job: Job | None) -> None:
        """Decode tokens of other answers between two layers, if it is time. Raises KvtoolError to abandon the job."""
        if job is not None and self._stopped:
            raise BusyError(_ENDED)
        if job is not None and (lost := job.lost) is not None:
            raise lost
        if not self._batch.sequences or not self._is_time():
            return
        started, self._current = time.monotonic(), None
        try:
            self._drop_lost(but=job)
            self._step()
        finally:
            self._current = job
        if job is not None:
            job.others_ms += (time.monotonic() - started) * 1e3

    def _is_time(self) -> bool:
        return time.monotonic() - self._stepped >= max(_SLICE, self._step_took)

    def _jobs(self) -> list[Job]:
        with self._changed:
            return [*self._running, *self._waiting]

    def _drop_lost(self, but: Job | None = None) -> None:
        """End jobs that are abandoned or take too long; `but`: the one whose prompt is computed."""
        for job in self._jobs():
            if job is not but and (lost := job.lost) is not None:
                if job.sequence is not None:
                    self._batch.remove(job.sequence)
                self._end(job, lost)

    def _learn(self, learner: Learner) -> None:
        decoder = self._model.decoder
        with nullcontext() if decoder is None else decoder.pausing(partial(self._run_others, None)):
            self._do_later(partial(learner.step, self._model.session), "a passage could not be learned")

    def _do_later(self, work: Callable[[], object], failure: str) -> None:
        """Do work after answers, which are valid without it."""
        try:
            work()
        except Closed:  # replaced by another store
            return
        except Exception as error:
            failed = as_error(error)
            self._warn(f"{failure}: {failed.message}", failed.hint)

    def _end(self, job: Job, event: Event) -> None:
        with self._changed:
            jobs: FairQueue | list[Job] = self._running if job in self._running else self._waiting
            if job not in jobs:
                return
            jobs.remove(job)
            self._changed.notify_all()
        if job.steps is not None:
            job.steps.close()  # which caches its conversation
        job.steps = job.sequence = None
        job.tell(event)
        job.ended = True
