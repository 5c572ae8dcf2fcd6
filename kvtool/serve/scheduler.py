"""Scheduler of questions: one thread runs the model, one prompt at a time, and decodes all answers in turn."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.core.cache.environment import Closed
from kvtool.core.cache.layout import read_uuid
from kvtool.core.common.types import Warn
from kvtool.core.errors import KvtoolError, ModelError, StoreFormatError, StoreNotFoundError
from kvtool.core.model.options import ModelOptions
from kvtool.serve.conversations import ConversationCache
from kvtool.serve.job import (
    Answer,
    Ask,
    BusyError,
    CachedConversation,
    Event,
    FairQueue,
    Job,
    LeftError,
    PromptTokens,
    Tell,
    as_error,
)
from kvtool.serve.learning import Learner
from kvtool.serve.options import ServeOptions

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.model.generate import ContinuousBatch
    from kvtool.core.query.answer import PreparedAnswer
    from kvtool.core.session.session import Session

_RETRY_AFTER = (1, 60)  # seconds, at least and at most
# Seconds of a prompt between two tokens of other answers; at least as long as the last decoding step took.
_SLICE = 0.05
_ENDED = "the server has ended"


class LoadedModel:
    """A store's session, with its model in memory. One thread at a time may ask for the session.

    `learn`: adds learned passages to each session that is opened. `spare`: a loaded model for a store that is not open
    yet.
    """

    def __init__(
        self, place: Path | str, model: ModelOptions, memory_cache: int, warn: Warn, learn: Callable[[Session], Session]
    ) -> None:
        self.place = place
        self._model, self._memory_cache, self._warn, self._learn = model, memory_cache, warn, learn
        self._session: Session | None = None
        self.spare: Decoder | None = None

    @property
    def decoder(self) -> Decoder | None:
        return self._session.decoder if self._session is not None else None

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext() if self._session is None else self._session.decoder.turns.turn()

    def session(self) -> Session:
        """Return the session of the current store, which may have replaced the open one."""
        if self._session is not None and not self._is_current(self._session):
            self._open(self.close())
        return self._session or self._open(None)

    def _is_current(self, session: Session) -> bool:
        if isinstance(self.place, Path) and read_uuid(self.place) != session.store.uuid:
            return False
        try:
            session.store.follow()
            session.refresh()
        except (ModelError, StoreFormatError):
            return False
        return True

    def _open(self, decoder: Decoder | None) -> Session:
        from kvtool.core.remote.mirror import open_store
        from kvtool.core.session.identity import store_identity
        from kvtool.core.session.session import Session

        is_start = decoder is None
        store, decoder = open_store(self.place, warn=self._warn), decoder or self.spare
        self.spare = None
        try:
            identity = store_identity(store)
            if decoder is not None and (
                decoder.loaded.fingerprint != identity.fingerprint
                or str(decoder.kv_dtype).removeprefix("torch.") != identity.dtype
            ):
                decoder = None  # it is not the store's
            session = Session.open(
                store, self._model, decoder=decoder, warn=self._warn, memory_cache=self._memory_cache
            )
            _ = session.decoder
            try:
                session = self._learn(session)
            except KvtoolError as error:
                if is_start:
                    raise
                self._warn(f"the new store's passages are not learned: {error.message}", error.hint)
        except BaseException:
            store.close()
            raise
        self._session = session
        return session

    def count(self, ask: Ask) -> int:
        """Return the tokens of a question, without passages; in any thread."""
        from kvtool.core.model.prompt import question_tokens, said_tokens, turn_header
        from kvtool.core.query.prompt import parts_for

        if (session := self._session) is None:
            raise ModelError("no model is loaded, so there is no tokenizer", "ingest a document first")
        ask, tokenizer = _told(ask, session), session.tokenizer
        parts = parts_for(session, ask.options)
        count = len(parts.prefix) + len(question_tokens(tokenizer, ask.request.question, parts, ask.request.prefill))
        for question, answer in ask.turns or ():
            count += len(question_tokens(tokenizer, question, parts)) + len(said_tokens(tokenizer, answer))
        return count + (len(turn_header(tokenizer)) * len(ask.turns) if ask.turns else 0)

    def exists(self) -> bool:
        if isinstance(self.place, Path):
            try:
                read_uuid(self.place)
            except StoreNotFoundError:
                return False
        return True

    def close(self) -> Decoder | None:
        decoder, session, self._session = self.decoder, self._session, None
        if session is not None:
            session.close()
        return decoder


def _told(ask: Ask, session: Session) -> Ask:
    if not ask.tools:
        return ask
    from kvtool.core.model.prompt import with_tools

    system = with_tools(session.tokenizer, ask.options.system or session.identity.system, ask.tools)
    said = tuple(message for message in ask.request.messages if message[0] != "system")
    request = replace(ask.request, messages=(("system", system), *said) if said else ())
    return replace(ask, request=request, options=replace(ask.options, system=system), tools=())


class Scheduler:
    """Scheduler that answers jobs in the order of a `FairQueue`.

    A turn brings one prompt to its first token, if an answer may begin, and then decodes one token of every answer.
    Between two layers of a prompt, tokens of the other answers are decoded, too, so that no answer waits for another
    one or for a long prompt. A prompt with earlier turns of a conversation is interrupted between two turns while other
    questions wait, and continues after the first of them. A draft (`verify`) is checked after its last token, and
    chunks are stored after the answer, in the same way. A turn after which nothing runs or waits learns one passage.
    """

    def __init__(self, model: LoadedModel, warn: Warn, options: ServeOptions, conversations: ConversationCache) -> None:
        self._model, self._warn, self._conversations = model, warn, conversations
        self._parallel, self._timeout = options.parallel, options.request_timeout
        self._changed = threading.Condition()
        self._waiting = FairQueue(options.queue)
        self._running: list[Job] = []
        self._aside: deque[Job] = deque()  # of those, interrupted prompts
        self._current: Job | None = None  # that is being computed, so that warnings belong to it
        self._stepped = self._step_took = 0.0  # end of the last step by `time.monotonic()`, and its seconds
        self._drafts: deque[Job] = deque()  # of those, answers that full prefill is to check
        self._unkept: deque[PreparedAnswer | CachedConversation] = deque()
        self._learner = Learner() if options.learn else None
        self._seconds = 1.0  # moving average of an answer's duration
        self._taking, self._stopped = True, False
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
            if not self._taking:
                raise BusyError("the server is about to end", _RETRY_AFTER[0])
            last = self._waiting.add(job)
            least, most = _RETRY_AFTER
            retry_after = int(min(most, max(least, self._seconds * len(self._waiting) / self._parallel)))
            busy = BusyError(f"{len(self._waiting)} questions wait already", retry_after)
            self._changed.notify_all()
        if last is job:
            raise busy
        if last is not None:
            self._tell(last, busy)
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
            self._taking = False

    def close(self) -> None:
        with self._changed:
            self._taking, self._stopped = False, True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    # ---- in the engine's thread ----

    def _run(self) -> None:
        from kvtool.core.model.generate import ContinuousBatch

        batch = ContinuousBatch()
        while self._is_work():
            with self._model.turn():
                self._turn(batch)
        for job in self._jobs():
            self._end(job, BusyError(_ENDED, _RETRY_AFTER[0]))

    def _is_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._running or self._stopped or self._can_learn)
            return not self._stopped

    @property
    def _can_learn(self) -> bool:
        return self._taking and self.learning > 0 and not self._running and not self._waiting

    def _turn(self, batch: ContinuousBatch) -> None:
        jobs = [self._next(), self._aside.popleft() if self._aside else None]
        self._drop_lost(batch)  # before the next job begins: their conversations can be reused
        for job in jobs:
            if job is not None and not job.ended:
                self._begin(job, batch)
        self._step(batch)
        if self._drafts:  # one of them, so that a question that waits begins before the next
            self._check(self._drafts.popleft(), batch)
        while self._unkept:
            unkept = self._unkept.popleft()
            self._do_later(unkept.keep, "the computed chunks of a prompt could not be stored", batch)
        if self._learner is not None and self._can_learn:  # one chunk at most: a question may come meanwhile
            learn = partial(self._learner.step, self._model.session)
            self._do_later(learn, "a passage could not be learned", batch)

    def _step(self, batch: ContinuousBatch) -> None:
        started = time.monotonic()
        try:
            done = batch.step()
        except Exception as error:  # most likely out of memory: unknown which of them could go on
            for job in [job for job in self._running if job.sequence is not None]:
                self._end(job, as_error(error))
            batch.sequences.clear()
            done = []
        ended = {id(sequence) for sequence in done}
        for job in [job for job in self._running if id(job.sequence) in ended]:
            self._answer(job)
        self._stepped = time.monotonic()
        self._step_took = self._stepped - started

    def _run_others(self, batch: ContinuousBatch, job: Job | None = None) -> None:
        """Decode tokens of other answers between two layers, if it is time. Raises KvtoolError to abandon the job."""
        if job is not None and self._stopped:
            raise BusyError(_ENDED, _RETRY_AFTER[0])
        if job is not None and (lost := job.lost) is not None:
            raise lost
        if not batch.sequences or not self._is_time():
            return
        started, self._current = time.monotonic(), None
        try:
            self._drop_lost(batch, but=job)
            self._step(batch)
        finally:
            self._current = job
        if job is not None:
            job.others_ms += (time.monotonic() - started) * 1e3

    def _next(self) -> Job | None:
        with self._changed:
            if not self._waiting or len(self._running) >= self._parallel:
                return None
            job = self._waiting.take()
            self._running.append(job)
            return job

    def _jobs(self) -> list[Job]:
        with self._changed:
            return [*self._running, *self._waiting]

    def _is_time(self) -> bool:
        return time.monotonic() - self._stepped >= max(_SLICE, self._step_took)

    def _drop_lost(self, batch: ContinuousBatch, but: Job | None = None) -> None:
        """End jobs that are abandoned or take too long; `but`: the one whose prompt is computed."""
        for job in self._jobs():
            if job is not but and (lost := job.lost) is not None:
                if job.sequence is not None:
                    batch.remove(job.sequence)
                self._end(job, lost)

    def _begin(self, job: Job, batch: ContinuousBatch) -> None:
        from kvtool.core.model.generate import AnswerSequence

        job.queue_ms += (time.monotonic() - (job.aside or job.arrived)) * 1e3
        with self._computing(job):
            begun = job.begun = self._begun(job, batch)
            if begun is None:
                job.aside = time.monotonic()
                self._aside.append(job)
                return
            cache, decoder, counts = begun.outcome.fused.cache, begun.session.decoder, begun.outcome.fused.tokens
            kept = 0 if job.cached is None else min(job.cached.kept, counts.resident)
            job.tokens = PromptTokens(counts.prompt, counts.reused + kept)
            sampling = replace(begun.sampling, stop=job.ask.stop)
            job.sequence = AnswerSequence(decoder, cache, begun.known, sampling, partial(self._tell, job))
            batch.add(job.sequence)

    @contextmanager
    def _computing(self, job: Job) -> Iterator[None]:
        self._current = job
        try:
            yield
        except Exception as error:
            self._end(job, as_error(error))
        finally:
            self._current = None

    def _begun(self, job: Job, batch: ContinuousBatch, is_again: bool = False) -> PreparedAnswer | None:
        """Return a job's computed prompt; None: it is interrupted. Tried again if the store was just replaced."""
        session = self._model.session()
        if job.session is not session:
            job.session, job.steps = session, self._steps_of(job, session)
        try:
            with session.decoder.pausing(lambda: self._run_others(batch, job)):
                return self._stepped_through(job, session.decoder)
        except (ModelError, StoreFormatError):
            if is_again or session is self._model.session():
                raise
        return self._begun(job, batch, is_again=True)

    def _steps_of(self, job: Job, session: Session) -> Generator[PreparedAnswer | None]:
        """Bring a job to its first token. Yields None between two turns of its conversation, at last the prompt."""
        from kvtool.core.query.answer import begin_answer
        from kvtool.core.query.prompt import lay_out, lay_out_messages

        ask = _told(job.ask, session)
        with session.lock, session.store.view():
            asked = lay_out_messages(session, ask.request, ask.options)
            if asked is None:
                ask = job.ask = replace(ask, request=replace(ask.request, messages=()))
            if asked is None and ask.turns is None:
                asked = lay_out(session, ask.request, ask.options, must_find=ask.must_find)
            begun = None if asked is None else begin_answer(session, asked, ask.options)
        if begun is not None:
            yield begun
            return
        for cached in self._conversations.begin(session, ask):
            job.cached = cached
            yield None if cached is None else cached.begun

    def _stepped_through(self, job: Job, decoder: Decoder) -> PreparedAnswer | None:
        assert job.steps is not None
        started = time.monotonic()
        while (begun := next(job.steps)) is None:
            decoder.pause()
            others_can_begin = self._aside or (self._waiting and len(self._running) < self._parallel)
            if others_can_begin and time.monotonic() - started >= _SLICE:
                return None
        return begun

    def _answer(self, job: Job) -> None:
        assert job.begun is not None
        assert job.sequence is not None
        begun = job.begun
        try:
            said = job.sequence.end()
            if job.checked is None and begun.is_draft:
                job.draft, job.drafted, job.sequence = said, time.perf_counter(), None
                self._drafts.append(job)
                return
            event: Event = Answer.of((job.cached or begun).reply(said, job.checked), job)
        except Exception as error:
            event = as_error(error)
        if isinstance(event, Answer):
            self._unkept.append(job.cached or begun)
            if self._learner is not None and job.ask.request.messages:
                self._learner.add(job.ask.request)
        self._end(job, event)

    def _check(self, job: Job, batch: ContinuousBatch) -> None:
        """Check a draft by full prefill; what is left to generate joins the batch, and the job ends with that."""
        from kvtool.core.model.generate import AnswerSequence

        begun, draft = job.begun, job.draft
        if begun is None or draft is None:  # it was abandoned
            return
        decoder = begun.session.decoder
        with self._computing(job), decoder.pausing(lambda: self._run_others(batch, job)):
            sampling = replace(begun.sampling, stop=job.ask.stop)
            checked = job.checked = begun.check(draft, sampling, job.drafted)
            job.sequence = AnswerSequence(decoder, checked.exact.cache, checked.known, sampling)
            batch.add(job.sequence)

    def _do_later(self, work: Callable[[], object], failure: str, batch: ContinuousBatch) -> None:
        """Do work after answers, which are valid without it."""
        decoder = self._model.decoder
        pausing = nullcontext() if decoder is None else decoder.pausing(lambda: self._run_others(batch))
        try:
            with pausing:
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
        if job.cached is not None:
            self._conversations.hold(job.cached.conversation, job.ask.request)
        job.begun = job.sequence = job.cached = job.steps = job.session = job.draft = job.checked = None
        if isinstance(event, Answer):
            took = time.monotonic() - job.arrived - job.queue_ms / 1e3
            self._seconds += (took - self._seconds) / 8
        failed = job.failed
        self._tell(job, failed or event)
        if job.failed is not None and job.failed is not failed:
            self._tell(job, job.failed)  # in its place
        job.ended = True

    def _tell(self, job: Job, event: Event) -> None:
        """Send an event. A job ends if its client has left, and fails if sending fails otherwise."""
        try:
            job.tell(event)
        except LeftError:
            job.left = True
        except Exception as error:
            job.failed = as_error(error)
            self._warn(f"an event could not be sent: {job.failed.message}", job.failed.hint)
