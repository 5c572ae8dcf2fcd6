"""Batches computed by Ray workers, and written here by the store's only writer."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import kvtool
from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import level_of
from kvtool.core.codec.profile import Profile
from kvtool.core.common.plugins import extra_line
from kvtool.core.common.text import counted
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.report import Account
from kvtool.core.ingest.storer import Storer
from kvtool.core.ingest.stream import Choices
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.options import ModelOptions
from kvtool.core.records.encode import ChunkRecords, LeadIns, make
from kvtool.core.session.identity import ProfileCache, StoreIdentity

LOCAL, AUTO = "local", "auto"  # auto: the cluster that this machine is part of
_PORT, _CONNECT_TIMEOUT = 6379, 10.0  # of a cluster's head; seconds
_WHERE = "--ray local, or the address of a running cluster, such as 10.0.0.5:6379"
_TOKEN = "where the cluster asks for a token, set RAY_AUTH_MODE=token, or name another cluster"
_CORES = 8  # per worker without a GPU, if no number of workers is given
_AHEAD = 2  # batches of a worker under way: one is computed while the records of the one before travel
_RESTARTS = 5  # of a worker that dies
_PREFIX = 0  # number of the batch that is the prompt's fixed beginning, which has no lead-in
_INSTALL = "install this version, with the same extras, on all machines of the cluster"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Model and settings to make the same records as the writer; `wanted` is valid on every machine."""

    identity: StoreIdentity
    wanted: ModelOptions
    level: str
    profile: bytes = b""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """`dtype` of the arithmetic."""

    version: str
    model: str
    device: str
    dtype: str
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
        decoder, _, _ = self._loaded
        made_by = decoder.loaded.files.ref, decoder.loaded.device, decoder.loaded.arithmetic.dtype
        return WorkerState(kvtool.__version__, *made_by, os.getpid())

    def compute(self, number: int, chunks: Sequence[ChunkSpec]) -> Computed:
        decoder, lead_ins, profile = self._loaded
        level, started = self._recipe.level, time.perf_counter()
        if number == _PREFIX:
            level, lead_ins = level_of(level).of_prefix, LeadIns.nothing(decoder)
        return Computed(number, make(decoder, lead_ins, chunks, level, profile), time.perf_counter() - started)


class Workers:
    """Actors of Ray, each with the model. Ray restarts one that dies and repeats its tasks."""

    def __init__(self, options: IngestOptions, recipe: Recipe) -> None:
        self._held = contextlib.ExitStack()
        self._held.enter_context(contextlib.redirect_stdout(sys.stderr))  # where Ray prints that a worker has died
        try:
            self._ray = ray = connect(options.ray or LOCAL)
            self._held.callback(ray.shutdown)
            share = share_of(ray.cluster_resources(), options.ray_workers, options.device)
            needs = {"num_cpus": share.cpus, "num_gpus": share.gpus}
            actor = ray.remote(max_restarts=_RESTARTS, max_task_retries=-1, **needs)(RemotePrefillWorker)
            self._recipe = ray.put(recipe)  # sent to each machine once; a restarted worker takes it, too
            actors = [actor.remote(self._recipe, 0 if share.gpus else share.cpus) for _ in range(share.workers)]
            self.states = self._states(actors)
            self.pool = ray.util.ActorPool(actors * _AHEAD)
        except BaseException:
            self.close()
            raise

    def next(self) -> Computed:
        """Wait for the next result, in any order. Raises KvtoolError: the task raised it, or a worker keeps dying."""
        with self._explained("Ray's workers die one after another", "give each more memory: fewer --ray-workers"):
            computed: Computed = self.pool.get_next_unordered()
        return computed

    def close(self) -> None:
        self._held.close()

    def _states(self, actors: Sequence[Any]) -> list[WorkerState]:
        own = kvtool.__version__
        with self._explained(f"Ray's workers cannot run kvtool {own}", _INSTALL):
            states: list[WorkerState] = self._ray.get([actor.state.remote() for actor in actors])
        if others := {state.version for state in states} - {own}:
            raise KvtoolError(f"Ray's workers have kvtool {', '.join(others)}, and this is {own}", _INSTALL)
        return states

    @contextlib.contextmanager
    def _explained(self, what: str, hint: str) -> Iterator[None]:
        """Raise a task's own KvtoolError, or one that says `what` is wrong with the workers."""
        errors = self._ray.exceptions
        try:
            yield
        except errors.RayTaskError as error:
            if isinstance(error.cause, KvtoolError):
                raise error.cause from error
            hint = "without --ray it is computed here"
            raise KvtoolError(f"a worker of Ray failed: {reason_of(error)}", hint) from error
        except errors.RayError as error:
            raise KvtoolError(f"{what}: {reason_of(error)}", hint) from error


class RayStorer(Storer):
    """Storer that sends batches to workers. Results come in any order."""

    def __init__(
        self, store: Store, writer: Writer, account: Account, options: IngestOptions, choices: Choices
    ) -> None:
        """Start workers with the store's recipe, and report what they compute with. Raises KvtoolError."""
        profile = ProfileCache(store).current() if level_of(options.level).nested else None
        account.events.status(f"loading {choices.files.ref} in Ray's workers")
        model = ModelOptions(
            model=choices.files.ref, device=options.device, dtype=options.dtype, offline=options.offline
        )
        recipe = Recipe(choices.identity, model, options.level, b"" if profile is None else profile.data)
        self._workers = workers = Workers(options, recipe)
        state = workers.states[0]
        super().__init__(writer, account, state.device)
        self._batches: dict[int, Sequence[ChunkSpec]] = {}
        self._sent = 0
        ways = " and ".join(dict.fromkeys(f"{each.dtype} on {each.device}" for each in workers.states))
        account.events.status(f"{state.model} in {ways}, {counted(len(workers.states), 'worker')} of Ray")
        if " and " in ways:
            account.warn(f"workers compute in {ways}: each chunk notes its own", "--dtype gives all of them one format")
        account.resolve(choices.identity, state.model, state.device, state.dtype)
        account.report.resolved["workers"] = len(workers.states)

    def store_prefix(self, prefix: ChunkSpec) -> None:
        self._submit(_PREFIX, [prefix])
        self._put(self._workers.next().records)

    def _finish(self) -> None:
        while self._batches:
            self._take()

    def close(self) -> None:
        self._workers.close()

    def _compute(self, batch: Sequence[ChunkSpec]) -> None:
        while not self._workers.pool.has_free():
            self._take()
        self._sent += 1
        self._batches[self._sent] = batch
        self._submit(self._sent, batch)

    def _submit(self, number: int, chunks: Sequence[ChunkSpec]) -> None:
        self._workers.pool.submit(lambda actor, number: actor.compute.remote(number, chunks), number)

    def _take(self) -> None:
        computed = self._workers.next()
        batch = self._batches.pop(computed.number)
        self._put(computed.records)
        self._count(batch, computed.seconds / len(self._workers.states))
        self._account.computed(batch)


# ---- the cluster ----


class Share(NamedTuple):
    workers: int
    cpus: int
    gpus: int


def share_of(resources: dict[str, float], workers: int, device: str) -> Share:
    """Divide a cluster among workers; 0 workers: as many as fit. Raises UsageError if the cluster has fewer."""
    cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    if gpus and device in ("auto", "cuda"):
        if workers > gpus:
            raise UsageError(f"{workers} workers, and Ray has {gpus} GPUs", "each takes one: lower --ray-workers")
        return Share(workers or gpus, 1, 1)
    if workers > cpus:
        raise UsageError(f"{workers} workers, and Ray has {cpus} CPUs", "lower --ray-workers")
    workers = workers or max(1, cpus // _CORES)
    return Share(workers, max(1, cpus // workers), 0)


def check_reachable(address: str) -> None:
    """Raise KvtoolError if nothing listens at an address: Ray itself would retry for a quarter of an hour."""
    _import_ray()
    if address in (LOCAL, AUTO):
        return
    try:
        url = urlsplit(address if "://" in address else f"ray://{address}")
        socket.create_connection((url.hostname or "", url.port or _PORT), timeout=_CONNECT_TIMEOUT).close()
    except (OSError, ValueError) as error:
        raise KvtoolError(f"Ray does not answer at {address!r}: {error}", _WHERE) from error


def connect(address: str) -> Any:
    """Return the module `ray`, connected to a cluster. Raises KvtoolError."""
    ray, dashboard = _import_ray(), False if address == LOCAL else None
    how = {"include_dashboard": dashboard, "log_to_driver": False, "logging_level": logging.CRITICAL}
    try:
        _keep_sigterm(partial(ray.init, address=address, **how))
    except Exception as error:
        hint = _WHERE if address in (LOCAL, AUTO) else _TOKEN  # `check_reachable` has found that something listens
        raise KvtoolError(f"Ray does not answer at {address!r}: {reason_of(error)}", hint) from error
    return ray


def _keep_sigterm(start: Callable[[], object]) -> None:
    """Start Ray and restore the handler of SIGTERM: Ray installs one that exits with status 15."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        start()
        return
    try:
        start()
    except SystemExit:  # SIGTERM came meanwhile
        signal.signal(signal.SIGTERM, handler)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)


def reason_of(error: Exception) -> str:
    """Return the first sentence of an error's last line; the rest is advice for the cluster's administrator."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(". ")[0].rstrip(".") if lines else type(error).__name__


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ImportError as error:
        raise KvtoolError("--ray needs the package ray", extra_line("ray")) from error
    return ray
