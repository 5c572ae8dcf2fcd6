"""Chunks encoded by workers of Ray; this process reads and sends what they are made of."""

from __future__ import annotations

from kvtool.core.codec.profile import Profile
from kvtool.core.common.types import Warn
from kvtool.core.compress.encoding import Task
from kvtool.core.compress.far_encoder import FarEncoder, Recipe
from kvtool.core.compress.hands import Done, Plan, Read
from kvtool.core.compress.options import CompressOptions
from kvtool.core.crew.actor_pool import ActorPool

BATCH_BYTES = 32 * 2**20  # of exact records that go to a worker at once; more where a single chunk has more


class RaysHands:
    """Sends chunks to workers, some megabytes of exact records at once.

    Raises
    ------
    KvtoolError, UsageError : see ActorPool, which there is from the first chunk on.
    """

    def __init__(self, read: Read, profile: Profile | None, options: CompressOptions, warn: Warn) -> None:
        self._read, self._options, self._warn = read, options, warn
        self._recipe = Recipe(b"" if profile is None else profile.data)
        self._crew: ActorPool | None = None
        self._plans: list[Plan] = []
        self._tasks: list[Task] = []

    @property
    def workers(self) -> int:
        """See Hands."""
        return 0 if self._crew is None else self._crew.size

    @property
    def is_full(self) -> bool:
        """See Hands."""
        return self._crew is not None and self._crew.is_full

    @property
    def is_busy(self) -> bool:
        """See Hands."""
        return self._crew is not None and (self._crew.is_busy or bool(self._plans))

    def give(self, plan: Plan) -> None:
        """See Hands."""
        if self._crew is None:
            self._crew = ActorPool(self._options, FarEncoder, self._recipe, device="cpu", warn=self._warn)
        self._plans.append(plan)
        self._tasks.append(self._read(plan))
        if sum(task.size for task in self._tasks) >= BATCH_BYTES:
            self._hand_over(self._crew)

    def take(self) -> Done:
        """See Hands."""
        assert self._crew is not None
        if self._plans and not self._crew.is_full:
            self._hand_over(self._crew)
        plans, made = self._crew.next()
        return [*zip(plans, made, strict=True)]

    def close(self) -> None:
        """See Hands."""
        if self._crew is not None:
            self._crew.close()

    def _hand_over(self, crew: ActorPool) -> None:
        plans, tasks = self._plans, self._tasks
        self._plans, self._tasks = [], []
        crew.submit("chunks", plans, tasks)
