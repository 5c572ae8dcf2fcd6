"""Local store → shared tier: what is missing there, then the catalogue, then the head in one step."""

from __future__ import annotations

import time
from dataclasses import replace

from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import level_of, nested
from kvtool.core.common.sizes import counted
from kvtool.core.common.types import Events
from kvtool.core.errors import DamagedError, RemoteError, StoreNotFoundError, UsageError
from kvtool.core.remote import survey, values
from kvtool.core.remote.blobs import Blobs
from kvtool.core.remote.catalogue import Catalogue
from kvtool.core.remote.entries import Chunk, File, Level, catalogue_name, digest_of
from kvtool.core.remote.head import HEAD, Head, seal_head, unseal_head
from kvtool.core.remote.lease import Lease
from kvtool.core.remote.reading import check_same_identity, put_copies, read_head
from kvtool.core.remote.rehearsal import Rehearsal
from kvtool.core.remote.send import Sender
from kvtool.core.remote.shards import pack_root, sharded
from kvtool.core.remote.signing import SigningKey
from kvtool.core.remote.state import join_codec
from kvtool.core.remote.sweep import Sweep, check_ours, check_share, own_names
from kvtool.core.remote.transfer_report import TransferReport

_TRIES = 8  # pushes of others that come in between


def push(
    store: Store,
    blobs: Blobs,
    *,
    delete: bool = False,
    newer: bool = False,
    verify: bool = False,
    dry_run: bool = False,
    yes: bool = False,
    key: SigningKey | None = None,
    events: Events | None = None,
) -> TransferReport:
    """Bring a tier up to date with a store. Run again to resume; what is there already is not sent again.

    Parameters
    ----------
    delete : forget what the store does not have, if nothing of the store is damaged; else the tier keeps it.
    newer : of a file that both have in two versions take the one changed last; else the store's.
    verify : read back what is there already, and send again what is damaged.
    dry_run : change nothing; the report counts what would be done.
    yes : `delete` may take more than half of the tier.
    key : signs the catalogue. The tier then holds nothing that this key has not signed.

    Raises
    ------
    RemoteError, NoSpaceError : the tier does not answer, or is full. What was sent stays.
    StoreFormatError : it holds a store of another model, or other things than a store.
    UsageError : it would lose more than half, and nobody said `yes`; or it is signed by another key, or by one that
        was not given.
    """
    started = time.perf_counter()
    report = TransferReport("push", blobs.url, dry_run=dry_run)
    job = _Push(store, Rehearsal(blobs) if dry_run else blobs, report, events or Events(), newer, verify, key)
    job.run(delete, yes or dry_run)
    report.seconds = time.perf_counter() - started
    return report


class _Push:
    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        report: TransferReport,
        events: Events,
        newer: bool,
        verify: bool,
        key: SigningKey | None,
    ) -> None:
        self.store, self.blobs, self.report = store, blobs, report
        self.events, self.newer, self.verify, self.key = events, newer, verify, key
        self.lease = Lease(blobs)
        self.sender = Sender(store, blobs, self.lease, report, events, verify)
        self.sweep = Sweep(blobs, self.lease, report, events)

    def run(self, delete: bool, yes: bool) -> None:
        if not self.store.manifest():
            raise StoreNotFoundError(f"the store at {self.store.path} is empty", "run `kvtool ingest PATH` first")
        self._say_what_stays()
        head, theirs = self._there()
        if theirs is not None:
            self._check_signer(theirs, delete)
        listed = own_names(self.blobs) if delete else set()
        known = theirs if self.key is None or self._has_signed(theirs) else None  # what others say is not signed
        mine = survey.survey(self.store, known, self.report.note_damage, sealed=self.key is not None)
        if delete and not self._is_whole(mine):
            self.events.warn(
                f"nothing of {self.blobs.url} was deleted: what is damaged or lost here may be whole there",
                "run `kvtool store verify --repair` and pull, then push again",
            )
            delete = False
        if delete and not yes:
            check_share(listed, mine, theirs, self.blobs.url)
        with self.lease.running():
            if head is not None and theirs is not None:
                self.sender.mend(unseal_head(head).catalogue, theirs)
            mine = self.sender.send(mine, theirs)
            self._publish(head, theirs, mine, delete)
            if delete and not self.sweep.run(listed):
                head, theirs = self._there()  # what somebody who knows of no leases counts on was deleted
                self._publish(head, theirs, self.sender.send(mine, theirs), delete=False)

    def _check_signer(self, theirs: Catalogue, delete: bool) -> None:
        """Refuse to take a signature away, and to sign what somebody else has put there."""
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

    def _say_what_stays(self) -> None:
        """States are of prompts of a model that keeps some; a catalogue knows no name for them."""
        if count := sum(not info.alone for info in self.store.stretches().values()):
            self.events.warn(
                f"a shared store holds no states: {counted(count, 'stretch', 'stretches')} of prompts stay here, and "
                "whoever asks there computes them",
                "`kvtool store export` puts them into a pack, and `kvtool store import` takes them from it",
            )

    def _there(self) -> tuple[bytes | None, Catalogue | None]:
        """Read the shared store's head and catalogue. With `verify`, a damaged catalogue counts as missing."""
        try:
            head, theirs = read_head(self.blobs)
        except DamagedError:
            if not self.verify:
                raise
            head, theirs = self.blobs.get([HEAD])[0], None
        if theirs is None:
            check_ours(self.blobs)
        else:
            check_same_identity(self.store.manifest().get("identity", {}), theirs.identity, self.blobs.url)
        return head, theirs

    def _publish(self, head: bytes | None, theirs: Catalogue | None, mine: Catalogue, delete: bool) -> None:
        for _ in range(_TRIES):
            if theirs is not None:
                check_same_identity(mine.identity, theirs.identity, self.blobs.url)
                self._check_signer(theirs, delete)
            joined = mine if theirs is None or delete else self._joined(mine, theirs)
            signed = self.key is None or self._has_signed(theirs)
            if (
                theirs is not None and joined == theirs and theirs.shards and signed
            ):  # else an older kvtool put it there
                return
            if self._swap(head, theirs, joined):
                if delete and theirs is not None:
                    self.report.forgotten = len(theirs.files.keys() - mine.files.keys())
                return
            head, theirs = read_head(self.blobs)
        raise RemoteError(f"{self.blobs.url} changes all the time", "try again when no other push runs")

    def _joined(self, mine: Catalogue, theirs: Catalogue) -> Catalogue:
        joined = join(mine, theirs, self.newer)
        less = without_superseded(joined, mine)
        return self._with_codec(less if less != joined and self._is_whole(mine) else joined, theirs)

    def _with_codec(self, joined: Catalogue, theirs: Catalogue) -> Catalogue:
        """With what the tier knows of the codec levels besides, where the store has no profile: it was never
        compressed, or all KV that needed one has gone from it. Else what the store says is as it is."""
        state, mark = self.store.codec_state(), theirs.meta.get("codec")
        if state.get("profile") or mark in (None, joined.meta["codec"]):
            return joined
        (value,) = self.blobs.get([f"meta/codec-{mark}"])
        try:
            known = values.open_meta("codec", value or b"")
        except DamagedError:
            return joined
        both = join_codec(state, known)
        if both.get("profile") and both["profile"] not in joined.profiles:
            return joined
        sealed = values.sealed_meta("codec", both)
        self.blobs.put({f"meta/codec-{digest_of(sealed)}": sealed})
        return replace(joined, meta=joined.meta | {"codec": digest_of(sealed)})

    def _is_whole(self, mine: Catalogue) -> bool:
        """Return True if nothing is damaged or lost here; otherwise the shared store may hold the sound copy."""
        return not self.report.damaged and survey.is_complete(self.store, mine)

    def _swap(self, head: bytes | None, theirs: Catalogue | None, joined: Catalogue) -> bool:
        joined, shards = sharded(joined, theirs)
        root = pack_root(joined, self.key)
        digest = digest_of(root)
        self.blobs.put({**shards, catalogue_name(digest): root})
        self.blobs.settle()
        put_copies(self.blobs, [root, *shards.values()])
        before: tuple[str, ...] = ()
        if head is not None and theirs is not None:
            before = self.sweep.reclaim(head, joined, theirs, digest)
        return self.blobs.swap(HEAD, head, seal_head(Head(digest, before)))


# ---- two catalogues ----


def join(mine: Catalogue, theirs: Catalogue, newer: bool) -> Catalogue:
    """Return the union of both catalogues. Of two versions keep `mine`, or with `newer` the file changed last."""
    files: dict[str, File] = theirs.files | mine.files
    if newer:
        for key in mine.files.keys() & theirs.files.keys():
            files[key] = max(mine.files[key], theirs.files[key], key=lambda version: (version.mtime_ns, version.mark))
    chunks = theirs.chunks | {
        key: join_chunks(version, theirs.chunks[key]) if key in theirs.chunks else version
        for key, version in mine.chunks.items()
    }
    profiles = tuple(sorted({*mine.profiles, *theirs.profiles}))
    return replace(mine, profiles=profiles, files=files, chunks=chunks)


def without_superseded(joined: Catalogue, mine: Catalogue) -> Catalogue:
    """Drop chunks and profiles of earlier versions if every document is the store's own.

    Documents of others are not read to find that out: with them, all is kept.
    """
    if joined.files != mine.files:
        return joined
    chunks = {key: joined.chunks[key] for key in mine.chunks}
    same_levels = all(chunk.levels == mine.chunks[key].levels for key, chunk in chunks.items())
    return replace(joined, chunks=chunks, profiles=mine.profiles if same_levels else joined.profiles)


def join_chunks(mine: Chunk, theirs: Chunk) -> Chunk:
    """Levels of both. Nested ones may refine each other, so they are all of one side where they differ. What somebody
    else made never joins what was made by who pushes, and gives way to it."""
    if mine.foreign != theirs.foreign:
        return theirs if mine.foreign else mine
    levels: dict[str, Level] = theirs.levels | mine.levels
    common = nested(mine.levels.keys() & theirs.levels.keys())
    if any(mine.levels[level].mark != theirs.levels[level].mark for level in common):
        levels = {name: level for name, level in levels.items() if not level_of(name).nested or name in mine.levels}
    return replace(mine, levels=levels)
