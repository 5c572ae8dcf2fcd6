"""What computes batches in another process: a model, and what records are made with, and no store."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kvtool.core.model.options import ModelOptions
from kvtool.core.records.making import ChunkRecords, LeadIns, make
from kvtool.core.records.wanted import WantedChunk
from kvtool.core.session.identity import StoreIdentity

if TYPE_CHECKING:
    from kvtool.core.codec.profile import Profile
    from kvtool.core.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that a process has to know to make the records that the writer's own would make.

    Attributes
    ----------
    wanted : the model, by a name or a path that holds wherever it is loaded.
    profile, rows : bytes of the codec profile in use, and of a learned lead-in; empty: none.
    threads : of a CPU that one process takes; 0: as many as there are.
    """

    identity: StoreIdentity
    wanted: ModelOptions
    level: str
    prefix_level: str
    profile: bytes = b""
    rows: bytes = b""
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """What the other process says of itself: `dtype` is what it computes in; `context`, `lead_in` in tokens."""

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
    """Holds the model, loaded when something is first asked of it: what goes wrong there is then told as the answer,
    where Ray would only say that the worker died."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    @cached_property
    def _tools(self) -> tuple[Decoder, LeadIns, Profile | None]:
        """Raises what opening a session does: it has to be the recipe's very model."""
        import torch

        from kvtool.core.cache.store import Store
        from kvtool.core.codec.profile import Profile
        from kvtool.core.session.lead_in import open_lead_ins
        from kvtool.core.session.session import Session

        recipe = self._recipe
        if recipe.threads:
            torch.set_num_threads(recipe.threads)
        profile = Profile.from_bytes(recipe.profile) if recipe.profile else None
        with TemporaryDirectory(prefix="kvtool-") as folder, Store.create_or_open(Path(folder)) as store:
            if recipe.rows:
                with store.writer() as writer:
                    writer.add_profile(bytes.fromhex(recipe.identity.lead_in.rows), recipe.rows)
            decoder = Session(store, recipe.wanted, identity=recipe.identity).decoder
            return decoder, open_lead_ins(store, decoder, recipe.identity), profile

    def facts(self) -> Facts:
        """What this process is."""
        decoder, lead_ins, _ = self._tools
        loaded = decoder.loaded
        limits = decoder.context, len(lead_ins.own)
        return Facts(loaded.files.ref, loaded.device, loaded.arithmetic.dtype, *limits, os.getpid())

    def prefix(self, prefix: WantedChunk) -> Computed:
        """Compute the prompt's own beginning."""
        return self._computed(LeadIns.nothing(self._tools[0]), [prefix], self._recipe.prefix_level)

    def chunks(self, chunks: Sequence[WantedChunk]) -> Computed:
        """Compute a batch."""
        return self._computed(self._tools[1], chunks, self._recipe.level)

    def _computed(self, lead_ins: LeadIns, chunks: Sequence[WantedChunk], level: str) -> Computed:
        decoder, _, profile = self._tools
        started = time.perf_counter()
        records = make(decoder, lead_ins, chunks, level, profile)
        return Computed(records, time.perf_counter() - started)
