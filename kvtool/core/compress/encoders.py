"""Encoders of chunks: threads of this process, or workers of Ray. New records depend only on stored records."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch

from kvtool.core.cache.entries import ChunkInfo
from kvtool.core.cache.record import aligned
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded, LayerKV, no_profiles
from kvtool.core.codec.encode import encode_levels, encode_rows
from kvtool.core.codec.levels import level_of, whole
from kvtool.core.codec.profile import Profile
from kvtool.core.common.types import Ids, Warn
from kvtool.core.compress.options import CompressOptions
from kvtool.core.crew.actor_pool import ActorPool
from kvtool.core.records.encode import encoder_threads, sealed

BATCH_BYTES = 32 * 2**20  # of exact records that go to a worker at once; more where a single chunk has more


@dataclass(frozen=True, slots=True)
class Task:
    """Input of a chunk's new records.

    Attributes
    ----------
    exact : its records at the exact level `source`, one a layer.
    levels : what is to be made.
    bases : stored records that new ones may refine, one a layer, by their level.
    rows : those that stay at levels that leave rows out, ascending.
    """

    chunk: bytes
    source: str
    exact: list[Encoded]
    levels: tuple[str, ...]
    bases: dict[str, list[Encoded]] = field(default_factory=dict)
    rows: dict[str, Ids] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of the exact records."""
        return sum(len(item.payload) for item in self.exact)


@dataclass(frozen=True, slots=True)
class Made:
    """Records of a chunk by level, one a layer, the bytes of the numbers in them, and the seconds of a core."""

    records: dict[str, list[bytes]]
    raw_bytes: int
    seconds: float


def make(task: Task, profile: Profile | None) -> Made:
    """Encode a chunk at each of a task's levels.

    Raises
    ------
    DamagedError : a record that was given cannot be decoded.
    """
    started = time.thread_time()
    layers = range(len(task.exact))
    kvs = CODECS[task.source].decode_layers(task.exact)
    bases = {
        level: [item.payload for item in stored]
        for level, stored in task.bases.items()
        if _is_of(kvs, level, stored, profile)
    }
    made = encode_levels(kvs, whole(task.levels), profile, bases)
    for level, rows in task.rows.items():
        made[level] = encode_rows(kvs, rows, level, profile)
    records = {
        level: [sealed(task.chunk, kvs[layer], level, layer, made[level][layer]) for layer in layers]
        for level in task.levels
    }
    size = sum(side.nbytes for kv in kvs for side in kv)
    return Made(records, size, time.thread_time() - started)


def _is_of(kvs: Sequence[LayerKV], level: str, stored: Sequence[Encoded], profile: Profile | None) -> bool:
    """Return True if a stored level encodes just this exact KV. A pulled level may round differently: then only its
    maker could refine it."""

    def profiles(digest: bytes) -> Profile:
        return profile if profile is not None and digest == profile.digest else no_profiles(digest)

    for layer, (item, payload) in enumerate(zip(stored, CODECS[level].encode_layers(kvs, profile), strict=True)):
        made = Encoded(b"".join(payload), item.shape, item.dtype)
        sides = [CODECS[level].decode([record], layer, profiles)[0] for record in (item, made)]
        if not all(torch.equal(*pair) for pair in zip(*sides, strict=True)):
            return False
    return True


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a chunk's new records.

    Attributes
    ----------
    source : the exact level that it is made of.
    kept : nested levels that stay as they are, which new ones may refine.
    """

    chunk: bytes
    info: ChunkInfo
    source: str
    levels: tuple[str, ...]
    kept: tuple[str, ...]

    @property
    def sparse(self) -> list[str]:
        """Return the levels that drop rows."""
        return [level for level in self.levels if level_of(level).share < 100]


Read = Callable[[Plan], Task]
Done = Sequence[tuple[Plan, Made]]


class LocalEncoder:
    """Encoder that runs in threads of this process, `together` chunks at a time."""

    workers = 0  # of Ray

    def __init__(self, read: Read, profile: Profile | None, pool: ThreadPoolExecutor, together: int) -> None:
        self._read, self._profile = read, profile
        self._pool, self._together = pool, together
        self._plans: list[Plan] = []

    @property
    def is_full(self) -> bool:
        """Return True if a result has to be taken before more work is submitted."""
        return len(self._plans) >= self._together

    @property
    def is_busy(self) -> bool:
        """Return True if results are still to be taken."""
        return bool(self._plans)

    def submit(self, plan: Plan) -> None:
        """Have a chunk encoded."""
        self._plans.append(plan)

    def next(self) -> Done:
        """Wait for some results, in no order. Raises DamagedError, KvtoolError."""
        plans, self._plans = self._plans, []
        return [*zip(plans, self._pool.map(self._made, plans), strict=True)]

    def close(self) -> None:
        """Give up what was not taken."""

    def _made(self, plan: Plan) -> Made:
        return make(self._read(plan), self._profile)


@dataclass(frozen=True, slots=True)
class Facts:
    """Report of a worker about itself."""

    pid: int
    threads: int


class EncodeWorker:
    """Encoder in another process: it has a codec profile (bytes, empty for none), but neither a store nor a model.

    It encodes as many chunks at a time as torch has threads.
    """

    def __init__(self, profile: bytes) -> None:
        self._profile = Profile.from_bytes(profile) if profile else None
        self._pool = encoder_threads()

    def facts(self) -> Facts:
        """Return the facts about this process."""
        return Facts(os.getpid(), torch.get_num_threads())

    def chunks(self, tasks: Sequence[Task]) -> list[Made]:
        """Encode some chunks."""
        return [*self._pool.map(self._made, tasks)]

    def _made(self, task: Task) -> Made:
        bases = {level: [*map(_own, items)] for level, items in task.bases.items()}
        return make(replace(task, exact=[*map(_own, task.exact)], bases=bases), self._profile)


def _own(item: Encoded) -> Encoded:
    """Copy a record into aligned memory of this process, out of what Ray shares with others."""
    payload = aligned(len(item.payload))
    payload[:] = item.payload
    return replace(item, payload=payload, base=None if item.base is None else _own(item.base))


class RayEncoder:
    """Encoder that sends chunks to workers of Ray, some megabytes of exact records at once.

    Raises
    ------
    KvtoolError, UsageError : see ActorPool, which there is from the first chunk on.
    """

    def __init__(self, read: Read, profile: Profile | None, options: CompressOptions, warn: Warn) -> None:
        self._read, self._options, self._warn = read, options, warn
        self._profile = b"" if profile is None else profile.data
        self._actors: ActorPool | None = None
        self._plans: list[Plan] = []
        self._tasks: list[Task] = []

    @property
    def workers(self) -> int:
        """Return the number of Ray workers that encode."""
        return 0 if self._actors is None else self._actors.size

    @property
    def is_full(self) -> bool:
        """Return True if a result has to be taken before more work is submitted."""
        return self._actors is not None and self._actors.is_full

    @property
    def is_busy(self) -> bool:
        """Return True if results are still to be taken."""
        return self._actors is not None and (self._actors.is_busy or bool(self._plans))

    def submit(self, plan: Plan) -> None:
        """Have a chunk encoded."""
        if self._actors is None:
            self._actors = ActorPool(self._options, EncodeWorker, self._profile, device="cpu", warn=self._warn)
        self._plans.append(plan)
        self._tasks.append(self._read(plan))
        if sum(task.size for task in self._tasks) >= BATCH_BYTES:
            self._hand_over(self._actors)

    def next(self) -> Done:
        """Wait for some results, in no order. Raises DamagedError, KvtoolError."""
        assert self._actors is not None
        if self._plans and not self._actors.is_full:
            self._hand_over(self._actors)
        plans, made = self._actors.next()
        return [*zip(plans, made, strict=True)]

    def close(self) -> None:
        """Give up what was not taken."""
        if self._actors is not None:
            self._actors.close()

    def _hand_over(self, actors: ActorPool) -> None:
        plans, tasks = self._plans, self._tasks
        self._plans, self._tasks = [], []
        actors.submit("chunks", plans, tasks)


Encoder = LocalEncoder | RayEncoder
