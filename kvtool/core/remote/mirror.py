"""Mirror of a shared store in a local one: opened by URL, brought up to date with the shared store's catalogue.

KV is fetched from the shared store when it is read, and kept within a budget."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from kvtool.core.cache import layout
from kvtool.core.cache.backend import BlobRequest, KVRead
from kvtool.core.cache.chunks import read_record
from kvtool.core.cache.entries import ChunkInfo
from kvtool.core.cache.identity import HERE
from kvtool.core.cache.layout import atomic_write
from kvtool.core.cache.record import aligned
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import known, level_of, nested
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
from kvtool.core.remote.blobs import MOST_BYTES, TIMEOUT, Blobs, open_blobs
from kvtool.core.remote.catalogue import Catalogue, Chunk, Level, digest_of, records_wanted, unseal_head
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
from kvtool.core.remote.options import TransferReport
from kvtool.core.remote.prefetch import Prefetcher
from kvtool.core.remote.pull import Origins, PullJob
from kvtool.core.remote.values import base_of
from kvtool.core.upkeep.plan import eviction_order, kept_always, pages, pinned_with_documents
from kvtool.core.upkeep.prune import LOW_WATER

Place = tuple[bytes, str]  # chunk id, level
_Record = tuple[Place, int]  # of a layer
_Fetched = tuple[bytes, ChunkInfo, str, list[bytes]]  # whole: chunk id, description, level, records
CATALOGUE = "remote/catalogue"  # side file of the local cache: root of the catalogue that was imported last


class Tier:
    """A shared store as the :class:`kvtool.core.cache.chunks.RemoteBackend` of its local cache.

    A chunk's KV is requested when its first layer is read, and written into the local cache after the answer, whole or
    not at all. A shared store that stops answering is not asked again: missing KV is a miss.
    """

    def __init__(
        self, store: Store, blobs: Blobs, offers: LazyCatalogue, digest: str, timeout: float, warn: Warn
    ) -> None:
        self._store, self._blobs, self._warn = store, blobs, warn
        self.url, self.timeout = blobs.url, timeout
        self._there: LazyCatalogue | None = offers  # None: the shared store is gone
        self._digest = digest  # of the catalogue that they are of
        self._fetched: dict[Place, dict[int, bytes]] = {}
        self._fetching = threading.Lock()
        self._arrivals: Prefetcher | None = None
        self._coming = deque[_Record]()  # what was asked for and has not come

    # ---- what there is ----

    def offers(self, chunk_id: bytes) -> Mapping[str, Level]:
        chunk = self._chunk(chunk_id)
        return chunk.levels if chunk is not None else {}

    def _chunk(self, chunk_id: bytes) -> Chunk | None:
        try:
            return self._there.get(chunk_id.hex()) if self._there is not None else None
        except (RemoteError, DamagedError) as error:
            self.give_up(error)
            return None

    def is_here(self, chunk_id: bytes, level: str) -> bool:
        chunk = self._chunk(chunk_id)
        fetched = self._fetched.get((chunk_id, level), {})
        return level in self._store.sizes_here(chunk_id) or (chunk is not None and len(fetched) == chunk.layers)

    def wanted(self, chunk_id: bytes, level: str) -> list[BlobRequest]:
        chunk = self._chunk(chunk_id)
        return records_wanted(chunk_id.hex(), chunk, level) if chunk is not None and level in chunk.levels else []

    # ---- reading ----

    def complete(
        self,
        reads: list[KVRead | KvtoolError | None],
        chunk_ids: Sequence[bytes],
        level: str,
        layer: int,
        before: Callable[[int], None],
    ) -> None:
        missing = [
            number
            for number, (read, chunk_id) in enumerate(zip(reads, chunk_ids, strict=True))
            if (read is None or isinstance(read, KvtoolError))
            and (layer < len(self.wanted(chunk_id, level)) or (chunk_id, level) in self._fetched)
        ]
        if not missing:
            return
        try:
            for number in missing:
                before(number)
            self._fetch([chunk_ids[number] for number in missing], level, layer)
            why: KvtoolError = DamagedError("its record in the shared store is damaged or lost")
        except RemoteError as error:
            why = error
        for number in missing:
            value = self._fetched.get((chunk_ids[number], level), {}).get(layer)
            if value is None:
                reads[number] = why
                continue
            copy = aligned(len(value))
            copy[:] = value
            reads[number] = read_record(chunk_ids[number], level, layer, copy)

    def _fetch(self, chunk_ids: Sequence[bytes], level: str, layer: int) -> None:
        """Fetch a layer of some chunks, and request their other layers. A failed stream is not waited for again."""
        with self._fetching:
            places = [(chunk_id, level) for chunk_id in chunk_ids]
            lacking = {(place, layer) for place in places if layer not in self._fetched.get(place, {})}
            if not lacking:
                return
            if self._there is None:
                raise RemoteError("the shared store is gone")
            try:
                arrivals = self._arrivals = self._arrivals or self.arrivals()
                first = lacking.difference(self._coming)
                self._ask(arrivals, [place for place in places if (place, layer) in first])
                while lacking:
                    place, number = self._coming.popleft()
                    self.keep(place, number, arrivals.take(self.timeout).value)
                    lacking.discard((place, number))
            except BaseException as error:  # Ctrl-C, too: nobody knows which of them comes next
                self._drop_stream()
                if isinstance(error, RemoteError):
                    self.give_up(error)
                raise

    def _drop_stream(self) -> None:
        if self._arrivals is not None:
            self._arrivals.close()
            self._arrivals = None
        self._coming.clear()

    def _ask(self, arrivals: Prefetcher, places: Sequence[Place]) -> None:
        asked, coming = list[tuple[int, Place, BlobRequest]](), {*self._coming}
        for place in places:
            wanted = self.wanted(*place)
            if not wanted:
                raise RemoteError("the shared store is gone")
            lacking = {*range(len(wanted))} - self._fetched.get(place, {}).keys()
            asked += [(number, place, wanted[number]) for number in lacking if (place, number) not in coming]
        asked.sort(key=lambda row: row[0])  # chunks stay in the order given
        self._coming += [(place, number) for number, place, _ in asked]
        arrivals.ask([wanted for _, _, wanted in asked])

    # ---- streaming (core/streaming) ----

    def arrivals(self) -> Prefetcher:
        return Prefetcher(self._blobs)

    def keep(self, place: Place, layer: int, value: bytes | None) -> bool:
        """Hold a record that arrived, to be read now and written afterwards. False: it is missing, damaged or too
        large."""
        if value is None or not isinstance(read_record(place[0], place[1], layer, memoryview(value)), tuple):
            return False
        held = self._fetched.setdefault(place, {})
        others = sum(len(record) for number, record in held.items() if number != layer)
        offer = self.offers(place[0]).get(place[1])
        if others + len(value) > (offer.size if offer is not None else MOST_BYTES):
            return False
        held[layer] = value
        return True

    def give_up(self, error: KvtoolError) -> None:
        if self._there is not None:
            self._there = None
            self._warn(f"{error.message}: what is not here is computed", error.hint)

    # ---- afterwards ----

    def keep_fetched(self) -> None:
        if self._fetched or self._store.use_log.is_long:  # which a writer adds when it ends
            try:
                self._write_fetched()
            except KvtoolError as error:  # locked, full, read-only
                self._warn(f"what was fetched is not kept: {error.message}", error.hint)

    def _write_fetched(self) -> None:
        whole, sizes = self._whole(), Counter[bytes]()
        self._fetched = {}
        for chunk_id, _, _, records in whole:
            sizes[chunk_id] += sum(pages(len(record)) + _ROW for record in records)
        with self._store.writer(0.0) as writer:
            kept, mine = evict_until_fits(self._store, writer, sizes), self._is_in_force()
            for chunk_id, info, level, records in whole:
                if chunk_id not in kept or (level_of(level).nested and not mine):
                    continue  # another process has taken a newer catalogue over: it may refine what that has dropped
                with suppress(ValueError):  # of another length than its description: a hole in the answer
                    writer.put_chunk(chunk_id, info, level, records)

    def _whole(self) -> list[_Fetched]:
        """Return the levels of chunks of which all layers, and what they refine, have arrived or are here; the coarser
        first. The records say so: the shared store may be gone by now, with its catalogue."""
        whole = dict[Place, _Fetched]()
        for (chunk_id, level), layers in sorted(self._fetched.items(), key=lambda row: level_of(row[0][1]).bits):
            with suppress(DamagedError):  # its description: the next catalogue brings it again
                info = self._store.chunk_info(chunk_id)
                if info is None or len(layers) != info.layers:
                    continue
                base = base_of(chunk_id, level, layers[0]) if level_of(level).nested else None
                if base is None or (chunk_id, base) in whole or base in self._store.sizes_here(chunk_id):
                    records = [layers[layer] for layer in range(info.layers)]
                    whole[chunk_id, level] = chunk_id, info, level, records
        return [*whole.values()]

    def _is_in_force(self) -> bool:
        with suppress(OSError):
            return digest_of(self._store.side_file(CATALOGUE).read_bytes()) == self._digest
        return False

    def close(self) -> None:
        self._drop_stream()
        self._blobs.close()


# ---- eviction: the local cache has a budget, by the rules of `store prune` ---------------------------------------

MOST_BUDGET = 20 * 10**9
_ROW = 256  # bytes of the B-tree for a record
_SLACK = 3 * 2**19  # tree pages, locks, notes of use until they are folded, and what else a commit touches
_SPARE = 1 - LOW_WATER  # share of the budget that an eviction leaves free


def default_budget(path: Path) -> int:
    """Return 20 GB, or half of the free disk space if that is less; never less than what is stored already."""
    used = layout.folder_bytes(path)
    return max(used, min(MOST_BUDGET, used + layout.disk_free(path) // 2))


def evict_until_fits(store: Store, writer: Writer, coming: Mapping[bytes, int]) -> set[bytes]:
    """Evict the least used KV until incoming chunks, of so many bytes each, fit into the budget; return those that fit.

    No chunk is evicted that is used as often as the incoming ones. Pinned documents and the prompt's own beginning
    stay. A share of the budget is left free, so that the next eviction is not due at once.
    """
    budget = store.budget()
    if budget is None:
        return {*coming}
    room = budget - layout.folder_bytes(store.path) + store.environment.free_bytes() - _SLACK
    kept = {*coming}
    if sum(coming.values()) > room:
        plan = _Eviction(store, {*coming}, room)
        plan.until(0)  # a budget that was lowered is met, whatever comes
        kept = plan.fit(coming)
        plan.until(int(budget * _SPARE), below=min(map(plan.score, coming)))
        plan.drop(writer)
    if layout.folder_bytes(store.path) > budget:  # it was lowered: free pages are not left out
        with suppress(NoSpaceError):
            writer.compact()
    return kept


def evict_some(store: Store, writer: Writer) -> bool:
    """Evict the KV of the least used chunks, a tenth of the budget. False: nothing can be evicted."""
    plan = _Eviction(store, set(), room=0)
    plan.until(max(1, int((store.budget() or layout.folder_bytes(store.path)) * _SPARE)))
    plan.drop(writer)
    return bool(plan.evicted)


def evict_for_files(store: Store, writer: Writer, size: int) -> None:
    """Evict and compact until files of so many bytes fit into the store's folder, as far as KV can be evicted."""
    budget = store.budget()
    while budget is not None and layout.folder_bytes(store.path) + size > budget and evict_some(store, writer):
        with suppress(NoSpaceError):
            writer.compact()


class _Eviction:
    """An eviction in progress: chunks in order of use, and the bytes that are free once those before were evicted."""

    def __init__(self, store: Store, stay: set[bytes], room: int) -> None:
        self._store, self._scores, self.room = store, eviction_order(store), room
        self.evicted: dict[str, list[bytes]] = {}
        stay |= kept_always(store) | pinned_with_documents(store)
        may_go = (chunk_id for chunk_id in store.ids_here() if chunk_id not in stay)
        self._order = iter(sorted(may_go, key=lambda chunk_id: (self.score(chunk_id), chunk_id)))

    def score(self, chunk_id: bytes) -> float:
        return self._scores.get(chunk_id, 0.0)

    def until(self, room: int, below: float | None = None) -> None:
        """Evict chunks until so many bytes are free; only those with a score below the one given."""
        while self.room < room and (chunk_id := next(self._order, None)) is not None:
            if below is not None and self.score(chunk_id) >= below:
                self._order = chain([chunk_id], self._order)
                return
            for level, size in self._store.sizes_here(chunk_id).items():
                self.evicted.setdefault(level, []).append(chunk_id)
                self.room += size

    def fit(self, coming: Mapping[bytes, int]) -> set[bytes]:
        """Evict less used chunks for those that come, the most used first; return those that fit."""
        kept = set[bytes]()
        for chunk_id in sorted(coming, key=lambda chunk_id: (-self.score(chunk_id), chunk_id)):
            self.until(coming[chunk_id], below=self.score(chunk_id))
            if coming[chunk_id] <= self.room:
                kept.add(chunk_id)
                self.room -= coming[chunk_id]
        return kept

    def drop(self, writer: Writer) -> None:
        for level in known(self.evicted):  # the finer first: none is ever there without what it refines
            writer.drop_level(self.evicted[level], level)


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
