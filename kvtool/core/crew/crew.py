"""Work done by Ray's actors: who dies is replaced, and its work done again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import kvtool
from kvtool.core.common.types import Warn
from kvtool.core.crew.cluster import connected, reason_of, share_of
from kvtool.core.crew.options import LOCAL, CrewOptions
from kvtool.core.crew.parcel import packed
from kvtool.core.crew.worker import Worker
from kvtool.core.errors import KvtoolError

AHEAD = 2  # pieces of work of an actor under way: one is done while the results of the one before travel
_MOST_DEATHS = 5  # one after another, without a piece of work in between


class _Work(NamedTuple):
    """Something under way; `given` stands in Ray's object store, from where another worker can have it, too."""

    who: int
    what: str
    key: Any
    given: Any


class Crew:
    """Actors, and what each of them is doing.

    Parameters
    ----------
    options : which cluster, as `ray.init` takes it, and how many workers.
    make : makes of `recipe`, in each worker, what does the work; its `facts()` is the first that is asked of it.
    device : where it computes, which tells what a worker takes of the cluster.
    warn : told of actors that died.

    Raises
    ------
    KvtoolError : Ray is not installed, or does not answer; its workers have no kvtool, or another version.
    UsageError : the cluster has less than that.

    Attributes
    ----------
    facts : what each worker says of itself.
    """

    def __init__(
        self, options: CrewOptions, make: Callable[[Any], Any], recipe: Any, *, device: str, warn: Warn
    ) -> None:
        self._ray = connected(options.ray or LOCAL)
        self._warn, self._deaths = warn, 0
        self._busy: dict[Any, _Work] = {}  # by the result to come
        try:
            self._share = share_of(self._ray.cluster_resources(), options.ray_workers, device)
            self._make = self._ray.put(packed((make, recipe)))  # sent to each machine once
            self._actors = [self._new() for _ in range(self._share.workers)]
            self.facts = self._met()
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
        """Return True if any work is under way."""
        return bool(self._busy)

    def submit(self, what: str, key: Any, *given: Any) -> None:
        """Have something done by whoever has least to do; `key` comes back with its result."""
        load = [sum(work.who == actor for work in self._busy.values()) for actor in range(len(self._actors))]
        self._send(_Work(load.index(min(load)), what, key, self._ray.put(packed(given))))

    def next(self) -> tuple[Any, Any]:
        """Wait for the next result, in no order; returns what it was submitted by, and the result.

        Raises
        ------
        KvtoolError : what the worker met; or workers die all the time.
        """
        errors = self._ray.exceptions
        while True:
            (ready,), _ = self._ray.wait([*self._busy], num_returns=1)
            work = self._busy.pop(ready)
            try:
                made = self._ray.get(ready)
            except errors.RayTaskError as error:
                raise error.cause if isinstance(error.cause, KvtoolError) else _failed(error) from error
            except errors.RayActorError as error:
                self._replace(work.who, error)
                self._send(work)
            except errors.RayError as error:  # its machine went with what it had computed
                self._count_death(error)
                self._send(work)
            else:
                self._deaths = 0
                return work.key, made

    def close(self) -> None:
        """End the actors."""
        for actor in getattr(self, "_actors", ()):
            with suppress(Exception):
                self._ray.kill(actor)
        self._ray.shutdown()

    def _met(self) -> list[Any]:
        """Wait until all actors are ready, and return the facts that each reports."""
        nothing = self._ray.put(packed(()))
        for actor in range(len(self._actors)):
            self._send(_Work(actor, "facts", actor, nothing))
        found = dict(self.next() for _ in self._actors)
        return [found[actor] for actor in range(len(self._actors))]

    def _send(self, work: _Work) -> None:
        self._busy[self._actors[work.who].do.remote(work.what, work.given)] = work

    def _replace(self, who: int, error: Any) -> None:
        """Put another in the place of an actor that died, unless that was done for a result of its before."""
        if error.actor_init_failed:  # a worker only keeps what it is given: it was not found there
            raise KvtoolError(
                f"Ray's workers cannot run kvtool {kvtool.__version__}: {reason_of(error)}",
                "install this version, with the same extras, on all machines of the cluster",
            ) from error
        with suppress(self._ray.exceptions.RayActorError):
            self._ray.get(self._actors[who].__ray_ready__.remote())
            return
        self._count_death(error)
        self._actors[who] = self._new()

    def _count_death(self, error: Exception) -> None:
        self._deaths += 1
        why = reason_of(error)
        if self._deaths > _MOST_DEATHS:
            raise KvtoolError(
                f"Ray's workers die one after another: {why}", "give each more memory: fewer --ray-workers"
            ) from error
        self._warn(f"a worker of Ray died and is replaced: {why}", "what it was at is done again")

    def _new(self) -> Any:
        share = self._share
        actor = self._ray.remote(num_cpus=share.cpus, num_gpus=share.gpus, max_restarts=0)(Worker)
        return actor.remote(kvtool.__version__, self._make, share.threads)


def _failed(error: Exception) -> KvtoolError:
    return KvtoolError(f"a worker of Ray failed: {reason_of(error)}", "without --ray it is computed here")
