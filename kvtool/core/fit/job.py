"""The order of a fit: chunks, teachers, training with checkpoints, a check on held-out chunks, keep."""

from __future__ import annotations

import random
import statistics
import time
from functools import cached_property
from pathlib import Path

from kvtool.core.cache.store import Store
from kvtool.core.common.progress import Events
from kvtool.core.common.types import Ids
from kvtool.core.errors import KvtoolError, ModelError
from kvtool.core.fit.checkpoint import Checkpoint
from kvtool.core.fit.fit_report import FitReport
from kvtool.core.fit.options import FitOptions
from kvtool.core.fit.teacher import Target, targets, variances
from kvtool.core.fit.training import Training
from kvtool.core.model.lead_in import lead_in_ids
from kvtool.core.model.learned import LearnedRows
from kvtool.core.model.prefill import LeadIn
from kvtool.core.session.identity import store_identity
from kvtool.core.session.lead_in import learned_lead_in, learned_rows
from kvtool.core.session.session import Session

# Chunks of a teacher's prompt, and tokens of each: a chunk then learns what stands behind one to five others.
CHUNKS_AT_ONCE, CHUNK_TOKENS = 6, 200
FEWEST_CHUNKS = 12
_LEAST_TOKENS = 16
_HELD_OUT = 10  # one chunk in so many is checked on, and at least CHUNKS_AT_ONCE
_CHECKS = 4  # prompts
_BATCHES = (slice(0, 3), slice(3, None))  # of a round's targets, shortest first: little is padding
_SAVE_EVERY = 10  # rounds: a minute of work
_SEED = 3
_FORMAT = 1


def fit_lead_in(path: Path, options: FitOptions, events: Events | None = None) -> FitReport:
    """Learn the lead-in of a store's model on the store's own chunks, and keep it where it is better than the warm one.

    Interrupted, it goes on from its last checkpoint and ends with the same rows. Nothing is locked before the end.

    Raises
    ------
    KvtoolError : too few chunks, or nothing better was found.
    StoreNotFoundError, StoreLockedError, NoSpaceError, ModelError : see the rooms they come from.
    """
    started = time.perf_counter()
    with Store.open(path) as store:
        session = Session(store, options, gradients=True)
        if session.decoder.plain_shape is None:
            raise ModelError(
                "a lead-in can be learned only where all layers keep keys and values of one shape",
                "ingest with --lead-in warm",
            )
        job = _Job(session, options, events or Events())
        rows = job.taken(options.source) if options.source is not None else job.fitted()
        state = {"digest": rows.digest, "fingerprint": rows.fingerprint, "ids": list(rows.ids)}
        with store.writer(options.lock_wait) as writer:
            writer.put_learned(bytes.fromhex(rows.digest), rows.data, state)
        if options.source is None:
            job.checkpoint.drop()
        report = job.report
        report.digest, report.tokens, report.bytes = rows.digest, len(rows.ids), len(rows.data)
    report.seconds = time.perf_counter() - started
    return report


class _Job:
    def __init__(self, session: Session, options: FitOptions, events: Events) -> None:
        self.session, self.store, self.identity = session, session.store, session.identity
        self.identity.check_movable("fit")
        self.options, self.events = options, events
        self.report = FitReport()

    def taken(self, path: Path) -> LearnedRows:
        """Take what another store has learned.

        Raises
        ------
        ModelError : it is another model's.
        UsageError : there is nothing, or it was learned behind another instruction.
        """
        with Store.open(path) as other:
            if store_identity(other).fingerprint != self.identity.fingerprint:
                raise ModelError(f"the store at {path} is another model's", "fit this one by itself, without --from")
            learned = learned_lead_in(other, self.identity.fingerprint, self.ids)
            return learned_rows(other, learned.rows)

    def fitted(self) -> LearnedRows:
        """Learn the rows here.

        Raises
        ------
        KvtoolError : there are too few chunks, or it is no better than the warm lead-in.
        """
        chunks = self.chunks
        self.events.status(f"loading {self.options.model or self.identity.model}")
        decoder = self.session.decoder
        decoder.check_length(len(self.ids) + CHUNK_TOKENS, "use a model with a longer context")
        self.events.step("prefill held-out prompts", _CHECKS, "prompts")
        cut = max(CHUNKS_AT_ONCE, len(chunks) // _HELD_OUT)
        held = [target for turn in range(_CHECKS) for target in self._targets(chunks[:cut], f"held-out {turn}")]
        training = self._training(held)
        before = training.losses(held)
        self._train(training, chunks[cut:])
        after = training.losses(held)
        warm, learned = statistics.fmean(before), statistics.fmean(after)
        self.report.held_out = {"warm": warm, "learned": learned, "chunks": len(held)}
        if not learned < warm:
            self.checkpoint.drop()
            raise KvtoolError(
                f"what was learned is no better than the warm lead-in on held-out chunks ({learned:.4f}, {warm:.4f})",
                "ingest more documents, or give more --rounds; the store is unchanged",
            )
        keys, values = (side.detach().to("cpu", self.session.decoder.kv_dtype) for side in training.rows())
        return LearnedRows(self.identity.fingerprint, self.ids, keys, values)

    # ---- what it works on ----

    @cached_property
    def ids(self) -> Ids:
        """The token ids of the warm lead-in behind the store's own instruction."""
        return lead_in_ids("warm", self.session.tokenizer, self.session.parts)

    @cached_property
    def chunks(self) -> list[Ids]:
        """The token ids of the store's chunks, in an order that hangs on nothing but them."""
        infos = [self.store.chunk_info(chunk) for chunk in self.store.chunk_ids() if chunk != self.identity.prefix_id]
        chunks = {info.token_ids[:CHUNK_TOKENS] for info in infos if info is not None}
        usable = sorted(ids for ids in chunks if len(ids) >= _LEAST_TOKENS)
        if len(usable) < FEWEST_CHUNKS:
            raise KvtoolError(
                f"the store has {len(usable)} different chunks to learn from, at least {FEWEST_CHUNKS} are needed",
                "ingest more documents, or take another store's with --from STORE",
            )
        random.Random(_SEED).shuffle(usable)
        return usable

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """Keeps the state of this fit, of just these chunks and options, between runs."""
        options = self.options
        settings = (_FORMAT, self.identity.fingerprint, self.ids, self.chunks, options.rounds, options.rate)
        return Checkpoint.of(self.store, *settings)

    # ---- the work ----

    def _targets(self, pool: list[Ids], seed: str) -> list[Target]:
        draw = random.Random(f"{_SEED} {seed}")
        chunks = draw.sample(pool, CHUNKS_AT_ONCE)
        room = (self.session.decoder.context - len(self.identity.prefix)) // CHUNKS_AT_ONCE
        return targets(self.session.decoder, self.identity.prefix, [chunk[:room] for chunk in chunks])

    def _training(self, held: list[Target]) -> Training:
        decoder, steps = self.session.decoder, self.options.rounds * len(_BATCHES)
        fixed = len(self.identity.prefix)
        return Training(decoder, LeadIn(decoder, self.ids), fixed, variances(held), steps, self.options.rate)

    def _train(self, training: Training, pool: list[Ids]) -> None:
        done, saved = 0, self.checkpoint.load()
        if saved is not None:
            done, state = saved
            training.restore(state)
            self.report.resumed = done
            self.events.status(f"going on after {done} rounds")
        self.report.rounds = self.options.rounds
        self.events.step("learn the lead-in", self.options.rounds, "prompts")
        self.events.advance(done)
        for number in range(done, self.options.rounds):
            made = sorted(self._targets(pool, f"round {number}"), key=lambda target: len(target.ids))
            losses = [training.step(2 * number + at, made[part]) for at, part in enumerate(_BATCHES)]
            self.events.advance(1)
            self.events.status(f"round {number + 1}: loss {statistics.fmean(losses):.4f}")
            if (number + 1) % _SAVE_EVERY == 0 and not self.store.read_only:
                self.checkpoint.save(number + 1, training.state())
