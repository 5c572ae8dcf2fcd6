"""Encoding worker in another process: it has a codec profile, but neither a store nor a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvtool.core.cache.buffers import aligned
from kvtool.core.codec.base import Encoded
from kvtool.core.codec.profile import Profile
from kvtool.core.compress.encoding import Made, Task, make
from kvtool.core.records.encode import encoder_threads


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of a worker: bytes of the profile, empty for none."""

    profile: bytes


@dataclass(frozen=True, slots=True)
class Facts:
    """Report of a worker about itself."""

    pid: int
    threads: int


class FarEncoder:
    """Encodes what it is sent, several chunks at a time: as many as torch has threads."""

    def __init__(self, recipe: Recipe) -> None:
        self._profile = Profile.from_bytes(recipe.profile) if recipe.profile else None
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
    """The same record in memory of this process: aligned, and no part of what Ray shares with others."""
    room = aligned(len(item.payload))
    room[:] = item.payload
    return replace(item, payload=room, base=None if item.base is None else _own(item.base))
