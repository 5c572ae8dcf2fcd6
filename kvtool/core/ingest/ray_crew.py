"""Batches computed by Ray's actors, each of which holds the model; who dies is replaced, and the batch done again."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.ingest.far_maker import Computed, Facts, FarMaker, Recipe
from kvtool.core.ingest.storer import Batch
from kvtool.core.records.wanted import WantedChunk

LOCAL, AUTO = "local", "auto"  # auto: the cluster that this machine is part of
AHEAD = 2  # batches of an actor under way: one is computed while the records of the one before travel
_MOST_DEATHS = 5  # one after another, without a batch in between
_PORT, _PATIENCE = 6379, 10.0  # of a cluster's head; seconds for a connection
_WHERE = "--ray local, or the address of a running cluster, such as 10.0.0.5:6379"
_CORES = 8  # of an actor without a GPU, where nobody says how many there are to be

Warn = Callable[[str, str], None]


class RayCrew:
    """Actors, and what each of them is computing.

    Parameters
    ----------
    address : of a cluster, as `ray.init` takes it; `local`: one of this machine, for this run.
    actors : how many; 0: one a GPU, or one for eight cores where there is none.
    warn : told of actors that died.

    Raises
    ------
    KvtoolError : Ray is not installed, or does not answer.
    UsageError : the cluster has less than that.
    ModelError : the actors find another model than the recipe's, or none.
    """

    def __init__(self, address: str, actors: int, recipe: Recipe, warn: Warn) -> None:
        self._ray = _connected(address)
        self._recipe, self._warn, self._deaths = recipe, warn, 0
        self._busy: dict[Any, tuple[int, str, Any]] = {}  # a result to come → who computes it, what, of what
        try:
            self._share = share_of(self._ray.cluster_resources(), actors, recipe.wanted.device)
            self._actors = [self._new() for _ in range(self._share.actors)]
            self.facts: Facts = self._met()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """How many actors there are."""
        return len(self._actors)

    @property
    def is_full(self) -> bool:
        """Whether all have enough to do."""
        return len(self._busy) >= AHEAD * len(self._actors)

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._busy)

    def prefix(self, prefix: WantedChunk) -> Computed:
        """Have the prompt's own beginning computed; nothing else may be under way."""
        self._send(0, "prefix", prefix)
        computed: Computed = self._next()[1]
        return computed

    def submit(self, batch: Batch) -> None:
        """Have a batch computed by whoever has least to do."""
        load = [sum(who == actor for who, _, _ in self._busy.values()) for actor in range(len(self._actors))]
        self._send(load.index(min(load)), "chunks", batch)

    def next(self) -> tuple[Batch, Computed]:
        """Wait for the next batch, in no order.

        Raises
        ------
        KvtoolError : what the actor met; or actors die all the time.
        """
        batch, computed = self._next()
        return batch, computed

    def close(self) -> None:
        """End the actors."""
        for actor in getattr(self, "_actors", ()):
            with suppress(Exception):
                self._ray.kill(actor)
        self._ray.shutdown()

    def _met(self) -> Facts:
        """What an actor says of itself, when all have loaded the model."""
        for actor in range(len(self._actors)):
            self._send(actor, "facts")
        met: list[Facts] = [self._next()[1] for _ in self._actors]
        return met[0]

    def _send(self, actor: int, what: str, given: Any = None) -> None:
        method = getattr(self._actors[actor], what)
        taken = [given.chunks if isinstance(given, Batch) else given] if given is not None else []
        self._busy[method.remote(*taken)] = actor, what, given

    def _next(self) -> tuple[Any, Any]:
        errors = self._ray.exceptions
        while True:
            (ready,), _ = self._ray.wait([*self._busy], num_returns=1)
            who, what, given = self._busy.pop(ready)
            try:
                made = self._ray.get(ready)
            except errors.RayTaskError as error:
                raise error.cause if isinstance(error.cause, KvtoolError) else _failed(error) from error
            except errors.RayActorError as error:
                self._replace(who, error)
                self._send(who, what, given)
            except errors.RayError as error:  # its machine went with what it had computed
                self._count_death(error)
                self._send(who, what, given)
            else:
                self._deaths = 0
                return given, made

    def _replace(self, who: int, error: Exception) -> None:
        """Put another in the place of an actor that died, unless that was done for a result of its before."""
        with suppress(self._ray.exceptions.RayActorError):
            self._ray.get(self._actors[who].__ray_ready__.remote())
            return
        self._count_death(error)
        self._actors[who] = self._new()

    def _count_death(self, error: Exception) -> None:
        self._deaths += 1
        why = _reason(error)
        if self._deaths > _MOST_DEATHS:
            raise KvtoolError(
                f"Ray's workers die one after another: {why}", "give each more memory: fewer --ray-workers"
            ) from error
        self._warn(f"a worker of Ray died and is replaced: {why}", "its batch is computed again")

    def _new(self) -> Any:
        share = self._share
        actor = self._ray.remote(num_cpus=share.cpus, num_gpus=share.gpus, max_restarts=0)(FarMaker)
        return actor.remote(share.of(self._recipe))


class Share:
    """What each of several actors takes of a cluster."""

    def __init__(self, actors: int, cpus: int, gpus: int) -> None:
        self.actors, self.cpus, self.gpus = actors, cpus, gpus

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe for one of them."""
        from dataclasses import replace

        return replace(recipe, threads=0 if self.gpus else self.cpus)


def share_of(resources: dict[str, float], actors: int, device: str) -> Share:
    """What each of so many actors takes of a cluster; 0: as many as suit it. Raises UsageError where it has less."""
    cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    if gpus and device in ("auto", "cuda"):
        if actors > gpus:
            raise UsageError(f"{actors} workers, and Ray has {gpus} GPUs", "each takes one: lower --ray-workers")
        return Share(actors or gpus, 1, 1)
    if actors > cpus:
        raise UsageError(f"{actors} workers, and Ray has {cpus} CPUs", "lower --ray-workers")
    actors = actors or max(1, cpus // _CORES)
    return Share(actors, max(1, cpus // actors), 0)


def check_there(address: str) -> None:
    """Refuse an address behind which nothing listens: Ray itself tries for a quarter of an hour.

    Raises
    ------
    KvtoolError : it does, or Ray is not installed.
    """
    _ray()
    if address in (LOCAL, AUTO):
        return
    place = urlsplit(address if "://" in address else f"ray://{address}")
    try:
        socket.create_connection((place.hostname or "", place.port or _PORT), timeout=_PATIENCE).close()
    except (OSError, ValueError) as error:
        raise KvtoolError(f"Ray does not answer at {address!r}: {error}", _WHERE) from error


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise KvtoolError("--ray needs the package ray", "pip install 'kvtool[ray]'") from error
    return ray


def _connected(address: str) -> Any:
    ray = _ray()
    try:
        ray.init(
            address=address,
            include_dashboard=False if address == LOCAL else None,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
        )
    except Exception as error:
        raise KvtoolError(f"Ray does not answer at {address!r}: {_reason(error)}", _WHERE) from error
    _quieten()
    return ray


def _quieten() -> None:
    """Keep Ray's own words about dead workers from stdout, where answers and JSON go; there is no setting for it."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *data, **how: None


def _failed(error: Exception) -> KvtoolError:
    return KvtoolError(f"a worker of Ray failed: {_reason(error)}", "without --ray it is computed here")


def _reason(error: Exception) -> str:
    """The first sentence of its last line: what follows is advice for who looks after the cluster."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(". ")[0].rstrip(".") if lines else type(error).__name__
