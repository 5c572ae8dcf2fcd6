"""Encoders: this process, or workers of Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from kvtool.core.cache.entries import ChunkInfo
from kvtool.core.codec.levels import level_of
from kvtool.core.codec.profile import Profile
from kvtool.core.compress.encoding import Made, Task, make


@dataclass(frozen=True, slots=True)
class Plan:
    """Tells what is to be made of a chunk.

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


class Hands(Protocol):
    """Encodes chunks, some at a time."""

    @property
    def workers(self) -> int:
        """Return the number of Ray workers that encode; 0: this process does."""
        ...

    @property
    def is_full(self) -> bool:
        """Return True if a result has to be taken before more work is given."""
        ...

    @property
    def is_busy(self) -> bool:
        """Return True if results are still to be taken."""
        ...

    def give(self, plan: Plan) -> None:
        """Have a chunk encoded."""
        ...

    def take(self) -> Done:
        """Wait for some that were given, in no order. Raises DamagedError, KvtoolError."""
        ...

    def close(self) -> None:
        """Give up what was not taken."""
        ...


class OwnHands:
    """Threads of this process encode so many chunks together."""

    workers = 0

    def __init__(self, read: Read, profile: Profile | None, pool: ThreadPoolExecutor, together: int) -> None:
        self._read, self._profile = read, profile
        self._pool, self._together = pool, together
        self._plans: list[Plan] = []

    @property
    def is_full(self) -> bool:
        """See Hands."""
        return len(self._plans) >= self._together

    @property
    def is_busy(self) -> bool:
        """See Hands."""
        return bool(self._plans)

    def give(self, plan: Plan) -> None:
        """See Hands."""
        self._plans.append(plan)

    def take(self) -> Done:
        """See Hands."""
        plans, self._plans = self._plans, []
        return [*zip(plans, self._pool.map(self._made, plans), strict=True)]

    def close(self) -> None:
        """See Hands."""

    def _made(self, plan: Plan) -> Made:
        return make(self._read(plan), self._profile)
