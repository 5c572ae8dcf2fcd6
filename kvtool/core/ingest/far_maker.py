"""Prefill worker in another process: it has a model and the settings of records, but no store."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.model.options import ModelOptions
from kvtool.core.records.encode import ChunkRecords, LeadIns, make
from kvtool.core.session.identity import StoreIdentity


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that a process has to know to make the records that the writer's own would make.

    Attributes
    ----------
    wanted : the model, by a name or a path that holds wherever it is loaded.
    profile : bytes of the codec profile in use; empty: none.
    """

    identity: StoreIdentity
    wanted: ModelOptions
    level: str
    prefix_level: str
    profile: bytes = b""


@dataclass(frozen=True, slots=True)
class Facts:
    """Report of the other process about itself: `dtype` is its arithmetic; `context`, `lead_in` in tokens."""

    model: str
    device: str
    dtype: str
    context: int
    lead_in: int
    pid: int


@dataclass(frozen=True, slots=True)
class Computed:
    """A batch's records, and the seconds that making them took."""

    records: list[ChunkRecords]
    seconds: float


class FarMaker:
    """Holds the model; raises what opening a session does: it has to be the recipe's very model."""

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

    def facts(self) -> Facts:
        """Return the facts about this process."""
        loaded = self._decoder.loaded
        limits = self._decoder.context, len(self._lead_ins.own)
        return Facts(loaded.files.ref, loaded.device, loaded.arithmetic.dtype, *limits, os.getpid())

    def prefix(self, prefix: ChunkSpec) -> Computed:
        """Compute the prompt's own beginning."""
        return self._computed(LeadIns.nothing(self._decoder), [prefix], self._recipe.prefix_level)

    def chunks(self, chunks: Sequence[ChunkSpec]) -> Computed:
        """Compute a batch."""
        return self._computed(self._lead_ins, chunks, self._recipe.level)

    def _computed(self, lead_ins: LeadIns, chunks: Sequence[ChunkSpec], level: str) -> Computed:
        started = time.perf_counter()
        records = make(self._decoder, lead_ins, chunks, level, self._profile)
        return Computed(records, time.perf_counter() - started)
