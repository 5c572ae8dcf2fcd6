"""Push of a local store: the values that a shared store lacks, then the catalogue, then the head in one step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import level_of, nested
from kvtool.core.common.text import counted
from kvtool.core.common.types import Events
from kvtool.core.errors import DamagedError, RemoteError, StoreNotFoundError, UsageError
from kvtool.core.remote import values
from kvtool.core.remote.blobs import Blobs, PrivateBlobs, open_blobs
from kvtool.core.remote.catalogue import (
    HEAD,
    Catalogue,
    Chunk,
    Head,
    Level,
    catalogue_name,
    digest_of,
    seal_head,
    unseal_head,
)
from kvtool.core.remote.catalogue_io import CatalogueCache, check_same_identity, pack_root, read_head, sharded
from kvtool.core.remote.options import PushOptions, TransferReport
from kvtool.core.remote.send import GarbageCollector, Lease, Sender, check_ours, check_share, own_names

_DEFAULTS = PushOptions()
_TRIES = 8  # pushes of others that come in between


def push(
    store: Store,
    blobs: Blobs,
    options: PushOptions = _DEFAULTS,
    *,
    events: Events | None = None,
    part: values.Part | None = None,
) -> TransferReport:
    """Bring a shared store up to date with a store. Run again to resume; what is there already is not sent again.

    If something of the store is damaged, nothing is deleted. A signed shared store holds nothing that its key has not
    signed. `part`: push only that, into an empty pack.

    Raises RemoteError or NoSpaceError (what was sent stays), StoreFormatError (another model, or no store), UsageError.
    """
    started = time.perf_counter()
    report = TransferReport("push", blobs.url, dry_run=options.dry_run)
    job = _Push(store, DryRunBlobs(blobs) if options.dry_run else blobs, options, report, events or Events(), part)
    job.run(options.delete)
    report.seconds = time.perf_counter() - started
    return report


def push_to(url: str, folder: Path, options: PushOptions, events: Events) -> TransferReport:
    with closing(open_blobs(url, options.remote_timeout)) as blobs, Store.open(folder) as store:
        return push(store, blobs, options, events=events)


@dataclass
class _Push:
    store: Store
    blobs: Blobs
    options: PushOptions
    report: TransferReport
    events: Events
    part: values.Part | None

    def __post_init__(self) -> None:
        self.key, self.lease = self.options.key, Lease(self.blobs)
        self.sender = Sender(self.store, self.blobs, self.lease, self.report, self.events, self.options.verify)
        self.garbage = GarbageCollector(self.blobs, self.lease, self.report, self.events)

    def run(self, delete: bool) -> None:
        if not self.store.manifest():
            raise StoreNotFoundError(f"the store at {self.store.path} is empty", "run `kvtool ingest PATH` first")
        if self.part is None and (count := len(self.store.stretches())):  # which a catalogue has no name for
            self.events.warn(
                f"a shared store holds no states: {counted(count, 'state checkpoint')} of prompts stay here, "
                "and a question there computes them",
                "`kvtool store export` puts them into a pack, and `kvtool store import` takes them from it",
            )
        head, theirs = self._there()
        if theirs is not None:
            self._check_signer(theirs, delete)
        listed = own_names(set(self.blobs.names())) if delete else set()
        known = theirs if self.key is None or self._has_signed(theirs) else None  # what others say is not signed
        mine = values.Survey(self.store, self.report.note_damage, self.key is not None, self.part).catalogue(known)
        if delete and not self._is_whole(mine):
            self.events.warn(
                f"nothing of {self.blobs.url} was deleted: what is damaged or lost here may be whole there",
                "run `kvtool store verify --repair` and pull, then push again",
            )
            delete = False
        if delete and not (self.options.yes or self.options.dry_run):
            check_share(listed, mine, theirs, self.blobs.url)
        with self.lease.running():
            if head is not None and theirs is not None:
                self.sender.mend(unseal_head(head).catalogue, theirs)
            mine = self.sender.send(mine, theirs)
            self._publish(head, theirs, mine, delete)
            if delete:
                self.garbage.run(listed)

    def _check_signer(self, theirs: Catalogue, delete: bool) -> None:
        url = self.blobs.url
        if self.key is None and theirs.proof is not None:
            raise UsageError(f"{url} is signed by {theirs.proof.signer}", "push with --sign KEY, or to another place")
        if self.key is not None and not delete and not self._has_signed(theirs):
            raise UsageError(
                f"{url} holds what {self.key.name} has not signed",
                "push to an empty place, or with --delete, which leaves there only what this store has",
            )

    def _has_signed(self, theirs: Catalogue | None) -> bool:
        return self.key is not None and theirs is not None and self.key.has_signed(theirs.proof)

    def _there(self) -> tuple[bytes | None, Catalogue | None]:
        try:
            head, theirs = self._read()
        except DamagedError:
            if not self.options.verify:
                raise
            head, theirs = self.blobs.get([HEAD])[0], None
        if theirs is None:
            check_ours(self.blobs)
        else:
            check_same_identity(self.store.manifest().get("identity", {}), theirs.identity, self.blobs.url)
        return head, theirs

    def _read(self) -> tuple[bytes | None, Catalogue | None]:
        try:
            return read_head(self.blobs)
        except StoreNotFoundError:
            return None, None

    def _publish(self, head: bytes | None, theirs: Catalogue | None, mine: Catalogue, delete: bool) -> None:
        for _ in range(_TRIES):
            if theirs is not None:
                check_same_identity(mine.identity, theirs.identity, self.blobs.url)
                self._check_signer(theirs, delete)
            joined = mine if theirs is None or delete else self._joined(mine, theirs)
            signed = self.key is None or self._has_signed(theirs)
            if joined == theirs and signed:
                return
            if self._swap(head, theirs, joined):
                if delete and theirs is not None:
                    self.report.documents_removed = len(theirs.files.keys() - mine.files.keys())
                return
            head, theirs = self._read()
        raise RemoteError(f"{self.blobs.url} changes all the time", "try again when no other push runs")

    def _joined(self, mine: Catalogue, theirs: Catalogue) -> Catalogue:
        joined = join(mine, theirs)
        less = without_superseded(joined, mine)
        return self._with_codec(less if less != joined and self._is_whole(mine) else joined, theirs)

    def _with_codec(self, joined: Catalogue, theirs: Catalogue) -> Catalogue:
        """Add what the shared store knows of the codec levels if the store has no profile: it was never compressed, or
        all KV that needed one has gone from it. Else what the store says is as it is."""
        state, mark = self.store.codec_state(), theirs.meta.get("codec")
        if state.get("profile") or mark in (None, joined.meta["codec"]):
            return joined
        (value,) = self.blobs.get([f"meta/codec-{mark}"])
        try:
            known = values.open_meta("codec", value or b"")
        except DamagedError:
            return joined
        both = values.join_codec(state, known)
        if both.get("profile") and both["profile"] not in joined.profiles:
            return joined
        sealed = values.sealed_meta("codec", both)
        self.blobs.put({f"meta/codec-{digest_of(sealed)}": sealed})
        return replace(joined, meta=joined.meta | {"codec": digest_of(sealed)})

    def _is_whole(self, mine: Catalogue) -> bool:
        used = (ref.chunk_id.hex() for document in self.store.documents() for ref in document.chunks)
        return not self.report.damaged and all(chunk in mine.chunks for chunk in used)

    def _swap(self, head: bytes | None, theirs: Catalogue | None, joined: Catalogue) -> bool:
        joined, shards = sharded(joined, theirs)
        root = pack_root(joined, self.key)
        digest = digest_of(root)
        self.blobs.put({**shards, catalogue_name(digest): root})
        self.blobs.flush()
        copies = CatalogueCache(self.blobs.url)
        for value in (root, *shards.values()):  # so that the next push from here does not fetch them
            copies.put(digest_of(value), value)
        before: tuple[str, ...] = ()
        if head is not None and theirs is not None:
            before = self.garbage.reclaim(head, joined, theirs, digest)
        return self.blobs.compare_and_swap(HEAD, head, seal_head(Head(digest, before)))


# ---- two catalogues ----


def join(mine: Catalogue, theirs: Catalogue) -> Catalogue:
    chunks = theirs.chunks | {
        key: join_chunks(version, theirs.chunks[key]) if key in theirs.chunks else version
        for key, version in mine.chunks.items()
    }
    profiles = tuple(sorted({*mine.profiles, *theirs.profiles}))
    return replace(mine, profiles=profiles, files=theirs.files | mine.files, chunks=chunks)


def without_superseded(joined: Catalogue, mine: Catalogue) -> Catalogue:
    """Drop chunks and profiles of earlier versions if every document is the store's own. Documents of others are not
    read to find that out: with them, all is kept."""
    if joined.files != mine.files:
        return joined
    chunks = {key: joined.chunks[key] for key in mine.chunks}
    same_levels = all(chunk.levels == mine.chunks[key].levels for key, chunk in chunks.items())
    return replace(joined, chunks=chunks, profiles=mine.profiles if same_levels else joined.profiles)


def join_chunks(mine: Chunk, theirs: Chunk) -> Chunk:
    """Join the levels of both. Nested ones may refine each other, so where they differ they are all of one side.

    A chunk that another user made is never joined with the pusher's own, but replaced by it."""
    if mine.foreign != theirs.foreign:
        return theirs if mine.foreign else mine
    levels: dict[str, Level] = theirs.levels | mine.levels
    common = nested(mine.levels.keys() & theirs.levels.keys())
    if any(mine.levels[level].mark != theirs.levels[level].mark for level in common):
        levels = {name: level for name, level in levels.items() if not level_of(name).nested or name in mine.levels}
    return replace(mine, levels=levels)


# ---- dry runs ----


class DryRunBlobs(PrivateBlobs):
    """A shared store that is only read; see Blobs. What a push writes is dropped, except the head and the catalogues,
    which decide on what follows."""

    def __init__(self, blobs: Blobs) -> None:
        self.url, self.sizes, self.names = blobs.url, blobs.sizes, blobs.names
        self._blobs = blobs
        self._written: dict[str, bytes] = {}

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        values = self._blobs.get(names)
        return [self._written.get(name, value) for name, value in zip(names, values, strict=True)]

    def put(self, values: Mapping[str, bytes]) -> None:
        self._written |= {name: value for name, value in values.items() if name.startswith(("catalogue/", "shard/"))}

    def compare_and_swap(self, name: str, before: bytes | None, after: bytes) -> bool:
        self._written[name] = after
        return True
