"""Mirror of a shared store in a local one: opened by URL, brought up to date with the shared store's catalogue.

KV is fetched from the shared store when it is read, and kept within a budget."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvtool.core.cache.identity import HERE
from kvtool.core.cache.layout import atomic_write
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import nested
from kvtool.core.common.types import Warn, warn_nobody
from kvtool.core.errors import (
    DamagedError,
    KvtoolError,
    NoSpaceError,
    RemoteError,
    StoreFormatError,
    StoreLockedError,
    StoreNotFoundError,
)
from kvtool.core.remote import values
from kvtool.core.remote.blobs import TIMEOUT, Blobs, open_blobs
from kvtool.core.remote.catalogue import Catalogue, Chunk, digest_of, unseal_head
from kvtool.core.remote.catalogue_io import (
    LazyCatalogue,
    cache_folder,
    check_same_identity,
    keep_copies,
    number_of,
    open_root,
    pack_root,
    read_head,
    with_shards,
)
from kvtool.core.remote.pull import PullJob
from kvtool.core.remote.report import TransferReport
from kvtool.core.remote.selection import Origins
from kvtool.core.remote.tier import CATALOGUE, Tier, default_budget, evict_for_files, evict_some


def open_store(place: Path | str, *, warn: Warn = warn_nobody) -> Store:
    return Store.open(place) if isinstance(place, Path) else open_shared(place, warn=warn)


def open_shared(url: str, *, timeout: float = TIMEOUT, lock_wait: float = 0.0, warn: Warn = warn_nobody) -> Store:
    """Open the local cache of a shared store, with the shared store as its remote backend, of which each value may take
    `timeout` seconds. If it does not answer, is gone or cannot be used, the local cache is used without it; raises
    RemoteError, StoreNotFoundError if that is empty."""
    blobs, place = open_blobs(url, timeout), local_place(url)
    try:
        head, root = read_head(blobs, whole=False)
    except (RemoteError, DamagedError, StoreNotFoundError) as error:
        blobs.close()
        return _alone(place, warn, error)
    store: Store | None = None
    try:
        store = Store.create_or_open(place)
        mirror = MirrorUpdater(store, blobs, unseal_head(head).catalogue, root, timeout, warn)
        if mirror.sync_catalogue(lock_wait):
            store.link = Tier(store, blobs, LazyCatalogue(blobs, root), mirror.mark, timeout, warn)
        return store
    except BaseException:
        if store is not None:
            store.close()
        raise
    finally:
        if store is None or store.link is None:
            blobs.close()


def _alone(place: Path, warn: Warn, error: KvtoolError) -> Store:
    with suppress(KvtoolError):
        store = Store.open(place)
        if store.manifest():
            warn(f"{error.message}: only what is here already is used", error.hint)
            return store
        store.close()
    raise error


def local_place(url: str) -> Path:
    return cache_folder("remote", url)


_ADOPTED = "remote/adopted.json"
_MOST_TOLD = 10  # damages, one by one


class MirrorUpdater:
    """Updater of a local cache to the root of its shared store's catalogue, of this digest. `mark` is the digest of the
    root as the local cache stores it."""

    def __init__(self, store: Store, blobs: Blobs, digest: str, root: Catalogue, timeout: float, warn: Warn) -> None:
        self._store, self._blobs, self._digest, self._root = store, blobs, digest, root
        self._timeout, self._warn = timeout, warn
        self._packed = pack_root(root)
        self.mark = digest_of(self._packed)

    def sync_catalogue(self, lock_wait: float) -> bool:
        """Return False if the shared store cannot be used, and the local cache can. Raises KvtoolError if it is
        empty."""
        store, url, warn = self._store, self._blobs.url, self._warn
        mine = store.manifest()
        try:
            if mine:
                check_same_identity(mine.get("identity", {}), self._root.identity, url)
            self._adopt(lock_wait)
        except StoreFormatError as error:
            warn(f"{error.message}: only what is here already is used", f"start anew: remove {store.path}")
            return False
        except (RemoteError, StoreLockedError, NoSpaceError) as error:
            if not store.manifest():
                raise
            if isinstance(error, RemoteError):
                warn(f"{error.message}: only what is here already is used", error.hint)
                return False
            warn(f"the changes at {url} were not imported: {error.message}", "")
        return True

    def _adopt(self, lock_wait: float) -> None:
        adopted = self._store.read_side(_ADOPTED)
        if adopted.get("catalogue") == self.mark and not adopted.get("damaged"):
            return
        with self._store.writer(lock_wait) as writer:
            last = self._store.side_file(CATALOGUE)
            count = len(self._root.shards)
            changed, then = {*range(count)}, None
            with suppress(OSError, KvtoolError):  # then all may have changed
                packed = last.read_bytes()
                before = open_root(packed)
                if adopted == {"catalogue": digest_of(packed), "damaged": False} and len(before.shards) == count:
                    changed = {number for number in changed if self._root.shards[number] != before.shards[number]}
                then = with_shards(
                    self._blobs, before, changed if len(before.shards) == count else range(len(before.shards))
                )
            now = with_shards(self._blobs, self._root, changed)

            def within(key: str) -> bool:
                return number_of(key, count) in changed

            report = self._described(writer, now, within)
            if self._store.budget() is None and not last.exists():  # later on it is what its owner wants
                writer.set_budget(default_budget(self._store.path))
            _drop_stale(self._store, writer, now, then, within)
            evict_for_files(self._store, writer, len(self._packed))
            atomic_write(last, self._packed)
        keep_copies(self._blobs, self._digest, self._root)
        for damage in report.damaged[:_MOST_TOLD]:
            self._warn(f"{damage['subject']}: {damage['reason']}", "push again with --verify")
        if len(report.damaged) > _MOST_TOLD:
            self._warn(f"{len(report.damaged) - _MOST_TOLD} more are damaged or missing there", "")
        self._store.write_side(_ADOPTED, {"catalogue": self.mark, "damaged": bool(report.damaged)})

    def _described(self, writer: Writer, now: Catalogue, within: Callable[[str], bool]) -> TransferReport:
        report = TransferReport("pull", self._blobs.url)
        origins = Origins(HERE, self._blobs.url, mirror=True)
        job = PullJob(self._store, writer, self._blobs, origins, report, self._timeout, mirror=within)
        while True:
            try:
                job.run(now, (), delete=True)
                return report
            except NoSpaceError:
                if not evict_some(self._store, writer):
                    raise


def _drop_stale(
    store: Store, writer: Writer, now: Catalogue, then: Catalogue | None, within: Callable[[str], bool]
) -> None:
    """Drop lossy records that differ from the shared store's: what is fetched may refine just those. Entries that are
    the same in the last catalogue were compared then."""
    doomed: dict[str, list[bytes]] = {}
    for chunk_id in store.ids_here():  # of the others there are no records
        key = chunk_id.hex()
        new = now.chunks.get(key) if within(key) else None
        old = then.chunks.get(key) if then is not None else None
        if new is not None and (old is None or old.levels != new.levels):
            for level in _stale(store, chunk_id, new):
                doomed.setdefault(level, []).append(chunk_id)
    for level in nested(doomed):  # the finer first: none is ever there without what it refines
        writer.drop_level(doomed[level], level)


def _stale(store: Store, chunk_id: bytes, now: Chunk) -> list[str]:
    here = [*reversed(nested(store.sizes_here(chunk_id)))]
    kept: list[str] = []
    for level in here:  # the coarser first
        if level in now.levels:
            sound = values.holds_level(store, chunk_id, now, level)
        else:
            base = values.stored_base(store, chunk_id, level)
            sound = base is None or base in kept
        if sound:
            kept.append(level)
    return [level for level in here if level not in kept]
