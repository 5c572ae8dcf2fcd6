"""The part of the Python API that gives a store to others and takes from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from kvtool.core.api.held import Held, alone
from kvtool.core.common.types import Events
from kvtool.core.remote.options import ExportOptions, ImportOptions, PullOptions, PushOptions

if TYPE_CHECKING:
    from kvtool.core.options import arguments
    from kvtool.core.pack.export import ExportReport
    from kvtool.core.remote.report import TransferReport


class Sharing(Held):
    """Shared stores, and packs."""

    @alone(PushOptions)
    def push(
        self, url: str, *, events: Events | None = None, **options: Unpack[arguments.PushArguments]
    ) -> TransferReport:
        """Bring a shared store up to date with this one; `options` are the fields of `PushOptions`."""
        from kvtool.core.remote.push import push_to

        wanted = self._wanted(PushOptions, options)
        with self._beside() as folder:
            return push_to(url, folder, wanted, self._events(events))

    @alone(PullOptions)
    def pull(
        self, url: str, *, events: Events | None = None, **options: Unpack[arguments.PullArguments]
    ) -> TransferReport:
        """Bring this store up to date with a shared one; `options` are the fields of `PullOptions`."""
        from kvtool.core.remote.pull import pull_from

        wanted = self._wanted(PullOptions, options)
        with self._beside() as folder:
            return pull_from(url, folder, wanted, self._events(events))

    @alone(ExportOptions)
    def export(
        self, pack: str | Path, *, events: Events | None = None, **options: Unpack[arguments.ExportArguments]
    ) -> ExportReport:
        """Write the store, or a part of it, into one file; `options` are the fields of `ExportOptions`."""
        from kvtool.core.pack.export import export

        wanted = self._wanted(ExportOptions, options)
        levels, told = wanted.levels or None, self._events(events)
        with self._beside() as folder:
            only, force = wanted.only, wanted.force
            return export(folder, Path(pack), only=only, levels=levels, force=force, key=wanted.key, events=told)

    @alone(ImportOptions)
    def take(
        self, pack: str | Path, *, events: Events | None = None, **options: Unpack[arguments.ImportArguments]
    ) -> TransferReport:
        """Take a pack into the store, as `store import` does; `options` are the fields of `ImportOptions`."""
        from kvtool.core.pack.import_ import take

        wanted = self._wanted(ImportOptions, options)
        told, trust, wait = self._events(events), wanted.trusted(), wanted.lock_wait
        with self._beside() as folder:
            return take(folder, Path(pack), trust=trust, lock_wait=wait, max_size=wanted.max_size, events=told)

    @alone(ImportOptions)
    def merge(
        self,
        sources: Sequence[str | Path],
        *,
        events: Events | None = None,
        **options: Unpack[arguments.ImportArguments],
    ) -> list[TransferReport]:
        """Take other stores and packs into the store, as `store import` does; `options` are of `ImportOptions`."""
        from kvtool.core.pack.import_ import merge

        wanted, paths = self._wanted(ImportOptions, options), [Path(source) for source in sources]
        told, trust, wait = self._events(events), wanted.trusted(), wanted.lock_wait
        with self._beside() as folder:
            return merge(folder, paths, trust=trust, lock_wait=wait, max_size=wanted.max_size, events=told)
