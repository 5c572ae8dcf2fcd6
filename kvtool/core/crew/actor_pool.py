"""Pool of Ray actors: the cluster, the serialisation of tasks, and the replacement of actors that die."""

from __future__ import annotations

import copyreg
import io
import logging
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

import kvtool
from kvtool.core.common.installing import extra_line
from kvtool.core.common.types import Warn
from kvtool.core.crew.options import AUTO, LOCAL, RayOptions
from kvtool.core.errors import KvtoolError, UsageError

AHEAD = 2  # tasks of an actor under way: one runs while the results of the one before travel
_MOST_DEATHS = 5  # in a row, without a finished task in between
_PORT, _CONNECT_TIMEOUT = 6379, 10.0  # of a cluster's head; seconds
_WHERE = "--ray local, or the address of a running cluster, such as 10.0.0.5:6379"
_TOKEN = "where the cluster asks for a token, set RAY_AUTH_MODE=token, or name another cluster"
_CORES = 8  # per worker without a GPU, if no number of workers is given


# ---- the cluster ----


@dataclass(frozen=True, slots=True)
class Share:
    """Resources of a cluster that each worker takes."""

    workers: int
    cpus: int
    gpus: int

    @property
    def threads(self) -> int:
        """Return the number of threads for a process; 0: no limit."""
        return 0 if self.gpus else self.cpus


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
    """Refuse an address at which nothing listens. Ray itself would retry for a quarter of an hour.

    Raises
    ------
    KvtoolError : nothing listens there, or Ray is not installed.
    """
    _ray()
    if address in (LOCAL, AUTO):
        return
    try:
        url = urlsplit(address if "://" in address else f"ray://{address}")
        socket.create_connection((url.hostname or "", url.port or _PORT), timeout=_CONNECT_TIMEOUT).close()
    except (OSError, ValueError) as error:
        raise KvtoolError(f"Ray does not answer at {address!r}: {error}", _WHERE) from error


def connected(address: str) -> Any:
    """Return the module `ray`, connected to a cluster. Raises KvtoolError."""
    ray = _ray()
    try:
        with _keep_sigterm():
            ray.init(
                address=address,
                include_dashboard=False if address == LOCAL else None,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
            )
    except Exception as error:
        hint = _WHERE if address in (LOCAL, AUTO) else _TOKEN  # `check_reachable` has found that something listens
        raise KvtoolError(f"Ray does not answer at {address!r}: {reason_of(error)}", hint) from error
    _silence()
    return ray


@contextmanager
def _keep_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM: Ray installs handlers of its own that exit with status 1 or 15."""
    before, ended = signal.getsignal(signal.SIGTERM), None
    is_kept = callable(before) and threading.current_thread() is threading.main_thread()
    try:
        yield
    except SystemExit as error:  # the signal came while Ray starts
        ended = error
    finally:
        if is_kept:
            signal.signal(signal.SIGTERM, before)
    if ended is not None:
        if is_kept:
            signal.raise_signal(signal.SIGTERM)
        raise ended


def reason_of(error: Exception) -> str:
    """Return the first sentence of an error's last line; the rest is advice for the cluster's administrator."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(". ")[0].rstrip(".") if lines else type(error).__name__


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise KvtoolError("--ray needs the package ray", extra_line("ray")) from error
    return ray


def _silence() -> None:
    """Keep Ray's messages about dead workers off stdout, where answers and JSON go. Ray has no setting for it."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *data, **how: None


# ---- in a worker ----

Serialized = tuple[bytes, list[npt.NDArray[np.uint8]]]
"""Pickled values, and the buffers of their memoryviews as arrays: Ray shares those with processes without a copy."""


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | {memoryview: lambda view: (memoryview, (pickle.PickleBuffer(view),))}


def serialize(value: Any) -> Serialized:
    """Serialise a value; the memory of memoryviews in it is not copied."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    _Pickler(pickled, 5, buffer_callback=buffers.append).dump(value)
    return pickled.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]


def deserialize(data: Serialized) -> Any:
    """Return the value again. Its memoryviews use the memory of `data` and are read-only."""
    pickled, buffers = data
    return pickle.loads(pickled, buffers=buffers)


class Worker:
    """Actor that makes its worker object when it is first called: an error is then returned as the result, where Ray
    would only report a dead actor.

    Parameters
    ----------
    version : of the calling kvtool. Only the same version deserialises what it sends.
    make : a function, and the recipe that it makes the worker object of.
    threads : CPU threads for the process; 0: no limit.
    """

    def __init__(self, version: str, make: Serialized, threads: int) -> None:
        self._callers_version, self._make, self._threads = version, make, threads

    def do(self, method: str, arguments: Serialized) -> Any:
        """Call a method of the worker object.

        Raises
        ------
        KvtoolError : another version of kvtool calls; or what making the object, or the method, raises.
        """
        call = getattr(self._made, method)
        return call(*deserialize(arguments))

    @cached_property
    def _made(self) -> Any:
        if kvtool.__version__ != self._callers_version:
            raise KvtoolError(
                f"Ray's workers have kvtool {kvtool.__version__}, and this is {self._callers_version}",
                "install the same version on all machines of the cluster",
            )
        if self._threads:
            import torch

            torch.set_num_threads(self._threads)
        make, recipe = deserialize(self._make)
        return make(recipe)


# ---- the pool ----


class _Task(NamedTuple):
    """A running call; `arguments` is in Ray's object store, from which a replacement can take it, too."""

    actor: int
    method: str
    key: Any
    arguments: Any


class ActorPool:
    """Pool of Ray actors. A dead actor is replaced and its task is retried.

    Parameters
    ----------
    make : makes the worker object of `recipe` in each process; its method `facts` is called first.
    device : decides whether a worker takes a GPU.
    warn : called when an actor has died.

    Raises
    ------
    KvtoolError : Ray is not installed, or does not answer; its workers have no kvtool, or another version.
    UsageError : the cluster has fewer resources than the options ask for.

    Attributes
    ----------
    facts : result of `facts` of each worker object.
    """

    def __init__(
        self, options: RayOptions, make: Callable[[Any], Any], recipe: Any, *, device: str, warn: Warn
    ) -> None:
        self._ray = connected(options.ray or LOCAL)
        self._warn, self._deaths = warn, 0
        self._busy: dict[Any, _Task] = {}  # by the result to come
        self._actors: list[Any] = []
        try:
            self._share = share_of(self._ray.cluster_resources(), options.ray_workers, device)
            self._make = self._ray.put(serialize((make, recipe)))  # sent to each machine once
            self._actors += [self._new() for _ in range(self._share.workers)]
            self.facts = self._all_facts()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Return the number of actors."""
        return len(self._actors)

    @property
    def is_full(self) -> bool:
        """Return True if all actors have enough to do."""
        return len(self._busy) >= AHEAD * len(self._actors)

    @property
    def is_busy(self) -> bool:
        """Return True if a task is running."""
        return bool(self._busy)

    def submit(self, method: str, key: Any, *arguments: Any) -> None:
        """Call a method in the actor with the fewest tasks; `next` returns `key` with the result."""
        load = [sum(task.actor == actor for task in self._busy.values()) for actor in range(len(self._actors))]
        self._send(_Task(load.index(min(load)), method, key, self._ray.put(serialize(arguments))))

    def next(self) -> tuple[Any, Any]:
        """Wait for the next result, in any order; return its key and the result.

        Raises
        ------
        KvtoolError : the task raised it; or actors keep dying.
        """
        errors = self._ray.exceptions
        while True:
            (ready,), _ = self._ray.wait([*self._busy], num_returns=1)
            task = self._busy.pop(ready)
            try:
                made = self._ray.get(ready)
            except errors.RayTaskError as error:
                raise error.cause if isinstance(error.cause, KvtoolError) else _failed(error) from error
            except errors.RayActorError as error:
                self._replace(task.actor, error)
                self._send(task)
            except errors.RayError as error:  # the result was lost with its machine
                self._count_death(error)
                self._send(task)
            else:
                self._deaths = 0
                return task.key, made

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            with suppress(Exception):
                self._ray.kill(actor)
        self._ray.shutdown()

    def _all_facts(self) -> list[Any]:
        nothing = self._ray.put(serialize(()))
        for actor in range(len(self._actors)):
            self._send(_Task(actor, "facts", actor, nothing))
        found = dict(self.next() for _ in self._actors)
        return [found[actor] for actor in range(len(self._actors))]

    def _send(self, task: _Task) -> None:
        self._busy[self._actors[task.actor].do.remote(task.method, task.arguments)] = task

    def _replace(self, actor: int, error: Any) -> None:
        """Replace a dead actor, unless it was replaced after an earlier failure."""
        if error.actor_init_failed:  # `Worker.__init__` cannot fail: the class was not found
            raise KvtoolError(
                f"Ray's workers cannot run kvtool {kvtool.__version__}: {reason_of(error)}",
                "install this version, with the same extras, on all machines of the cluster",
            ) from error
        with suppress(self._ray.exceptions.RayActorError):
            self._ray.get(self._actors[actor].__ray_ready__.remote())
            return
        self._count_death(error)
        self._actors[actor] = self._new()

    def _count_death(self, error: Exception) -> None:
        self._deaths += 1
        why = reason_of(error)
        if self._deaths > _MOST_DEATHS:
            raise KvtoolError(
                f"Ray's workers die one after another: {why}", "give each more memory: fewer --ray-workers"
            ) from error
        self._warn(f"a worker of Ray died and is replaced: {why}", "its task is retried")

    def _new(self) -> Any:
        share = self._share
        actor = self._ray.remote(num_cpus=share.cpus, num_gpus=share.gpus, max_restarts=0)(Worker)
        return actor.remote(kvtool.__version__, self._make, share.threads)


def _failed(error: Exception) -> KvtoolError:
    return KvtoolError(f"a worker of Ray failed: {reason_of(error)}", "without --ray it is computed here")
