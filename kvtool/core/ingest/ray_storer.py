"""Batches computed by Ray workers, and written here by the store's only writer."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import level_of
from kvtool.core.common.sizes import counted
from kvtool.core.crew.actor_pool import ActorPool
from kvtool.core.ingest.account import Account
from kvtool.core.ingest.choices import Choices
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.storer import Batch, Storer
from kvtool.core.model.options import ModelOptions
from kvtool.core.records.encode import ChunkRecords, LeadIns, make
from kvtool.core.session.identity import ProfileCache, StoreIdentity


def ray_storer(store: Store, writer: Writer, account: Account, options: IngestOptions, choices: Choices) -> RayStorer:
    """Start a pool with the store's recipe, and report what its actors compute with.

    Raises
    ------
    KvtoolError, UsageError, ModelError : see `ActorPool` and `RemotePrefillWorker`.
    DamagedError : the codec profile is lost.
    """
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
    pool = ActorPool(options, RemotePrefillWorker, recipe, device=options.device, warn=account.warn)
    state: WorkerState = pool.facts[0]
    ways = " and ".join(dict.fromkeys(f"{each.dtype} on {each.device}" for each in pool.facts))
    account.events.status(f"{state.model} in {ways}, {counted(pool.size, 'worker')} of Ray")
    if " and " in ways:
        account.warn(f"workers compute in {ways}: each chunk notes its own", "--dtype gives all of them one format")
    account.resolve(identity, state.model, state.device, state.dtype)
    account.report.resolved["workers"] = pool.size
    return RayStorer(writer, account, pool)


class RayStorer(Storer):
    """Storer that sends batches to a pool. Results come in any order; a file is committed once all its chunks are
    written, so an interrupted run leaves complete files."""

    def __init__(self, writer: Writer, account: Account, pool: ActorPool) -> None:
        state: WorkerState = pool.facts[0]
        super().__init__(writer, account, state.device, state.context, state.lead_in)
        self._pool = pool

    def store_prefix(self, prefix: ChunkSpec) -> None:
        """See Storer."""
        self._pool.submit("prefix", None, prefix)
        computed: Computed = self._pool.next()[1]
        for records in computed.records:
            self._put(records)

    def finish(self) -> None:
        """See Storer."""
        super().finish()
        while self._pool.is_busy:
            self._take()

    def close(self) -> None:
        """See Storer."""
        self._pool.close()

    def _compute(self, batch: Batch) -> None:
        while self._pool.is_full:
            self._take()
        self._pool.submit("chunks", batch, batch.chunks)

    def _take(self) -> None:
        batch: Batch
        computed: Computed
        batch, computed = self._pool.next()
        for file in self._spanning(batch):
            self._writer.begin_file(file.entry.path, file.chunk_ids)
        for records in computed.records:
            self._put(records)
        self._count(batch, computed.seconds / self._pool.size)
        self._complete(batch)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Model and settings by which a process makes the same records as the writer would.

    Attributes
    ----------
    wanted : the model, by a name or path that is valid on every machine.
    profile : bytes of the codec profile in use; empty: none.
    """

    identity: StoreIdentity
    wanted: ModelOptions
    level: str
    prefix_level: str
    profile: bytes = b""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """State of a worker process: `dtype` of its arithmetic; `context` and `lead_in` in tokens."""

    model: str
    device: str
    dtype: str
    context: int
    lead_in: int
    pid: int


@dataclass(frozen=True, slots=True)
class Computed:
    """Records of a batch, and the seconds of compute."""

    records: list[ChunkRecords]
    seconds: float


class RemotePrefillWorker:
    """Prefill worker in another process, with the model but no store. Raises as `Session` does."""

    def __init__(self, recipe: Recipe) -> None:
        from kvtool.core.cache.store import Store
        from kvtool.core.codec.profile import Profile
        from kvtool.core.session.identity import lead_ins_of
        from kvtool.core.session.session import Session

        self._recipe = recipe
        self._profile = Profile.from_bytes(recipe.profile) if recipe.profile else None
        with TemporaryDirectory(prefix="kvtool-") as folder, Store.create_or_open(Path(folder)) as store:
            self._decoder = Session(store, recipe.wanted, identity=recipe.identity).decoder
            self._lead_ins = lead_ins_of(recipe.identity, self._decoder)

    def facts(self) -> WorkerState:
        """Return the state of this process."""
        loaded = self._decoder.loaded
        limits = self._decoder.context, len(self._lead_ins.own)
        return WorkerState(loaded.files.ref, loaded.device, loaded.arithmetic.dtype, *limits, os.getpid())

    def prefix(self, prefix: ChunkSpec) -> Computed:
        """Compute the prompt's fixed beginning."""
        return self._computed(LeadIns.nothing(self._decoder), [prefix], self._recipe.prefix_level)

    def chunks(self, chunks: Sequence[ChunkSpec]) -> Computed:
        """Compute a batch."""
        return self._computed(self._lead_ins, chunks, self._recipe.level)

    def _computed(self, lead_ins: LeadIns, chunks: Sequence[ChunkSpec], level: str) -> Computed:
        started = time.perf_counter()
        records = make(self._decoder, lead_ins, chunks, level, self._profile)
        return Computed(records, time.perf_counter() - started)
