"""Batches computed by Ray workers, and written here by the store's only writer."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import kvtool
from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import level_of
from kvtool.core.codec.profile import Profile
from kvtool.core.common.sizes import counted
from kvtool.core.errors import KvtoolError
from kvtool.core.ingest.account import Account
from kvtool.core.ingest.choices import Choices
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.ray_cluster import LOCAL, connect, reason_of, share_of
from kvtool.core.ingest.storer import Batch, Storer
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.options import ModelOptions
from kvtool.core.records.encode import ChunkRecords, LeadIns, make
from kvtool.core.session.identity import ProfileCache, StoreIdentity

_AHEAD = 2  # batches of a worker under way: one is computed while the records of the one before travel
_RESTARTS = 5  # of a worker that dies
_INSTALL = "install this version, with the same extras, on all machines of the cluster"


def ray_storer(store: Store, writer: Writer, account: Account, options: IngestOptions, choices: Choices) -> RayStorer:
    """Start workers with the store's recipe, and report what they compute with. Raises KvtoolError."""
    identity, level = choices.identity, level_of(options.level)
    profile = ProfileCache(store).current() if level.nested else None
    account.events.status(f"loading {choices.files.ref} in Ray's workers")
    recipe = Recipe(
        identity,
        ModelOptions(model=choices.files.ref, device=options.device, dtype=options.dtype, offline=options.offline),
        options.level,
        level.of_prefix,
        b"" if profile is None else profile.data,
    )
    workers = Workers(options, recipe)
    state = workers.states[0]
    ways = " and ".join(dict.fromkeys(f"{each.dtype} on {each.device}" for each in workers.states))
    account.events.status(f"{state.model} in {ways}, {counted(len(workers.states), 'worker')} of Ray")
    if " and " in ways:
        account.warn(f"workers compute in {ways}: each chunk notes its own", "--dtype gives all of them one format")
    account.resolve(identity, state.model, state.device, state.dtype)
    account.report.resolved["workers"] = len(workers.states)
    return RayStorer(writer, account, workers)


class Workers:
    """Actors of Ray, each with the model. Ray restarts one that dies and repeats its tasks."""

    def __init__(self, options: IngestOptions, recipe: Recipe) -> None:
        self._held = contextlib.ExitStack()
        self._held.enter_context(contextlib.redirect_stdout(sys.stderr))  # where Ray prints that a worker has died
        try:
            self._ray = ray = connect(options.ray or LOCAL)
            self._held.callback(ray.shutdown)
            share = share_of(ray.cluster_resources(), options.ray_workers, options.device)
            actor = ray.remote(num_cpus=share.cpus, num_gpus=share.gpus, max_restarts=_RESTARTS, max_task_retries=-1)(
                RemotePrefillWorker
            )
            self._recipe = ray.put(recipe)  # sent to each machine once; a restarted worker takes it, too
            actors = [actor.remote(self._recipe, 0 if share.gpus else share.cpus) for _ in range(share.workers)]
            self.states = self._states(actors)
            self.pool = ray.util.ActorPool(actors * _AHEAD)
        except BaseException:
            self.close()
            raise

    def next(self) -> Computed:
        """Wait for the next result, in any order. Raises KvtoolError: the task raised it, or a worker keeps dying."""
        errors = self._ray.exceptions
        try:
            computed: Computed = self.pool.get_next_unordered()
        except errors.RayTaskError as error:
            raise _cause_of(error) from error
        except errors.RayError as error:
            raise KvtoolError(
                f"Ray's workers die one after another: {reason_of(error)}",
                "give each more memory: fewer --ray-workers",
            ) from error
        return computed

    def close(self) -> None:
        self._held.close()

    def _states(self, actors: Sequence[Any]) -> list[WorkerState]:
        errors = self._ray.exceptions
        try:
            states: list[WorkerState] = self._ray.get([actor.state.remote() for actor in actors])
        except errors.RayTaskError as error:
            raise _cause_of(error) from error
        except errors.RayError as error:
            raise KvtoolError(
                f"Ray's workers cannot run kvtool {kvtool.__version__}: {reason_of(error)}", _INSTALL
            ) from error
        for state in states:
            if state.version != kvtool.__version__:
                raise KvtoolError(
                    f"Ray's workers have kvtool {state.version}, and this is {kvtool.__version__}", _INSTALL
                )
        return states


def _cause_of(error: Any) -> KvtoolError:
    if isinstance(error.cause, KvtoolError):
        return error.cause
    return KvtoolError(f"a worker of Ray failed: {reason_of(error)}", "without --ray it is computed here")


class RayStorer(Storer):
    """Storer that sends batches to workers. Results come in any order; files are committed once complete."""

    def __init__(self, writer: Writer, account: Account, workers: Workers) -> None:
        state = workers.states[0]
        super().__init__(writer, account, state.device, state.context, state.lead_in)
        self._workers, self._pool = workers, workers.pool
        self._batches: dict[int, Batch] = {}
        self._sent = 0

    def store_prefix(self, prefix: ChunkSpec) -> None:
        self._pool.submit(lambda actor, chunk: actor.prefix.remote(chunk), prefix)
        for records in self._workers.next().records:
            self._put(records)

    def finish(self) -> None:
        super().finish()
        while self._batches:
            self._take()

    def close(self) -> None:
        self._workers.close()

    def _compute(self, batch: Batch) -> None:
        while not self._pool.has_free():
            self._take()
        self._sent += 1
        self._batches[self._sent] = batch
        self._pool.submit(lambda actor, number: actor.chunks.remote(number, batch.chunks), self._sent)

    def _take(self) -> None:
        computed = self._workers.next()
        batch = self._batches.pop(computed.number)
        for file in self._spanning(batch):
            self._writer.begin_file(file.entry.path, file.chunk_ids)
        for records in computed.records:
            self._put(records)
        self._count(batch, computed.seconds / len(self._workers.states))
        self._complete(batch)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Model and settings to make the same records as the writer; `wanted` is valid on every machine."""

    identity: StoreIdentity
    wanted: ModelOptions
    level: str
    prefix_level: str
    profile: bytes = b""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """`dtype` of the arithmetic; `context` and `lead_in` in tokens."""

    version: str
    model: str
    device: str
    dtype: str
    context: int
    lead_in: int
    pid: int


class Computed(NamedTuple):
    number: int
    records: list[ChunkRecords]
    seconds: float


class RemotePrefillWorker:
    """Prefill worker in another process. The model is loaded at the first call, so that Ray returns its error."""

    def __init__(self, recipe: Recipe, threads: int) -> None:
        self._recipe, self._threads = recipe, threads

    @cached_property
    def _loaded(self) -> tuple[Decoder, LeadIns, Profile | None]:
        import torch

        from kvtool.core.session.identity import lead_ins_of
        from kvtool.core.session.session import Session

        if self._threads:
            torch.set_num_threads(self._threads)
        recipe = self._recipe
        with TemporaryDirectory(prefix="kvtool-") as folder, Store.create_or_open(Path(folder)) as store:
            decoder = Session.open(store, recipe.wanted, identity=recipe.identity).decoder
        profile = Profile.from_bytes(recipe.profile) if recipe.profile else None
        return decoder, lead_ins_of(recipe.identity, decoder), profile

    def state(self) -> WorkerState:
        decoder, lead_ins, _ = self._loaded
        loaded = decoder.loaded
        return WorkerState(
            kvtool.__version__,
            loaded.files.ref,
            loaded.device,
            loaded.arithmetic.dtype,
            decoder.context,
            len(lead_ins.own),
            os.getpid(),
        )

    def prefix(self, prefix: ChunkSpec) -> Computed:
        decoder, _, profile = self._loaded
        started = time.perf_counter()
        records = make(decoder, LeadIns.nothing(decoder), [prefix], self._recipe.prefix_level, profile)
        return Computed(0, records, time.perf_counter() - started)

    def chunks(self, number: int, chunks: Sequence[ChunkSpec]) -> Computed:
        started = time.perf_counter()
        records = make(*self._loaded[:2], chunks, self._recipe.level, self._loaded[2])
        return Computed(number, records, time.perf_counter() - started)
