"""Scheduler of questions: one thread runs the model, one prompt at a time, and writes all begun answers in turn."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtool.core.cache.environment import Closed
from kvtool.core.common.types import Warn
from kvtool.core.errors import ModelError, StoreFormatError
from kvtool.serve.job import Answer, Ask, BusyError, Event, Job, LeftError, Talk, Tell, as_error
from kvtool.serve.line import Line
from kvtool.serve.resident import Resident
from kvtool.serve.talks import Talks, begun_for

if TYPE_CHECKING:
    from kvtool.core.model.generate import ContinuousBatch
    from kvtool.core.query.answer import PreparedAnswer

_ANOTHER_STORE = 2  # times that a question may find another store than the one that was there a moment before
_RETRY_AFTER = (1, 60)  # seconds, at least and at most
# Seconds of a prompt between two tokens of other answers; a step that takes longer itself has the prompt go on as long.
_SLICE = 0.05
_ENDED = "the server has ended"


class Scheduler:
    """Answers jobs, one of each client after another (`Line`).

    A turn takes one prompt to its first token, where an answer may begin, and then one step of every answer that was
    begun. A prompt of many turns is put aside between two of them where other questions wait, and goes on behind the
    first of those. Between the layers of a prompt, too, steps are taken, so that no answer waits for the end of
    another, nor for a long prompt. What is stored of an answer is made when its turn is over, in the same way.

    Parameters
    ----------
    parallel : answers that are written at a time; `queue`: jobs that may wait beside.
    patience : seconds that a job may take from its coming to its end.
    talks : conversations between their requests.
    """

    def __init__(
        self, resident: Resident, warn: Warn, parallel: int, queue: int, patience: float, talks: Talks
    ) -> None:
        self._resident, self._warn = resident, warn
        self._parallel, self._patience, self._talks = parallel, patience, talks
        self._changed = threading.Condition()
        self._waiting = Line(queue)
        self._running: list[Job] = []
        self._aside: deque[Job] = deque()  # of those, the ones whose prompts have begun and are to go on
        self._current: Job | None = None  # of which something is computed just now, so that warnings are about it
        self._stepped = self._step_took = 0.0  # when the last step ended, by `time.monotonic()`, and its seconds
        self._unkept: deque[PreparedAnswer | Talk] = deque()
        self._seconds = 1.0  # that an answer has taken lately
        self._taking, self._stopped = True, False
        self._thread = threading.Thread(target=self._run, name="kvtool-engine", daemon=True)

    # ---- from any thread ----

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Return the number of jobs that wait for their turn."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Return the number of answers that are being written."""
        return len(self._running)

    def submit(self, ask: Ask, tell: Tell) -> Job:
        """Take a question in. Where too many wait, one of the client that has most waiting is told that it is too busy.

        Raises
        ------
        BusyError : this one is it, or the server is about to end.
        """
        job = Job(ask, tell, self._patience)
        with self._changed:
            if not self._taking:
                raise BusyError("the server is about to end", _RETRY_AFTER[0])
            last = self._waiting.add(job)
            busy = BusyError(f"{len(self._waiting)} questions wait already", self._retry_after)
            self._changed.notify_all()
        if last is job:
            raise busy
        if last is not None:
            self._tell(last, busy)
            last.ended = True
        return job

    @property
    def _retry_after(self) -> int:
        """Seconds after which a place may be free."""
        least, most = _RETRY_AFTER
        return int(min(most, max(least, self._seconds * len(self._waiting) / self._parallel)))

    def leave(self, job: Job) -> None:
        """Nobody waits for a job any more: it ends before its next token, and its place in the queue is free."""
        with self._changed:
            job.left = True
            if job in self._waiting:
                self._waiting.remove(job)
                job.ended = True
            self._changed.notify_all()

    def warned(self, text: str, hint: str) -> bool:
        """Note a warning with the job that it is about; False: it is about none."""
        job = self._current
        if job is not None:
            job.warnings.append((text, hint))
        return job is not None

    def refuse(self) -> None:
        """Take no more jobs in; those that were are done."""
        with self._changed:
            self._taking = False

    def close(self) -> None:
        """End at once; what is left is told so."""
        with self._changed:
            self._taking, self._stopped = False, True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    # ---- in the thread that answers ----

    def _run(self) -> None:
        from kvtool.core.model.generate import ContinuousBatch

        batch = ContinuousBatch()
        while self._is_work():
            with self._resident.turn():
                self._turn(batch)
        for job in self._jobs():
            self._end(job, BusyError(_ENDED, _RETRY_AFTER[0]))

    def _is_work(self) -> bool:
        """Wait for something to do; False: it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._running or self._stopped)
            return not self._stopped

    def _turn(self, batch: ContinuousBatch) -> None:
        jobs = [self._next(), self._aside.popleft() if self._aside else None]
        self._drop_lost(batch)  # whoever left before the next one came: what it held of a conversation is free then
        for job in jobs:
            if job is not None and not job.ended:
                self._begin(job, batch)
        self._step(batch)
        while self._unkept:
            self._keep(self._unkept.popleft(), batch)

    def _step(self, batch: ContinuousBatch) -> None:
        """Write a token of every answer that was begun, and end those that are done."""
        started = time.monotonic()
        try:
            done = batch.step()
        except Exception as error:  # out of memory, most likely: nobody knows which of them could go on
            for job in [job for job in self._running if job.sequence is not None]:
                self._end(job, as_error(error))
            batch.sequences.clear()
            done = []
        ended = {id(sequence) for sequence in done}
        for job in [job for job in self._running if id(job.sequence) in ended]:
            self._answer(job)
        self._stepped = time.monotonic()
        self._step_took = self._stepped - started

    def _give_way(self, batch: ContinuousBatch, job: Job | None = None) -> None:
        """Let other answers go on between two layers of a prompt, if it has had its share of the time.

        Parameters
        ----------
        job : whose prompt it is.

        Raises
        ------
        KvtoolError : nobody waits for it any more.
        """
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
        """Return True if begun answers have waited long enough while a prompt is computed."""
        return time.monotonic() - self._stepped >= max(_SLICE, self._step_took)

    def _drop_lost(self, batch: ContinuousBatch, but: Job | None = None) -> None:
        """Let go of jobs that nobody waits for, or that have taken too long; `but`: the one that is begun just now."""
        for job in self._jobs():
            if job is not but and (lost := job.lost) is not None:
                if job.sequence is not None:
                    batch.remove(job.sequence)
                self._end(job, lost)

    def _begin(self, job: Job, batch: ContinuousBatch) -> None:
        """Bring a job to its first token, or nearer to it."""
        from kvtool.core.model.generate import AnswerSequence
        from kvtool.core.model.preemption import between_layers

        job.queue_ms += (time.monotonic() - (job.aside or job.arrived)) * 1e3
        self._current = job
        try:
            with between_layers(lambda: self._give_way(batch, job)):
                begun = job.begun = self._begun(job)
            if begun is None:
                job.aside = time.monotonic()
                self._aside.append(job)
                return
            sampling = replace(begun.sampling, stop=job.ask.stop)
            cache, decoder = begun.outcome.fused.cache, begun.session.decoder
            job.sequence = AnswerSequence(decoder, cache, begun.known, sampling, lambda piece: self._tell(job, piece))
            batch.add(job.sequence)
        except Exception as error:
            self._end(job, as_error(error))
        finally:
            self._current = None

    def _begun(self, job: Job) -> PreparedAnswer | None:
        """A job's prompt, fused; begun once more where another store has just come into the place of the open one.

        Returns
        -------
        None : it has more turns to go through, and others wait.
        """
        for attempt in range(_ANOTHER_STORE):
            session = self._resident.session()
            if job.session is not session:
                job.session, job.steps = session, begun_for(job, session, self._talks)
            try:
                return self._stepped_through(job)
            except (ModelError, StoreFormatError):
                if attempt == _ANOTHER_STORE - 1 or session is self._resident.session():
                    raise
        raise AssertionError("it is tried once at least")

    def _stepped_through(self, job: Job) -> PreparedAnswer | None:
        from kvtool.core.model.preemption import run_pending

        assert job.steps is not None
        started = time.monotonic()
        while (begun := next(job.steps)) is None:
            run_pending()
            if self._others_can_begin and time.monotonic() - started >= _SLICE:
                return None
        return begun

    @property
    def _others_can_begin(self) -> bool:
        """Return True if a waiting question could start, or another prompt has been put aside."""
        return bool(self._aside or (self._waiting and len(self._running) < self._parallel))

    def _answer(self, job: Job) -> None:
        """End a job whose answer is written; what is to be kept of it is kept after it was told."""
        assert job.begun is not None
        assert job.sequence is not None
        begun = job.begun
        try:
            said = job.sequence.end()
            reply = begun.reply(said) if job.talk is None else job.talk.reply(said)
            event: Event = Answer.of(reply, job)
        except Exception as error:
            event = as_error(error)
        if isinstance(event, Answer):
            self._unkept.append(job.talk or begun)
        self._end(job, event)

    def _keep(self, begun: PreparedAnswer | Talk, batch: ContinuousBatch) -> None:
        """Keep what is to be kept of an answer that was told."""
        from kvtool.core.model.preemption import between_layers

        try:
            with between_layers(lambda: self._give_way(batch)):
                begun.keep()
        except Closed:  # another store stands in its place by now
            return
        except Exception as error:  # the answer stands
            failed = as_error(error)
            self._warn(f"what was computed of a prompt could not be kept: {failed.message}", failed.hint)

    def _end(self, job: Job, event: Event) -> None:
        """Tell a job its last event; of one that has ended already nothing more is told."""
        with self._changed:
            jobs: Line | list[Job] = self._running if job in self._running else self._waiting
            if job not in jobs:
                return
            jobs.remove(job)
            self._changed.notify_all()
        if job.steps is not None:
            job.steps.close()  # what it has gone through is held
        if job.talk is not None:
            self._talks.hold(job.talk.talk, job.ask.request)
        job.begun = job.sequence = job.talk = job.steps = job.session = None
        if isinstance(event, Answer):
            took = time.monotonic() - job.arrived - job.queue_ms / 1e3
            self._seconds += (took - self._seconds) / 8
        failed = job.failed
        self._tell(job, failed or event)
        if job.failed is not None and job.failed is not failed:
            self._tell(job, job.failed)  # in its place
        job.ended = True

    def _tell(self, job: Job, event: Event) -> None:
        """Tell an event. A job whose listener has left ends; one that cannot be told for another reason fails."""
        try:
            job.tell(event)
        except LeftError:
            job.left = True
        except Exception as error:
            job.failed = as_error(error)
            self._warn(f"an event could not be sent: {job.failed.message}", job.failed.hint)
