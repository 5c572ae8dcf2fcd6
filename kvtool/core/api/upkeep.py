"""The part of the Python API that keeps a store small and in order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from kvtool.core.api.held import Held, alone
from kvtool.core.cache.options import LockOptions
from kvtool.core.cache.store import Store
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.options.option import options_of
from kvtool.core.upkeep.options import ForgetOptions, PruneOptions

if TYPE_CHECKING:
    from kvtool.core.options import arguments
    from kvtool.core.upkeep.plan import Plan
    from kvtool.core.upkeep.prune import Compacted, PruneReport
    from kvtool.core.upkeep.size_report import Budget


class Upkeep(Held):
    """Methods that free bytes of the store."""

    @alone(ForgetOptions)
    def rm(self, *targets: str | Path, **options: Unpack[arguments.ForgetArguments]) -> Plan:
        """Remove documents, by path, folder, glob or chunk's id; `options` are the fields of `ForgetOptions`."""
        from kvtool.core.upkeep.forget import forget

        wanted = self._wanted(ForgetOptions, options)
        names = tuple(map(str, targets))
        with self._beside() as folder:
            return forget(folder, names, dry_run=wanted.dry_run, yes=wanted.yes, lock_wait=wanted.lock_wait)

    @alone(PruneOptions)
    def prune(self, **options: Unpack[arguments.PruneArguments]) -> PruneReport:
        """Make the store smaller; `options` are the fields of `PruneOptions`."""
        from kvtool.core.upkeep.prune import prune

        wanted = self._wanted(PruneOptions, options)
        with self._beside() as folder:
            return prune(folder, wanted)

    @alone(LockOptions)
    def compact(self, **options: Unpack[arguments.LockArguments]) -> Compacted:
        """Give free pages, and what nothing refers to, back to the disk."""
        from kvtool.core.upkeep.prune import compact

        wanted = self._wanted(LockOptions, options)
        with self._beside() as folder:
            return compact(folder, lock_wait=wanted.lock_wait)

    @alone(LockOptions)
    def budget(self, *size: int | str | None) -> Budget:
        """The size budget that the store keeps to; a size (bytes, or `20GB`) sets it, None or "none" lifts it."""
        from kvtool.core.upkeep.size_report import keep_budget, read_budget

        with self._beside() as folder:
            if size:
                wanted = None if size[0] == "none" else size[0]
                most = options_of(IngestOptions)["max_size"].accept(wanted, "size")
                return keep_budget(folder, most, lock_wait=self._wanted(LockOptions, {}).lock_wait)
            with Store.open(folder) as store:
                return read_budget(store)
