"""Batches computed by Ray's actors, and written here by the store's one writer."""

from __future__ import annotations

from typing import Any

from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.cache.identity import HERE
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import level_of
from kvtool.core.common.sizes import counted
from kvtool.core.crew.actor_pool import ActorPool
from kvtool.core.ingest.account import Account
from kvtool.core.ingest.choices import Choices
from kvtool.core.ingest.far_maker import Computed, Facts, FarMaker, Recipe
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.prepare import PreparedFile
from kvtool.core.ingest.storer import Batch, Storer
from kvtool.core.model.options import ModelOptions
from kvtool.core.session.identity import ProfileCache


def far_storer(
    store: Store, writer: Writer, account: Account, options: IngestOptions, choices: Choices
) -> tuple[RayStorer, dict[str, Any]]:
    """Make a crew with the store's recipe; and what its actors say of themselves, for the report.

    Raises
    ------
    KvtoolError, UsageError, ModelError : see ActorPool and FarMaker.
    DamagedError : the codec profile is lost.
    """
    identity, level = choices.identity, level_of(options.level)
    profile = ProfileCache(store).current() if level.nested else None
    account.events.status(f"loading {choices.files.ref} in Ray's workers")
    recipe = Recipe(
        identity,
        ModelOptions(model=choices.files.ref, device=options.device, dtype=options.dtype, offline=options.offline),
        options.level,
        level.of_prefix,
        b"" if profile is None else profile.data,
    )
    crew = ActorPool(options, FarMaker, recipe, device=options.device, warn=account.warn)
    facts: Facts = crew.facts[0]
    ways = " and ".join(dict.fromkeys(f"{each.dtype} on {each.device}" for each in crew.facts))
    account.events.status(f"{facts.model} in {ways}, {counted(crew.size, 'worker')} of Ray")
    if " and " in ways:
        account.warn(f"workers compute in {ways}: each chunk notes its own", "--dtype gives all of them one format")
    resolved = {
        "model": facts.model,
        "device": facts.device,
        "dtype": facts.dtype,
        "store_dtype": identity.dtype,
        "fingerprint": identity.fingerprint,
        "lead_in": identity.lead_in.mode,
        "workers": crew.size,
    }
    return RayStorer(writer, account, crew), resolved


class RayStorer(Storer):
    """Hands batches to a crew. A file is committed when all of its chunks are there, in whatever order they come, so a
    run that ends in the middle leaves whole files."""

    def __init__(self, writer: Writer, account: Account, crew: ActorPool) -> None:
        facts: Facts = crew.facts[0]
        super().__init__(account, facts.device, facts.context, facts.lead_in)
        self._writer, self._crew = writer, crew

    def store_prefix(self, prefix: ChunkSpec) -> None:
        """See Storer."""
        self._crew.submit("prefix", None, prefix)
        self._write(self._crew.next()[1])

    def finish(self) -> None:
        """See Storer."""
        super().finish()
        while self._crew.is_busy:
            self._take()

    def close(self) -> None:
        """See Storer."""
        self._crew.close()

    def _compute(self, batch: Batch) -> None:
        while self._crew.is_full:
            self._take()
        self._crew.submit("chunks", batch, batch.chunks)

    def _take(self) -> None:
        batch: Batch
        computed: Computed
        batch, computed = self._crew.next()
        for file in self._spanning(batch):
            self._writer.begin_file(file.entry.path, file.chunk_ids)
        self._write(computed)
        report = self._account.report
        report.prefill_seconds += computed.seconds / self._crew.size
        report.tokens += sum(len(chunk.ids) for chunk in batch.chunks)
        report.chunks.computed += len(batch.chunks)
        self._is_there(batch)

    def _write(self, computed: Computed) -> None:
        for made in computed.records:
            self._account.report.kv_bytes += sum(map(len, made.layers))
            self._writer.put_chunk(made.chunk_id, made.info, made.level, made.layers, origin=HERE)

    def _commit(self, file: PreparedFile) -> None:
        self._writer.commit_file(file.entry, file.documents)
